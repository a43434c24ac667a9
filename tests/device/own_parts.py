"""Parts of users that compute on the CPU, or make tensors there."""

from dataclasses import dataclass, replace

import torch
import torchmetrics
from torch.nn.functional import cross_entropy

from fedsim.methods import FedPav
from fedsim.training.batch_loss import BatchLoss
from fedsim.training.messages import Measured
from fedsim.training.objective import Objective
from lightning_modules import DropsOut, Small
from small import fit, make_model


class LogsOnTheCPU(DropsOut):
    """Logs its loss, and a number on the CPU."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss.detach(), "temperature": torch.tensor(0.25)})
        return loss


class WithAMetric(Small):
    """Logs its loss, and a metric of torchmetrics in each batch and epoch."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=num_classes)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.classifier(self.embed(images))
        loss = cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss)
        return loss


class OnTheHost(BatchLoss):
    """Computes on the CPU."""

    def forward(self, seen):
        return seen.features.neck.cpu().square().mean()


class MadeOnTheHost(BatchLoss):
    """Compares features with a tensor that it makes on the CPU."""

    def forward(self, seen):
        return (seen.features.neck - torch.zeros(seen.features.neck.shape[1])).square().mean()


@dataclass(frozen=True, kw_only=True)
class MeasuresOnTheHost(FedPav):
    """Measures a number on the CPU."""

    @property
    def measures(self):
        return {"count": "client"}

    def upload(self, client):
        values = torch.tensor(float(client.data.num_images))
        return replace(super().upload(client), signals={"count": Measured(values, lambda numbers: numbers[0])})


@dataclass(frozen=True, kw_only=True)
class ScalesOnTheHost(FedPav):
    """Scales an upload by a tensor that it makes on the CPU."""

    def upload(self, client):
        upload = super().upload(client)
        upload.vector.mul_(torch.ones(len(upload.vector)))
        return upload


class ComparesOnTheHost(Small):
    """Compares features with a tensor that it makes on the CPU."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.embed(batch[0]) - torch.zeros(8)).square().mean()


PARTS = {
    "a loss on the host": lambda: make_model(FedPav(), objective=Objective(metric=OnTheHost())),
    "a signal on the host": lambda: make_model(MeasuresOnTheHost()),
}
"""Name -> a federation whose numbers are partly computed on the CPU"""


def trained(name, **where):
    """Train with one of these parts."""
    return fit(PARTS[name](), **where)
