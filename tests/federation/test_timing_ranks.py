"""Deadlines and buffers of answers: the same bits of every method on any ranks, and after pauses and kills."""

import json
import signal
from functools import partial

import pytest
import torch

import fedsim.methods
import others
from failing import Jitter, assert_equal, finish, go_on, last, read_result, results, run_on_ranks
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.selection import Availability
from fedsim.federation.components.timing import Buffered, Deadline
from fedsim.methods.base import Method
from fedsim.models import Neck
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.labels import BottomUp
from fedsim.training.settings import LocalTraining
from small import fit, labels_of, make_data, make_model
from small_tower import small_tower

pytestmark = [pytest.mark.dist, pytest.mark.slow]

METHODS = {name: kind for name, kind in vars(fedsim.methods).items() if isinstance(kind, type) and kind is not Method}
METHODS = {name: kind for name, kind in METHODS.items() if issubclass(kind, Method)}
NEED_ROUNDS = {
    "FedDIP", "FedDyn", "FedKLPR", "FedProto", "GPerXAN", "IFCA", "LotteryFL", "Scaffold", "StyleBank",
    "SubFedAvg",
}  # fmt: skip
"""methods that Buffered refuses, see test_timing.py"""
ALLOWED = [name for name in METHODS if name not in NEED_ROUNDS]
OPTIONS = {"MOON": {"mu": 0.1}, "TextAnchors": {"tower": small_tower(), "prompt_epochs": 1}}
TIMINGS = {
    "buffered": (Buffered(buffer=2), 4),
    "deadline": (Deadline(seconds=1.0, late="partial"), 2),
    "first": (Deadline(first=3), 2),
    "asynchronous": (Buffered(buffer=1, mix=0.6), 8),
}
"""name -> timing, rounds"""
METRICS = ("time/clock", "time/simulated_seconds", "comm/up_bytes", "comm/down_bytes", "train/loss", "train/images")
SPEEDS = {"town0": 100.0, "town1": 17.0, "town2": 60.0, "town3": 23.0}
HARDWARE = Hardware(
    down_mbit=8.0, up_mbit=4.0, images_per_second=1.0,
    clients={name: ClientHardware(images_per_second=speed) for name, speed in SPEEDS.items()},
)  # fmt: skip


def train(folder, timing, method="FedPav", devices=1, rounds=None, callbacks=(), ckpt_path=None):
    """Train four clients of unequal speeds, some of which drop out or are slow; save a checkpoint and metrics."""
    setting, planned = TIMINGS[timing]
    clusters = BottomUp(merge=0.3) if method == "FedUReID" else None
    chosen = METHODS[method](**OPTIONS.get(method, {}))
    model = make_model(
        chosen, neck=Neck(dim=8, dropout=0.2), timing=setting, hardware=HARDWARE,
        availability=Availability(drop=0.1, straggle=0.2),
        client=LocalTraining(
            batch_size=8, local_epochs=2, bottom_up=clusters, optimizer=partial(torch.optim.SGD, lr=0.01)
        ),
    )  # fmt: skip
    data = make_data(
        SyntheticReID(clients=4, unseen=1, scale=0.1), size=(16, 8), augmentation=Augmentation(pad=1, flip=0.5),
        labels=labels_of(chosen),
    )  # fmt: skip
    fit(model, data, rounds or planned, devices, ckpt_path, callbacks=[*callbacks])
    name = f"{timing} {method}"
    model.trainer.save_checkpoint(folder / f"{name}.ckpt")
    if model.strategy.global_rank == 0:
        metrics = {key: model.round_metrics[key] for key in METRICS}
        (folder / f"{name}.json").write_text(json.dumps(metrics))
    return model


def assert_same(a, b, timing, method="FedPav"):
    """Two folders hold the same results and metrics of a run."""
    name = f"{timing} {method}"
    assert_equal(read_result(a / f"{name}.ckpt"), read_result(b / f"{name}.ckpt"))
    assert (a / f"{name}.json").read_text() == (b / f"{name}.json").read_text()


# -- every method ------------------------------------------------------------------------------------------------------


