"""Damaged files of runs: each is recognised before a table, a figure or a page needs its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedsim.core.errors import DataError
from fedsim.settings.changes import read_changes

KINDS = ("global", "local", "personalised", "ensemble")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _fits(value)


def _fits(value: float) -> bool:
    """Whether a number is finite, and of a size that a float can hold."""
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)


def _is_score(value: Any) -> bool:
    # a test set without any match has the score NaN
    return _is_number(value) or (isinstance(value, float) and math.isnan(value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_evaluation(value: Any) -> bool:
    if value is None:
        return True
    metrics = value.get("metrics") if isinstance(value, Mapping) else None
    return isinstance(metrics, Mapping) and _is_whole(value.get("round")) and all(map(_is_score, metrics.values()))


def _are_changes(value: Any) -> bool:
    try:
        read_changes(value)
    except ValueError:
        return False
    return True


def _are_answers(value: Any) -> bool:
    least = value.get("least") if isinstance(value, Mapping) else None
    return (
        isinstance(least, Mapping)
        and _is_text(least.get("client"))
        and all(map(_is_whole, (least.get("answers"), value.get("most"), value.get("total"), value.get("since"))))
        and all(map(_is_number, (least.get("work"), value.get("median"))))
    )


def _are_versions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value.values()))


def _are_data(value: Any) -> bool:
    sets = value.get("sets", {}) if isinstance(value, Mapping) else None
    return value is None or (
        isinstance(sets, Mapping) and _is_text(value.get("digest")) and all(map(_is_data_set, sets.values()))
    )


def _is_identity(value: Any) -> bool:
    parts = (value.get("files", {}), value.get("code", {})) if isinstance(value, Mapping) else (None,)
    return all(isinstance(part, Mapping) for part in parts)


def _is_data_set(value: Any) -> bool:
    parts = [value.get(part) for part in ("train", "query", "gallery", "pool")] if isinstance(value, Mapping) else [0]
    return all(part is None or (isinstance(part, Mapping) and _has_counts(part)) for part in parts)


def _has_counts(part: Mapping[str, Any]) -> bool:
    people = part.get("people", "")
    return _is_whole(part.get("images")) and (people is None or _is_whole(people))


Test = Callable[[Any], bool]

_FIELDS: dict[str, tuple[Test, str]] = {
    "finished": (lambda value: isinstance(value, bool), "true or false"),
    "method": (_is_text, "a name"),
    "fingerprint": (_is_text, "a text"),
    "seed": (_is_whole, "a whole number"),
    "rounds": (_is_whole, "a whole number"),
    "clients": (_are_names, "a list of names"),
    "unseen": (_are_names, "a list of names"),
    "primary": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    "final": (_is_evaluation, "a round with its metrics, or null"),
    "best": (_is_evaluation, "a round with its metrics, or null"),
}
"""fields of every summary.json -> the test of their values, and its name"""
_MAY_LACK: dict[str, tuple[Test, str]] = {
    "changes": (_are_changes, "a list of changed settings"),
    "data": (_are_data, "the counts of data sets"),
    "identity": (_is_identity, "hashes of the settings, of files and of code"),
    "answers": (_are_answers, "the numbers of the clients' answers"),
    "versions": (_are_versions, "names with versions"),
    "seconds": (_is_number, "a number"),
    "simulated_seconds": (_is_number, "a number"),
    "ranks": (_is_whole, "a whole number"),
    "threads": (_is_whole, "a whole number"),
    "device": (_is_text, "a name"),
    "written": (_is_text, "a date"),
}


def check_summary(summary: Mapping[str, Any], name: str) -> None:
    """Check the content of a summary.json, which the message calls ``name``.

    Raises:
        DataError: for the first field that no fit has written so.
    """
    for field in _FIELDS:
        if field not in summary:
            raise DataError(f"{name}: lacks {field}; was it edited?")
    of_bytes = {field: (_is_number, "a number of bytes") for field in summary if field.startswith("bytes_")}
    for field, (is_valid, expected) in {**_FIELDS, **_MAY_LACK, **of_bytes}.items():
        if field in summary and not is_valid(summary[field]):
            raise DataError(f"{name}: {field} is not {expected}; was it edited?")


def check_evaluation(evaluation: Mapping[str, Any], name: str) -> None:
    """Check the content of a file of ``fedsim test``; raise DataError if it is not one."""
    settings, data = evaluation.get("settings", {}), evaluation.get("data")
    if not (_is_evaluation({"round": 0, **evaluation}) and isinstance(settings, Mapping) and _are_data(data)):
        raise DataError(f"{name}: is not a round with its metrics; remove it, or test again")
