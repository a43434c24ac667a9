"""W&B's ``early_terminate``: after which evaluations runs are compared, and the worse ones stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_KEYS = ("type", "min_iter", "max_iter", "s", "eta", "strict")


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Successive halving: after ``first``, ``first * eta``, ``first * eta**2``, ... evaluations, one in eta goes on."""

    first: int
    """evaluations of a run before it is compared"""
    eta: int
    last: int | None = None
    """no comparison after more evaluations than this; None: as long as the run lasts"""
    strict: bool = False
    """as in the file; it has no effect"""


def early_stop_of(fields: Mapping[str, Any], refuse: Callable[[str, str], NoReturn]) -> EarlyStop:
    """Return the rule of the field early_terminate; call ``refuse`` with field and message if it is wrong.

    ``min_iter`` is the first comparison. ``max_iter`` with ``s`` asks for ``s`` of them, of which the last is after
    ``max_iter / eta`` evaluations, as in W&B's code; those before the first evaluation are left out.

    >>> early_stop_of({"type": "hyperband", "max_iter": 27, "s": 2}, print)
    EarlyStop(first=3, eta=3, last=9, strict=False)
    """
    _check_words(fields, refuse)
    eta, strict = fields.get("eta", 3), fields.get("strict", False)
    if ("min_iter" in fields) == ("max_iter" in fields):
        refuse("early_terminate", "give one of min_iter and max_iter: evaluations of a run")
    for key, least in (("min_iter", 1), ("max_iter", 1), ("s", 1), ("eta", 2)):
        if key in fields and not (_is_whole(fields[key]) and fields[key] >= least):
            refuse(f"early_terminate.{key}", f"{fields[key]} is not a whole number from {least}")
    if "min_iter" in fields:
        return EarlyStop(first=int(fields["min_iter"]), eta=int(eta), strict=strict)
    if "s" not in fields:
        refuse("early_terminate.s", "is missing, but max_iter needs it: the number of comparisons")
    most = int(fields["max_iter"])
    if most < eta:
        refuse("early_terminate.max_iter", f"{most} is less than eta, so that no runs are compared")
    last = most // int(eta)
    first = _first_band(last, int(eta), int(fields["s"]))
    return EarlyStop(first=first, eta=int(eta), last=last, strict=strict)


def _check_words(fields: Mapping[str, Any], refuse: Callable[[str, str], NoReturn]) -> None:
    """Check the names of fields, and those that are no numbers."""
    for key in fields:
        if key not in _KEYS:
            refuse(f"early_terminate.{key}", f"there is no such field; choose from {', '.join(_KEYS)}")
    if fields.get("type") != "hyperband":
        refuse("early_terminate.type", f"{fields.get('type')} is unknown; it is hyperband")
    if not isinstance(fields.get("strict", False), bool):
        refuse("early_terminate.strict", f"{fields['strict']} is neither true nor false")


def _first_band(last: int, eta: int, number: int) -> int:
    """Return the first of at most ``number`` comparisons, each at a whole ``eta``-th of the next one's evaluations."""
    while number > 1 and last >= eta:
        last, number = last // eta, number - 1
    return last


def _is_whole(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
