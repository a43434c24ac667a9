"""Settings that earlier versions had."""

from __future__ import annotations

from typing import NamedTuple


class Gone(NamedTuple):
    """A setting that is no longer there."""

    since: str
    """the version that dropped it"""
    place: str = ""
    """the section in which each config of the version before has it, and in which it is dropped; empty: refused"""
    value: str | None = None
    """the only value that is dropped, as it says what there is now; None: it changed no result, so each is"""


GONE = {
    "camera_reduction": Gone("0.3"),
    "choice_images": Gone("0.3"),
    "entropies": Gone("0.4", "model.method.init_args", "batch"),
    "flat_step": Gone("0.3", "model.client"),
    "unit_features": Gone("0.3"),
}
"""by name"""


def line_of_gone(name: str) -> str:
    """Return the error line for a gone setting, without its place; empty for other names.

    >>> line_of_gone("flat_step"), line_of_gone("step")
    ('flat_step is gone since 0.3; remove it', '')
    """
    return f"{name} is gone since {GONE[name].since}; remove it" if name in GONE else ""
