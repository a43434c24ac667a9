"""The LightningDataModule: data sets, their division among clients, and the preparation of images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from lightning import LightningDataModule
from torch import Tensor

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import SIZE, at_least, positive
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.paths import given_path
from fedsim.core.room import usable_cores
from fedsim.core.shared import shared_array
from fedsim.data import decoded
from fedsim.data.augmentation import Augmentation
from fedsim.data.datasets.small import warn_of_common_people
from fedsim.data.decoded import DecodedFile, Wanted
from fedsim.data.federated import FederatedData, map_splits
from fedsim.data.federations import LabelScope, Validation, build_federation
from fedsim.data.generated import Generated, add_generated
from fedsim.data.identity import identity_of, identity_of_generated
from fedsim.data.images import Domain, Images, ReIDSource, Size, Split
from fedsim.data.listing import listed_in_order
from fedsim.data.manifest import domains_of, read_manifest
from fedsim.data.partitions import Partition
from fedsim.data.pixels import HeldPixels, Pixels, ReadPixels, on_device, read_all
from fedsim.data.standins import standin_of
from fedsim.settings.facts import NOTHING, Facts

log = logging.getLogger(__name__)

Cache = Literal["device", "host", "none"]  # place of decoded images


class OncePerRound:
    """An iterable with one empty item, for one step per epoch, which is one communication round.

    Lightning would treat the list ``[{}]`` as an empty loader.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {}

    def __len__(self) -> int:
        return 1


