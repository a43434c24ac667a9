"""Federations of many clients: made when they train, with states only of those that have trained."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch

from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.cli import describe
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.room import Room
from fedsim.core.seeding import numpy_generator
from fedsim.core.store import FileStore, MemoryStore
from fedsim.core.versions import current_version
from fedsim.data import FederatedDataModule, SyntheticReID
from fedsim.data.federations import check_names
from fedsim.data.images import Domain, ImageArray, Split
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import PoissonSampling, RandomFraction
from fedsim.methods import MOON, SKA, Ditto, FedPav, FedReID
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from fedsim.training import lazy_clients
from small import fit, make_data, make_model, vector

METHODS = {"pav": FedPav(), "moon": MOON(), "ska": SKA(), "reid": FedReID(), "ditto": Ditto()}


def state_of(model):
    """Everything that a federation is: the global model, and all private states."""
    clients = {name: model.parts.clients[name].private_state() for name in model.parts.names}
    return vector(model), clients


def assert_equal(first, second):
    assert torch.equal(first[0], second[0])
    assert first[1].keys() == second[1].keys()
    for name, state in first[1].items():
        assert state.keys() == second[1][name].keys(), name
        assert all(torch.equal(tensor, second[1][name][key]) for key, tensor in state.items()), name


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cache", ["device", "none"])
def test_clients_that_are_made_again_have_the_same_bits(name, cache, monkeypatch):
    def trained():
        model = make_model(METHODS[name], selection=RandomFraction(0.67), evaluation=Evaluation())
        return fit(model, make_data(cache=cache), rounds=3, limit_val_batches=1.0)

    expected = trained()
    monkeypatch.setattr(lazy_clients, "KEPT", 1)
    again = trained()
    assert len(again.parts.clients._made) == 1
    assert_equal(state_of(expected), state_of(again))
    assert again.scores == expected.scores
    assert any(score.startswith("test/personalised/town") for score in again.scores)


def test_a_client_in_memory_is_the_same_object_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(lazy_clients, "KEPT", 2)
    clients = fit(make_model(FedPav()), rounds=1).parts.clients
    first, second, third = clients
    one = clients[first]
    assert clients[first] is one
    _, _ = clients[second], clients[first]
    _ = clients[third]  # the second is the oldest now
    assert clients[first] is one
    assert [*clients._made] == [third, first]
    assert len(clients) == 3
    assert first in clients
    assert "nobody" not in clients
    with pytest.raises(KeyError):
        clients["nobody"]


def test_a_state_of_the_start_is_the_one_that_training_loads():
    """As it was stored for every client before the first round: a function of the seed and the client's name."""
    model = fit(make_model(FedPav(), bn_stats="local"), rounds=1)
    untrained = fit(make_model(FedPav(), bn_stats="local", selection=RandomFraction(0.34)), rounds=1)
    stored = untrained.parts.rank_share.states.clients()
    assert len(stored) == 2  # ceil(0.34 * 3)
    [name] = {*untrained.parts.names} - stored
    state = untrained.parts.clients[name].private_state()["state"]
    flat = model.parts.models[model.parts.archs[name]]
    generator = untrained.parts.clients[name]._initial_state()["state"]
    assert torch.equal(state, generator)
    assert torch.equal(state[: flat.initial_private.numel()], flat.initial_private)
    head = flat.head_of(state, untrained.parts.num_classes[name])
    assert float(head.weight.std()) > 0


def crowd(num_clients, images=4):
    """Clients with arrays of 8 x 4 pixels."""
    rng = np.random.default_rng(0)
    labels = np.arange(images, dtype=np.int64) % 2
    pixels = [rng.integers(0, 256, (images, 8, 4, 3), dtype=np.uint8) for _ in range(num_clients)]
    splits = [Split(ImageArray(p), labels, np.zeros(images, dtype=np.int64)) for p in pixels]
    return [Domain(f"client{i:04d}", split, split, split) for i, split in enumerate(splits)]


def many():
    """150 clients, three of which train in a round."""
    return make_data(SyntheticReID(150, unseen=1, scale=0.2, identities=2), size=(16, 8))


def train(folder, rounds, ranks=1, ckpt_path=None, store="device"):
    """Train on many clients, and save a checkpoint."""
    model = make_model(FedPav(), selection=RandomFraction(0.02), bn_stats="local", client_store=store)
    fit(model, many(), rounds, ranks, ckpt_path)
    model.trainer.save_checkpoint(folder / "part.ckpt")
    return model