def train_each(folder, names):
    """What each of two ranks does."""
    for timing, methods in names.items():
        for method in methods:
            train(folder, timing, method, devices=2)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, request):
    """The folder with the results of two ranks, of the methods whose tests are run."""
    folder = tmp_path_factory.mktemp("two")
    names = {
        "buffered": others.names_in(request, "test_old_answers_of_a_method_have_the_same_bits_on_two_ranks"),
        "deadline": others.names_in(request, "test_a_method_with_a_deadline_has_the_same_bits_on_two_ranks"),
        "first": others.names_in(request, "test_a_method_with_first_answers_has_the_same_bits_on_two_ranks"),
    }
    run_on_ranks(partial(train_each, names=names), folder, timeout=900)
    return folder


@pytest.mark.parametrize("name", others.some(ALLOWED, ["MOON", "FedNova"]))
def test_old_answers_of_a_method_have_the_same_bits_on_two_ranks(on_two_ranks, tmp_path, name):
    model = train(tmp_path, "buffered", name)
    tables = list(model.round.clock.timetables(4))
    assert any(began < round_ for round_, table in enumerate(tables) for began in table.versions.values())
    assert_same(tmp_path, on_two_ranks, "buffered", name)


@pytest.mark.parametrize("name", others.some(METHODS, ["Scaffold"]))
def test_a_method_with_a_deadline_has_the_same_bits_on_two_ranks(on_two_ranks, tmp_path, name):
    model = train(tmp_path, "deadline", name)
    shares = [share for table in model.round.clock.timetables(2) for share in table.work.values()]
    assert min(shares) < 0.5 < max(shares), "nobody is late"
    assert_same(tmp_path, on_two_ranks, "deadline", name)


@pytest.mark.parametrize("name", others.some(METHODS, ["SubFedAvg"]))
def test_a_method_with_first_answers_has_the_same_bits_on_two_ranks(on_two_ranks, tmp_path, name):
    model = train(tmp_path, "first", name)
    assert sum(table.late for table in model.round.clock.timetables(2)) > 0
    assert_same(tmp_path, on_two_ranks, "first", name)


# -- FedAsync ----------------------------------------------------------------------------------------------------------


def continue_slowly(folder, ranks):
    """What each of some ranks does, slowed at random: the whole run, and the end of one that one rank began."""
    train(folder, "asynchronous", devices=ranks, callbacks=[Jitter()])
    part = folder / "part.ckpt"
    train(folder / "resumed", "asynchronous", devices=ranks, callbacks=[Jitter()], ckpt_path=part)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """The folder with FedAsync's result on one rank, and in ``part`` that of half of its steps."""
    folder = tmp_path_factory.mktemp("one")
    train(folder, "asynchronous")
    (folder / "part").mkdir()
    train(folder / "part", "asynchronous", rounds=4)
    return folder


@pytest.mark.parametrize("ranks", others.some([2, 4], [2]))
def test_fedasync_has_the_same_bits_on_any_number_of_ranks_also_after_a_pause(on_one_rank, tmp_path, ranks):
    begun = on_one_rank / "part" / "asynchronous FedPav.ckpt"
    assert len(read_checkpoint(begun)["fedsim"]["timing"]["version"]) == 3, "nobody is under way"
    (tmp_path / "part.ckpt").symlink_to(begun)
    (tmp_path / "resumed").mkdir()
    run_on_ranks(partial(continue_slowly, ranks=ranks), tmp_path, ranks)
    for folder in (tmp_path, tmp_path / "resumed"):
        assert_same(on_one_rank, folder, "asynchronous")


# -- killed ------------------------------------------------------------------------------------------------------------

LATE = "{down_mbit: 8, up_mbit: 4, images_per_second: 100, clients: {town1: {latency_ms: 9000}}}"
UNDER_WAY = ["--model.timing=Buffered", "--model.timing.buffer=2", f"--model.hardware={LATE}"]


@pytest.mark.others
def test_a_run_that_is_killed_with_a_client_under_way_has_the_same_bits(tmp_path):
    """Twice, on two ranks; then one rank goes on."""
    whole, folder = results(tmp_path / "whole", *UNDER_WAY), tmp_path / "run"
    for number, fail in enumerate(("mid-checkpoint@2/0", "before training@3/1")):
        codes = go_on(folder, number, *UNDER_WAY, ranks=2, fail=fail).wait()
        assert codes[int(fail[-1])] == -signal.SIGKILL
        content = read_checkpoint(last(folder))
        assert [*content["fedsim"]["timing"]["due"]] == ["town1"]
        assert content["fedsim_old_models"].keys() == {0}
        assert_equal(read_result(last(folder)), whole[number])
    finish(go_on(folder, 2, *UNDER_WAY))
    assert_equal(read_result(last(folder)), whole[-1])
