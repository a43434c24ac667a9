"""Defaults of fedsim's classes, from the table of settings."""

from __future__ import annotations

from typing import Any

from fedsim.settings.table import MISSING, class_at


def defaults_of_class(path: str) -> dict[str, Any]:
    """Return the defaults of a class of fedsim; ``path``: with or without its module.

    >>> defaults_of_class("SKA")["unseen"]
    'dual'
    """
    cls = class_at(path)
    if cls is None or not cls.path.startswith("fedsim."):
        return {}
    return {name: argument.default for name, argument in cls.arguments.items() if argument.default is not MISSING}
