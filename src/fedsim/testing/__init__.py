"""Checks for authors of methods, modules, backbones, data sources and losses: call them in your own tests.

Each raises an AssertionError with a sentence for each finding, and returns None for a part that can be used. They are
imported at their first use: the process that lists a source once more needs no Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.testing.backbone import check_backbone
    from fedsim.testing.findings import PartRefusedError
    from fedsim.testing.loss import check_loss
    from fedsim.testing.method import check_method
    from fedsim.testing.module import check_module
    from fedsim.testing.source import check_source

_PLACES = {
    "PartRefusedError": "findings", "check_backbone": "backbone", "check_loss": "loss", "check_method": "method",
    "check_module": "module", "check_source": "source",
}  # fmt: skip

__all__ = ["PartRefusedError", "check_backbone", "check_loss", "check_method", "check_module", "check_source"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _PLACES:
        return getattr(import_module(f"fedsim.testing.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
