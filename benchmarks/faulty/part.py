"""A part that an author could write, with one fault or with none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from fedsim.testing import check_backbone, check_loss, check_method, check_module, check_source

Kind = Literal["source", "loss", "backbone", "module", "method"]
CHECKS: dict[Kind, Callable[[Any], None]] = {
    "source": lambda part: check_source(part, size=(32, 16)), "loss": check_loss, "backbone": check_backbone,
    "module": check_module, "method": check_method,
}  # fmt: skip


class Part(NamedTuple):
    """A part, made by ``make``."""

    name: str
    kind: Kind
    make: Callable[[], Any]
    fault: str
    """what is wrong with it, or what only looks wrong"""
    about: str = ""
    """a regular expression, without regard to case: a finding that it matches is about the fault; empty: it is sound"""
    harmless: str = ""
    """the reason why fedsim accepts it, if it does"""


def documented(kind: Kind, make: Callable[[], Any], about: str = "", harmless: str = "") -> Part:
    """Return a part whose fault is the first line of the docstring of its class."""
    return Part(make.__name__, kind, make, (make.__doc__ or "").strip().splitlines()[0], about, harmless)
