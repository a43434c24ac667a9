"""Several ranks on one simulated GPU: the bits of one rank on the CPU, and one line for settings that cannot be."""

import functools
import os
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

import simulated
from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.cli import app
from fedsim.core.errors import ConfigError, PeerError
from fedsim.federation.scheduling import scheduler
from fedsim.federation.scheduling.plan import RoundPlan
from fedsim.methods import FedPav
from fedsim.strategy import FederatedStrategy, sharing, watched
from fedsim.strategy.trial import try_sum
from runs import differences, fit, left_by, options
from small import refuse

FIELD = "trainer.strategy.ranks_per_device"
MICRO_BATCHES = "--model.client.micro_batch=4"
FITS = {
    "sums": ["fedpav"],
    "private states, extras": ["scaffold", "--data.source.init_args.clients=3"],
    "a second model": ["ditto"],
    "micro-batches": ["fedavg", MICRO_BATCHES, "--data.source.init_args.clients=3"],
    "server's work": ["fedpav_kd_cdw"],
    "shared evaluation": ["fedpav", "--model.evaluation.share_from=1"],
    "single uploads": ["fedavg", "--model.aggregation=Median", "--data.source.init_args.clients=3"],
    "masks": ["subfedavg"],
    "clusters": ["fedcapr"],
}  # fmt: skip
FAST = ("sums",)
FOUR = ("sums", "private states, extras", "micro-batches")
SCORED = ("sums", "a second model", "shared evaluation")
"""which of them are also scored"""


def together(tasks, num_ranks):
    """A plan in which all ranks together train each client whose batches are cut."""
    rank_groups = [(task.client, range(num_ranks)) for task in tasks if task.micro_batches > 1]
    return RoundPlan(rank_groups, [task.client for task in tasks if task.micro_batches == 1], 0.0)


def fit_all(folder, names, ranks, share):
    """What each rank does: the fits of these names."""
    with mock.patch.object(scheduler, "make_plan", together):
        for name in names:
            strategy = FederatedStrategy(ranks_per_device=share)
            how = {"gpus": ranks, "scored": name in SCORED, "strategy": strategy}
            fit(folder / name, *FITS[name], deterministic=True, **how)


def two_on_one(folder):
    """What each of two ranks does, on one GPU."""
    with simulated.cuda(1, board=folder / "board") as gpu:
        fit_all(folder, [name for name in FITS if name not in FAST], 2, 2)
    assert gpu.reading().kernels > 1000, "hardly anything ran on the GPU"


def two_on_one_fast(folder):
    """The same for a single fit."""
    with simulated.cuda(1, board=folder / "board"):
        fit_all(folder, FAST, 2, 2)


def four_on_two(folder):
    """What each of four ranks does, on two GPUs: NCCL sums by the first rank of each."""
    with simulated.cuda(2, board=folder / "board"):
        fit_all(folder, FOUR, 4, 2)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """Make one of the fits on the CPU, once."""
    folder = tmp_path_factory.mktemp("cpu")
    return functools.cache(lambda name: fit(folder / name, *FITS[name], scored=name in SCORED, deterministic=True))


@pytest.mark.dist
def test_two_ranks_of_one_gpu_give_the_bits_of_one_rank_on_the_cpu(tmp_path, on_the_cpu):
    run_on_ranks(two_on_one_fast, tmp_path)
    assert differences(left_by(tmp_path / "sums"), on_the_cpu("sums")) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-gpu")
    run_on_ranks(two_on_one, folder, timeout=1200)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FITS if name not in FAST])
def test_whatever_ranks_of_one_gpu_exchange(name, shared, on_the_cpu):
    assert differences(left_by(shared / name), on_the_cpu(name)) == []


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-gpus")
    run_on_ranks(four_on_two, folder, ranks=4, timeout=1200)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_of_two_gpus_give_the_bits_of_one_rank_on_the_cpu(name, two_gpus, on_the_cpu):
    assert differences(left_by(two_gpus / name), on_the_cpu(name)) == []


