"""The timeout of each process group: gloo's waits as long as a round may take, NCCL's only for a sum."""

import json
import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

import simulated
from failing import run_on_ranks
from fedsim.federation.scheduling import scheduler
from fedsim.federation.scheduling.plan import RoundPlan
from fedsim.strategy.sharing import SharedGpus
from fedsim.strategy.strategy import FederatedStrategy
from runs import fit

SUM, ROUND = timedelta(minutes=7), timedelta(hours=3)
"""neither is a default, of ours or of torch's"""


class Opened:
    """Takes the place of ``dist.new_group``, or of ``dist.init_process_group``, and notes what is opened."""

    def __init__(self, function=None):
        self.function, self.groups = function, []

    def __call__(self, *args, **options):
        backend = options["backend"] if "backend" in options else args[0]
        self.groups.append([backend, options["timeout"].total_seconds()])
        return self.function and self.function(*args, **options)


def new_strategy(**options):
    return FederatedStrategy(timeout=SUM, round_timeout=ROUND, **options)


@pytest.mark.parametrize(("device", "backends"), [("cpu", ["gloo"]), ("cuda", ["gloo", "nccl"])])
def test_ranks_of_a_group_wait_for_a_round_and_nccl_for_a_sum(device, backends):
    strategy = new_strategy(process_group_backend=backends[-1])
    strategy.parallel_devices, strategy.cluster_environment = [torch.device(device, 0)], LightningEnvironment()
    with mock.patch.object(dist, "new_group", Opened()) as opened:
        strategy.open_groups([range(2)])
    wanted = {"gloo": ROUND.total_seconds(), "nccl": SUM.total_seconds()}
    assert opened.groups == [[backend, wanted[backend]] for backend in backends]


def test_ranks_that_share_gpus_wait_for_a_sum():
    with mock.patch.object(dist, "new_group", Opened()) as opened:
        SharedGpus([[0, 2], [1, 3]], 0, "nccl", SUM, lambda work: None)
    assert opened.groups == [[backend, SUM.total_seconds()] for backend in ("gloo", "gloo", "nccl")]


def together(tasks, num_ranks):
    return RoundPlan([(task.client, range(num_ranks)) for task in tasks], [], 0.0)


def two_ranks(folder):
    """What each of two ranks does: a round in which they train together."""
    with (
        simulated.cuda(2, board=folder / "board"), mock.patch.object(scheduler, "make_plan", together),
        mock.patch.object(dist, "new_group", Opened(dist.new_group)) as smaller,
        mock.patch.object(dist, "init_process_group", Opened(dist.init_process_group)) as of_all,
    ):  # fmt: skip
        words = ["--model.client.micro_batch=4", "--data.source.init_args.clients=1"]
        fit(folder / "run", "fedavg", *words, gpus=2, rounds=1, scored=False, strategy=new_strategy())
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps([of_all.groups, smaller.groups]))


@pytest.mark.dist
@pytest.mark.slow
def test_the_groups_of_a_fit(tmp_path):
    run_on_ranks(two_ranks, tmp_path)
    for rank in range(2):
        of_all, smaller = json.loads((tmp_path / f"{rank}.json").read_text())
        assert of_all == [["nccl", SUM.total_seconds()]]
        smaller = [group for group in smaller if group[1] < timedelta(days=100).total_seconds()]  # Lightning has one
        assert smaller == [["gloo", ROUND.total_seconds()]] * 2 + [["nccl", SUM.total_seconds()]]
