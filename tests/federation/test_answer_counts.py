"""The price of rounds that do not wait: how often each client has answered, counted over a run and in checkpoints."""

import json
import random
import statistics

import pytest
from lightning import Callback

from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.federation.callbacks.summary import RunSummary
from fedsim.federation.components.answers import AnswerCount
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.components.selection import Availability, RandomFraction
from fedsim.federation.components.timing import Buffered, Deadline, Synchronous
from fedsim.methods import FedPav
from fedsim.report.costs import fewest_answers
from fedsim.report.runs import read_run
from fedsim.strategy.checkpoint_files import read_checkpoint
from run_dirs import training, write_log
from small import fit, make_data, make_model

INF = float("inf")


def federation(timing, slow=4.0, **options):
    """Clients that train 100 images in a second, but town0 so many times slower; messages take no time."""
    town0 = {"town0": ClientHardware(images_per_second=100.0 / slow)}
    hardware = Hardware(down_mbit=INF, up_mbit=INF, images_per_second=100.0, clients=town0)
    return make_model(FedPav(), timing=timing, hardware=hardware, **options)


def data_of(clients):
    return make_data(SyntheticReID(clients=clients, unseen=1, identities=2))


class Note(Callback):
    """The clients whose updates counted in each round, and the shares of their work."""

    def __init__(self):
        self.rounds = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        work = pl_module.round.clock.table.work
        self.rounds.append({name: work[name] for name in pl_module.reports})


def summary_of(rounds, names):
    """The entry of the summary, by plain loops over the rounds."""
    counts = {name: sum(name in work for work in rounds) for name in names}
    done = {name: sum(work.get(name, 0.0) for work in rounds) for name in names}
    least = names[0]
    for name in names:
        if (done[name], counts[name]) < (done[least], counts[least]):
            least = name
    share = round(done[least] / counts[least], 6) if counts[least] else 0.0
    return {
        "least": {"client": least, "answers": counts[least], "work": share},
        "median": float(statistics.median(counts.values())), "most": max(counts.values()),
        "total": sum(counts.values()), "since": 1,
    }  # fmt: skip


def count_of(model):
    return next(listener for listener in model.listeners if isinstance(listener, AnswerCount))


def run(clients, timing, rounds, folder=None, **options):
    note = Note()
    summary = [RunSummary(str(folder), "x")] if folder else []
    model = fit(federation(timing, **options), data_of(clients), rounds, callbacks=[note, *summary])
    return model, note.rounds


@pytest.mark.parametrize(
    "timing",
    [Buffered(buffer=2), Buffered(buffer=1, max_staleness=1), Deadline(first=2), Deadline(seconds=0.2, late="partial")],
    ids=["buffered", "too old", "first", "partial"],
)
def test_answers_are_counted_as_by_plain_loops(timing):
    availability = Availability(drop=0.2, straggle=0.3)
    model, rounds = run(4, timing, 9, availability=availability)
    assert count_of(model).summary()["answers"] == summary_of(rounds, model.parts.names)


def test_counts_of_drawn_rounds():
    """Many rounds of clients that answer or do not, in the count alone, through a checkpoint after each."""
    draw = random.Random(0)

    class Clock:
        table = None

    for _ in range(200):
        names = [f"town{i}" for i in range(draw.randint(1, 12))]
        clock, rounds = Clock(), []
        count = AnswerCount(clock, names)
        assert count.summary() == {}
        for round_ in range(draw.randint(1, 8)):
            work = {name: draw.choice((1.0, 1.0, 0.3, 0.1)) for name in names if draw.random() < draw.random()}
            clock.table = type("Table", (), {"work": work})
            count.observe(RoundRecord(round_, 0, names, work))
            rounds.append(work)
            again = AnswerCount(clock, names)
            again.load_state_dict(count.state_dict())
            assert again.state_dict() == count.state_dict()
            count = again
        assert count.summary()["answers"] == summary_of(rounds, names)


def test_rounds_that_wait_have_no_count(tmp_path):
    for timing in (None, Synchronous()):
        model, _ = run(3, timing, 1, tmp_path)
        assert not any(isinstance(listener, AnswerCount) for listener in model.listeners)
        assert "answers" not in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("clients", "options"),
    [(51, {"timing": Deadline(first=50)}), (1001, {"timing": Deadline(first=3), "selection": RandomFraction(0.005)})],
    ids=["51", "1001"],
)
def test_the_price_among_many_clients_is_in_the_summary_and_in_reports(tmp_path, clients, options):
    model, rounds = run(clients, rounds=3, folder=tmp_path, **options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["answers"] == summary_of(rounds, model.parts.names)
    assert (summary["clients"] == []) == (clients > 1000)
    write_log(tmp_path / "metrics.csv", [(1, training() | {"time/clock": 1.0})])
    assert fewest_answers(read_run(tmp_path)) == f"0 of {sum(map(len, rounds))} (town0)"
    assert not any(name.startswith("train/town") for name in model.round_metrics)


def test_a_slow_client_that_answers_with_less_work_is_named(tmp_path):
    """All answer in each round, so their numbers of answers hide who pays."""
    note, data = Note(), make_data(SyntheticReID(clients=4, unseen=1, identities=10))  # 40 images: 0.4 s and 1.6 s
    model = federation(Deadline(seconds=0.5, late="partial"))
    fit(model, data, 4, callbacks=[note, RunSummary(str(tmp_path), "x")])
    write_log(tmp_path / "metrics.csv", [(1, training() | {"time/clock": 1.0})])
    assert fewest_answers(read_run(tmp_path)) == "4 of 16, 0.31 of its work (town0)"
    assert model.reports["town0"].images == 8  # one of five batches
    assert json.loads((tmp_path / "summary.json").read_text())["answers"] == summary_of(note.rounds, model.parts.names)


def test_a_continued_run_goes_on_counting(tmp_path):
    timing = Buffered(buffer=2)
    whole, rounds = run(4, timing, 8)
    first, _ = run(4, timing, 4)
    first.trainer.save_checkpoint(tmp_path / "four.ckpt")
    again = fit(federation(timing), data_of(4), 8, ckpt_path=tmp_path / "four.ckpt")
    assert count_of(again).state_dict() == count_of(whole).state_dict()
    assert count_of(again).summary()["answers"] == summary_of(rounds, whole.parts.names)


def test_a_run_of_a_version_without_counts_says_since_when_it_counts(tmp_path, caplog):
    first, _ = run(3, None, 2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert "answers" not in read_checkpoint(tmp_path / "two.ckpt")["fedsim"]
    model = fit(federation(Deadline(first=2)), data_of(3), 4, ckpt_path=tmp_path / "two.ckpt")
    assert count_of(model).since == 3
    assert "has no answers of clients: their count begins here" in caplog.text


def test_another_federation_is_refused_with_one_name_of_many(tmp_path):
    """A line that holds the names of all clients would be as long as a file."""
    saved = fit(make_model(FedPav(), selection=RandomFraction(0.01)), data_of(301), 1)
    saved.trainer.save_checkpoint(tmp_path / "many.ckpt")
    for clients, end in ((300, "has town300, which this federation lacks"),
                         (302, "lacks town301, which this federation has")):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            fit(
                make_model(FedPav(), selection=RandomFraction(0.01)),
                data_of(clients),
                2,
                ckpt_path=tmp_path / "many.ckpt",
            )
        assert str(error.value) == (
            f"ckpt_path: the checkpoint has 301 clients and this federation {clients}; it {end}; use the data of the "
            "run that wrote it"
        )
