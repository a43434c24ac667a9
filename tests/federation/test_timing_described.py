"""What ``fedsim describe`` says of rounds that do not wait, before a run: each row by hand."""

import re

import pytest
import torch
from lightning import Callback

from fedsim.cli.describe import describe_federation
from fedsim.data import SyntheticReID
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.selection import Availability, RandomFraction, Selection
from fedsim.federation.components.timing import Buffered, Deadline
from fedsim.federation.federation import clock_of
from fedsim.methods import FedPav, LotteryFL
from small import fit, make_data, make_model

NEEDS = {"town0": 1.0, "town1": 1.0, "town2": 2.5}
"""seconds of a session"""
FACTOR = "answers per second, over those of synchronous rounds of the same selection"
MEMORY = "host memory: models of earlier rounds, once per machine"


class Turns(Selection):
    """One client after another."""

    def select(self, round_, clients, seed):
        return [clients[round_ % len(clients)]]

    def expected_share(self, num_clients):
        return 1 / num_clients


def configured(timing, needs=NEEDS, method=None, **options):
    """A federation whose sessions take so many seconds, and its data."""
    data = make_data(SyntheticReID(clients=len(needs), unseen=1, scale=0.2))
    clients = {c.name: ClientHardware(images_per_second=c.num_images / needs[c.name]) for c in data.federated.clients}
    hardware = Hardware(down_mbit=float("inf"), up_mbit=float("inf"), images_per_second=1.0, clients=clients)
    return make_model(method or FedPav(), timing=timing, hardware=hardware, **options), data


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
        FACTOR: "1.67x",  # (10 / 5) / (3 / 2.5)
        "fewest answers of a client": "1 of town2; most: 5 of town0",
        "staleness of answers: mean, largest": "0.3, 2",  # town2's two, and one of town1
        # three models follow each other, and a slot that becomes free rests for a round
        MEMORY: f"1 at once, in 3 slots: {3 * flat.shared_bytes / 2**20:,.1f} MiB",
    }


@pytest.mark.parametrize("timing", [Buffered(buffer=2), Buffered(buffer=1), Deadline(first=2)], ids=str)
def test_half_of_equal_clients_answer_as_often_as_in_synchronous_rounds_of_half(timing):
    """In those of all clients, twice as many would answer in the same time."""
    needs = {f"town{i}": 2.0 for i in range(4)}
    rows, _ = rows_of(timing, rounds=12, needs=needs, selection=RandomFraction(0.5))
    assert rows[FACTOR] == "1.00x"


def test_the_factor_of_a_selection_by_hand():
    """A round of one client takes its time: 1, 1 and 2.5 seconds."""
    rows, _ = rows_of(Deadline(seconds=2.0), rounds=9, selection=Turns())
    assert rows["answers, and those that do not count: late, too old"] == "6, 3, 0"
    # town2 is late: 6 answers in 3 (1 + 1 + 2) s, over 9 answers in 3 (1 + 1 + 2.5) s
    assert rows[FACTOR] == f"{6 / 12 / (9 / 13.5):.2f}x"


def test_synchronous_rounds_of_the_factor_have_the_drop_outs_of_the_run():
    model, data = configured(Deadline(seconds=60.0), availability=Availability(drop=0.4))
    text = describe_federation(model, data, 1, 30)
    tables = list(clock_of(model.listeners).timetables(30))
    seconds = sum(max((NEEDS[name] for name in table.work), default=0.0) for table in tables)
    assert 0 < sum(len(table.work) for table in tables) < 90
    # the deadline waits for clients that drop out, synchronous rounds do not: messages take no time here
    assert re.search(rf"^{FACTOR} +{seconds / (30 * 2.5):.2f}x$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("timing", "method", "words"),
    [
        (None, FedPav(), "without drop-outs"),
        (None, LotteryFL(), "without drop-outs or pruning, with masks"),
        (Deadline(first=1), FedPav(), "with drop-outs"),
        (Deadline(first=1), LotteryFL(), "with drop-outs, without pruning, with masks"),
    ],
)
def test_the_bytes_of_a_run_say_what_they_include(timing, method, words):
    model, data = configured(timing, method=method, availability=Availability(drop=0.5))
    text = describe_federation(model, data, 1, 4)
    assert re.search(rf"^bytes of 4 rounds, both ways, {words} +[\d,]+$", text, re.MULTILINE)
    [down, up] = re.findall(r"^bytes (?:down|up) per round, at most +([\d,]+)$", text, re.MULTILINE)
    is_less = 2 * int(up.replace(",", "")) < int(down.replace(",", ""))
    assert is_less == (timing is not None), "with a timing, late clients and those that drop out do not send"


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
    assert rows[FACTOR] == "0.83x"  # (8 / 8) / (3 / 2.5)
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