def train_on_two_ranks(folder):
    train(folder, 2, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return state_of(train(tmp_path_factory.mktemp("whole"), 4))


@pytest.mark.parametrize("store", ["device", "disk"])
def test_a_checkpoint_has_the_states_of_those_that_trained_and_continues(tmp_path, whole, store):
    train(tmp_path, 2, store=store)
    content = read_checkpoint(tmp_path / "part.ckpt")["fedsim"]
    assert len(content["clients"]) == len(content["hosts"]) == 150
    states = read_states(tmp_path / "part.ckpt", content, list(content["clients"]))
    assert 3 <= len(states) == sum(content["states"]) <= 6
    assert_equal(state_of(train(tmp_path, 4, ckpt_path=tmp_path / "part.ckpt", store=store)), whole)


@pytest.mark.dist
def test_so_has_one_of_two_ranks(tmp_path, whole):
    run_on_ranks(train_on_two_ranks, tmp_path)
    assert_equal(state_of(train(tmp_path, 4, ckpt_path=tmp_path / "part.ckpt")), whole)


def test_a_federation_that_goes_back_to_a_checkpoint_forgets_later_states(tmp_path, whole):
    """In one process: clients that had not trained by then have their first state again."""
    model = train(tmp_path, 2)
    (tmp_path / "part.ckpt").rename(tmp_path / "early.ckpt")
    trained = model.parts.rank_share.states.clients()
    fit(
        model,
        make_data(SyntheticReID(150, unseen=1, scale=0.2, identities=2), size=(16, 8)),
        4,
        ckpt_path=tmp_path / "early.ckpt",
    )
    assert model.parts.rank_share.states.clients() > trained
    fit(
        model,
        make_data(SyntheticReID(150, unseen=1, scale=0.2, identities=2), size=(16, 8)),
        4,
        ckpt_path=tmp_path / "early.ckpt",
    )
    assert_equal(state_of(model), whole)


def test_lost_states_are_noticed(tmp_path):
    """A file of fewer clients than the checkpoint counts, with a digest of its own, from an earlier round."""
    train(tmp_path, 1)
    (tmp_path / "part.ckpt").rename(tmp_path / "early.ckpt")
    train(tmp_path, 3)
    early, late = (current_version(tmp_path / name) / "clients-0-0.safetensors" for name in ("early.ckpt", "part.ckpt"))
    late.write_bytes(early.read_bytes())
    with pytest.raises(DataError, match=r"holds no private state of town\d+; is it complete\?"):
        train(tmp_path, 4, ckpt_path=tmp_path / "part.ckpt")


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_stores_know_the_clients_that_have_tensors(tmp_path):
    names = [f"client{i}" for i in range(50)]
    for store in (MemoryStore(torch.device("cpu")), FileStore(tmp_path / "states", names)):
        assert store.clients() == set()
        for name in names[::7]:
            store.write(name, {"state": torch.ones(3)})
        assert store.clients() == {*names[::7]}
        store.write(names[7], {})
        assert store.clients() == {*names[::7]} - {names[7]}
        assert store.read(names[7]) == {}
        store.write(names[7], {"state": torch.zeros(5)})
        assert torch.equal(store.read(names[7])["state"], torch.zeros(5))


class CountedName(str):
    """A name that counts how often it is compared with another one."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def test_the_check_of_names_compares_each_name_a_few_times():
    domains = crowd(1)
    split = domains[0].query
    many = [Domain(CountedName(f"client{i}"), split, split, split) for i in range(2000)]
    check_names(many)
    assert CountedName.comparisons < 10 * len(many)
    with pytest.raises(ConfigError, match="two data sets are called client7; rename a folder"):
        check_names([*many, many[7]])


def test_a_sample_of_many_clients_is_uniform_and_below_it_the_bits_stay():
    names = [f"c{i}" for i in range(20_000)]
    chosen = [RandomFraction(0.05).select(t, names, 0) for t in range(40)]
    counts = np.zeros(len(names))
    for of_round in chosen:
        positions = [int(name[1:]) for name in of_round]
        assert len(set(positions)) == len(positions) == 1000
        assert positions == sorted(positions)
        counts[positions] += 1
    thirds = counts.reshape(4, -1).sum(axis=1)  # 10,000 each; standard deviation 84 (hypergeometric, 40 rounds)
    assert abs(thirds - 10_000).max() < 5 * 84
    assert RandomFraction(0.0003).select(3, names[:10_000], 1) == _by_permutation(3, names[:10_000], 1, 3)


def _by_permutation(round_, names, seed, count):
    return [names[i] for i in sorted(numpy_generator(seed, round_, "selection").permutation(len(names))[:count])]


def test_poisson_samples_are_those_of_the_plain_loop():
    names = [f"c{i}" for i in range(3000)]
    draws = numpy_generator(5, 2, "Poisson selection").random(len(names))
    assert PoissonSampling(0.1).select(2, names, 5) == [n for n, draw in zip(names, draws, strict=True) if draw < 0.1]


# -- what a run says of many clients -----------------------------------------------------------------------------------

MANY = """
seed_everything: 0
trainer: {max_epochs: 1, check_val_every_n_epoch: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  neck: {kind: bnneck, dropout: 0.0}
  client: {batch_size: 8}
  selection: {class_path: RandomFraction, init_args: {fraction: 0.002}}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 1001, unseen: 1, scale: 0.2, identities: 2}}
  val: none
  cache: none
  size: [16, 8]
