"""Trainings of generators that are interrupted and go on, and files and surroundings that could spoil them."""

import signal
from functools import partial
from types import MethodType

import pytest
import torch
from lightning import Trainer

from fedsim.core.errors import DataError, TrainingError
from fedsim.data import FederatedDataModule, SyntheticReID
from fedsim.generation.fitting import fit_generator
from fedsim.generation.saved import CHECKPOINT, is_finished
from fedsim.generation.training import GeneratorSteps
from fedsim.models import ConvNeXt, SmallCNN
from small_generators import SMALL, equal, untrained_generator

SIZE = (64, 32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def town():
    """A client, and its images."""
    data = FederatedDataModule(SyntheticReID(clients=2, unseen=0, scale=0.2), size=SIZE, val="none")
    client = data.federated.clients[1]
    return client, client.train.images.decode(SIZE)


def begin(town, make_backbone=partial(SmallCNN, 4)):  # noqa: B008 - a constant
    torch.manual_seed(0)  # the backbone's initial weights
    client, pixels = town
    return untrained_generator(
        client, pixels, make_backbone(), SMALL, GeneratorSteps(steps=5, batch_size=3, save_every=2)
    )


class StopError(Exception):
    """What interrupts."""


def stop_in_second_epoch(module):
    step = module.training_step

    def training_step(self, batch, position):
        if self.current_epoch == 1 and position == 1:
            raise StopError
        step(batch, position)

    module.training_step = MethodType(training_step, module)
    return module


@pytest.mark.parametrize("make_backbone", [partial(SmallCNN, 4), partial(ConvNeXt, "micro")])
def test_an_interrupted_training_ends_as_one_that_was_not(town, tmp_path, make_backbone):
    whole, part, again = (begin(town, make_backbone) for _ in range(3))
    fit_generator(whole, town[0], tmp_path / "whole", CPU)
    with pytest.raises(StopError):
        fit_generator(stop_in_second_epoch(part), town[0], tmp_path / "part", CPU)
    assert (tmp_path / "part" / CHECKPOINT).is_file()
    assert not is_finished(tmp_path / "part")
    torch.rand(7)  # others have used the process's random numbers
    fit_generator(again, town[0], tmp_path / "part", CPU)
    assert again.history == whole.history
    assert [row["step"] for row in again.history] == [2, 4, 5]
    assert equal(again, whole)
    for name in ("generator.safetensors", "losses.csv"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "part" / CHECKPOINT).exists()


@pytest.mark.parametrize("content", [b"", b"something else", b"PK\x03\x04 and no more"])
def test_a_damaged_checkpoint_is_refused_in_a_line(town, tmp_path, content):
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(DataError, match=r"training\.ckpt: cannot be continued \(\w+\); remove it") as caught:
        fit_generator(begin(town), town[0], tmp_path, CPU)
    assert "\n" not in str(caught.value)
    assert (tmp_path / CHECKPOINT).read_bytes() == content


def test_slurm_is_taken_no_notice_of(town, tmp_path, monkeypatch):
    """Lightning would save and requeue at Slurm's signal."""
    job = {"JOB_ID": "3", "JOB_NAME": "mine", "NTASKS": "2", "PROCID": "1", "LOCALID": "1", "NODEID": "0",
           "NODELIST": "a", "NNODES": "1", "NTASKS_PER_NODE": "2"}  # fmt: skip
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    handlers, module = [], begin(town)
    module.on_train_start = lambda: handlers.append(signal.getsignal(signal.SIGUSR1))
    fit_generator(module, town[0], tmp_path, CPU)
    assert handlers == [signal.getsignal(signal.SIGUSR1)] == [signal.SIG_DFL]
    assert is_finished(tmp_path)
    plain = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(plain._accelerator_connector.cluster_environment).__name__ == "SLURMEnvironment"  # it would have


def test_weights_that_the_last_step_spoils_are_not_written(town, tmp_path):
    module = begin(town)
    step = module.training_step

    def training_step(self, batch, position):
        step(batch, position)
        if self.current_epoch == 2:  # of a single step, the last
            with torch.no_grad():
                self.generator.decoder.enlarge[1].bias[0] = torch.nan

    module.training_step = MethodType(training_step, module)
    with pytest.raises(TrainingError, match=r"client town1: generator\.decoder\.\S+ is not finite at the end"):
        fit_generator(module, town[0], tmp_path, CPU)
    assert not is_finished(tmp_path)
