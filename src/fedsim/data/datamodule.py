"""The LightningDataModule: data sets, their division among clients, and the preparation of images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from torch import Tensor
from tqdm import tqdm

from fedsim.core.checks import at_least, positive
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.shared import shared_array
from fedsim.data import decoded
from fedsim.data.augmentation import MAX_PIXELS, Augmentation
from fedsim.data.datasets.small import warn_of_common_people
from fedsim.data.decoded import DecodedFile, Wanted
from fedsim.data.federated import FederatedData, map_splits
from fedsim.data.federations import LabelScope, Validation, build_federation
from fedsim.data.generated import Generated, add_generated
from fedsim.data.images import Domain, Images, ReIDSource, Size, Split
from fedsim.data.manifest import domains_of, read_manifest
from fedsim.data.partitions import Partition
from fedsim.data.pixels import HeldPixels, Pixels, ReadPixels
from fedsim.data.standins import standin_of

log = logging.getLogger(__name__)

Cache = Literal["device", "host", "none"]  # place of decoded images


class OncePerRound:
    """An iterable with one empty item, for one step per epoch, which is one communication round.

    Lightning would take a literal ``[{}]`` for an empty loader.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {}

    def __len__(self) -> int:
        return 1


class FederatedDataModule(LightningDataModule):
    """Data of all clients and all test sets.

    Args:
        source: SyntheticReID, MarketFolders, one of the papers' data sets, or your own ReIDSource; or a list of these.
        partition: by_dataset: each data set is a client; union: one client has all data sets (the centralised bound);
            several clients per data set: by_camera, by_identity, iid, dirichlet, shards; stratified: each client has
            an equal share of every identity of every data set.
        parts: clients per data set, for by_identity, iid, dirichlet and shards; clients in all, for stratified.
        alpha: of dirichlet; small values give each identity to few clients.
        unseen: data sets that nobody trains on, in addition to those without training images.
        public: an unseen data set whose images, without labels, the server may use (bn_stats: recalibrate).
        val: images that each client holds out for model selection: identities (all images of a random share),
            first_image (of each identity), images (a random share), or none.
        val_fraction: share of the identities (val: identities) or of the images (val: images) to hold out.
        max_images: maximum of training images per client, a random part; null keeps all.
        max_identities: maximum of training identities per client, a random part; null keeps all.
        labels: own: each client numbers its identities from 0; common: an identity has the same label in all clients,
            for classification, where identities are classes.
        manifest: a CSV file of fedsim data manifest, which lists the images of each client; instead of a source.
        size: height and width of the images, pixels.
        test_size: height and width of validation and test images, if different (papers 000 and 001: 288, 144).
        augmentation: of training images.
        generated: images of generators of people, which join the local training; null: real images only.
        cache: place of decoded training images. device: beside the model; host: host memory, or mapped files with a
            cache_dir; none: workers read each batch again.
        cache_dir: a folder of decoded images; fedsim data prepare or the first fit fills it, and runs map it into
            memory. null: each run decodes its images at the start.
        workers: processes that read images for cache: none, and that fill the cache_dir.
        on_corrupt: stop, or skip images that cannot be read (needs a cache_dir, which finds them before the start).
        dry_run: replace the papers' data sets by small drawn stand-ins with as many clients, and load no pretrained
            weights, to try a config without the data; your own data sets stay as they are.
        limit_client_batches: maximum of batches per client and local epoch (1, 2, ...), or, below 1, a share of them;
            null trains on all.
    """

    def __init__(
        self,
        source: ReIDSource | list[ReIDSource] | None = None,
        partition: Partition = "by_dataset",
        parts: int = 4,
        alpha: float = 0.5,
        unseen: list[str] | None = None,
        public: str | None = None,
        val: Validation = "identities",
        val_fraction: float = 0.2,
        max_images: int | None = None,
        max_identities: int | None = None,
        labels: LabelScope = "own",
        manifest: str | None = None,
        size: tuple[int, int] = (256, 128),
        test_size: tuple[int, int] | None = None,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - frozen dataclass, shown as the default in --help
        generated: Generated | None = None,
        cache: Cache = "device",
        cache_dir: str | None = None,
        workers: int = 2,
        on_corrupt: Literal["stop", "skip"] = "stop",
        dry_run: bool = False,
        limit_client_batches: float | None = None,
    ) -> None:
        super().__init__()
        for name, pixels in (("size", size), ("test_size", test_size or size)):
            if not 1 <= min(pixels) <= max(pixels) <= MAX_PIXELS:
                raise ConfigError(f"data.{name}: {list(pixels)} is not a height and a width in pixels")
        if augmentation.pad > max(size):
            raise ConfigError(f"data.augmentation.pad: {augmentation.pad} reaches beyond images of {list(size)} pixels")
        limit = limit_client_batches
        if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
            rule = "is neither a number of batches (1, 2, ...) nor a share between 0 and 1"
            raise ConfigError(f"data.limit_client_batches: {limit} {rule}")
        at_least("data", int(cache == "none"), workers=workers)
        positive("data", alpha=alpha, parts=parts)
        if on_corrupt == "skip" and cache_dir is None:
            raise ConfigError(
                "data.on_corrupt: skip needs data.cache_dir, a folder for decoded images: "
                "which cannot be read must be known before the start"
            )
        if (source is None) == (manifest is None):
            raise ConfigError("data.source: give a source of data sets or data.manifest, one of them")
        decided = {"unseen": unseen, "public": public, "max_images": max_images, "max_identities": max_identities,
                   "partition": partition != "by_dataset", "dry_run": dry_run, "on_corrupt": on_corrupt == "skip",
                   "labels": labels != "own"}  # fmt: skip
        if manifest is not None and (given := [name for name, value in decided.items() if value]):
            raise ConfigError(f"data.{given[0]}: data.manifest says who holds what; leave this out")
        self.sources = [] if source is None else source if isinstance(source, list) else [source]
        self.manifest = None if manifest is None else Path(manifest).expanduser()
        self.unseen, self.public, self.val = tuple(unseen or ()), public, val
        self._divide = partial(
            build_federation, partition=partition, parts=parts, alpha=alpha, unseen=self.unseen, public=public, val=val,
            val_fraction=val_fraction, max_images=max_images, max_identities=max_identities, labels=labels,
        )  # fmt: skip
        self.size, self.test_size = size, test_size or size
        self.augmentation, self.generated = augmentation, generated
        self.cache: Cache = cache
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self.workers, self.on_corrupt, self.dry_run = workers, on_corrupt, dry_run
        self.limit_client_batches = limit_client_batches
        self._standins: TemporaryDirectory[str] | None = None  # as long as this object
        self._files: list[Domain] | None = None
        self._federated: FederatedData | None = None
        self.shared_folder: Path | None = None
        """while ranks of a machine read images: where those that one has read are mapped by the others"""

    @property
    def federated(self) -> FederatedData:
        """The federation. The first use lists its files, and opens no image."""
        if self._federated is None:
            if self.manifest is None:
                warn_of_common_people(self.sources, self.public)
            found = self._divide(self.list_domains()) if self.manifest is None else self._read(self.manifest)
            self._federated = found if self.generated is None else add_generated(found, self.generated)
        return self._federated

    def _read(self, manifest: Path) -> FederatedData:
        federated = read_manifest(manifest)
        if self.cache_dir is not None:
            opened = [decoded.open_decoded(self.cache_dir, wanted) for wanted in self._wanted_of_manifest(federated)]
            found = _readable([one for one in opened if one], f"leave its rows out of {self.manifest}")
            federated = map_splits(federated, lambda split: decoded.use(split, found))
        if self.val == "none":
            return replace(federated, clients=tuple(replace(client, val=None) for client in federated.clients))
        if all(client.val is None for client in federated.clients):
            raise ConfigError(f"data.val: {manifest} lists no validation images; set data.val to none")
        return federated

    def list_domains(self) -> list[Domain]:
        """Return all data sets, in their order, with decoded files where these exist."""
        if self.manifest is not None:
            return domains_of(self.federated)
        folder = self.cache_dir
        return [domain if folder is None else self._look_up(domain, folder) for domain in self._list_files()]

    def _list_files(self) -> list[Domain]:
        """List everything once: reading the names of a large data set takes seconds."""
        if self._files is None:
            sources = self.sources
            if self.dry_run:
                self._standins = TemporaryDirectory(prefix="fedsim-standins-")
                sources = [standin_of(source, Path(self._standins.name)) for source in sources]
            self._files = [domain for source in sources for domain in source.domains()]
        return self._files

    def prepare_data(self) -> None:
        """Fill the cache_dir; Lightning calls this in one process of each machine."""
        if self.cache_dir is not None:
            for wanted in self.wanted():
                decoded.build(self.cache_dir, wanted, self.workers)

    def setup(self, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Check that the cache_dir is filled; the federation is then built with its files."""
        if self.cache_dir is not None:
            for path in [decoded.find(self.cache_dir, wanted) for wanted in self.wanted()]:
                if not decoded.is_complete(path):
                    raise DataError(f"{path}: is not there; run fedsim data prepare on this machine")
            self._federated = None

    def wanted(self) -> list[Wanted]:
        """Return the image files of the run, in each of their sizes."""
        if self.manifest is not None:
            return self._wanted_of_manifest(read_manifest(self.manifest))
        return [wanted for domain in self._list_files() for wanted in self._wanted_of(domain)]

    def _wanted_of_manifest(self, federated: FederatedData) -> list[Wanted]:
        """One file per size for all clients together."""
        assert self.manifest is not None
        train = [*(client.train for client in federated.clients), *([federated.public] if federated.public else [])]
        sets = [*(client.val for client in federated.clients), *federated.tests.values()]
        tests = [split for one in sets if one for split in (one.query, one.gallery)]
        return self._by_size(self.manifest.stem, train, tests)

    def _wanted_of(self, domain: Domain) -> list[Wanted]:
        """Clients' training images in the training size; validation and test images in the test size."""
        train, tests = [] if domain.train is None else [domain.train], [domain.query, domain.gallery]
        if domain.name == self.public:
            return self._by_size(domain.name, domain.parts, [])
        if domain.name in self.unseen:
            return self._by_size(domain.name, [], tests)
        return self._by_size(domain.name, train, tests if self.val == "none" else domain.parts)

    def _by_size(self, name: str, train: list[Split], tests: list[Split]) -> list[Wanted]:
        same = self.test_size == self.size
        parts = {self.size: train + tests} if same else {self.size: train, self.test_size: tests}
        found = []
        for size, splits in parts.items():
            paths = dict.fromkeys(path for split in splits for path in split.images.locations() if path is not None)
            found += [Wanted(name, tuple(paths), size)] if paths else []
        return found

    def _look_up(self, domain: Domain, folder: Path) -> Domain:
        opened = [decoded.open_decoded(folder, wanted) for wanted in self._wanted_of(domain)]
        found = [one for one in opened if one]
        if self.on_corrupt == "stop":
            found = _readable(found, "leave such images out with data.on_corrupt: skip")
        bad = {path: why for one in found for path, why in one.unreadable.items()}
        for why in bad.values():
            log.warning("left out: %s", why)
        left = decoded.without(domain, bad) if bad else domain
        if domain.train and not left.train:
            raise DataError(f"{domain.name}: none of its {len(domain.train)} training images can be read; replace them")
        return left.map_splits(lambda split: decoded.use(split, found))

    def open_train(self, images: Images, what: str, device: torch.device) -> Pixels:
        """Return training images as batches for ``device``; see ``cache``."""
        if reader := self._reader(images, self.size, device):
            return reader
        pixels = self.decode(images, what)
        if self.cache == "host" or self.shared_folder is not None:
            return HeldPixels(pixels, device, moved=self.cache == "device")
        try:
            return HeldPixels(pixels.to(device), device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"data.cache: the {len(pixels)} images of {what} ({pixels.nbytes / 2**30:.1f} GiB) do not fit on the "
                "device; set it to host"
            ) from error

    def open_test(self, images: Images, what: str, device: torch.device) -> Pixels:
        """Return images for validation or test, in their size, as batches for ``device``."""
        if reader := self._reader(images, self.test_size, device):
            return reader
        try:
            return HeldPixels(self.decode(images, what, self.test_size), device)
        except ConfigError as error:
            if self.test_size == self.size:
                raise
            raise ConfigError(str(error).replace("data.size", "data.test_size")) from error  # sources know of one size

    def _reader(self, images: Images, size: Size, device: torch.device) -> Pixels | None:
        """Return images that are read again for each batch, unless ``cache`` keeps them in memory."""
        is_decoded = images.is_decoded(size)
        if self.cache == "none" or (self.cache == "host" and is_decoded):
            return ReadPixels(images, size, device, workers=0 if is_decoded else self.workers)
        return None

    def decode(self, images: Images, what: str, size: Size | None = None) -> Tensor:
        """Read images to uint8 [n, 3, H, W] in host memory, by default in the training size.

        ``what`` is a name for the progress bar, which appears if it takes long.
        """
        size = size or self.size
        if images.is_decoded(size):
            return images.decode(size)
        shape = (len(images), 3, *size)
        if self.shared_folder is None or not len(images):
            return _read(images, what, size, torch.empty(shape, dtype=torch.uint8))
        with shared_array(self.shared_folder, f"{what} {size}", shape) as (pixels, is_new):
            return _read(images, what, size, pixels) if is_new else pixels

    def train_dataloader(self) -> OncePerRound:
        """One step per round, evaluation or prediction."""
        return OncePerRound()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _read(images: Images, what: str, size: Size, pixels: Tensor) -> Tensor:
    """Read images into ``pixels`` uint8 [n, 3, H, W], a part at a time."""
    done = 0
    for part in tqdm(list(images.chunks()), desc=f"reading {what}", delay=2.0, disable=None, leave=False):
        pixels[done : done + len(part)] = part.decode(size)
        done += len(part)
    return pixels


def _readable(found: Sequence[DecodedFile], otherwise: str) -> list[DecodedFile]:
    """Return the files with all images; raise DataError, with the remedy ``otherwise``, if an image cannot be read."""
    bad = {path: why for one in found for path, why in decoded.still_unreadable(one).items()}
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(f"{next(iter(bad.values()))}{more}, or {otherwise}")
    return [one for one in found if not one.unreadable]  # others lack an image that was repaired since