"""


@pytest.fixture(scope="module")
def many_run(tmp_path_factory):
    """A run of 1,001 clients, three of which train."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "many.yaml").write_text(MANY)
    assert main(["fit", "--config", str(folder / "many.yaml"), "--run_dir", str(folder / "run")]) == 0
    return folder


def test_the_summary_has_number_and_hash_of_many_clients(many_run, capsys):
    summary = json.loads((many_run / "run" / "summary.json").read_text())
    names = "\n".join(f"town{i}" for i in range(1001))
    assert (summary["clients"], summary["num_clients"]) == ([], 1001)
    assert summary["clients_sha256"] == hashlib.sha256(names.encode()).hexdigest()
    assert main(["report", str(many_run / "run")]) == 0
    assert "new0" in capsys.readouterr().out
    assert main(["report", str(many_run / "run"), "--participation", str(many_run / "p.png")]) == 2
    assert "names none of its 1001 clients, so --participation cannot draw them" in capsys.readouterr().err


def test_few_clients_are_listed(tmp_path):
    (tmp_path / "few.yaml").write_text(MANY.replace("clients: 1001", "clients: 3").replace("0.002", "1.0"))
    assert main(["fit", "--config", str(tmp_path / "few.yaml"), "--run_dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["clients"] == ["town0", "town1", "town2"]
    assert "num_clients" not in summary


def test_a_description_has_quantiles_of_many_clients(many_run, capsys):
    assert main(["describe", "--config", str(many_run / "many.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("town1 ")]
    [images] = [line.split() for line in lines if line.startswith("images ")]
    assert images == ["images", "8", "8", "8", "8", "8", "8,008"]
    assert [line for line in lines if line.startswith("of 1,001 clients")]


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_those_of_sorted_counts(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 50, rng.integers(1, 40)).tolist()
    ordered = sorted(counts)
    expected = [ordered[math.floor(q * (len(counts) - 1))] for q in (0, 0.1, 0.5, 0.9, 1)]
    row = describe._quantiles("clients", {"images": counts}).splitlines()[-1].split()
    assert row == ["images", *map(str, expected), f"{sum(counts):,}"]


@pytest.mark.parametrize(("free", "warns"), [(1, True), (10**15, False)])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_line_warns_if_all_states_have_no_room(many_run, monkeypatch, caplog, store, free, warns):
    """1,001 states of about a kilobyte; the fit goes on, since few clients train."""
    for name in ("memory_room", "room_of"):
        monkeypatch.setattr(f"fedsim.federation.memory.{name}", lambda *_: Room("here", free, 2 * free))
    args = ["--config", str(many_run / "many.yaml"), "--run_dir", str(many_run / f"{store}{free}")]
    assert main(["fit", *args, "--model.client_store", store]) == 0
    lines = [r.message for r in caplog.records if "the private states of all 1,001 clients take" in r.message]
    assert bool(lines) is warns
    assert not lines or ("(here)" in lines[0] and ("set it to disk" in lines[0]) == (store == "host"))


def test_an_evaluation_opens_no_images_of_clients(monkeypatch):
    """Of many clients only those that train: a copy of all images would fill the memory."""
    opened = []
    monkeypatch.setattr(lazy_clients, "KEPT", 1)
    monkeypatch.setattr(FederatedDataModule, "must_decode", lambda *_: False)
    open_train = FederatedDataModule.open_train
    monkeypatch.setattr(
        FederatedDataModule, "open_train",
        lambda data, images, name, device: opened.append(name) or open_train(data, images, name, device),
    )  # fmt: skip
    model = make_model(Ditto(), selection=RandomFraction(0.34), evaluation=Evaluation())
    fit(model, rounds=1, limit_val_batches=1.0)
    assert any("personalised" in name for name in model.scores)
    assert opened == list(model.reports)
    assert len(opened) == 2
