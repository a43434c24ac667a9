"""``fedsim describe`` prints who spans ranks, and what limits the speed-up."""

import pytest

from fedsim.cli.describe import describe_federation
from fedsim.data import SyntheticReID
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.methods import FedPav
from fedsim.training.settings import ClientOverride, LocalTraining
from small import make_data, make_model, sgd


def described(ranks, per_machine, share=1, precision="32-true", **options):
    """Three clients; town0 has four local epochs."""
    client = LocalTraining(batch_size=8, optimizer=sgd, **options)
    model = make_model(FedPav(), client=client, clients={"town0": ClientOverride(local_epochs=4)})
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.2))
    text = describe_federation(model, data, ranks, 2, per_machine, ranks_per_device=share, precision=precision)
    lines = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in text.splitlines() if "  " in line}
    return model.parts, lines


def test_pieces_let_ranks_share_the_largest_client():
    parts, lines = described(2, 2, micro_batch=4)
    tasks = [Task(name, parts.costs[name], 2) for name in parts.names]
    expected = sum(parts.costs.values()) / make_plan(tasks, 2).seconds
    assert lines["clients that rank groups train"] == "town0 on ranks 0 to 1 (assumed gain: rounds will measure it)"
    share = 100 * parts.costs["town0"] / sum(parts.costs.values())
    assert lines["predicted speed-up over one rank"] == (
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
    assert lines["predicted speed-up over one rank"].endswith(f"of the work, so at most {bound:.2f}x{remedy}")


def test_spans_of_the_second_machine_have_the_numbers_of_its_ranks():
    _, lines = described(4, 2, micro_batch=4)
    spans = lines["clients that rank groups train"].split(", ")
    assert "town0 on ranks 0 to 1" in spans
    assert any(span.endswith("on ranks 2 to 3") for span in spans)


def mib(lines, words):
    [value] = [value for name, value in lines.items() if name.startswith(f"device memory: {words}")]
    return float(value.removesuffix(" MiB").replace(",", ""))


def test_ranks_that_share_gpus_have_a_place_and_need_memory_together():
    _, alone = described(4, 4)
    _, lines = described(4, 4, share=2)
    assert lines["ranks that share a device"] == "cuda:0: ranks 0, 2; cuda:1: ranks 1, 3"
    assert "ranks that share a device" not in alone
    one = mib(lines, "model, gradient") + mib(lines, "activations of 8 images") + 512
    assert mib(lines, "2 ranks, with CUDA") == pytest.approx(2 * one, abs=0.3)


def test_pieces_and_short_numbers_need_less_memory():
    whole, pieces = (mib(described(1, 1, **more)[1], "activations") for more in ({}, {"micro_batch": 4}))
    short = mib(described(1, 1, precision="bf16-mixed")[1], "activations")
    assert whole == pytest.approx(2 * pieces, abs=0.1)
    assert whole == pytest.approx(2 * short, abs=0.1)
