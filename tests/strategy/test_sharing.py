"""Ranks that share GPUs: the devices that Lightning looks for, the one of each rank, and who has the same one."""

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.federation.memory import kept_by
from fedsim.federation.trainer import Trainer
from fedsim.strategy.sharing import gpus_for, is_refused_by_nccl, neighbours_by, spread
from fedsim.strategy.strategy import FederatedStrategy

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}
SLURM = {
    "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def gpus(count):
    return [torch.device("cuda", index) for index in range(count)]


@pytest.mark.parametrize("environ", [{}, TORCHRUN, SLURM])
@pytest.mark.parametrize(
    ("devices", "share", "wanted"),
    [
        (4, 1, 4), (4, 2, 2), ("4", 2, 2), (4, 4, 1), ([0, 2], 2, [0, 2]), ("0,2", 2, "0,2"), ("auto", 2, "auto"),
        (-1, 2, -1), (1, 1, 1),
    ],
)  # fmt: skip
def test_lightning_looks_for_gpus_where_the_user_counts_ranks(devices, share, wanted, environ, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_for(devices, share, environ) == wanted


@pytest.mark.parametrize(("environ", "wanted"), [(TORCHRUN, 1), (SLURM, 1), ({}, 2)])
def test_a_task_that_is_bound_to_a_gpu_has_that_one(environ, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus_for(4, 2, environ) == wanted
    assert gpus_for(4, 4, environ) == 1


@pytest.mark.parametrize(("environ", "count", "share", "wanted"), [
    ({}, 2, 1, [0, 1]), ({}, 2, 2, [0, 1, 0, 1]), ({}, 1, 3, [0, 0, 0]), (SLURM, 2, 2, [0, 1, 0, 1]),
    (TORCHRUN, 1, 2, [0, 0, 0, 0]), (SLURM, 1, 1, [0, 0, 0, 0]),
])  # fmt: skip
def test_a_rank_s_device_is_that_of_its_local_number(environ, count, share, wanted):
    assert [device.index for device in spread(gpus(count), share, environ)] == wanted


@pytest.mark.parametrize(("machines", "backend", "share", "wanted"), [
    (1, None, 1, "gloo"), (2, None, 1, "nccl"), (2, None, 2, "gloo"), (1, "nccl", 1, "nccl"), (2, "gloo", 1, "gloo"),
])  # fmt: skip
def test_a_single_rank_opens_no_communicator_of_nccl(machines, backend, share, wanted):
    strategy = FederatedStrategy(process_group_backend=backend, ranks_per_device=share)
    strategy.parallel_devices, strategy.num_nodes = gpus(1), machines
    strategy.cluster_environment = LightningEnvironment()
    strategy.set_world_ranks()
    assert strategy._get_process_group_backend() == wanted


def test_gpus_of_several_machines_are_not_taken_for_one():
    assert neighbours_by([5, 6, 5, 6, 5, 6, 5, 6], 4, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_more_ranks_on_a_gpu_than_were_announced():
    with pytest.raises(ConfigError, match="2, but ranks 0, 1, 3 have one GPU; set it to 3, or bind fewer tasks to a"):
        neighbours_by([5, 5, 6, 5], 4, 2)


@pytest.mark.parametrize(("text", "refuses"), [
    ("NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", True),
    ("Last error:\nMultiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable", True),
    ("Last error:\nCall to connect returned Connection refused", False),
])  # fmt: skip
def test_a_refusal_of_nccl_is_known_by_the_texts_of_its_versions(text, refuses):
    assert is_refused_by_nccl(text) == refuses


def test_python_counts_ranks_too(monkeypatch):
    with pytest.raises(ConfigError, match="2 does not divide the 3 ranks"):
        Trainer(strategy=FederatedStrategy(ranks_per_device=2), devices=3, accelerator="cpu")
    trainer = Trainer(strategy=FederatedStrategy(ranks_per_device=2), devices=4, accelerator="cpu")
    assert trainer.world_size == 4
    with pytest.raises(ConfigError, match="these ranks are on CPUs"):
        trainer.strategy.check_device()


def test_activations_are_counted_once_and_without_parameters():
    norm = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    images, maps = 2 * 3 * 8 * 8, 2 * 4 * 8 * 8
    found = kept_by(norm, (2, 3, 8, 8))
    # input of the convolution, of the normalisation, of the rectifier in place; mean and scale of 4 channels
    assert found == 4 * (images + maps + maps + 2 * 4)
    assert kept_by(norm, (4, 3, 8, 8)) == 2 * (found - 32) + 32
    assert norm.training


def test_a_layer_that_cannot_be_asked():
    class Asks(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    assert kept_by(Asks(), (2, 3)) is None
