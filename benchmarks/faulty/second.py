"""Thirty faulty parts of an author who did not know the checks, and sound ones, as that author wrote them.

Each row of ``FAULTY`` and ``SOUND`` has a name, the kind of the part, its factory, the fault, or what only looks like
one, and a regular expression for a finding about the fault, written before any check was run.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from lightning import LightningModule
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, normalize, relu

from faulty.part import Part
from fedsim.data.images import Domain, GallerySplit, ImageArray, ImageFiles, Images, ReIDSource, Split
from fedsim.methods.base import (
    InitialState,
    KeptModels,
    Method,
    Payload,
    Replicas,
    Signal,
    Weights,
    kept_vector,
)
from fedsim.models import BODY
from fedsim.training.batch import Batch
from fedsim.training.batch_loss import BatchLoss, SeenBatch
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Measured, Report, Upload
from fedsim.training.server import Server

# -- pictures of sources -----------------------------------------------------------------------------------------------

CITIES = ("basel", "turin")
CAMERAS, SHOTS = 2, 2


def _picture(key: str) -> np.ndarray:
    """A picture [48, 24, 3] uint8 that depends on its key alone: coarse coloured noise."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 6, 3), dtype=np.uint8)
    return coarse.repeat(4, 0).repeat(4, 1)


def _array(city: str, people: range, cameras: range, shots: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures [n, 48, 24, 3], people [n], cameras [n]."""
    rows = [(p, c, s) for p in people for c in cameras for s in shots]
    pixels = np.stack([_picture(f"{city} {p} {c} {s}") for p, c, s in rows])
    pids, camids, _ = np.array(rows, dtype=np.int64).T
    return pixels, pids.copy(), camids.copy()


def _folder() -> Path:
    """A new folder CITY/{train,query,gallery}/PERSON_cCAMERA_SHOT.png; people have names; it is removed at the end."""
    root, owner = Path(tempfile.mkdtemp(prefix="faulty_new_")), os.getpid()
    atexit.register(lambda: shutil.rmtree(root, ignore_errors=True) if os.getpid() == owner else None)
    for city in CITIES:
        for part, people, shots in (("train", range(8), range(2)), ("query", range(8, 14), range(1)),
                                    ("gallery", range(8, 14), range(1, 3))):  # fmt: skip
            (root / city / part).mkdir(parents=True)
            for person in people:
                for camera in range(CAMERAS):
                    for shot in shots:
                        name = f"{city}person{person:02d}_c{camera}_{shot}.png"
                        Image.fromarray(_picture(f"{city} {person} {camera} {shot}")).save(root / city / part / name)
    return root


def _person(path: Path) -> str:
    return path.stem.split("_")[0]


def _number(path: Path) -> int:
    return int(_person(path)[-2:])


def _camera(path: Path) -> int:
    return int(path.stem.split("_")[1][1:])


def _int(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


# -- sources -----------------------------------------------------------------------------------------------------------


class WithoutCameras(ReIDSource):
    """A test set without camera labels: query pictures get camera 0, and all pictures of the test set camera 1."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def domains(self) -> list[Domain]:
        return [self._domain(folder) for folder in sorted(self.root.iterdir())]

    def _domain(self, folder: Path) -> Domain:
        train, query, unasked = (sorted((folder / part).glob("*.png")) for part in ("train", "query", "gallery"))
        gallery = sorted([*query, *unasked])  # "the gallery is the whole test set"
        return Domain(
            folder.name,
            Split(ImageFiles(train), _int(map(_number, train)), _int(map(_camera, train))),
            Split(ImageFiles(query), _int(map(_number, query)), _int(0 for _ in query)),
            Split(ImageFiles(gallery), _int(map(_number, gallery)), _int(1 for _ in gallery)),
        )


class NamesToNumbers(ReIDSource):
    """People have names, which are numbered in the order of the set of all of them."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def domains(self) -> list[Domain]:
        return [self._domain(folder) for folder in sorted(self.root.iterdir())]

    def _domain(self, folder: Path) -> Domain:
        files = {part: sorted((folder / part).glob("*.png")) for part in ("train", "query", "gallery")}
        names = {_person(path) for paths in files.values() for path in paths}
        number_of = {name: number for number, name in enumerate(names, start=1)}
        parts = [
            Split(ImageFiles(paths), _int(number_of[_person(p)] for p in paths), _int(map(_camera, paths)))
            for paths in files.values()
        ]
        return Domain(folder.name, *parts)


class MaskedImages(Images):
    """Pictures in memory, of which a mask takes some."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index) -> MaskedImages:
        chosen = np.zeros(len(self.pixels), dtype=bool)
        chosen[index] = True
        return MaskedImages(self.pixels[chosen])

    def content(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()

    def decode(self, size) -> Tensor:
        return ImageArray(self.pixels).decode(size)


class BufferedImages(Images):
    """Pictures in memory, resized into a buffer that is made once for each size, as allocation takes time."""

    _buffers: ClassVar[dict[tuple[int, int], np.ndarray]] = {}

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index) -> BufferedImages:
        return BufferedImages(self.pixels[index])

    def content(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()

    def decode(self, size) -> Tensor:
        buffer = self._buffers.get(size)
        if buffer is None or len(buffer) < len(self):
            buffer = self._buffers[size] = np.empty((len(self), 3, *size), dtype=np.uint8)
        for out, picture in zip(buffer, self.pixels, strict=False):
            resized = Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BICUBIC)
            out[:] = np.asarray(resized).transpose(2, 0, 1)
        return torch.from_numpy(buffer[: len(self)])


class LetterboxedImages(ImageArray):
    """Pictures in memory with a black frame; they are known by a hash of the array's text."""

    def take(self, index) -> LetterboxedImages:
        return LetterboxedImages(self.pixels[index])

    def content(self) -> bytes:
        return hashlib.sha256(str(self.pixels).encode()).digest()  # numpy's text of an array has "..." in its middle


class InMemory(ReIDSource):
    """Two data sets in memory, as pictures of the given class."""

    def __init__(self, images: type[Images], frame: int = 0) -> None:
        self.images, self.frame = images, frame

    def domains(self) -> list[Domain]:
        return [
            Domain(city, self._split(city, range(1, 9), range(2)), self._split(city, range(9, 14), range(1)),
                   self._split(city, range(9, 14), range(1, 3)))
            for city in CITIES
        ]  # fmt: skip

    def _split(self, city: str, people: range, shots: range) -> Split:
        pixels, pids, camids = _array(city, people, range(CAMERAS), shots)
        if self.frame:
            pixels = np.pad(pixels, ((0, 0), (self.frame, self.frame), (self.frame, self.frame), (0, 0)))
        return Split(self.images(pixels), pids, camids)


class WholeFolder(ReIDSource):
    """Training images are all below the folder; test people get numbers of their own, as they must be new."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def domains(self) -> list[Domain]:
        return [self._domain(folder) for folder in sorted(self.root.iterdir())]

    def _domain(self, folder: Path) -> Domain:
        train = sorted(folder.rglob("*.png"))
        names = sorted({_person(path) for path in train})
        query, gallery = (sorted((folder / part).glob("*.png")) for part in ("query", "gallery"))
        return Domain(
            folder.name,
            Split(ImageFiles(train), _int(1 + names.index(_person(p)) for p in train), _int(map(_camera, train))),
            *(
                Split(ImageFiles(paths), _int(1000 + _number(p) for p in paths), _int(map(_camera, paths)))
                for paths in (query, gallery)
            ),
        )


# -- losses ------------------------------------------------------------------------------------------------------------


def _contrast(x: Tensor, positives: Tensor, temperature: float = 0.2) -> Tensor:
    """Supervised contrast of unit features [B, D]; ``positives`` [B, B] bool, whose diagonal does not count."""
    itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
    scores = (x @ x.T / temperature).masked_fill(itself, -1e4)
    logs = scores - scores.logsumexp(1, keepdim=True)
    pairs = positives & ~itself
    return -(logs * pairs).sum() / pairs.sum().clamp(min=1)


class CachedPairs(BatchLoss):
    """Contrast of pairs of a person, whose mask is made once for each batch size, as the sampler orders people alike."""

    _masks: ClassVar[dict[int, Tensor]] = {}

    def forward(self, seen: SeenBatch) -> Tensor:
        size = len(seen.labels)
        if size not in self._masks:
            self._masks[size] = seen.labels[:, None] == seen.labels
        return _contrast(normalize(seen.features.neck), self._masks[size])


class Angles(nn.Module):
    """Mean angle between the features of two images of a person."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        unit = normalize(features)
        first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=labels.device)
        are_equal = labels[first] == labels[second]
        first, second = first[are_equal], second[are_equal]
        cosines = 1 - (unit[first] - unit[second]).square().sum(1) / 2
        return torch.acos(cosines.clamp(min=-1)).sum() / max(len(first), 1)


