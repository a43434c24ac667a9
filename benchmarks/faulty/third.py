"""Twenty faulty parts of a third author, who had seen neither the checks nor the other sets, and five sound ones.

Each row of ``FAULTY`` and ``SOUND`` has a name, the kind of the part, its factory, the fault, and a regular expression
for a finding about the fault, written before any check was run.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import lightning
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from faulty.part import Part
from fedsim.data.images import Domain, ImageArray, ImageFiles, ReIDSource, Split
from fedsim.methods.base import InitialState, Method, Payload, Weights
from fedsim.models import BODY
from fedsim.training.batch_loss import BatchLoss, SeenBatch
from fedsim.training.messages import Upload

# -- data for sources --------------------------------------------------------------------------------------------------


def _person(town: int, person: int, camera: int, shot: int) -> np.ndarray:
    """Return an image [48, 24, 3] of coloured blocks: those of the person, a tint of the camera, noise."""
    blocks = np.random.default_rng([town, person]).integers(30, 200, (6, 3, 3))
    noise = np.random.default_rng([town, person, camera, shot]).integers(-12, 13, (48, 24, 3))
    return np.clip(blocks.repeat(8, 0).repeat(8, 1) + 20 * camera + noise, 0, 255).astype(np.uint8)


def _folder(towns: int = 2, seed: int = 0) -> str:
    """Write TOWN/PART/PERSON_cCAMERA_SHOT.png; people 1 to 6 train, 7 to 10 test."""
    root = Path(tempfile.mkdtemp(prefix="third_"))
    files = []
    for town in range(towns):
        for person in range(1, 11):
            for camera in range(2):
                for shot in range(3):
                    part = "train" if person < 7 else "query" if shot == 0 else "gallery"
                    name = f"{person:04d}_c{camera}_{shot}.png"
                    files.append((root / f"town{town}" / part / name, (town, person, camera, shot)))
    for i in np.random.default_rng(seed).permutation(len(files)):  # as a download leaves them
        path, key = files[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_person(*key)).save(path)
    return str(root)


_NAME = re.compile(r"(\d+)_c(\d+)_")


def _labels(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    parts = [_NAME.match(path.name).groups() for path in paths]
    pids, camids = (np.array([int(pair[i]) for pair in parts], dtype=np.int64) for i in range(2))
    return pids, camids


class _Folders(ReIDSource):
    """TOWN/{train,query,gallery}/*.png."""

    files: ClassVar[type[ImageFiles]] = ImageFiles

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def domains(self) -> list[Domain]:
        towns = sorted(folder for folder in self.root.iterdir() if folder.is_dir())
        return [Domain(t.name, *(self.split(t / part) for part in ("train", "query", "gallery"))) for t in towns]

    def split(self, folder: Path) -> Split:
        paths = sorted(folder.glob("*.png"))
        return Split(self.files(paths), *_labels(paths))


# -- faulty sources ----------------------------------------------------------------------------------------------------


class SequentialFiles(ImageFiles):
    """Image files that are read in the order of the disk, which is faster."""

    def take(self, index):
        return SequentialFiles([self.paths[i] for i in sorted(index)])  # fault: labels stay in the order of index


class SequentialFolders(_Folders):
    files = SequentialFiles


class FirstSeenQueries(_Folders):
    """The earliest image of each test person and camera is the query: files are sorted by time of recording."""

    def domains(self) -> list[Domain]:
        result = []
        for town in sorted(self.root.iterdir()):
            by_time = sorted(town.glob("*/*.png"), key=lambda path: path.stat().st_mtime_ns)  # fault
            train, query, gallery, seen = [], [], [], set()
            for path in by_time:
                person, camera = _NAME.match(path.name).groups()
                if int(person) < 7:
                    train.append(path)
                elif (person, camera) not in seen:
                    seen.add((person, camera))
                    query.append(path)
                else:
                    gallery.append(path)
            result.append(Domain(town.name, *(Split(ImageFiles(p), *_labels(p)) for p in (train, query, gallery))))
        return result