class FederatedDataModule(KeepsArguments, LightningDataModule, option="data"):
    """Data of all clients and all test sets.

    Args:
        source: SyntheticReID, MarketFolders, one of the papers' data sets, or your own ReIDSource; or a list of these.
        partition: by_dataset: each data set is a client; union: one client has all data sets (the centralised bound);
            several clients per data set: by_camera, by_identity, iid, dirichlet, shards; stratified: each client has
            an equal share of every identity of every data set.
        parts: clients per data set, for by_identity, iid, dirichlet and shards; clients in all, for stratified.
        alpha: of dirichlet; small values give each identity to few clients.
        unseen: data sets on which no client trains, in addition to those without training images.
        public: a data set, none of unseen, whose images the server may use, without labels (bn_stats: recalibrate), in
            place of clients and tests; FLTrust trains on its training images with theirs.
        val: images that each client holds out for model selection: identities (all images of a random share),
            first_image (of each identity), images (a random share), or none.
        val_fraction: share of the identities (val: identities) or of the images (val: images) to hold out.
        max_images: maximum of training images per client, a random part; null keeps all.
        max_identities: maximum of training identities per client, a random part; null keeps all.
        labels: own: each client numbers its identities from 0; common: an identity has the same label in all clients,
            for classification, where identities are classes; equal ones of several data sets are one person (or class).
        manifest: a CSV file of fedsim data manifest, which lists the images of each client; instead of a source.
        size: height and width of the images, pixels.
        test_size: height and width of validation and test images, if different (papers 000 and 001: 288, 144).
        augmentation: of training images.
        generated: images of generators of people, which join the local training; null: real images only.
        cache: place of decoded training images. device: on the device, beside the model; host: host memory, or mapped
            files with a cache_dir; none: workers read each batch again.
        cache_dir: a folder of decoded images; fedsim data prepare or the first fit fills it, and runs map it into
            memory. null: each run decodes its images at the start.
        workers: processes that read images for cache: none, and that fill the cache_dir.
        on_corrupt: stop, or skip images that cannot be read (needs a cache_dir: filling it finds them in advance).
        dry_run: replace the papers' data sets by small drawn stand-ins with as many clients, and load no pretrained
            weights, to try a config without the data; your own data sets stay as they are.
        limit_client_batches: maximum of batches per client and local epoch (1, 2, ...), or, below 1, a share of them;
            null trains on all.
    """

    def __init__(
        self,
        source: Annotated[ReIDSource | list[ReIDSource] | None, Facts(kind="data-sets", usage="MarketFolders")] = None,
        partition: Annotated[Partition, Facts(usage="by_camera")] = "by_dataset",
        parts: Annotated[
            int,
            Facts(
                needs="partition in ('by_identity', 'iid', 'dirichlet', 'shards', 'stratified')",
                synonyms=("clients", "num_clients", "num_users"),
            ),
        ] = 4,
        alpha: Annotated[float, Facts(needs="partition == 'dirichlet'")] = 0.5,
        unseen: Annotated[
            list[str] | None,
            Facts(
                null=(), is_list_of_names=True, is_set=True, is_protocol=True, usage="[NAME]", spelled_as="data.source"
            ),
        ] = None,
        public: Annotated[str | None, Facts(spelled_as="data.source")] = None,
        val: Annotated[Validation, Facts(group="evaluation", is_protocol=True, usage="images")] = "identities",
        val_fraction: Annotated[
            float, Facts(group="evaluation", needs="val in ('identities', 'images') and manifest is None")
        ] = 0.2,
        max_images: int | None = None,
        max_identities: int | None = None,
        labels: LabelScope = "own",
        manifest: Annotated[str | None, Facts(is_file=True)] = None,
        size: Annotated[
            tuple[int, int],
            Facts(
                group="images",
                usage="[256,128]",
                expected="a height and a width, such as [64, 32]",
                synonyms=("size", "image_size", "img_size"),
            ),
        ] = (256, 128),
        test_size: Annotated[tuple[int, int] | None, Facts(group="evaluation", null_is="size")] = None,
        augmentation: Annotated[Augmentation, Facts(group="images", usage="{erase: 0.5}")] = Augmentation(),  # noqa: B008 - frozen dataclass, shown as the default in --help
        generated: Annotated[
            Generated | None, Facts(expected="settings of its own, such as --data.generated.root FOLDER")
        ] = None,
        cache: Annotated[Cache, NOTHING] = "device",
        cache_dir: Annotated[str | None, Facts(effect="nothing", usage="FOLDER")] = None,
        workers: Annotated[int, NOTHING] = 2,
        on_corrupt: Literal["stop", "skip"] = "stop",
        dry_run: Annotated[bool, Facts(usage="true")] = False,
        limit_client_batches: float | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(size, test_size or size, augmentation)
        _check_limit(limit_client_batches)
        at_least("data", int(cache == "none"), workers=workers)
        positive("data", alpha=alpha, parts=parts)
        if on_corrupt == "skip" and cache_dir is None:
            raise ConfigError(
                "data.on_corrupt: skip needs data.cache_dir, a folder for decoded images: "
                "images that cannot be read must be known before the start"
            )
        if (source is None) == (manifest is None):
            raise ConfigError("data.source: give either a source of data sets or data.manifest")
        decided = {"unseen": unseen, "public": public, "max_images": max_images, "max_identities": max_identities,
                   "partition": partition != "by_dataset", "dry_run": dry_run, "on_corrupt": on_corrupt == "skip",
                   "labels": labels != "own"}  # fmt: skip
        if manifest is not None:
            _check_left_out(decided)
        self.sources = [] if source is None else source if isinstance(source, list) else [source]
        self.manifest = None if manifest is None else given_path(manifest, "data.manifest")
        names = {alias: name for source in self.sources for alias, name in source.folder_names.items()}
        public = None if public is None else names.get(public, public)
        self.unseen, self.public, self.val = tuple(names.get(name, name) for name in unseen or ()), public, val
        self._divide = partial(
            build_federation, partition=partition, parts=parts, alpha=alpha, unseen=self.unseen, public=public, val=val,
            val_fraction=val_fraction, max_images=max_images, max_identities=max_identities, labels=labels,
        )  # fmt: skip
        self.size, self.test_size = size, test_size or size
        self.augmentation, self.generated = augmentation, generated
        self.cache: Cache = cache
        self.cache_dir = None if cache_dir is None else given_path(cache_dir, "data.cache_dir")
        self.workers, self.on_corrupt, self.dry_run = workers, on_corrupt, dry_run
        self.limit_client_batches = limit_client_batches
        self._standins: TemporaryDirectory[str] | None = None  # as long as this object
        self._files: list[Domain] | None = None
        self._federated: FederatedData | None = None
        self._listed: list[Domain] | None = None  # of which the federation is made; None: a manifest's
        self.shared_folder: Path | None = None
        """set while the ranks of a machine read images: one rank writes arrays into it, and the others map them"""
        self.threads: int | None = None
        """that decode images in this process; None: as many as it may use cores"""

    @property
    def federated(self) -> FederatedData:
        """The federation. The first use lists the files, and opens no image."""
        if self._federated is None:
            if self.manifest is None:
                warn_of_common_people(self.sources, self.public)
            self._listed = self.list_domains() if self.manifest is None else None
            federated = self._read(self.manifest) if self.manifest is not None else self._divide(self._listed or ())
            self._federated = federated if self.generated is None else add_generated(federated, self.generated)
        return self._federated

    def _read(self, manifest: Path) -> FederatedData:
        federated = read_manifest(manifest)
        if self.cache_dir is not None:
            opened = [decoded.open_decoded(self.cache_dir, wanted) for wanted in self._wanted_of_manifest(federated)]
            files = _readable([file for file in opened if file], f"leave its rows out of {self.manifest}")
            federated = map_splits(federated, lambda split: decoded.use(split, files))
        if self.val == "none":
            return replace(federated, clients=tuple(replace(client, val=None) for client in federated.clients))
        if all(client.val is None for client in federated.clients):
            raise ConfigError(f"data.val: {manifest} lists no validation images; set data.val to none")
        return federated

    def list_domains(self) -> list[Domain]:
        """Return all data sets, in their order, with the decoded files that exist."""
        if self.manifest is not None:
            return domains_of(self.federated)
        folder = self.cache_dir
        return [domain if folder is None else self._look_up(domain, folder) for domain in self._list_files()]

    def identity(self, most_listed: int) -> dict[str, Any]:
        """Return the identity of the data of the federation; see :func:`~fedsim.data.identity.identity_of`.

        In a dry run it has ``dry_run``, and equals that of no other data. ``generated`` are the clients' own images.
        """
        federated = self.federated
        domains = domains_of(federated) if self._listed is None else self._listed
        identity = identity_of(domains, self.sources, most_listed)
        if generated := identity_of_generated(federated.clients):
            identity |= {"digest": f"{identity['digest']}-{generated['digest']}", "generated": generated}
        return {**identity, "digest": f"dry-{identity['digest']}", "dry_run": True} if self.dry_run else identity

    def _list_files(self) -> list[Domain]:
        """List all files once: reading the names of a large data set takes seconds."""
        if self._files is None:
            sources = self.sources
            if self.dry_run:
                self._standins = TemporaryDirectory(prefix="fedsim-standins-")
                sources = [standin_of(source, Path(self._standins.name)) for source in sources]
            self._files = listed_in_order(sources, [type(source) for source in self.sources])
            if self.public is not None and self.public not in {domain.name for domain in self._files}:
                added = (source.public_domain(self.public) for source in sources)
                self._files += [domain for domain in added if domain is not None]
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
                    raise DataError(f"{path}: is missing; run fedsim data prepare on this machine")
            self._federated = None

    def wanted(self) -> list[Wanted]:
        """Return the image files of the run, in each of their sizes."""
        if self.manifest is not None:
            return self._wanted_of_manifest(read_manifest(self.manifest))
        return [wanted for domain in self._list_files() for wanted in self._wanted_of(domain)]

    def _wanted_of_manifest(self, federated: FederatedData) -> list[Wanted]:
        """Return one decoded file per size, for all clients together."""
        assert self.manifest is not None
        train = [*(client.train for client in federated.clients), *([federated.public] if federated.public else [])]
        sets = [*(client.val for client in federated.clients), *federated.tests.values()]
        tests = [split for pair in sets if pair for split in (pair.query, pair.gallery)]
        return self._by_size(self.manifest.stem, train, tests)

    def _wanted_of(self, domain: Domain) -> list[Wanted]:
        """Return the training images in the training size, validation and test images in the test size."""
        train, tests = [] if domain.train is None else [domain.train], [domain.query, domain.gallery]
        if domain.name == self.public:
            return self._by_size(domain.name, domain.parts, [])
        if domain.name in self.unseen:
            return self._by_size(domain.name, [], tests)
        return self._by_size(domain.name, train, tests if self.val == "none" else domain.parts)

    def _by_size(self, name: str, train: list[Split], tests: list[Split]) -> list[Wanted]:
        is_one_size = self.test_size == self.size
        parts = {self.size: train + tests} if is_one_size else {self.size: train, self.test_size: tests}
        wanted = []
        for size, splits in parts.items():
            paths = dict.fromkeys(path for split in splits for path in split.images.whole_files())
            wanted += [Wanted(name, tuple(paths), size)] if paths else []
        return wanted

    def _look_up(self, domain: Domain, folder: Path) -> Domain:
        opened = [decoded.open_decoded(folder, wanted) for wanted in self._wanted_of(domain)]
        files = [file for file in opened if file]
        if self.on_corrupt == "stop":
            files = _readable(files, "leave such images out with data.on_corrupt: skip")
        unreadable = {path: problem for file in files for path, problem in file.unreadable.items()}
        for problem in unreadable.values():
            log.warning("left out: %s", problem)
        readable = decoded.without(domain, unreadable) if unreadable else domain
        if domain.train and not readable.train:
            raise DataError(f"{domain.name}: none of its {len(domain.train)} training images can be read; replace them")
        return readable.map_splits(lambda split: decoded.use(split, files))

    def open_train(self, images: Images, name: str, device: torch.device) -> Pixels:
        """Return training images as batches for ``device``; see ``cache``. ``name``: see :meth:`decode`."""
        if reader := self._reader(images, self.size, device):
            return reader
        pixels = self.decode(images, name)
        if self.cache == "host" or self.shared_folder is not None:
            return HeldPixels(pixels, device, moved_as=name if self.cache == "device" else None)
        return HeldPixels(on_device(pixels, name, device), device)

    def open_test(self, images: Images, name: str, device: torch.device) -> Pixels:
        """Return validation or test images, in their size, as batches for ``device``. ``name``: see :meth:`decode`."""
        if reader := self._reader(images, self.test_size, device):
            return reader
        try:
            return HeldPixels(self.decode(images, name, self.test_size), device)
        except ConfigError as error:
            if self.test_size == self.size:
                raise
            raise ConfigError(str(error).replace("data.size", "data.test_size")) from error  # a source gets one size

    def _reader(self, images: Images, size: Size, device: torch.device) -> Pixels | None:
        """Return images that are read again for each batch, unless ``cache`` keeps them in memory."""
        is_decoded = images.is_decoded(size)
        if self.cache == "none" or (self.cache == "host" and is_decoded):
            return ReadPixels(images, size, device, workers=0 if is_decoded else self.workers)
        return None

    def must_decode(self, images: Images) -> bool:
        """Whether :meth:`open_train` decodes these images to memory; else it opens a reader, or only copies."""
        return self.cache != "none" and not images.is_decoded(self.size)

    def decode(self, images: Images, name: str, size: Size | None = None) -> Tensor:
        """Read images to uint8 [n, 3, H, W] in host memory, by default in the training size.

        ``name``: of the images, for messages and the progress bar, which appears if reading takes long.
        """
        size = size or self.size
        if images.is_decoded(size):
            return images.decode(size)
        shape = (len(images), 3, *size)
        if self.shared_folder is None or not len(images):
            return self._read_all(images, name, torch.empty(shape, dtype=torch.uint8))
        with shared_array(self.shared_folder, f"{name} {size}", shape) as (pixels, is_new):
            return self._read_all(images, name, pixels) if is_new else pixels

    def _read_all(self, images: Images, name: str, pixels: Tensor) -> Tensor:
        return read_all(images, name, pixels, self.threads or max(1, int(usable_cores())))

    def train_dataloader(self) -> OncePerRound:
        """Return a loader of one step, for each round, evaluation or prediction."""
        return OncePerRound()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _readable(files: Sequence[DecodedFile], remedy: str) -> list[DecodedFile]:
    """Return the files with all images; raise DataError, with this ``remedy``, if an image cannot be read."""
    problems = {path: problem for file in files for path, problem in decoded.still_unreadable(file).items()}
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DataError(f"{next(iter(problems.values()))}{more}, or {remedy}")
    return [file for file in files if not file.unreadable]  # without those that lack an image repaired since


def _check_sizes(size: Size, test_size: Size, augmentation: Augmentation) -> None:
    SIZE.check(size, "data.size")
    SIZE.check(test_size, "data.test_size")
    if augmentation.pad > max(size):
        raise ConfigError(f"data.augmentation.pad: {augmentation.pad} reaches beyond images of {list(size)} pixels")


def _check_limit(limit: float | None) -> None:
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
        problem = "is neither a number of batches (1, 2, ...) nor a share between 0 and 1"
        raise ConfigError(f"data.limit_client_batches: {limit} {problem}")


def _check_left_out(decided: Mapping[str, object]) -> None:
    """Raise ConfigError if an argument that a manifest decides has a value."""
    if names := [name for name, value in decided.items() if value]:
        raise ConfigError(f"data.{names[0]}: data.manifest lists the images of each client; leave this out")