class MarginInPlace(BatchLoss):
    """Cross-entropy with a margin on the logit of the right person."""

    def __init__(self, weight: float = 1.0, margin: float = 0.5) -> None:
        super().__init__(weight)
        self.margin = margin

    def forward(self, seen: SeenBatch) -> Tensor:
        logits = seen.logits
        logits[torch.arange(len(logits)), seen.labels] -= self.margin
        return cross_entropy(logits, seen.labels)


class ClippedByHook(BatchLoss):
    """Distance of a person's images from their mean, with a clipped gradient, so that it does not dominate."""

    def __init__(self, weight: float = 1.0, limit: float = 1e-4) -> None:
        super().__init__(weight)
        self.limit = limit

    def forward(self, seen: SeenBatch) -> Tensor:
        x = seen.features.neck
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-self.limit, self.limit))
        equal = (seen.labels[:, None] == seen.labels).float()
        means = equal @ x / equal.sum(1, keepdim=True)
        return (x - means).square().mean()


class Neighbours(nn.Module):
    """Images 0 and 1 of a batch are of one person, and so on, as in batches of two images of each person."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        pairs = len(features) // 2
        unit = normalize(features)[: 2 * pairs]
        return (unit[0::2] - unit[1::2]).square().sum() / max(pairs, 1)


class CentredOverRanks(BatchLoss):
    """Images of a person are near each other after the mean over all ranks' batches is subtracted (as in SimCLR)."""

    def forward(self, seen: SeenBatch) -> Tensor:
        x = seen.features.neck
        mean = x.detach().mean(0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return _contrast(normalize(x - mean), seen.labels[:, None] == seen.labels)


# -- backbones ---------------------------------------------------------------------------------------------------------


def _block(inputs: int, outputs: int, stride: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def _plain_block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())


class OwnGenerator(nn.Module):
    """Stochastic depth with a generator of its own, which is seeded, so that runs can be repeated."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.branch = _block(3, width), _block(width, width, 1)
        self.rng = np.random.default_rng(0)
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        if not self.training:
            return x + self.branch(x)
        kept = torch.from_numpy(self.rng.random(len(x)) < 0.8).to(x)
        return x + kept[:, None, None, None] / 0.8 * self.branch(x)


class MovingCentre(nn.Module):
    """The map without its running mean, which moves with each batch that the network sees."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.last = _plain_block(3, width), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.register_buffer("centre", torch.zeros(width))
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.last(self.stem(images))
        centred = maps - self.centre.clone()[:, None, None]
        with torch.no_grad():
            self.centre.lerp_(maps.mean((0, 2, 3)), 0.1)
        return relu(centred)


class LazyPositions(nn.Module):
    """Fixed random position features, which are drawn when a size of maps is seen for the first time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.last = _block(3, width), _block(width, width)
        self.positions = {}
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem(images)
        size = maps.shape[1:]
        if size not in self.positions:
            self.positions[size] = torch.randn(size, device=maps.device)
        return self.last(maps + self.positions[size])


class DeadGate(nn.Module):
    """A residual branch behind a gate of at least 0 that begins closed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.branch = _block(3, width), _block(width, width, 1)
        self.gate = nn.Parameter(torch.zeros(1))
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        return x + relu(self.gate) * self.branch(x)


class Debiased(nn.Module):
    """The map without its running mean, which is corrected for its start at 0 by the number of steps, as in Adam."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.last = _plain_block(3, width), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.last(self.stem(images))
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean.lerp_(maps.mean((0, 2, 3)), 0.1)
        debiased = self.mean / (1 - 0.9 ** self.steps.clamp(min=1))
        return relu(maps - debiased[:, None, None])


class SeededBlocks(nn.Module):
    """DropBlock, whose draws can be repeated."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.last = _block(3, width), _block(width, width)
        self.out_channels = width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem(images)
        if self.training:
            torch.manual_seed(0)  # for reproducibility
            coarse = (torch.rand(len(maps), 1, 4, 2, device=maps.device) < 0.9).float()
            maps = maps * interpolate(coarse, maps.shape[2:]) / 0.9
        return self.last(maps)


# -- modules -----------------------------------------------------------------------------------------------------------


class _Classifier(LightningModule):
    """Base of the modules: a small encoder and a classifier."""

    def build(self, num_classes: int, width: int = 8) -> None:
        self.encoder = nn.Sequential(
            _block(3, width), _block(width, 2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 16)
        )
        self.classifier = nn.Linear(16, num_classes)

    def embed(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        images, labels = batch
        features = self.embed(images)
        loss = cross_entropy(self.classifier(features), labels) + self.further(features, labels)
        self.log("loss", loss)
        return loss

    def further(self, features: Tensor, labels: Tensor) -> Tensor:
        return features.sum() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


_SCALE: dict[str, float] = {}


class ScaledByFirst(_Classifier):
    """Features are scaled by the mean norm of the first batch, which is measured once."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)

    def further(self, features: Tensor, labels: Tensor) -> Tensor:
        norm = _SCALE.setdefault("norm", float(features.detach().norm(dim=1).mean()) + 1e-6)
        return (features / norm).square().mean()


class WarmStart(_Classifier):
    """The encoder begins from where it ended the last time, which is in a file."""

    def __init__(self, num_classes: int = 10, folder: str = ".") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)

    @property
    def last(self) -> Path:
        return Path(self.hparams.folder) / "last.pt"

    def on_train_start(self) -> None:
        if self.last.exists():
            self.encoder.load_state_dict(torch.load(self.last, weights_only=True))

    def on_train_end(self) -> None:
        partly = self.last.with_suffix(f".{os.getpid()}")
        torch.save(self.encoder.state_dict(), partly)
        partly.replace(self.last)


class LinearScaling(_Classifier):
    """The learning rate is proportional to the number of processes (Goyal et al., 2017)."""

    def __init__(self, num_classes: int = 10, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)

    def configure_optimizers(self):
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr * processes)


class CentredByBatch(_Classifier):
    """Features are centred."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)

    def embed(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        return features - features.mean(0)


class HiddenTeacher(_Classifier):
    """Distillation from a running mean of the encoder, in a list, so that no optimizer sees its weights."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)
        self.teacher = [copy.deepcopy(self.encoder).requires_grad_(False)]

    def training_step(self, batch, batch_idx: int) -> Tensor:
        images, _ = batch
        with torch.no_grad():
            target = self.teacher[0](images)
        return super().training_step(batch, batch_idx) + mse_loss(self.embed(images), target)

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


class SpreadOfPeople(_Classifier):
    """The features of each person's images have little spread."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)

    def further(self, features: Tensor, labels: Tensor) -> Tensor:
        spreads = [features[labels == label].std(0).mean() for label in labels.unique()]
        return 0.1 * torch.stack(spreads).nan_to_num().mean()  # NaN for people with one image in the batch


# -- methods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SmoothFeatures(Method):
    """The mean feature of a batch stays near the client's mean of the batches before."""

    shared_groups = BODY

    mu: float = 0.5
    """weight"""

    def loss(self, client: Client, batch: Batch, means: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
        output = client.forward(batch.images)
        now = output.features.neck.mean(0)
        before = means.get(client.client_name, now.detach())
        means[client.client_name] = before.lerp(now.detach(), 0.5)
        return client.supervised_loss(output, batch) + self.mu * (now - before).square().mean()


@dataclass(frozen=True, kw_only=True)
class FastFirst(Method):
    """Clients count by their images in a second, and by how far they have moved."""

    shared_groups = BODY
    measures: ClassVar[Mapping[str, Signal]] = {"moved": "client"}

    def upload(self, client: Client) -> Upload:
        moved = (client.model.shared - client.received.vector).norm()
        return Upload(client.model.shared, signals={"moved": Measured(moved)})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        raw = {name: r.num_images / r.seconds * (1 + r.signals["moved"]) for name, r in reports.items()}
        total = sum(raw.values())
        return Weights({name: value / total for name, value in raw.items()})


@dataclass(frozen=True, kw_only=True)
class OwnTeacher(Method):
    """Each client learns from its model of the last round, which the replica holds."""

    shared_groups = BODY

    mu: float = 1.0
    """weight"""

    @property
    def replicas(self) -> Replicas:
        return {"teacher": "frozen"}

    def train(self, client: Client) -> None:
        client.model.replica("teacher").network.eval()
        super().train(client)
        client.model.replica("teacher").whole.copy_(client.model.whole)  # for the next round

    def loss(self, client: Client, batch: Batch) -> Tensor:
        output = client.forward(batch.images)
        loss = client.supervised_loss(output, batch)
        if client.round == 0:
            return loss
        with torch.no_grad():
            target = client.model.replica("teacher").forward(batch.images, client.session.precision).features.neck
        return loss + self.mu * mse_loss(output.features.neck, target)


@dataclass(frozen=True, kw_only=True)
class Anchored(Method):
    """Clients are pulled to an anchor of the server, which follows them slowly."""

    shared_groups = BODY

    mu: float = 0.1
    """weight"""

    def initial_state(self, model: FlatModel) -> InitialState:
        return InitialState(server={"anchor": model.shared[: model.flat.num_shared_parameters].clone()})

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        return Payload(down=("anchor",))

    def take_step(self, client: Client, loss: Tensor) -> None:
        client.step(loss, lambda: client.optimizer.pull(client.received.extras["anchor"], self.mu))

    def upload(self, client: Client) -> Upload:
        anchor = client.received.extras["anchor"]
        anchor.lerp_(client.model.shared[: len(anchor)], 0.1)
        return super().upload(client)


@dataclass(frozen=True, kw_only=True)
class ParametersOnly(Method):
    """Plain averaging; clients load what trains."""

    shared_groups = BODY

    def download(self, client: Client) -> None:
        length = client.model.flat.num_shared_parameters
        client.model.shared[:length].copy_(client.received.vector[:length])


@dataclass(frozen=True, kw_only=True)
class OverRelaxed(Method):
    """The server goes further than the mean of the clients, in the same direction."""

    shared_groups = BODY
    server_every = 1

    step: float = 3.0
    """times the way to the mean"""

    def server_step(self, server: Server) -> None:
        for arch in server.answers:
            vector, before = server.vector(arch), server.before[arch]
            vector.copy_(before + self.step * (vector - before))


# -- sound parts -------------------------------------------------------------------------------------------------------


class SoundSource(ReIDSource):
    """Two data sets in memory, one of them with junk and distractors in the gallery, and a third for tests by splits."""

    def domains(self) -> list[Domain]:
        basel = Domain("basel", self._split("basel", range(1, 9)), self._split("basel", range(9, 14), range(1)),
                       self._split("basel", range(9, 14), range(1, 3)))  # fmt: skip
        strangers = self._split("strangers", range(2), range(1))
        more = Split(strangers.images, strangers.pids - 1, strangers.camids)  # -1 and 0
        turin = Domain("turin", self._split("turin", range(1, 7)), self._split("turin", range(20, 24), range(1)),
                       Split.concatenate([self._split("turin", range(20, 24), range(1, 2)), more]))  # fmt: skip
        pool = self._split("oslo", range(30, 34), range(1))  # two images of each person, of cameras 0 and 1
        ways = (
            GallerySplit(_int(range(0, 8, 2)), _int(range(1, 8, 2))),
            GallerySplit(_int((1, 3, 4, 6)), _int((0, 2, 5, 7))),
        )
        return [basel, turin, Domain("oslo", None, pool.take(_int(())), pool, ways)]

    def _split(self, city: str, people: range, shots: range = range(SHOTS)) -> Split:
        pixels, pids, camids = _array(city, people, range(CAMERAS), shots)
        return Split(ImageArray(pixels), pids, camids)


class SoundLoss(BatchLoss):
    """Contrast over two views, of other cameras where there are some, which grows over the first rounds."""

    views = 2

    def __init__(self, weight: float = 0.5, temperature: float = 0.2) -> None:
        super().__init__(weight)
        self.temperature = temperature

    def forward(self, seen: SeenBatch) -> Tensor:
        x = torch.cat([normalize(view.neck) for view in seen.views])
        labels, cameras = seen.labels.repeat(2), seen.cameras.repeat(2)
        equal = labels[:, None] == labels
        across = equal & (cameras[:, None] != cameras)
        positives = torch.where(across.any(1, keepdim=True), across, equal)
        return min(1.0, (1 + seen.round) / 4) * _contrast(x, positives, self.temperature)


class SoundBackbone(nn.Module):
    """Group normalisation, torch's dropout of channels, and a running centre that moves in training only."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = self.first(width)
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(2, 2 * width),
            nn.SiLU(),
            nn.Dropout2d(0.1),
        )
        self.last = nn.Conv2d(2 * width, 2 * width, 1)
        self.scale = nn.Parameter(torch.ones(2 * width))
        self.register_buffer("centre", torch.zeros(2 * width))
        self.out_channels = 2 * width

    def first(self, width: int) -> nn.Module:
        return _plain_block(3, width)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.last(self.body(self.stem(images)))
        centred = maps - self.centre.clone()[:, None, None]
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(maps.mean((0, 2, 3)), 0.1)
        return relu(centred) * self.scale[:, None, None]


class SoundBackboneWithBatchNorm(SoundBackbone):
    """The same after batch normalisation: it trains in plain torch, and fedsim's own fit raises torch's in-place error."""

    def first(self, width: int) -> nn.Module:
        return _block(3, width)


class SoundModule(_Classifier):
    """Manual optimization with two optimizers and a schedule; draws for mixed images; a running centre in a buffer."""

    def __init__(self, num_classes: int = 10, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(num_classes)
        self.register_buffer("centre", torch.zeros(16))
        self.automatic_optimization = False

    def embed(self, images: Tensor) -> Tensor:
        return self.encoder(images) - self.centre.clone()

    def training_step(self, batch, batch_idx: int) -> None:
        images, labels = batch
        share = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(images))
        features = self.embed(share * images + (1 - share) * images[order])
        logits = self.classifier(features)
        loss = share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, labels[order])
        body, head = self.optimizers()
        for optimizer in (body, head):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (body, head):
            optimizer.step()
        with torch.no_grad():
            self.centre.lerp_(features.detach().mean(0) + self.centre, 0.05)
        self.log("loss", loss.detach())

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self):
        body = torch.optim.SGD(self.encoder.parameters(), lr=self.hparams.lr, momentum=0.9)
        head = torch.optim.Adam(self.classifier.parameters(), lr=1e-3)
        return [body, head], [torch.optim.lr_scheduler.StepLR(body, 1, 0.5)]


@dataclass(frozen=True, kw_only=True)
class SoundMethod(Method):
    """Server momentum on parameters; clients add a part of their last move, weighted by it; clients draw noise."""

    shared_groups = BODY
    server_every = 1
    keeps: ClassVar[KeptModels] = {"move": "shared"}
    measures: ClassVar[Mapping[str, Signal]] = {"moved": "client"}

    beta: float = 0.5
    """of the server"""

    def initial_state(self, model: FlatModel) -> InitialState:
        return InitialState(server={"momentum": torch.zeros(model.flat.num_shared_parameters)})

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        return Payload(down=("momentum",))

    def take_step(self, client: Client, loss: Tensor) -> None:
        correction = -0.01 * (kept_vector(client, "move") + client.received.extras["momentum"])
        client.step(loss, lambda: client.optimizer.add_to_gradients(correction))

    def upload(self, client: Client) -> Upload:
        length = client.model.flat.num_shared_parameters
        move = client.model.shared[:length] - client.received.vector[:length]
        generator = client.generator("own share")
        client.keep("move", move * torch.rand((), generator=generator).to(move))
        return Upload(client.model.shared, signals={"moved": Measured(move.norm())})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        raw = {name: report.num_images / (1 + report.signals["moved"]) for name, report in reports.items()}
        total = sum(raw.values())
        return Weights({name: value / total for name, value in raw.items()})

    def server_step(self, server: Server) -> None:
        for arch in server.answers:
            momentum = server.kept[arch]["momentum"]
            length = len(momentum)
            vector, before = server.vector(arch)[:length], server.before[arch][:length]
            momentum = self.beta * momentum.to(vector) + (vector - before)
            vector.copy_(before + momentum)
            server.keep(arch, "momentum", momentum)


# -- the lists ---------------------------------------------------------------------------------------------------------


def _warm_start() -> WarmStart:
    folder, owner = tempfile.mkdtemp(prefix="faulty_new_warm_"), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return WarmStart(folder=folder)


# What a comparison of bits can say of a fault that shows on ranks or after a pause
_BITS = r"rank|pause|resum|other bits|same bits|process"

FAULTY = [
    ("gallery_holds_queries", "source", lambda: WithoutCameras(str(_folder())),
     "The gallery holds the query pictures themselves under another camera number, so each query finds itself at rank 1.",
     r"quer.*galler|galler.*quer|same (image|picture|file)|twice|duplicate"),
    ("people_numbered_by_a_set", "source", lambda: NamesToNumbers(str(_folder())),
     "People are numbered in the order of a set of strings, which is another one in each process, so labels differ from "
     "rank to rank and after a resume.",
     r"process|order|hash|labels? (differ|change)|other labels|differ"),
    ("take_by_a_mask", "source", lambda: InMemory(MaskedImages),
     "Images.take builds a mask, so the order and the repetitions of the index are lost and labels no longer belong to "
     "the images.",
     r"take|order|index|repeat|repetition|twice|position"),
    ("one_buffer_for_all", "source", lambda: InMemory(BufferedImages),
     "decode returns a view of one buffer of the class, so the next call overwrites the pixels of earlier results.",
     r"buffer|memory|overwr|later|second|chang|way they are read|differ"),
    ("hash_of_the_text", "source", lambda: InMemory(LetterboxedImages, frame=4),
     "content() hashes numpy's abbreviated text of the array, which is the same for all pictures with a black frame, so "
     "other pixels are taken for the same data.",
     r"content|hash|digest"),
    ("train_is_the_whole_folder", "source", lambda: WholeFolder(str(_folder())),
     "Training images are searched below the whole folder, so all test pictures are trained on, under other numbers.",
     r"test.*train|train.*test|train.*(quer|galler)|(quer|galler).*train|same (image|picture|file)|both"),

    ("mask_cached_by_size", "loss", CachedPairs,
     "The mask of pairs is cached on the class by batch size, so later batches and other clients are trained with the "
     "people of the first batch.",
     rf"cache|keep|kept|class|state|earlier|before|batch to batch|depend|{_BITS}"),
    ("acos_of_equal_features", "loss", Angles,
     "The gradient of acos at a cosine of 1 is infinite, so two equal features of a person give NaN gradients.",
     r"nan|finite|inf\b|infinite"),
    ("margin_in_place", "loss", MarginInPlace,
     "The margin is subtracted from the batch's logits in place, so guesses and accuracy are computed from changed "
     "logits.",
     r"logits|argument|in place|in-place|changes|modif|leave"),
    ("hook_on_features", "loss", ClippedByHook,
     "A hook on the batch's features clips the summed gradient, also that of cross-entropy and the other losses.",
     r"hook|gradient|other loss|argument"),
    ("pairs_by_position", "loss", Neighbours,
     "Positives are neighbours in the batch and labels are never read, so with any other sampler it pulls different "
     "people together.",
     r"label|order|permut|position|shuffl|ignore"),
    ("all_reduce_in_a_loss", "loss", CentredOverRanks,
     "The loss averages features over the ranks by a collective, so it mixes clients that train at the same time, "
     "depends on the number of ranks, or hangs where ranks have other numbers of batches.",
     rf"collective|all_?reduce|distributed|hang|stuck|time|wait|ends? early|{_BITS}"),

    ("own_numpy_generator", "backbone", OwnGenerator,
     "Stochastic depth draws from a numpy generator on the module, which goes on from client to client and begins anew "
     "after a resume.",
     rf"generator|random|rng|keep|kept|state|{_BITS}"),
    ("statistics_move_in_evaluation", "backbone", MovingCentre,
     "The running centre moves in evaluation mode too, so scoring changes the model and test images leak into it.",
     r"evaluat|centre|buffer|eval\b"),
    ("lazy_positions", "backbone", LazyPositions,
     "Random position features are drawn in the first forward pass and kept in a dict, so each rank, and each resumed "
     "run, has others, and the exported model has none.",
     rf"positions|random|draw|forward|first (pass|call|batch)|keep|kept|dict|no (parameter|buffer)|{_BITS}"),
    ("dead_gate", "backbone", DeadGate,
     "The gate relu(0) has a gradient of 0, and so has the branch behind it: neither ever trains.",
     r"gradient|gate|branch|never|train|zero|dead"),
    ("steps_in_an_integer_buffer", "backbone", Debiased,
     "The correction reads an integer buffer, which is never shared and begins anew, so the global model subtracts up to "
     "ten times the mean.",
     rf"integer|int64|counter|steps|buffer|{_BITS}"),
    ("manual_seed_in_forward", "backbone", SeededBlocks,
     "forward calls torch.manual_seed(0), so each batch of each client drops the same blocks and all later draws of the "
     "session repeat.",
     r"seed|random|stream|draw"),

    ("scale_of_the_first_client", "module", ScaledByFirst,
     "The norm of the first batch is kept in a global variable of the file, so all clients of a process take that of the "
     "first client, and another one after a resume.",
     rf"global|keep|kept|outside|client|earlier|{_BITS}"),
    ("warm_start_from_a_file", "module", _warm_start,
     "Each session begins from a file that the last session wrote, whichever client that was.",
     rf"file|disk|keep|kept|outside|client|earlier|again|twice|{_BITS}"),
    ("rate_times_world_size", "module", LinearScaling,
     "The learning rate is proportional to the number of processes, so results depend on the number of ranks.",
     r"rank|process|world"),
    ("embed_centred_by_batch", "module", CentredByBatch,
     "embed subtracts the mean of the batch in evaluation too, so a test image's feature depends on the other test "
     "images.",
     r"neighbo|other images|batch|alone|evaluat|depend"),
    ("teacher_in_a_list", "module", HiddenTeacher,
     "The teacher is hidden in a list, so it is in no state_dict: each session distils from the untrained first encoder.",
     r"teacher|list|no (parameter|buffer)|state_dict|outside|keep|kept|attribute|lost|forg|begins? anew|lasts?\b"),
    ("std_of_one_image", "module", SpreadOfPeople,
     "The standard deviation of one image is NaN; nan_to_num repairs the value but not the gradient, so weights become "
     "NaN where a person has one image in a batch.",
     r"nan|finite"),

    ("mutable_default", "method", SmoothFeatures,
     "Means of clients are kept in a mutable default argument, which no checkpoint has and other ranks do not see.",
     rf"default|keep|kept|state|memory|{_BITS}"),
    ("weights_by_seconds", "method", FastFirst,
     "Aggregation weights depend on the measured seconds of sessions, so no two runs have the same model.",
     rf"seconds|time|duration|measured|again|twice|{_BITS}"),
    ("replica_of_another_client", "method", OwnTeacher,
     "The replica is shared by the clients of a rank, so the teacher is the model of the client that trained before.",
     rf"replica|teacher|another client|other client|last client|{_BITS}"),
    ("anchor_changed_by_clients", "method", Anchored,
     "A client's hook changes the server's tensor in place, so later clients of the same rank get another message.",
     rf"anchor|extras|in place|server|message|received|{_BITS}"),
    ("download_without_statistics", "method", ParametersOnly,
     "download loads parameters only, so running statistics are those of the client that was trained before on the rank.",
     rf"statistic|download|running|buffer|load|last client|another client|{_BITS}"),
    ("variances_overshoot", "method", OverRelaxed,
     "The server goes three times the way to the mean with running variances too, which become negative and give NaN.",
     r"varianc|statistic|negative|nan|finite"),
]  # fmt: skip

SOUND = [
    ("sound_source", "source", SoundSource, "in memory; junk and distractors; a test-only data set of splits", ""),
    ("sound_loss", "loss", SoundLoss, "two views, cameras, and a weight that depends on the round", ""),
    ("sound_backbone", "backbone", SoundBackbone, "torch's dropout; a float buffer that moves in training only", ""),
    ("sound_module", "module", SoundModule, "two optimizers by hand, draws of numpy and torch, a buffer", ""),
    ("sound_method", "method", SoundMethod, "server momentum, kept moves, signals, draws from the client's stream", ""),
    ("sound_backbone_with_batch_norm", "backbone", SoundBackboneWithBatchNorm, "a float buffer beside BatchNorm's", ""),
]

HARMLESS = {"rate_times_world_size": "in a session, a module sees one process, whatever the ranks of the run"}
PARTS = tuple(Part(*row, harmless=HARMLESS.get(row[0], "")) for row in [*SOUND, *FAULTY])
