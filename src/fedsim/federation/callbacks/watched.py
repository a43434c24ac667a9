"""The federation that a callback watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lightning import LightningModule

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation


def federation_of(pl_module: LightningModule) -> Federation:
    """Return the module with its type: fedsim's callbacks watch nothing but federations."""
    return cast("Federation", pl_module)
