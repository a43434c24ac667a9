"""The faulty parts of an independent review, and some sound ones; each has one fault, which its first line names."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from faulty.part import documented
from fedsim.data import SyntheticReID
from fedsim.data.images import Domain, ReIDSource, Split
from fedsim.methods.base import Method, Weights
from fedsim.models.groups import BODY
from fedsim.training.batch_loss import BatchLoss, SeenBatch

# -- data sources ------------------------------------------------------------------------------------------------------


class SoundSource(ReIDSource):
    """Nothing: two drawn data sets, and one for tests."""

    def domains(self) -> list[Domain]:
        return [self.change(domain) for domain in SyntheticReID(clients=2, unseen=1, scale=0.1).domains()]

    def change(self, domain: Domain) -> Domain:
        return domain


class OrderOfASet(SoundSource):
    """Data sets come in the order of a set of texts."""

    def domains(self) -> list[Domain]:
        domains = {domain.name: domain for domain in super().domains()}
        return [domains[name] for name in set(domains)]


class TrainingImagesInGallery(SoundSource):
    """The gallery also holds the training images, as people with new numbers."""

    def change(self, domain: Domain) -> Domain:
        train = domain.train
        if train is None:
            return domain
        renamed = Split(train.images, train.pids + 1000, train.camids)
        return replace(domain, gallery=Split.concatenate([domain.gallery, renamed]))


class QueriesAsGallery(SoundSource):
    """The gallery is the queries, as images of another camera."""

    def change(self, domain: Domain) -> Domain:
        query = domain.query
        return replace(domain, gallery=Split(query.images, query.pids, query.camids + 1))


class NameOfAFolder(SoundSource):
    """The name of a data set has a slash."""

    def change(self, domain: Domain) -> Domain:
        return replace(domain, name=f"a/{domain.name}")


# -- losses ------------------------------------------------------------------------------------------------------------


class SoundLoss(BatchLoss):
    """Nothing: it pulls images of one identity from two cameras together."""

    def forward(self, seen: SeenBatch) -> Tensor:
        neck = seen.features.neck
        pairs = (seen.labels[:, None] == seen.labels) & (seen.cameras[:, None] != seen.cameras)
        return ((neck[:, None] - neck).square().sum(2) * pairs).sum() / pairs.sum().clamp(min=1)


class DeviationOfTheBatch(nn.Module):
    """The standard deviation of a batch of one image is NaN."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return features.std(0).mean()


class MeanOverOtherCameras(BatchLoss):
    """A mean over the pairs of two cameras, of which there are none where all images are of one camera."""

    def forward(self, seen: SeenBatch) -> Tensor:
        neck = seen.features.neck
        return (neck[:, None] - neck).square().sum(2)[seen.cameras[:, None] != seen.cameras].mean()


class RootOfDistances(nn.Module):
    """The square root of a squared distance has no gradient for two equal images."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(len(features), len(features), 1)
        return (features[rows] - features[columns]).square().sum(1).sqrt().sum() / max(1, len(rows))


class DividesByNorms(nn.Module):
    """Features of length 0 are divided by 0."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        units = features / features.norm(dim=1, keepdim=True)
        return (units @ units.T * (labels[:, None] == labels)).mean()


class EightPeople(nn.Module):
    """Labels are taken to be below 8."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        sums = one_hot(labels, 8).float().T @ features
        return sums.square().sum() / len(features)


class DrawsAPair(nn.Module):
    """It draws from torch's global stream."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - features[torch.randperm(len(features))]).square().mean()


class KeepsTheLast(nn.Module):
    """It remembers its last value."""

    last: Tensor | float = 0.0

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        value = features.square().mean() + 0.1 * self.last
        self.last = value.detach()
        return value


# -- backbones ---------------------------------------------------------------------------------------------------------


class SoundBackbone(nn.Module):
    """Nothing: a convolution with batch normalisation."""

    out_channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.norm(self.conv(images)).relu()
        return maps


class ClampsImages(SoundBackbone):
    """It changes the images that it gets."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.clamp_(-1, 1))


class AnotherFunctionInEvaluation(SoundBackbone):
    """It computes another function in evaluation than in training."""

    def forward(self, images: Tensor) -> Tensor:
        maps = super().forward(images)
        return maps if self.training else maps.tanh()


class StatisticsOfLargeBatches(SoundBackbone):
    """In evaluation, batches of 9 images or more are normalised by their own mean."""

    def forward(self, images: Tensor) -> Tensor:
        maps = super().forward(images)
        return maps - maps.mean(0) if len(maps) > 8 else maps


class LayersOfASet(SoundBackbone):
    """Its layers come in the order of a set of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Conv2d(3, 4, 3, stride=2) for name in {"head", "torso", "legs"}})

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + sum(self.branches[name](images) for name in ("head", "torso", "legs"))


