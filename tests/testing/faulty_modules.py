"""LightningModules that cannot be clients, and sound ones. They lie in a file, as each fit has processes of its own."""

import os
import random

import numpy as np
import torch
from lightning import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = [0]


class Sound(LightningModule):
    """Cross-entropy with dropout."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)
        )
        self.classifier = nn.Linear(4, num_classes)

    def embed(self, images):
        return self.encoder(images)

    def forward(self, images):
        return self.classifier(self.embed(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class MixesImages(Sound):
    """It draws from streams that are seeded for each session: nothing is wrong with it."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        share = np.random.rand() * random.random()  # noqa: NPY002 - as users do
        return super().training_step((images.lerp(images.flip(0), share), labels), batch_idx)


class ByRank(Sound):
    """Its loss depends on the rank."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + int(os.environ.get("RANK", "0")) + self.world())

    def world(self):
        return int(os.environ.get("WORLD_SIZE", "1"))


class ByOthers(Sound):
    """Its loss depends on the clients before it."""

    def training_step(self, batch, batch_idx):
        STEPS[0] += 1
        return super().training_step(batch, batch_idx) * (1 + STEPS[0] % 7)


class ByClass(Sound):
    """It counts on its class, which a pause forgets."""

    steps = 0

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        return super().training_step(batch, batch_idx) / type(self).steps


class CountsForItself(Sound):
    """It counts its steps in an attribute, which each session begins anew."""

    def __init__(self, num_classes: int = 4):
        super().__init__(num_classes)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) / self.steps


class ChangesItsBatch(Sound):
    def training_step(self, batch, batch_idx):
        batch[0].clamp_(-1, 1)
        return super().training_step(batch, batch_idx)


class Manual(Sound):
    """It optimizes by hand."""

    def __init__(self, num_classes: int = 4):
        super().__init__(num_classes)
        self.automatic_optimization = False


class StepsPastLightning(Sound):
    """It is sound: it optimizes by hand, and takes the steps of torch's optimizer."""

    def __init__(self, num_classes: int = 4):
        super().__init__(num_classes)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoOptimizers(Sound):
    """It has two optimizers."""

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.encoder, self.classifier)]


class WithoutLoss(Sound):
    """It forgets to return its loss."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class WithoutOptimizer(Sound):
    """It has no optimizer."""

    def configure_optimizers(self):
        return None


class Vector(Sound):
    """Its loss is no scalar."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self(images), labels, reduction="none")


class Detached(Sound):
    """Its loss has no gradient."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class Raises(Sound):
    """It fails."""

    def training_step(self, batch, batch_idx):
        raise ValueError("a fault of mine")


class Normed(Sound):
    """A batch normalisation moves its statistics, whatever the loss is."""

    def __init__(self, num_classes: int = 4):
        super().__init__(num_classes)
        self.norm = nn.BatchNorm1d(4)

    def embed(self, images):
        return self.norm(self.encoder(images))


class LogitsInTraining(Normed):
    """As in public code of the field: forward returns logits with features in training, and features in evaluation."""

    def forward(self, images):
        features = self.embed(images)
        return (self.classifier(features), features) if self.training else features

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self(images)[0], labels)


class TimesZero(Normed):
    """Its loss has a gradient of 0."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0


class BranchInAList(Sound):
    """Layers that nothing trains."""

    def __init__(self, num_classes: int = 4):
        super().__init__(num_classes)
        self.branch = [nn.Linear(4, 4)]

    def embed(self, images):
        return self.branch[0](super().embed(images))


MODULES = {
    ByRank: "bits",
    ByOthers: "bits",
    ByClass: "bits",
    CountsForItself: "does not last",
    ChangesItsBatch: "changes its batch",
    Manual: "do not move",
    TimesZero: "do not move",
    BranchInAList: "branch has layers in a plain list",
    TwoOptimizers: "optimizer",
    WithoutLoss: "loss",
    WithoutOptimizer: "optimizer",
    Vector: "scalar",
    Detached: "grad",
    Raises: "a fault of mine",
}
"""class -> a word of the finding"""
