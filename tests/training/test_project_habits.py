"""Habits of public projects under fedsim have the bits of Lightning alone on the same batches, in two rounds."""

import threading
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import lightning.pytorch
import pytest
import torch
from torch import nn

from alone import differences, recording, train_alone
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.methods import FedAvg, FedDIP, FedNova, FedProx, FedSAM, LotteryFL, PFedMe, Scaffold
from fedsim.training.settings import LocalTraining
from habits import habits
from lightning_modules import federation
from others import some
from project_habits import OPTIONS, project_habits
from small import fit, make_data

REFUSED = {
    "no optimizer": "configure_optimizers returned no optimizer; return one",
    "plateau of validation": "conditioned on metric val_loss which is not available",
}
NAMES = [name for name in project_habits(lightning.pytorch) if name not in REFUSED]
FIRST = (
    "optimizer given", "hook that is a method", "task", "bank that grows", "bank by the number of images",
    "function of a parameter", "hook after accumulation",
    "layer that merges", "state without parts", "two steps of one", "stops early", "averages at the end",
)  # fmt: skip


def data():
    return make_data(SyntheticReID(clients=1, unseen=1, scale=0.1), size=(16, 8))


def trained(kind, method=None, rounds=2, counts_from="round", **training):
    """Train one client for two epochs in each round; return the federation and its trainings."""
    trainings, client = [], LocalTraining(batch_size=8, local_epochs=2, **training)
    model = federation(method or FedAvg(), kind, client=client, module_counts_from=counts_from)
    with recording(trainings):
        fit(model, data(), rounds)
    return model, trainings


def compare(package, name):
    model, trainings = trained(project_habits(package)[name], **OPTIONS.get(name, {}))
    for recorded in trainings:
        kind = project_habits(package)[name]  # with what is given anew
        alone = train_alone(kind(num_classes=model.parts.num_classes["town0"]), recorded)
        assert differences(alone, recorded.end) == []
        assert differences(recorded.start, recorded.end), "nothing has moved"


@pytest.mark.parametrize("name", some(NAMES, FIRST))
def test_a_habit_has_the_bits_of_lightning_alone(name):
    compare(lightning.pytorch, name)


@pytest.mark.others
@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_habit_has_the_bits_of_pytorch_lightning_alone(name):
    compare(import_module("pytorch_lightning"), name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_before_the_run(name):
    with pytest.raises(ConfigError, match=REFUSED[name]) as error:
        trained(project_habits(lightning.pytorch)[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["layer that merges", "state without parts"])
def test_features_are_those_of_the_values_that_were_trained(name):
    kind = project_habits(lightning.pytorch)[name]
    model, trainings = trained(kind)
    (arch, rank_model), images = next(iter(model.parts.models.items())), torch.randn(4, 3, 16, 8)
    module = kind(num_classes=model.parts.num_classes["town0"])
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in trainings[-1].end.items():
        tensors[name].data.copy_(value)
    for _ in range(2):  # modes follow one another
        rank_model.load_global(model.server.vector(arch), {})
        features = rank_model.network.eval()(images)[0]
        assert torch.equal(features, module.eval().embed(images))
        rank_model.network.train()
        module.train()


class Locked(nn.Flatten):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Given(habits(lightning.pytorch)["plain"]):
    def __init__(self, part):
        lightning.pytorch.LightningModule.__init__(self)
        self.net, self.head = nn.Sequential(part, nn.Linear(3 * 16 * 8, 8)), nn.Linear(8, 8)


@pytest.mark.parametrize("source", [Given(Locked()), partial(Given, Locked())], ids=["module", "argument"])
def test_what_has_no_copy_is_refused_if_it_was_given_as_clients_would_share_it(source):
    with pytest.raises(ConfigError, match=r"Locked has no copy .*cannot pickle|or what has no copy; give its class"):
        trained(source)


def test_counters_begin_after_the_hooks_of_setup_as_in_a_continued_run():
    seen = []

    class Counts(project_habits(lightning.pytorch)["schedule that continues"]):
        def on_fit_start(self):
            seen.append(("fit", self.current_epoch, self.global_step))

        def on_train_epoch_start(self):
            batches = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
            rate = self.optimizers().param_groups[0]["lr"]
            seen.append((self.current_epoch, self.global_step, batches, rate))

    _, trainings = trained(Counts, counts_from="run")
    n = len(trainings[0].batches[0])
    epochs = [(e, e * n, e * n, pytest.approx(0.01 * 0.9 ** (e * n))) for e in range(4)]
    assert seen[-6:] == [("fit", 0, 0), *epochs[:2], ("fit", 0, 0), *epochs[2:]]


class Past(habits(lightning.pytorch)["manual"]):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("method", some([FedNova, FedProx, LotteryFL, PFedMe, Scaffold], [FedNova, FedProx]))
def test_steps_past_lightning_are_refused_where_a_method_changes_or_counts_them(method):
    with pytest.raises(ConfigError, match="Past took none by Lightning; call step"):
        trained(Past, method(), rounds=1)


@pytest.mark.parametrize("method", [FedDIP, FedSAM])
def test_a_method_that_changes_losses_refuses_manual_optimization_before_the_run(method):
    with pytest.raises(ConfigError, match="changes losses, and Past optimizes manually"):
        trained(Past, method(), rounds=1)


@pytest.mark.parametrize("method", [FedSAM, PFedMe])
def test_images_that_change_in_place_are_refused_where_a_method_uses_them_again(method):
    kind = project_habits(lightning.pytorch)["images changed in place"]
    with pytest.raises(ConfigError, match="changes its images in place, which the method uses, too; change a copy"):
        trained(kind, method(), rounds=1)
