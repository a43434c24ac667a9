"""The LightningDataModule: which data sets, who holds them, how images are prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from tqdm import tqdm

from fedsim.core.errors import ConfigError
from fedsim.data.augmentation import Augmentation
from fedsim.data.federations import FederatedData, Validation, build_federation
from fedsim.data.images import Domain, Images, ReIDSource, Size
from fedsim.data.partitions import Partition
from fedsim.data.standins import standin_of

__all__ = ["FederatedDataModule", "OncePerRound"]

log = logging.getLogger(__name__)


class OncePerRound:
    """An iterable with one empty item: one Lightning epoch is one communication round is one step.

    A literal ``[{}]`` would be taken for an empty loader.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield one empty batch."""
        yield {}

    def __len__(self) -> int:
        """Return 1."""
        return 1


class FederatedDataModule(LightningDataModule):
    """Data of all clients and all test sets.

    Args:
        source: where data sets come from: SyntheticReID, MarketFolders, or your own ReIDSource; or a list of these.
        partition: by_dataset: each data set is a client; union: one client holds everything (the centralised bound);
            several clients per data set: by_camera, by_identity, iid, dirichlet, shards.
        parts: clients per data set, for by_identity, iid, dirichlet and shards.
        alpha: of dirichlet; small values give each identity to few clients.
        unseen: data sets that nobody trains on, beside those without training images.
        public: an unseen data set whose images, without labels, the server may use (bn_stats: recalibrate).
        val: what each client holds out for model selection: identities, first_image, or none.
        val_fraction: share of the identities that val: identities holds out.
        size: height and width of the images, pixels.
        test_size: height and width of validation and test images, where they differ (papers 000 and 001: 288, 144).
        augmentation: of training images.
        dry_run: replace the papers' data sets by small drawn ones in the same layouts, with as many clients; to see
            whether a config works before the data are there.
        limit_client_batches: at most so many batches per client and local epoch (1, 2, ...), or, below 1, this share of
            them; null trains on everything.
    """

    def __init__(
        self,
        source: ReIDSource | list[ReIDSource],
        partition: Partition = "by_dataset",
        parts: int = 4,
        alpha: float = 0.5,
        unseen: list[str] | None = None,
        public: str | None = None,
        val: Validation = "identities",
        val_fraction: float = 0.2,
        size: tuple[int, int] = (256, 128),
        test_size: tuple[int, int] | None = None,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - frozen dataclass, shown as the default in --help
        dry_run: bool = False,
        limit_client_batches: float | None = None,
    ) -> None:
        super().__init__()
        for name, pixels in (("size", size), ("test_size", test_size or size)):
            if min(pixels) < 1:
                raise ConfigError(f"data.{name}: {list(pixels)} is not a height and a width in pixels")
        limit = limit_client_batches
        if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
            raise ConfigError(
                f"data.limit_client_batches: {limit_client_batches} is neither a number of batches (1, 2, ...) "
                "nor a share between 0 and 1"
            )
        self.sources = source if isinstance(source, list) else [source]
        self.partition = partition
        self.parts = parts
        self.alpha = alpha
        self.unseen = tuple(unseen or ())
        self.public = public
        self.val = val
        self.val_fraction = val_fraction
        self.size = size
        self.test_size = test_size or size
        self.augmentation = augmentation
        self.dry_run = dry_run
        self.limit_client_batches = limit_client_batches
        self._standins: TemporaryDirectory[str] | None = None  # as long as this object
        self._federated: FederatedData | None = None

    @property
    def federated(self) -> FederatedData:
        """The federation; its files are listed on first use, no image is read."""
        if self._federated is None:
            self._federated = build_federation(
                self.list_domains(),
                partition=self.partition,
                parts=self.parts,
                alpha=self.alpha,
                unseen=self.unseen,
                public=self.public,
                val=self.val,
                val_fraction=self.val_fraction,
            )
        return self._federated

    def list_domains(self) -> list[Domain]:
        """Return all data sets of all sources, in their order."""
        if not self.dry_run:
            return [domain for source in self.sources for domain in source.domains()]
        if self._standins is None:
            self._standins = TemporaryDirectory(prefix="fedsim-standins-")
        root = Path(self._standins.name)
        return [domain for source in self.sources for domain in standin_of(source, root).domains()]

    def decode(self, images: Images, what: str, size: Size | None = None) -> Tensor:
        """Read images to uint8 [n, 3, H, W] in host memory; a progress bar shows when it takes long.

        Args:
            images: n images.
            what: a name for the progress bar.
            size: (H, W); None: that of training images.
        """
        size = size or self.size
        parts = [
            part.decode(size)
            for part in tqdm(images.chunks(), desc=f"reading {what}", delay=2.0, disable=None, leave=False)
        ]
        return torch.cat(parts) if parts else torch.empty((0, 3, *size), dtype=torch.uint8)

    def decode_for_test(self, images: Images, what: str) -> Tensor:
        """:meth:`decode` in the size of validation and test images."""
        try:
            return self.decode(images, what, self.test_size)
        except ConfigError as error:
            if self.test_size == self.size:
                raise
            raise ConfigError(str(error).replace("data.size", "data.test_size")) from error  # sources know of one size

    def train_dataloader(self) -> OncePerRound:
        """One step per round."""
        return OncePerRound()

    def val_dataloader(self) -> OncePerRound:
        """One step per evaluation."""
        return OncePerRound()

    def test_dataloader(self) -> OncePerRound:
        """One step per evaluation."""
        return OncePerRound()

    def predict_dataloader(self) -> OncePerRound:
        """One step per prediction."""
        return OncePerRound()
