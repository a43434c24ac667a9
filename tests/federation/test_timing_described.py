"""What ``fedsim describe`` says of rounds that do not wait, before a run: each row by hand."""

import re

import pytest
import torch

from fedsim.cli.describe import describe_federation
from fedsim.data import SyntheticReID
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.timing import Buffered, Deadline
from fedsim.methods import FedPav
from small import fit, make_data, make_model

NEEDS = {"town0": 1.0, "town1": 1.0, "town2": 2.5}
"""seconds of a session"""


def rows_of(timing, rounds, ranks):
    """The rows of the last table, by their labels; and the bytes of a model."""
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.2))
    clients = {c.name: ClientHardware(images_per_second=c.num_images / NEEDS[c.name]) for c in data.federated.clients}
    hardware = Hardware(down_mbit=float("inf"), up_mbit=float("inf"), images_per_second=1.0, clients=clients)
    model = make_model(FedPav(), timing=timing, hardware=hardware)
    text = describe_federation(model, data, ranks, rounds)
    table = text.partition(f"Simulated time, with {type(timing).__name__}\n")[2]
    return dict(re.split("  +", line, maxsplit=1) for line in table.splitlines()), model.parts.models["smallcnn"]


def test_the_schedule_of_a_buffer_is_told_before_the_run():
    """test_timing.py has its five windows: town2 answers once, in the third, town1 in all but that."""
    rows, flat = rows_of(Buffered(buffer=2), rounds=5, ranks=2)
    idle = rows.pop("idle time of ranks (assumed: all images take equally long)")
    assert 0 <= float(idle.removesuffix(" %")) < 100
    assert rows == {
        "simulated seconds of 5 rounds": "5.0",
        "answers, and those that do not count: late, too old": "10, 0, 0",
        "answers per second, over those of synchronous rounds of all clients": "1.67x",  # (10 / 5) / (3 / 2.5)
        "fewest answers of a client": "1 of town2; most: 5 of town0",
        "staleness of answers: mean, largest": "0.3, 2",  # town2's two, and one of town1
        "host memory: models of earlier rounds, once per machine": f"2: {2 * flat.shared_bytes / 2**20:,.1f} MiB",
    }


def test_the_schedule_of_a_deadline_is_told_before_the_run():
    rows, _ = rows_of(Deadline(seconds=2.0), rounds=4, ranks=1)
    assert rows["simulated seconds of 4 rounds"] == "8.0"
    assert rows["answers, and those that do not count: late, too old"] == "8, 4, 0"
    assert rows["answers per second, over those of synchronous rounds of all clients"] == "0.83x"  # (8 / 8) / (3 / 2.5)
    assert rows["fewest answers of a client"] == "0 of town2; most: 4 of town0"
    assert "idle time of ranks (assumed: all images take equally long)" not in rows


def test_no_idle_rank_is_told_of_where_all_work():
    """A buffer of one: of two ranks one always waits."""
    rows, _ = rows_of(Buffered(buffer=1), rounds=12, ranks=2)
    assert rows["idle time of ranks (assumed: all images take equally long)"] == "50 %"


@pytest.mark.parametrize("timing", [Buffered(buffer=2), Deadline(first=2), None], ids=["buffer", "deadline", "none"])
def test_a_round_is_one_training_step_of_lightning(timing):
    hardware = Hardware(down_mbit=8.0, up_mbit=8.0, images_per_second=30.0)
    model = make_model(FedPav(), timing=timing, hardware=hardware)
    fit(model, make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)), rounds=3)
    assert model.trainer.global_step == model.trainer.current_epoch == 3
    assert torch.isfinite(model.server.vector("smallcnn")).all()