class IntegerCounter(SoundBackbone):
    """Its output depends on an integer buffer that counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(images) * (1 + self.steps / 100)


# -- LightningModules --------------------------------------------------------------------------------------------------


class SoundModule(LightningModule):
    """Nothing: cross-entropy with dropout."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)
        )
        self.classifier = nn.Linear(4, num_classes)

    def embed(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder(images)
        return features

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.classifier(self.embed(images)), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class MixesByNumPy(SoundModule):
    """It mixes images by numbers of NumPy's global stream."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        share = float(np.random.beta(1, 1))  # noqa: NPY002 - the fault
        return super().training_step((images.lerp(images.flip(0), share), labels), batch_idx)


class CountsOnALibrary(SoundModule):
    """It counts its steps on a module of a library."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        library: Any = torch.nn.functional
        library.steps_seen = getattr(library, "steps_seen", 0) + 1
        return super().training_step(batch, batch_idx) / library.steps_seen


class GivenNetwork(SoundModule):
    """Its network is an argument, which each build could share."""

    def __init__(self, net: nn.Module, num_classes: int = 4) -> None:
        super().__init__(num_classes)
        self.save_hyperparameters()
        self.encoder = nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def given_network() -> LightningModule:
    """Its network is an argument, which each build could share."""
    return GivenNetwork(SoundBackbone())


class CountsInAnInteger(SoundModule):
    """Its loss depends on an integer buffer that counts the steps."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__(num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx) / self.steps


class HashInTheLoss(SoundModule):
    """Its loss depends on the hash of a text."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + hash("person") % 97 / 100)


class NoisyFeatures(SoundModule):
    """Its features have noise, also in evaluation."""

    def embed(self, images: Tensor) -> Tensor:
        features = super().embed(images)
        return features + 0.01 * torch.randn_like(features)


# -- methods -----------------------------------------------------------------------------------------------------------


class SoundMethod(Method):
    """Nothing: body and neck are averaged."""

    shared_groups = BODY


class ScalesWhatItReceives(SoundMethod):
    """A client changes the received model in place, which is the server's."""

    def download(self, client: Any) -> None:
        client.model.shared.copy_(client.received.vector.mul_(0.999))


class TensorHooksThatStay(SoundMethod):
    """Each session adds hooks to tensors, which stay on the rank's network."""

    def download(self, client: Any) -> None:
        super().download(client)
        for parameter in client.model.network.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 1.1)


class FrozenParametersThatStay(SoundMethod):
    """A session freezes a parameter, which stays frozen on the rank's network."""

    def train(self, client: Any) -> None:
        super().train(client)
        next(client.model.network.parameters()).requires_grad_(False)


class CountsOnTorch(SoundMethod):
    """It counts sessions on a module of a library."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        library: Any = torch
        library.batches_seen = getattr(library, "batches_seen", 0) + 1
        return super().loss(client, batch) / library.batches_seen


class CountsInTheEnvironment(SoundMethod):
    """It counts batches in a variable of the environment."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        count = int(os.environ.get("BATCHES_SEEN", "0")) + 1
        os.environ["BATCHES_SEEN"] = str(count)
        return super().loss(client, batch) / count


class HashOfTheName(SoundMethod):
    """The loss depends on the hash of the client's name."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        return super().loss(client, batch) * (1 + hash(client.client_name) % 97 * 0.01)


class ProductOverASet(SoundMethod):
    """A product is taken in the order of a set of texts."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        loss = super().loss(client, batch)
        for word in {"head", "torso", "legs", "feet", "hands", "bag", "hat", "shoes"}:
            loss = loss * (1 + len(word) / 30) + 0.1 * len(word)
        return loss


class CountsFromTheFourthRound(SoundMethod):
    """It counts on its class, from the fourth round on."""

    count = 0

    def loss(self, client: Any, batch: Any) -> Tensor:
        if client.round >= 3:
            CountsFromTheFourthRound.count += 1
        return super().loss(client, batch) / (1 + CountsFromTheFourthRound.count)