# -- launchers that bind GPUs to ranks ---------------------------------------------------------------------------------


def as_torchrun(ranks):
    """Make this rank one of torchrun's, or Slurm's: its variables beside those that it has."""
    rank = os.environ["RANK"]
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "LOCAL_RANK": rank,
    }  # fmt: skip
    return int(rank)


def command(folder, *more):
    """Fit by a command that takes the GPUs it sees."""
    more = [*more, "--trainer.deterministic=true", "--trainer.devices=auto"]
    assert main(options(folder / "run", "fedpav", *more, gpus=1)) == 0


def a_gpu_each(folder):
    """What each of two ranks does, that sees one GPU, its own."""
    rank = as_torchrun(2)
    with simulated.cuda(1, board=folder / "board", buses=[3 + rank]) as gpu:
        command(folder)
    assert any("allreduce" in text and "default group" in text for text in gpu.collectives), "NCCL did nothing"


def a_gpu_each_where_two_could_share(folder):
    """The same, where two ranks might share one."""
    rank = as_torchrun(2)
    with simulated.cuda(1, board=folder / "board", buses=[3 + rank]):
        command(folder, f"--{FIELD}=2")


def a_gpu_for_two(folder):
    """What each of four ranks does, that sees one of two GPUs, which another rank sees, too."""
    rank = as_torchrun(4)
    with simulated.cuda(1, board=folder / "board", buses=[3 + rank // 2]):
        command(folder, f"--{FIELD}=2")


def a_gpu_too_few(folder):
    """What each of two ranks does, both of which are bound to one GPU, and nobody has said so."""
    as_torchrun(2)
    with simulated.cuda(1, buses=[3]), mock.patch.object(app, "_leave_other_ranks"):  # it would end this process
        assert main(options(folder / "run", "fedpav", "--trainer.devices=auto", gpus=1)) == 2


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ranks"), [(a_gpu_each, 2), (a_gpu_each_where_two_could_share, 2), (a_gpu_for_two, 4)]
)
def test_ranks_that_are_bound_to_a_gpu(what, ranks, tmp_path, on_the_cpu):
    run_on_ranks(what, tmp_path, ranks=ranks)
    assert differences(left_by(tmp_path / "run"), on_the_cpu("sums")) == []


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_that_are_bound_to_one_gpu_and_do_not_know_it(tmp_path):
    run_on_ranks(a_gpu_too_few, tmp_path)
    said = (tmp_path / "log-0.txt").read_text()
    assert f"fedsim: error: {FIELD}: 1, but several ranks have one GPU" in said
    assert "Traceback" not in said


def try_on_three(folder):
    """What each of three ranks does: the doctor's trial, bound to its GPU as in a fit."""
    with simulated.cuda(3, board=folder / "board") as gpu:
        gpus = [torch.device("cuda", index) for index in range(3)]
        try_sum(int(os.environ["RANK"]), gpus, folder / "store", seconds=60)
    groups = [text.rpartition(" in ")[2] for text in gpu.collectives if "allreduce" in text]
    assert len(groups) == (1 if os.environ["RANK"] == "2" else 3), gpu.collectives


@pytest.mark.dist
def test_the_doctor_s_trial_sums_in_smaller_groups(tmp_path):
    run_on_ranks(try_on_three, tmp_path, ranks=3)


# -- errors ------------------------------------------------------------------------------------------------------------


def fail(self, client):
    raise ConfigError("something is wrong")


def fail_on_two(folder):
    """What each of two ranks does, on a GPU each: the error of a client ends both."""
    given_up = []
    with (
        simulated.cuda(2, board=folder / "board"), mock.patch.object(FedPav, "train", fail),
        mock.patch.object(watched, "abort_groups", given_up.extend), pytest.raises((ConfigError, PeerError)),
    ):  # fmt: skip
        fit(folder / "run", "fedpav", gpus=2, rounds=1, scored=False)
    assert given_up == [dist.group.WORLD]


@pytest.mark.dist
@pytest.mark.slow
def test_after_an_error_ranks_give_up_nccl(tmp_path):
    run_on_ranks(fail_on_two, tmp_path)


# -- settings that cannot be -------------------------------------------------------------------------------------------


def refused(capsys, folder, *more, ranks, **machine):
    """The line with which a fit ends, before other ranks are started and anything is written."""
    began = mock.patch.object(_SubprocessScriptLauncher, "launch", side_effect=AssertionError("a fit has begun"))
    with began, simulated.cuda(**machine) if machine else nullcontext():
        said = refuse(capsys, *options(folder / "run", "fedpav", *more, gpus=ranks if machine else 0))
    assert not (folder / "run" / "config.yaml").exists(), "a run was begun"
    return said


@pytest.mark.parametrize(
    ("share", "ranks", "words"),
    [
        (2, 3, "2 does not divide the 3 ranks of trainer.devices; set devices to 4, or leave ranks_per_device out"),
        (3, 1, "3 does not divide the 1 rank of trainer.devices; set devices to 3, or leave ranks_per_device out"),
        (0, 2, "0 is not a number of ranks; set it to 1 or more"),
        (-1, 2, "-1 is not a number of ranks; set it to 1 or more"),
    ],
)
def test_numbers_that_cannot_be(share, ranks, words, capsys, tmp_path):
    assert f"{FIELD}: {words}" in refused(capsys, tmp_path, f"--{FIELD}={share}", ranks=ranks, gpus=2)


def test_more_memory_than_there_is(capsys, tmp_path):
    said = refused(capsys, tmp_path, f"--{FIELD}=4", ranks=4, gpus=1, memory=2)
    assert f"{FIELD}: 4 ranks need about 2.0 GiB on cuda:0, which has 2.0 GiB; set it to 3, or" in said
    assert "model.client.micro_batch to a part of 8 images" in said


@pytest.mark.parametrize(("devices", "share"), [("3", 1), ("6", 2), ("[0,2]", 1)])
def test_more_gpus_than_there_are(devices, share, capsys, tmp_path):
    more = [f"--trainer.devices={devices}", f"--{FIELD}={share}"]
    said = refused(capsys, tmp_path, *more, ranks=2, gpus=2)
    assert f"trainer.devices: {devices.replace(',', ', ')} cannot be used" in said
    assert "here: cpu, cuda:0 (Simulated H100), cuda:1 (Simulated H100)" in said


def test_a_gpu_that_takes_one_process(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "read_listing", lambda: "00000000:03:00.0, Exclusive_Process\n")
    monkeypatch.setattr(sharing, "has_mps", lambda: False)
    said = refused(capsys, tmp_path, f"--{FIELD}=2", ranks=2, gpus=1, buses=[3])
    assert f"{FIELD}: 2, but ranks cannot share cuda:0: its compute mode is Exclusive_Process, which takes one" in said


def test_a_gpu_that_cuda_refuses_where_nobody_knew_it(capsys, tmp_path, monkeypatch):
    """Without nvidia-smi, as in some containers."""
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    monkeypatch.setattr(CUDAAccelerator, "setup_device", mock.Mock(side_effect=busy))
    with simulated.cuda(1):
        said = refuse(capsys, *options(tmp_path / "run", "fedpav", gpus=1))
    assert f"{FIELD}: 1, but cuda:0 is busy or unavailable: its compute mode may take one process, and another" in said


def test_cpus_are_not_shared(capsys, tmp_path):
    said = refused(capsys, tmp_path, f"--{FIELD}=2", "--trainer.devices=2", ranks=2)
    assert f"{FIELD}: 2 is for GPUs, and these ranks are on CPUs; leave it out: trainer.devices alone is" in said
