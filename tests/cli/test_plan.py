"""``fedsim describe`` prints which clients rank groups train, and what limits the speed-up."""

from functools import partial

import pytest
import torch

from fedsim.cli.describe import describe_federation
from fedsim.data import SyntheticReID
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.methods import FedPav, Local
from fedsim.models import SmallCNN
from fedsim.training.settings import ClientOverride, LocalTraining
from small import make_data, make_model, sgd

SPEED_UP = "predicted speed-up over one rank (assumed: all images take equally long)"


def described(ranks, per_machine, share=1, precision="32-true", method=None, settings=None, cache="device", **options):
    """Three clients; town0 has four local epochs."""
    client = LocalTraining(**{"batch_size": 8, "optimizer": sgd} | options)
    overrides = {"town0": ClientOverride(local_epochs=4)}
    model = make_model(method or FedPav(), client=client, clients=overrides, **settings or {})
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.2), cache=cache)
    text = describe_federation(model, data, ranks, 2, per_machine, ranks_per_device=share, precision=precision)
    lines = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in text.splitlines() if "  " in line}
    return model.parts, lines


def test_micro_batches_let_ranks_share_the_largest_client():
    parts, lines = described(2, 2, micro_batch=4)
    tasks = [Task(name, parts.costs[name], 2) for name in parts.names]
    expected = sum(parts.costs.values()) / make_plan(tasks, 2).seconds
    assert lines["clients that rank groups train"] == "town0 on ranks 0 to 1 (assumed gain: rounds will measure it)"
    share = 100 * parts.costs["town0"] / sum(parts.costs.values())
    assert lines[SPEED_UP] == (
        f"{expected:.2f}x ({50 * expected:.0f} % efficiency); "
        f"town0 has {share:.0f} % of the work, in batches of 2 micro-batches"
    )
    assert expected > sum(parts.costs.values()) / parts.costs["town0"]


@pytest.mark.parametrize(
    ("per_machine", "remedy"), [(2, " unless model.client.micro_batch lets ranks share it"), (1, "")]
)
def test_whole_batches_are_bounded_by_the_largest_client(per_machine, remedy):
    parts, lines = described(2, per_machine)
    assert "clients that rank groups train" not in lines
    bound = sum(parts.costs.values()) / parts.costs["town0"]
    assert lines[SPEED_UP].endswith(f"of the work, so at most {bound:.2f}x{remedy}")


def test_rank_groups_of_the_second_machine_have_the_numbers_of_its_ranks():
    _, lines = described(4, 2, micro_batch=4)
    rank_groups = lines["clients that rank groups train"].split(", ")
    assert "town0 on ranks 0 to 1" in rank_groups
    assert any(group.endswith("on ranks 2 to 3") for group in rank_groups)


def mib(lines, words):
    [value] = [value for name, value in lines.items() if name.startswith(f"device memory: {words}")]
    return float(value.removesuffix(" MiB").replace(",", ""))


def test_ranks_that_share_gpus_have_a_place_and_need_memory_together():
    _, alone = described(4, 4)
    _, lines = described(4, 4, share=2)
    assert lines["ranks that share a device"] == "cuda:0: ranks 0, 2; cuda:1: ranks 1, 3"
    assert "ranks that share a device" not in alone
    one = mib(lines, "together, with CUDA")
    assert mib(lines, "2 ranks, with CUDA") == pytest.approx(2 * one, abs=0.3)
    others = [name for name in lines if name.startswith("device memory: ") and "with CUDA" not in name]
    assert one == pytest.approx(512 + sum(mib(lines, name.removeprefix("device memory: ")) for name in others), abs=0.3)


def test_micro_batches_and_short_numbers_need_less_memory():
    whole, in_parts = (mib(described(1, 1, **more)[1], "activations") for more in ({}, {"micro_batch": 4}))
    parts, lines = described(1, 1, precision="bf16-mixed")
    assert whole == pytest.approx(2 * in_parts, abs=0.1)
    [model] = parts.models.values()  # bf16 casts its weights
    assert mib(lines, "activations") == pytest.approx((whole + 4 * model.flat.num_model / 2**20) / 2, abs=0.15)


@pytest.mark.parametrize("clients", [3, 20])
def test_private_states_are_on_the_device(clients):
    """Local keeps a model and a momentum of each client, in a store on the device by default."""
    model = make_model(Local(), client=LocalTraining(batch_size=8, optimizer=sgd), backbone=SmallCNN(width=32))
    data = make_data(SyntheticReID(clients=clients, unseen=1, scale=0.2))
    lines = dict(line.split("  ", 1) for line in describe_federation(model, data, 1, 2).splitlines() if "  " in line)
    whole = sum(4 * (m.flat.num_model + m.head_room(n)) for m in model.parts.models.values()
                for n in model.parts.num_classes.values()) / 2**20  # fmt: skip
    assert mib(lines, "private states of the busiest rank") == pytest.approx(2 * whole, abs=0.1)


def places(lines, words):
    return [name.partition(": ")[0] for name in lines if words in name]


def test_states_and_images_are_where_the_settings_put_them():
    local = {"method": Local()}
    assert places(described(1, 1, **local)[1], "private states") == ["device memory"]
    assert places(described(2, 2, **local)[1], "private states") == ["host memory"], "ranks of a machine share files"
    assert places(described(1, 1, settings={"client_store": "host"}, **local)[1], "private states") == ["host memory"]
    assert places(described(1, 1, settings={"client_store": "disk"}, **local)[1], "private states") == ["disk"]
    assert places(described(1, 1)[1], "training images") == ["device memory"]
    assert places(described(2, 2)[1], "training images") == ["device memory", "host memory"]
    assert places(described(1, 1, cache="host")[1], "training images") == ["host memory"]
    assert places(described(1, 1, cache="none")[1], "training images") == []


@pytest.mark.parametrize(("kind", "text"), [
    (sgd, "model, gradient, 1 optimizer moment"),
    (partial(torch.optim.SGD, lr=0.1), "model, gradient"),
    (partial(torch.optim.Adam, lr=0.1), "model, gradient, 2 optimizer moments"),
    (partial(torch.optim.Adam, lr=0.1, amsgrad=True), "model, gradient, 3 optimizer moments"),
])  # fmt: skip
def test_moments_are_those_of_the_optimizer(kind, text):
    assert f"device memory: {text}" in described(1, 1, optimizer=kind)[1]
