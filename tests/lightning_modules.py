"""Modules of users, in foreign styles, and federations of them."""

import numpy as np
import torch
import torchmetrics
from lightning import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy, dropout, one_hot

from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.training.settings import LocalTraining


class Small(LightningModule):
    """The base of modules of foreign style."""

    def __init__(self, num_classes: int, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.neck = nn.Linear(6 * 15 * 7, 8)
        self.classifier = nn.Linear(8, num_classes)

    def embed(self, images):
        return self.neck(self.backbone(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.classifier(self.embed(images)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Optimizing:
    """An argument's own class."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate


class Typed(Small):
    """Takes an object, as others take a config's."""

    def __init__(self, optimizing: Optimizing, num_classes: int = 8):
        super().__init__(num_classes, optimizing.rate)


class DropsOut(Small):
    """Draws from the device's stream."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.classifier(dropout(self.embed(images), 0.5)), labels)


class OwnScheduler(Small):
    """A learning rate per step, and one per epoch; a dict of Lightning's documentation."""

    def training_step(self, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("own_epoch", float(self.current_epoch))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class ClipsInside(Small):
    """Clips gradients and warms up by hand."""

    norms: list

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.parameters()])))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = self.hparams.lr * min(1.0, (self.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)


class DictLosses(Small):
    """Returns a dict, and looks at it after the batch."""

    def training_step(self, batch, batch_idx):
        features = self.embed(batch.images)
        losses = {"id": cross_entropy(self.classifier(features), batch.labels), "size": 1e-3 * features.square().mean()}
        self.log_dict({f"loss_{name}": value for name, value in losses.items()}, on_step=True, on_epoch=True)
        return {"loss": losses["id"] + losses["size"], "cameras": batch.cameras, **losses}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["cameras"].shape == batch[1].shape
        self.log("total", outputs["loss"])


class MetricsInside(Small):
    """Metrics of torchmetrics, logged as objects and by hand, whose size is that of the classifier."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=num_classes)
        self.mean = torchmetrics.MeanMetric()
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.classifier(self.embed(images))
        assert one_hot(labels, self.hparams.num_classes).shape == logits.shape
        self.accuracy(logits, labels)
        self.mean.update(logits.mean())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.calls += 1
        self.scratch += 1
        return cross_entropy(logits, labels)

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.log("calls", float(self.calls))
        self.log("scratch", self.scratch[0])
        self.mean.reset()


class Frozen(Small):
    """A frozen backbone without gradients, whose normalisation stays in evaluation mode; a buffer that is replaced."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.backbone.requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))
        self.backbone.eval()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        with torch.no_grad():
            maps = self.backbone(images)
        features = self.neck(maps)
        self.center = 0.9 * self.center + 0.1 * features.detach().mean(0)
        return cross_entropy(self.classifier(features - self.center), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Restarted(Small):
    """What a resumed session could lose: dropout, NumPy's stream, Adam, a rate per step, counters, a queue."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(16, 8))
        self.register_buffer("precise", torch.zeros(8, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        features = nn.functional.dropout(self.embed(images), 0.2)
        self.queue[int(self.steps) % 16] = features.detach()[0]
        self.steps += 1
        self.precise += features.detach().mean(0) / 3
        share = np.random.uniform(0.9, 1.1)  # noqa: NPY002 - public code does so
        self.log("steps", self.steps.float())
        features = features - self.queue.mean(0) + self.precise.float() * 1e-3
        return share * cross_entropy(self.classifier(features), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Together(MetricsInside):
    """Asks all processes, of which a session has one: other ranks train other clients."""

    def training_step(self, batch, batch_idx):
        assert not torch.distributed.is_initialized()
        assert (self.trainer.world_size, self.global_rank, self.trainer.is_global_zero) == (1, 0, True)
        loss = super().training_step(batch, batch_idx)
        self.log("ranks", self.all_gather(torch.ones(1)).sum(), sync_dist=True)
        self.log("synced", loss.detach(), sync_dist=True, on_step=False, on_epoch=True)
        return loss


FOREIGN = [OwnScheduler, ClipsInside, DictLosses, MetricsInside, Frozen, Restarted, Together]


def federation(method, module, **options):
    defaults = {
        "client": LocalTraining(batch_size=8, local_epochs=2), "evaluation": Evaluation(test_during_fit=False),
    }  # fmt: skip
    return Federation(method, module, **defaults | options)


def module_state(model):
    """All that a run of a module has learnt."""
    private = {f"{n} {k}": t for n, c in model.parts.clients.items() for k, t in c.private_state().items()}
    [arch] = model.parts.models
    return {"global": model.server.vector(arch), **private}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
