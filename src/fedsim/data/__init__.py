"""Data sets, federations, and what happens to an image before the model sees it."""

from fedsim.data.augmentation import Augmentation
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData, FederatedData, RetrievalSet
from fedsim.data.federations import build_federation
from fedsim.data.generated import Generated, write_generated
from fedsim.data.images import Domain, ImageFiles, Images, ReIDSource, Split
from fedsim.data.market import MarketFolders
from fedsim.data.synthetic import SyntheticReID, content_hash

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
