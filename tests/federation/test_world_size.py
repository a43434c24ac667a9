"""The same bits on 1, 2, 3 and 4 ranks: global weights, private states and metrics."""

import csv
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from failing import Jitter, assert_equal, read_result, run_on_ranks
from fedsim.data import Augmentation, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.selection import AllClients, Availability, RandomFraction
from fedsim.federation.components.timing import Buffered
from fedsim.methods import FedPav
from fedsim.models import Neck, SmallCNN, StyleLayers
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.objective import Objective
from fedsim.training.server_optimizers import FedAdam
from fedsim.training.settings import ClientOverride, LocalTraining
from small import fit, make_data, make_model, sgd

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def settings_by_name():
    """Settings of several runs, beside those that all have; every process makes the same."""
    torch.manual_seed(1)  # initial weights
    training = partial(LocalTraining, batch_size=8, optimizer=sgd)
    return {
        "mean": {},
        "local statistics, FedAdam": {"bn_stats": "local", "server_optimizer": FedAdam},
        "first, two architectures": {
            "bn_stats": "first",
            "clients": {"town1": ClientOverride(backbone=SmallCNN(width=6))},
        },
        "recalibrate, triplet": {
            "bn_stats": "recalibrate",
            "objective": Objective(triplet=1.0),
            "client": training(sampler="identity"),
        },
        # town3 has more to do than all others together; of six seeds on two kinds of CPU, the largest gradient of a
        # micro-batch is 0.07 of the largest that is exact, and less than 0.5 within four standard deviations of its
        # logarithm
        "rank groups": {
            "client": training(micro_batch=4, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
            "clients": {"town3": ClientOverride(local_epochs=10, batch_size=15)},
        },
        # the same work; some clients are under way while others answer, also in a checkpoint
        "buffered rank groups": {
            "client": training(micro_batch=4, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
            "clients": {"town3": ClientOverride(local_epochs=10, batch_size=15)},
            "timing": Buffered(buffer=2),
            "selection": AllClients(),
            "hardware": Hardware(
                down_mbit=8.0,
                up_mbit=4.0,
                images_per_second=100.0,
                clients={
                    "town1": ClientHardware(images_per_second=30.0),
                    "town3": ClientHardware(images_per_second=1000.0),
                },
            ),
        },
        "mixed styles": {"backbone": SmallCNN(width=8, style=StyleLayers(kind="mix", after=("input", "layer1")))},
    }


NAMES = [*settings_by_name()]
RANK_GROUPS = ("rank groups", "buffered rank groups")


def train(folder, name, ranks=1, rounds=3, machines=1, **options):
    """Train a sample of unequal clients, one with its own settings, with drop-outs, stragglers and dropout."""
    settings = {"clients": {}, **settings_by_name()[name]}
    settings["clients"] = {"town3": ClientOverride(local_epochs=2, batch_size=4)} | settings["clients"]
    model = make_model(
        FedPav(), neck=Neck(kind="linear", dim=16, dropout=0.2), availability=Availability(drop=0.1, straggle=0.3),
        # several batches per data set; on one rank sets are scored by one, on others by all: the numbers do not differ
        evaluation=Evaluation(batch_size=8, share_from=1 if ranks > 1 else 1000),
        **{"selection": RandomFraction(0.75)} | settings,
    )  # fmt: skip
    data = make_data(
        SyntheticReID(clients=4, unseen=2, scale=0.25), size=(16, 8), augmentation=Augmentation(pad=2, flip=0.5),
        val="identities", val_fraction=0.3, public="new0" if name.startswith("recalibrate") else None,
    )  # fmt: skip
    fit(
        model, data, rounds, devices=ranks // machines, num_nodes=machines, logger=CSVLogger(folder, name, ""),
        check_val_every_n_epoch=2, limit_val_batches=1.0, log_every_n_steps=1, **options,  # a round follows the scores
    )  # fmt: skip
    model.trainer.save_checkpoint(folder / f"{name}.ckpt")


def assert_same(a, b, name):
    """Two folders hold the same results and metrics."""
    assert_equal(read_result(a / f"{name}.ckpt"), read_result(b / f"{name}.ckpt"))
    assert {"town0/state", "town3/state"} < read_result(a / f"{name}.ckpt").keys()
    assert read_rows(a, name) == read_rows(b, name)


def read_rows(folder, name):
    with (folder / name / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    assert any(key.startswith("test/") for row in rows for key in row)
    return rows


class First(Callback):
    """Keeps the global model of the first round."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.state = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """The folder with all results on one rank, and in ``part`` those after some rounds."""
    folder = tmp_path_factory.mktemp("one")
    for name in NAMES:
        train(folder, name, callbacks=[first := First()])
        content = read_checkpoint(folder / f"{name}.ckpt")["state_dict"]
        assert content.keys() == first.state.keys()
        moved = [not torch.equal(first.state[key], tensor) for key, tensor in content.items()]
        assert all(moved), "the others would be equal because nothing was trained"
    for name in ("mean", "buffered rank groups"):
        train(folder / "part", name, rounds=2)
    return folder


def train_with_rank_groups(folder, ranks, name="rank groups", **options):
    """Train on ranks that are slowed at random; those that share a client leave notes."""
    notes = folder / f"notes of {name}"
    notes.mkdir(exist_ok=True, parents=True)
    train(folder, name, ranks, callbacks=[Jitter(folder=notes)], **options)


def on_two_ranks(folder):
    """What each of them does."""
    for name in NAMES:
        if name not in RANK_GROUPS:
            train(folder, name, 2)
    for name in RANK_GROUPS:
        train_with_rank_groups(folder, 2, name)
    train(folder / "resumed", "mean", 2, ckpt_path=folder / "part.ckpt")


def on_three_ranks(folder):
    """What each of them does."""
    train_with_rank_groups(folder, 3)
    train_with_rank_groups(folder / "part", 3, rounds=1)


def on_four_ranks(folder):
    """What each of them does."""
    train(folder, "mean", 4)
    for name in RANK_GROUPS:
        train_with_rank_groups(folder, 4, name)


def on_two_machines(folder):
    """What each of their four ranks does."""
    train(folder, "mean", 4, machines=2)
    train_with_rank_groups(folder, 4, machines=2, ckpt_path=folder / "part.ckpt")
    train_with_rank_groups(folder, 4, "buffered rank groups", machines=2, ckpt_path=folder / "of one rank.ckpt")


@pytest.fixture(scope="module")
def two(on_one, tmp_path_factory):
    """The folder with all results on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(on_one / "part" / "mean.ckpt", folder / "part.ckpt")
    run_on_ranks(on_two_ranks, folder)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Of three ranks: with rank groups, and in ``part`` what one round leaves."""
    folder = tmp_path_factory.mktemp("three")
    run_on_ranks(on_three_ranks, folder, ranks=3)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Of four ranks: the first settings, and rank groups."""
    folder = tmp_path_factory.mktemp("four")
    run_on_ranks(on_four_ranks, folder, ranks=4)
    return folder


@pytest.fixture(scope="module")
def two_machines(on_one, three, tmp_path_factory):
    """Of two ranks on each of two machines: the first settings, and rank groups that three ranks of a machine began."""
    folder = tmp_path_factory.mktemp("machines")
    shutil.copytree(three / "part" / "rank groups.ckpt", folder / "part.ckpt")
    shutil.copytree(on_one / "part" / "buffered rank groups.ckpt", folder / "of one rank.ckpt")
    run_on_ranks(on_two_machines, folder, ranks=4, machines=2)
    return folder


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RANK_GROUPS])
def test_two_ranks_give_the_same_bits_as_one(on_one, two, name):
    assert_same(on_one, two, name)


def test_four_ranks_give_the_same_bits_as_one(on_one, four):
    assert_same(on_one, four, "mean")


def test_ranks_of_two_machines_give_the_same_bits_as_one(on_one, two_machines):
    assert set(read_checkpoint(two_machines / "mean.ckpt")["fedsim"]["hosts"].values()) == {0, 1, 2, 3}
    assert_same(on_one, two_machines, "mean")


def test_a_resumed_run_ends_in_the_same_bits_on_other_ranks(on_one, two):
    assert_equal(read_result(on_one / "mean.ckpt"), read_result(two / "resumed" / "mean.ckpt"))


@pytest.mark.parametrize("ranks", ["two", "three", "four"])
def test_whichever_rank_of_a_group_is_slow_the_bits_are_the_same(on_one, ranks, request):
    folder = request.getfixturevalue(ranks)
    assert_shared(folder)
    assert_same(on_one, folder, "rank groups")


def test_a_run_with_rank_groups_continues_on_other_machines(on_one, three, two_machines):
    """Begun on three ranks, continued on two machines with two ranks each."""
    for folder in (three / "part", two_machines):
        assert_shared(folder)
    assert_equal(read_result(on_one / "rank groups.ckpt"), read_result(two_machines / "rank groups.ckpt"))


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_buffered_answers_have_the_same_bits_on_any_number_of_ranks(on_one, ranks, request):
    folder = request.getfixturevalue(ranks)
    assert_shared(folder, "buffered rank groups")
    assert_same(on_one, folder, "buffered rank groups")


def test_clients_under_way_answer_on_other_machines(on_one, two_machines):
    """One rank has called them; they answer on two machines with two ranks each."""
    begun = read_checkpoint(on_one / "part" / "buffered rank groups.ckpt")
    # those that will drop out need none
    assert set() < begun["fedsim_old_models"].keys() <= {*begun["fedsim"]["timing"]["version"].values()}
    staleness = [
        row["timing/staleness"] for row in read_rows(on_one, "buffered rank groups") if row["timing/staleness"]
    ]
    assert float(staleness[-1]) > 0, "the last round had no old answer"
    assert_equal(
        read_result(on_one / "buffered rank groups.ckpt"), read_result(two_machines / "buffered rank groups.ckpt")
    )


def assert_shared(folder, name="rank groups"):
    """Some ranks shared a client."""
    sessions = Counter(note.name.rpartition(" ")[0] for note in (folder / f"notes of {name}").iterdir())
    assert max(sessions.values()) > 1, sessions