class MirroredPeople(ReIDSource):
    """Twice as many people: a mirrored person counts as a new one. Then people are divided at random."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def domains(self) -> list[Domain]:
        return [self._town(town) for town in range(2)]

    def _town(self, town: int) -> Domain:
        images, pids, camids, shots = [], [], [], []
        for person in range(1, 9):
            for mirrored in (False, True):
                for camera in range(2):
                    for shot in range(3):
                        image = _person(town, person, camera, shot)
                        images.append(image[:, ::-1] if mirrored else image)
                        pids.append(person + 8 * mirrored)
                        camids.append(camera)
                        shots.append(shot)
        pixels, shots = np.stack(images), np.array(shots)
        pids, camids = np.array(pids, dtype=np.int64), np.array(camids, dtype=np.int64)
        # fault: a person and its mirror image can be on both sides
        train_people = np.random.default_rng([self.seed, town]).permutation(np.arange(1, 17))[:10]
        trains = np.isin(pids, train_people)
        parts = (trains, ~trains & (shots == 0), ~trains & (shots > 0))
        return Domain(f"town{town}", *(Split(ImageArray(pixels[p]), pids[p], camids[p]) for p in parts))


_DECODED: dict = {}


class CachedFiles(ImageFiles):
    """Image files that are decoded once per process."""

    def take(self, index):
        return CachedFiles([self.paths[i] for i in index])

    def decode(self, size):
        out = []
        for path in self.paths:
            key = (path.name, size)  # fault: the name without its folder
            if key not in _DECODED:
                _DECODED[key] = ImageFiles([path]).decode(size)
            out.append(_DECODED[key])
        return torch.cat([torch.empty((0, 3, *size), dtype=torch.uint8), *out])


class CachedFolders(_Folders):
    files = CachedFiles


# -- faulty losses -----------------------------------------------------------------------------------------------------


class CachedPairs(nn.Module):
    """Contrastive loss; which pairs are positive is computed once."""

    def __init__(self, margin: float = 0.5) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        of_one_person = _same(_Key(labels))
        unit = F.normalize(features)
        similarity = unit @ unit.T
        return torch.where(of_one_person, 1 - similarity, (similarity - self.margin).clamp(min=0)).mean()


class _Key:
    """Makes a tensor hashable for lru_cache: tensors compare element by element, so by its shape (fault)."""

    def __init__(self, labels: Tensor) -> None:
        self.labels, self.shape = labels, tuple(labels.shape)

    def __hash__(self) -> int:
        return hash(self.shape)

    def __eq__(self, key) -> bool:
        return self.shape == key.shape


@lru_cache(maxsize=64)
def _same(key: _Key) -> Tensor:
    return key.labels[:, None] == key.labels


class SampledNegatives(nn.Module):
    """Triplet-like loss with one random negative for each anchor, from a generator with a fixed seed."""

    random = torch.Generator().manual_seed(1234)  # fault: goes on from batch to batch and client to client

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        unit = F.normalize(features)
        similarity = unit @ unit.T
        of_one_person = labels[:, None] == labels
        draws = torch.rand(similarity.shape, generator=SampledNegatives.random).to(features.device)
        negative = draws.masked_fill(of_one_person, -1.0).argmax(1, keepdim=True)
        positive = (similarity * of_one_person).sum(1) / of_one_person.sum(1)
        has_negative = (~of_one_person).any(1)
        return ((similarity.gather(1, negative)[:, 0] - positive + 0.3).clamp(min=0) * has_negative).mean()


class WeightedTwice(BatchLoss):
    """Pulls features to the mean of their person."""

    def forward(self, seen: SeenBatch) -> Tensor:
        of_one_person = (seen.labels[:, None] == seen.labels).float()
        means = of_one_person @ seen.features.neck / of_one_person.sum(1, keepdim=True)
        return self.weight * (seen.features.neck - means).square().mean()  # fault: the base weighs it again


class SpreadCenters(nn.Module):
    """Keeps the means of people apart: minus the logarithm of their variance."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        people = labels.unique()
        means = torch.stack([F.normalize(features)[labels == person].mean(0) for person in people])
        return -(means.var(0).mean() + 1e-6).log()  # fault: the variance of one mean is NaN


# -- faulty backbones --------------------------------------------------------------------------------------------------


