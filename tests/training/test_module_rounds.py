"""An own LightningModule in later rounds, where values and counters go on."""

import lightning.pytorch
import pytest
import timm.scheduler
import torch
from torch.optim import SGD, lr_scheduler

from alone import differences, recording, train_alone
from fedsim.data import SyntheticReID
from fedsim.methods import FedAvg
from fedsim.training.settings import LocalTraining
from habits import habits
from lightning_modules import federation
from small import fit, make_data

Base = habits(lightning.pytorch)["plain"]


def train_rounds(kind, rounds, recorded=(), epochs=1):
    data = make_data(SyntheticReID(clients=1, unseen=1, scale=0.1), size=(16, 8))
    model = federation(FedAvg(), kind, client=LocalTraining(batch_size=8, local_epochs=epochs))
    with recording(recorded):
        fit(model, data, rounds)
    return model


class Proximal(Base):
    """Stays near the values with which a training begins."""

    def setup(self, stage):
        self.start = [p.detach().clone() for p in self.net.parameters()]

    def training_step(self, batch, batch_idx):
        pairs = zip(self.net.parameters(), self.start, strict=True)
        return self.loss(batch) + sum((p - start).square().sum() for p, start in pairs)


class InModel(Proximal):
    setup = None

    def configure_model(self):
        self.start = [p.detach().clone() for p in self.net.parameters()]


del InModel.setup


@pytest.mark.parametrize("kind", [Proximal, InModel])
def test_hooks_of_setup_see_the_values_of_their_round(kind):
    trainings = []
    model = train_rounds(kind, 2, trainings, epochs=2)
    for recorded in trainings:
        alone = train_alone(kind(num_classes=model.parts.num_classes["town0"]), recorded)
        assert differences(alone, recorded.end) == []
    assert len(trainings) == 2


RATES = []


class Noting(Base):
    """Notes the rate of each epoch's first batch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            RATES.append((self.current_epoch, round(self.trainer.optimizers[0].param_groups[0]["lr"], 12)))


class Timm(Noting):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.05)
        return [optimizer], [timm.scheduler.CosineLRScheduler(optimizer, t_initial=8)]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class ByEpoch(Noting):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.05)
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.current_epoch))]


class AfterSteps(Noting):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.05)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        if self.global_step > 2:
            scheduler.step()


class AfterEpochs(AfterSteps):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), 0.05)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler, metric):
        if self.current_epoch >= 2:
            scheduler.step()


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", [Timm, ByEpoch, AfterSteps, AfterEpochs])
def test_schedulers_that_read_counters_go_on_as_in_one_training(kind, epochs):
    RATES.clear()
    trainings = []
    model = train_rounds(kind, 6 // epochs, trainings, epochs)
    under_fedsim = [pair for pair in RATES if isinstance(pair, tuple)][-6:]
    RATES.clear()
    whole = trainings[0]._replace(
        batches=[batches for recorded in trainings for batches in recorded.batches],
        horizon=trainings[0].horizon._replace(epochs=6, round_=0, rounds=None),
    )
    train_alone(kind(num_classes=model.parts.num_classes["town0"]), whole)
    assert under_fedsim == RATES
    assert len({rate for _, rate in RATES}) > 2
    assert not torch.tensor([rate for _, rate in RATES]).isnan().any()
