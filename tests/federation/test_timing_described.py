"""What ``fedsim describe`` says of rounds that do not wait, before a run: each row by hand."""

import re

import pytest
import torch
from lightning import Callback

from fedsim.cli.describe import describe_federation
from fedsim.data import SyntheticReID
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.timing import Buffered, Deadline
from fedsim.methods import FedPav
from small import fit, make_data, make_model

NEEDS = {"town0": 1.0, "town1": 1.0, "town2": 2.5}
"""seconds of a session"""
MEMORY = "host memory: models of earlier rounds, once per machine"


def configured(timing, needs=NEEDS, **options):
    """A federation whose sessions take so many seconds, and its data."""
    data = make_data(SyntheticReID(clients=len(needs), unseen=1, scale=0.2))
    clients = {c.name: ClientHardware(images_per_second=c.num_images / needs[c.name]) for c in data.federated.clients}
    hardware = Hardware(down_mbit=float("inf"), up_mbit=float("inf"), images_per_second=1.0, clients=clients)
    return make_model(FedPav(), timing=timing, hardware=hardware, **options), data


def text_of(timing, rounds, ranks=1, needs=NEEDS, **options):
    """What ``fedsim describe`` says; and the architecture's model."""
    model, data = configured(timing, needs, **options)
    return describe_federation(model, data, ranks, rounds), model.parts.models["smallcnn"]


def rows_of(timing, rounds, ranks=1, needs=NEEDS, **options):
    """The rows of the last table, by their labels; and the architecture's model."""
    text, flat = text_of(timing, rounds, ranks, needs, **options)
    table = text.partition(f"Simulated time, with {type(timing).__name__}\n")[2]
    return dict(re.split("  +", line, maxsplit=1) for line in table.splitlines()), flat


def test_the_schedule_of_a_buffer_is_told_before_the_run():
    """test_timing.py has its five windows: town2 answers once, in the third, town1 in all but that."""
    rows, flat = rows_of(Buffered(buffer=2), rounds=5, ranks=2)
    idle = rows.pop("idle time of ranks (assumed: all images take equally long)")
    assert 0 <= float(idle.removesuffix(" %")) < 100
    assert rows == {
        "simulated seconds of 5 rounds": "5.0",
        "answers, and those that do not count: late, too old": "10, 0, 0",
        "answers per second, over those of synchronous rounds of all clients": "1.67x",  # (10 / 5) / (3 / 2.5)
        "the price: fewest answers": "1 of town2; most: 5 of town0",
        "staleness of answers: mean, largest": "0.3, 2",  # town2's two, and one of town1
        # three models follow each other, and a slot that becomes free rests for a round
        MEMORY: f"1 at once, in 3 slots: {3 * flat.shared_bytes / 2**20:,.1f} MiB",
    }


class Noted(Callback):
    """Old models that are kept after each round."""

    def on_train_start(self, trainer, pl_module):
        self.kept = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.kept.append(pl_module.round_metrics["timing/old_models"])


@pytest.mark.parametrize(
    ("timing", "needs", "kept"),
    [
        (Buffered(buffer=2), (1.0, 1.0, 999.0), 1),
        (Buffered(buffer=1), (1.0, 1.5, 998.0, 999.0), 2),
        (Buffered(buffer=1, max_staleness=1), (1.0, 1.9, 2.7, 4.2), 1),
        (Buffered(buffer=1, max_staleness=3), (1.0, 1.9, 2.7, 40.0), 2),
    ],
    ids=["slow", "two that are slow", "too old", "slow and too old"],
)
def test_old_models_of_clients_that_never_answer_are_counted(timing, needs, kept):
    """A client under way at the end, or whose answer will be too old, has its model until then."""
    needs = {f"town{i}": seconds for i, seconds in enumerate(needs)}
    model, data = configured(timing, needs)
    fit(model, data, rounds=8, callbacks=[noted := Noted()])
    rows, flat = rows_of(timing, 8, needs=needs)
    slots = model.parts.rank_share.old_models.num_slots
    assert max(noted.kept) == kept
    assert rows[MEMORY] == f"{kept} at once, in {slots} slots: {slots * flat.shared_bytes / 2**20:,.1f} MiB"


def test_the_schedule_of_a_deadline_is_told_before_the_run():
    rows, _ = rows_of(Deadline(seconds=2.0), rounds=4, ranks=1)
    assert rows["simulated seconds of 4 rounds"] == "8.0"
    assert rows["answers, and those that do not count: late, too old"] == "8, 4, 0"
    assert rows["answers per second, over those of synchronous rounds of all clients"] == "0.83x"  # (8 / 8) / (3 / 2.5)
    assert rows["the price: fewest answers"] == "0 of town2; most: 4 of town0"
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