class WeightsOfFourClients(SoundMethod):
    """Weights sum to 2 if four clients or more take part."""

    def weights(self, reports: Any) -> Weights:
        total = 2.0 if len(reports) > 3 else 1.0
        return Weights({name: total / len(reports) for name in reports})


class KeepsTheLiveBuffer(SoundMethod):
    """It keeps the rank's live vector, not a copy of it."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        home = client.kept.get("home", client.received.vector)
        return super().loss(client, batch) + 0.1 * (home - client.model.shared).square().mean()

    def upload(self, client: Any) -> Any:
        client.keep("home", client.model.shared)
        return super().upload(client)


class ForwardHooksThatStay(SoundMethod):
    """Each session adds a forward hook to the rank's network, which stays there."""

    def download(self, client: Any) -> None:
        super().download(client)
        client.model.network.register_forward_hook(lambda module, inputs, output: None)  # noqa: ARG005 - of a hook


class LeavesEvaluation(SoundMethod):
    """The download leaves the network in evaluation mode."""

    def download(self, client: Any) -> None:
        super().download(client)
        client.model.network.eval()


_SETS = r"PYTHONHASHSEED|order of a set"
PARTS = (
    documented("source", SoundSource),
    documented("source", OrderOfASet, _SETS),
    documented("source", TrainingImagesInGallery, r"(pixels|images).*train|train.*(pixels|images)"),
    documented("source", QueriesAsGallery, r"(pixels|images).*quer|quer.*(pixels|images)"),
    documented("source", NameOfAFolder, r"name.*/|/.*name", harmless="names may have a slash; names of files quote it"),
    documented("loss", SoundLoss),
    documented("loss", DeviationOfTheBatch, r"(1|one) image"),
    documented("loss", MeanOverOtherCameras, r"one camera|1 camera|equal cameras|cameras \[0, 0"),
    documented("loss", RootOfDistances, r"equal (features|images)"),
    documented("loss", DividesByNorms, r"features (of|that are) (0|zero)|zero features"),
    documented("loss", EightPeople, r"labels.*(\d\d|above)|identities|Class values"),
    documented("loss", DrawsAPair, "random stream of torch"),
    documented("loss", KeepsTheLast, r"self\.last"),
    documented("backbone", SoundBackbone),
    documented("backbone", ClampsImages, r"changes (the|its) images|images.* in place"),
    documented("backbone", AnotherFunctionInEvaluation, r"evaluation.*than in training|training.*than in evaluation"),
    documented("backbone", StatisticsOfLargeBatches, "other images of the batch"),
    documented("backbone", LayersOfASet, _SETS),
    documented("backbone", IntegerCounter, r"steps.*(int64|integer)|(int64|integer).*steps"),
    documented("module", SoundModule),
    documented("module", MixesByNumPy, "numpy", harmless="the streams of NumPy and random are seeded for each client"),
    documented("module", CountsOnALibrary, "bits|differ"),
    documented("module", given_network, "evaluation mode|argument", harmless="each build gets a copy of its arguments"),
    documented("module", CountsInAnInteger, "steps", harmless="integer buffers last: each client keeps its own"),
    documented("module", HashInTheLoss, rf"{_SETS}|hash\("),
    documented("module", NoisyFeatures, r"evaluation mode.*(differ|random)"),
    documented("method", SoundMethod),
    documented("method", ScalesWhatItReceives, "the server's model"),
    documented("method", TensorHooksThatStay, "differ|hook on"),
    documented("method", FrozenParametersThatStay, "differ|requires_grad|frozen"),
    documented("method", CountsOnTorch, "differ"),
    documented("method", CountsInTheEnvironment, "differ|environment"),
    documented("method", HashOfTheName, rf"{_SETS}|hash\("),
    documented("method", ProductOverASet, rf"{_SETS}|hash\("),
    documented("method", CountsFromTheFourthRound, r"CountsFromTheFourthRound\.count"),
    documented("method", WeightsOfFourClients, "sum to 2"),
    documented("method", KeepsTheLiveBuffer, "live|copy", harmless="client.keep copies what it is given"),
    documented("method", ForwardHooksThatStay, r"leaves.*hook|hook.*(stay|remove)"),
    documented("method", LeavesEvaluation, "mode", harmless="a session's training begins with training mode"),
)
"""sound ones and 33 faulty ones, and NameOfAFolder; tensor hooks and the like may show as a difference of ranks"""
