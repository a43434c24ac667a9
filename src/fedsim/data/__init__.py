"""Data sets, federations, and the preparation of images for the model.

The names in ``__all__`` are imported at their first use, so that listing a folder of data sets does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.data.augmentation import Augmentation
    from fedsim.data.datamodule import FederatedDataModule
    from fedsim.data.federated import ClientData, FederatedData, RetrievalSet
    from fedsim.data.federations import build_federation
    from fedsim.data.generated import Generated, write_generated
    from fedsim.data.images import Domain, ImageFiles, Images, ReIDSource, Split
    from fedsim.data.market import MarketFolders
    from fedsim.data.synthetic import SyntheticReID, content_hash

_NAMES_IN = {
    "augmentation": ["Augmentation"],
    "datamodule": ["FederatedDataModule"],
    "federated": ["ClientData", "FederatedData", "RetrievalSet"],
    "federations": ["build_federation"],
    "generated": ["Generated", "write_generated"],
    "images": ["Domain", "ImageFiles", "Images", "ReIDSource", "Split"],
    "market": ["MarketFolders"],
    "synthetic": ["SyntheticReID", "content_hash"],
}
_PLACES = {name: f"fedsim.data.{module}" for module, names in _NAMES_IN.items() for name in names}

__all__ = [
    "Augmentation",
    "ClientData",
    "Domain",
    "FederatedData",
    "FederatedDataModule",
    "Generated",
    "ImageFiles",
    "Images",
    "MarketFolders",
    "ReIDSource",
    "RetrievalSet",
    "Split",
    "SyntheticReID",
    "build_federation",
    "content_hash",
    "write_generated",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fedsim.data' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
