"""Habits of public LightningModules under fedsim have the bits of Lightning alone on the same batches."""

from importlib import import_module
from importlib.util import find_spec

import lightning.pytorch
import pytest

from alone import differences, recording, train_alone
from fedsim.data import SyntheticReID
from fedsim.methods import FedAvg
from fedsim.training.settings import LocalTraining
from habits import habits
from lightning_modules import federation
from small import fit, make_data

NAMES = tuple(habits(lightning.pytorch))


def compare(package, name, precision="32-true", **training):
    """Train one client for two epochs, and the same module by Lightning alone."""
    kind, trainings = habits(package)[name], []
    model = federation(FedAvg(), kind, client=LocalTraining(batch_size=8, local_epochs=2, **training))
    with recording(trainings):
        fit(model, make_data(SyntheticReID(clients=1, unseen=1, scale=0.1), size=(16, 8)), 1, precision=precision)
    [recorded] = trainings
    alone = train_alone(kind(num_classes=model.parts.num_classes["town0"]), recorded)
    assert differences(alone, recorded.end) == []
    assert differences(recorded.start, recorded.end), "nothing has moved"


@pytest.mark.parametrize("name", NAMES)
def test_a_habit_has_the_bits_of_lightning_alone(name):
    compare(lightning.pytorch, name)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_habit_has_the_bits_of_pytorch_lightning_alone(name):
    compare(import_module("pytorch_lightning"), name)


@pytest.mark.parametrize(
    "training",
    [{"accumulate": 2}, {"accumulate": 3, "grad_clip": 0.1}, {"precision": "bf16-mixed"}, {"drop_partial": True}],
    ids=str,
)
@pytest.mark.parametrize("name", ["plain", "one cycle", "every second step", "autocast inside", "Averaged"])
def test_settings_have_the_bits_of_lightning_alone(name, training):
    compare(lightning.pytorch, name, **training)