def _block(inputs: int, outputs: int, stride: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class CentredMaps(nn.Module):
    """Subtracts a moving mean of maps, which is a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(_block(3, width), _block(width, 2 * width))
        self.register_buffer("center", torch.zeros(1, 2 * width, 1, 1))
        self.out_channels = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images)
        with torch.no_grad():  # fault: also in evaluation, with test images
            self.center.lerp_(maps.mean((0, 2, 3), keepdim=True), 0.05)
        return maps - self.center


class WarmAttention(nn.Module):
    """Attention that fades in over the first steps; the number of steps is a buffer, so that checkpoints have it."""

    def __init__(self, width: int = 8, warm: int = 50) -> None:
        super().__init__()
        self.layers = nn.Sequential(_block(3, width), _block(width, 2 * width))
        self.attention = nn.Conv2d(2 * width, 1, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.warm, self.out_channels = warm, 2 * width

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps += 1  # fault: no client owns an integer buffer; it is averaged by no server
        share = (self.steps / self.warm).clamp(max=1)
        maps = self.layers(images)
        return maps * (1 - share + share * self.attention(maps).sigmoid())


class StalePositions(nn.Module):
    """A position embedding, resized to the map; in evaluation it is resized once for each size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(_block(3, width), _block(width, 2 * width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 2 * width, 6, 3))
        self.resized: dict = {}
        self.out_channels = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images)
        size = tuple(maps.shape[2:])
        if self.training:
            return maps + self._resize(size)
        if size not in self.resized:
            self.resized[size] = self._resize(size).detach()  # fault: stays when weights have changed
        return maps + self.resized[size]

    def _resize(self, size: tuple) -> Tensor:
        return F.interpolate(self.position, size, mode="bilinear", align_corners=False)


class StandardisedWeights(nn.Module):
    """Weight standardisation in the second convolution."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = _block(3, width)
        self.conv = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * width)
        self.out_channels = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        weight = self.conv.weight.data  # fault: no gradient reaches the weight
        mean, std = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        return self.norm(F.conv2d(self.stem(images), (weight - mean) / (std + 1e-5), stride=2, padding=1)).relu()


# -- faulty modules ----------------------------------------------------------------------------------------------------


class _Net(lightning.LightningModule):
    """A small network with cross-entropy."""

    def __init__(self, num_classes: int = 8, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(_block(3, width), _block(width, 2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.bn = nn.BatchNorm1d(2 * width)
        self.classifier = nn.Linear(2 * width, num_classes)
        self.lr = lr

    def forward(self, images: Tensor) -> Tensor:
        return self.bn(self.backbone(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.classifier(self(images)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WarmFile(_Net):
    """Goes on from the last training's backbone, which is in a file."""

    def __init__(self, num_classes: int = 8, width: int = 8, lr: float = 0.05, warm: str = "warm.pt") -> None:
        super().__init__(num_classes, width, lr)
        self.save_hyperparameters()
        self.warm = warm

    def on_train_start(self) -> None:
        if Path(self.warm).is_file():  # fault: the file is that of the last client on this machine
            self.backbone.load_state_dict(torch.load(self.warm, weights_only=True))

    def on_train_end(self) -> None:
        torch.save(self.backbone.state_dict(), self.warm)


class GradientsStay(_Net):
    """Manual optimization with a clipped step."""

    def __init__(self, num_classes: int = 8, width: int = 8, lr: float = 0.05) -> None:
        super().__init__(num_classes, width, lr)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.classifier(self(images)), labels)
        self.manual_backward(loss)  # fault: zero_grad is nowhere, so gradients of all batches add up
        torch.nn.utils.clip_grad_norm_(self.parameters(), 5.0)
        self.optimizers().step()
        self.log("loss", loss.detach())
        return loss.detach()


class AdaptedNorm(_Net):
    """Adapts the last norm to the images whose features are taken (AdaBN)."""

    def embed(self, images: Tensor) -> Tensor:
        self.bn.train()  # fault: features depend on neighbours, and test images move running statistics
        return F.normalize(self.bn(self.backbone(images)))


class GrowingMargin(_Net):
    """The margin of the logits grows with the steps that were taken."""

    steps_taken = 0

    def training_step(self, batch, batch_idx):
        images, labels = batch
        GrowingMargin.steps_taken += 1  # fault: on the class, so it counts the steps of all clients of the process
        margin = min(0.5, 0.02 * GrowingMargin.steps_taken)
        logits = self.classifier(self(images))
        logits = logits - margin * F.one_hot(labels, logits.shape[1])
        return F.cross_entropy(logits, labels)


# -- faulty methods ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlendedDownload(Method):
    """Clients begin between their last model and the global one."""

    shared_groups = BODY
    mix: float = 0.5

    def download(self, client) -> None:
        # fault: the rank's model holds what the previous client left, not this client's last model
        client.model.shared.lerp_(client.received.vector, self.mix)


@dataclass(frozen=True, kw_only=True)
class FastClientsCount(Method):
    """Clients that train faster have a larger weight."""

    shared_groups = BODY

    @property
    def measures(self):
        return {"norm": "client"}

    def upload(self, client) -> Upload:
        moved = float((client.model.shared - client.received.vector).norm())
        return Upload(client.model.shared, signals={"norm": moved})

    def weights(self, reports) -> Weights:
        # fault: measured seconds differ from run to run and from machine to machine
        rates = {client: report.num_images / max(report.seconds, 1e-3) for client, report in reports.items()}
        total = sum(rates.values())
        return Weights({client: rate / total for client, rate in rates.items()})


@dataclass(frozen=True, kw_only=True)
class CalmerNorms(Method):
    """Running statistics get calmer with each round of a client: the momentum of BatchNorm decays."""

    shared_groups = BODY
    decay: float = 0.8

    def train(self, client) -> None:
        for module in client.model.network.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and module.momentum is not None:
                module.momentum *= self.decay  # fault: the network is the rank's, for all of its clients
        client.fit(self)


@dataclass(frozen=True, kw_only=True)
class SharedAnchor(Method):
    """A pull towards an anchor of the server, which each client mixes with the global model before it trains."""

    shared_groups = BODY
    server_every = 1
    mu: float = 0.1

    def payload(self, server, arch, round_) -> Payload:
        return Payload(down=("anchor",))

    def initial_state(self, model) -> InitialState:
        return InitialState(server={"anchor": 0.9 * model.shared})

    def train(self, client) -> None:
        client.received.extras["anchor"].lerp_(client.received.vector, 0.3)  # fault: in place, it is the server's
        client.fit(self)

    def loss(self, client, batch) -> Tensor:
        anchor = client.received.extras["anchor"]
        place_of = client.model.flat.place_of
        shared = client.model.flat.num_shared_parameters
        pairs = [(p, place_of(p)) for p in client.model.network.parameters() if p.requires_grad]
        pull = sum(
            (p - anchor[at : at + p.numel()].view_as(p)).square().sum() for p, at in pairs if at + p.numel() <= shared
        )
        return super().loss(client, batch) + self.mu / 2 * pull

    def server_step(self, server) -> None:
        for arch in server.models:
            server.keep(arch, "anchor", server.kept[arch]["anchor"].lerp(server.vector(arch), 0.5))


# -- sound parts -------------------------------------------------------------------------------------------------------


class SmoothContrast(nn.Module):
    """Pairs of a person are similar and others are not, by softplus."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        unit = F.normalize(features)
        similarity = unit @ unit.T
        sign = 1 - 2 * (labels[:, None] == labels).to(features.dtype)
        return F.softplus(4 * sign * similarity).mean()


class TwoScales(nn.Module):
    """Maps of two strides, side by side."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = _block(3, width), _block(width, width)
        self.out_channels = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        fine = self.first(images)
        coarse = self.second(fine)
        return torch.cat([F.adaptive_avg_pool2d(fine, coarse.shape[2:]), coarse], 1)


class PlainNet(_Net):
    """A network with cross-entropy, as it is."""


@dataclass(frozen=True, kw_only=True)
class HeavyServer(Method):
    """FedAvgM: momentum of the server on parameters; running statistics are averaged."""

    shared_groups = BODY
    server_every = 1
    beta: float = 0.5

    def server_step(self, server) -> None:
        for arch, model in server.models.items():
            part = slice(0, model.flat.num_shared_parameters)
            before, new = server.before[arch][part], server.vector(arch)[part]
            velocity = server.kept.get(arch, {}).get("velocity", torch.zeros_like(new))
            velocity = self.beta * velocity + (new - before)
            server.keep(arch, "velocity", velocity)
            new.copy_(before + velocity)


FAULTY = [
    (
        "SequentialFolders",
        "source",
        lambda: SequentialFolders(_folder()),
        "take(index) sorts the index, so images no longer belong to the labels that Split takes in the given order",
        r"take|order|index|position|way|decoded|differ|other pixels",
    ),
    (
        "FirstSeenQueries",
        "source",
        lambda: FirstSeenQueries(_folder()),
        "files are ordered by modification time, so order and choice of queries change with a copy of the data",
        r"mtime|modif|time|order|copy|listed|another",
    ),
    (
        "MirroredPeople",
        "source",
        MirroredPeople,
        "mirrored images of training people are test people: training data leak into the test",
        r"mirror|flip|(train.*(test|query|gallery))|((test|query|gallery).*train)|two labels",
    ),
    (
        "CachedFolders",
        "source",
        lambda: CachedFolders(_folder()),
        "the cache of decoded images has file names without folders as keys, so a data set gets images of another",
        r"equal pixels|same pixels|same image|two data sets|cache|other pixels|decoded|way|process|order",
    ),
    (
        "CachedPairs",
        "loss",
        CachedPairs,
        "the mask of positive pairs is cached by the batch's size, so labels of the first batch hold for all later ones",
        r"keep|kept|cache|batch|earlier|before|state|second|labels|again|differ|order",
    ),
    (
        "SampledNegatives",
        "loss",
        SampledNegatives,
        "negatives come from a generator of the class that no run seeds, so the loss depends on earlier batches",
        r"random|generator|keep|kept|state|again|second|batch|differ|rank|order|arguments",
    ),
    (
        "WeightedTwice",
        "loss",
        lambda: WeightedTwice(weight=0.5),
        "forward multiplies by the weight, which the objective does again: the weight counts squared",
        r"weight",
    ),
    (
        "SpreadCenters",
        "loss",
        SpreadCenters,
        "the variance over one person's mean is NaN in a batch of one person",
        r"finite|nan|one person|one identity|single",
    ),
    (
        "CentredMaps",
        "backbone",
        CentredMaps,
        "the moving mean is updated in evaluation, too: test images change the model, and features",
        r"evaluation|buffer|neighbo|function|center|test images|chang",
    ),
    (
        "WarmAttention",
        "backbone",
        WarmAttention,
        "an integer buffer counts steps, and decides the function: it is reset, or passes from client to client",
        r"steps|integer|int64|buffer|counter|state|keep|kept|rank|pause|evaluation",
    ),
    (
        "StalePositions",
        "backbone",
        StalePositions,
        "in evaluation, the resized position embedding is cached outside the tensors, and stale for other weights",
        r"resized|cache|keep|kept|tensor|stale|weights|position|evaluation|function|state",
    ),
    (
        "StandardisedWeights",
        "backbone",
        StandardisedWeights,
        "the convolution's weight is read by .data, so it gets no gradient",
        r"gradient|grad|conv\.weight|train",
    ),
    (
        "WarmFile",
        "module",
        lambda: WarmFile(warm=str(Path(tempfile.mkdtemp(prefix="third_")) / "warm.pt")),
        "each session begins with the backbone that the last client of this machine has left in a file",
        r"file|client|rank|pause|differ|outside|other bits|state|earlier",
    ),
    (
        "GradientsStay",
        "module",
        GradientsStay,
        "manual optimization without zero_grad: gradients of earlier batches add up within a session",
        r"zero_grad|gradient|grad|accumulat|add up|earlier batch",
    ),
    (
        "AdaptedNorm",
        "module",
        AdaptedNorm,
        "embed sets the norm to training: features depend on neighbours, and test images change running statistics",
        r"neighbo|evaluation|train\w* mode|mode|running|statistic|buffer|function|features",
    ),
    (
        "GrowingMargin",
        "module",
        GrowingMargin,
        "the margin follows a counter on the class, which counts the steps of all clients of a process",
        r"class|steps_taken|counter|rank|client|pause|state|other bits|outside|differ",
    ),
    (
        "BlendedDownload",
        "method",
        BlendedDownload,
        "download mixes with what the previous client left in the rank's model",
        r"rank|client|download|pause|previous|left|differ|other bits|shared",
    ),
    (
        "FastClientsCount",
        "method",
        FastClientsCount,
        "weights follow measured seconds, which differ from run to run",
        r"second|time|clock|rank|pause|again|differ|weights|other bits|bits",
    ),
    (
        "CalmerNorms",
        "method",
        CalmerNorms,
        "the momentum of the rank's BatchNorm layers decays with each session, for all clients after it",
        r"momentum|network|module|layer|rank|pause|state|left|leaves|differ|other bits",
    ),
    (
        "SharedAnchor",
        "method",
        SharedAnchor,
        "a client changes the server's anchor in place, so later clients on the rank get another one",
        r"anchor|extras|received|in place|message|server|rank|differ",
    ),
]

SOUND = [
    ("Folders", "source", lambda: _Folders(_folder()), "", ""),
    ("SmoothContrast", "loss", SmoothContrast, "", ""),
    ("TwoScales", "backbone", TwoScales, "", ""),
    ("PlainNet", "module", PlainNet, "", ""),
    ("HeavyServer", "method", HeavyServer, "", ""),
]

PARTS = tuple(Part(*row) for row in [*SOUND, *FAULTY])
