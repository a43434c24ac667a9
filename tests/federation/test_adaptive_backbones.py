"""Backbones that follow rewards (paper 002): the rule against plain loops, switches, ranks, checkpoints, errors."""

import csv
import math
import random

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.federation.adaptive_backbones import AdaptiveBackbones, BackboneLadder, next_rungs
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.components.selection import UCB
from fedsim.methods import SKA, Ditto, FedAvg, Scaffold, WeightedPav
from fedsim.models import Neck, SmallCNN
from fedsim.papers.files import read_paper
from fedsim.training import lazy_clients
from fedsim.training.messages import Report
from fedsim.training.settings import ClientOverride
from small import fit, make_data, make_model, receive, vector

NECK = Neck(kind="linear", dim=16, dropout=0.0)
WIDTHS = (4, 6, 8)
CLIENTS = ("town0", "town1", "town2")
METHODS = (WeightedPav(), SKA())
"""Without and with something that clients keep from the start."""


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_next_rungs_are_the_plain_loop(seed):
    draw = random.Random(seed)
    clients = "abcdefghi"[: draw.randint(3, 9)]
    rewards = {c: draw.randint(0, 4) / 4 for c in clients}  # few values, so that clients tie
    rungs, caps = {c: draw.randint(1, 3) for c in clients}, {c: draw.randint(1, 3) for c in clients}
    rungs = {c: min(rungs[c], caps[c]) for c in clients}
    third = len(clients) // 3
    expected = {}
    for c in clients:
        above = sum(rewards[other] > rewards[c] for other in clients)
        below = sum(rewards[other] < rewards[c] for other in clients)
        in_top, in_bottom = above < third, below < third
        expected[c] = rungs[c]
        if in_top and not in_bottom and rungs[c] < caps[c]:
            expected[c] += 1
        if in_bottom and not in_top and rungs[c] > 1:
            expected[c] -= 1
    assert next_rungs(rewards, rungs, caps, 1 / 3) == expected


def test_nobody_moves_without_a_difference():
    rungs = dict.fromkeys("abc", 2)
    assert next_rungs(dict.fromkeys("abc", 0.5), rungs, dict.fromkeys("abc", 3), 1 / 3) == rungs
    assert next_rungs({"a": 0.0, "b": 1.0}, rungs, dict.fromkeys("abc", 3), 1 / 3) == rungs  # a third of two
    assert next_rungs({}, rungs, dict.fromkeys("abc", 3), 1 / 3) == rungs


TABLE_3 = {"market1501": 12936, "cuhk03np": 7365, "prid2011": 3744, "cuhk01": 1940, "cuhk02": 3107, "viper": 632,
           "3dpes": 450, "ilids": 248, "grid": 4000}  # fmt: skip # training images, as printed
RUNGS = {"convnext tiny": 1, "resnet": 2, "convnext large": 3}


def played(seed, rewarded):
    """The rungs at the end of figure11_adaptive's 20 rounds, if models move by the root of the data's size, with 15 %
    of noise."""
    paper = read_paper("002")
    of_row, common = paper.rows["figure11_adaptive"]["overrides"]["model"], paper.content["protocol"]["model"]
    settings = of_row["adaptive_backbones"]
    rungs = dict.fromkeys(TABLE_3, RUNGS["resnet"])
    for client, own in of_row["clients"].items():
        rungs[client] = RUNGS[f"convnext {own['backbone']['init_args']['size']}"]
    caps = dict.fromkeys(TABLE_3, 3) | settings["caps"]
    selection = UCB(**common["selection"]["init_args"] | of_row["selection"]["init_args"])
    draw = random.Random(seed)
    for t in range(paper.content["protocol"]["trainer"]["max_epochs"]):
        if t and t % settings["every"] == 0:
            rungs = next_rungs(selection.mean_rewards(), rungs, caps, settings["share"], rewarded)
        chosen = selection.select(t, list(TABLE_3), seed)
        moved = {c: TABLE_3[c] ** 0.5 * math.exp(draw.gauss(0, 0.15)) for c in chosen}
        weights = {c: distance / sum(moved.values()) for c, distance in moved.items()}
        reports = {c: Report(1, {}) for c in chosen}
        selection.observe(RoundRecord(t, seed, chosen, reports, weights, {c: str(rungs[c]) for c in chosen}))
    return rungs


def test_large_clients_leave_the_largest_backbone_as_in_figure_11():
    """Over 200 seeds: Market-1501 in all, and the whole figure in 180; with the rule the other way round, in none."""
    assert read_paper("002").rows["figure11_adaptive"]["overrides"]["model"]["adaptive_backbones"]["rewarded"] == "down"
    small = ("prid2011", "viper", "ilids")
    down, up = ([played(seed, how) for seed in range(50)] for how in ("down", "up"))
    assert {rungs["market1501"] for rungs in down} == {2}
    assert sum(rungs["grid"] == 2 and all(rungs[c] == 1 for c in small) for rungs in down) > 35
    assert {rungs["market1501"] for rungs in up} == {3}


@pytest.mark.parametrize(("rewarded", "rungs"), [("up", [1, 2, 3]), ("down", [3, 2, 1])])
def test_clients_with_many_rewards_step_where_they_shall(rewarded, rungs):
    selection = UCB(3)
    model = adaptive(selection=selection, rewarded=rewarded)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    selection.rewards, selection.num_selected = {"town0": 0.0, "town1": 1.0, "town2": 2.0}, dict.fromkeys(CLIENTS, 2)
    ladder = BackboneLadder(model.settings.adaptive_backbones, model.parts, selection)
    ladder.begin(2)
    assert [ladder.rungs[client] for client in CLIENTS] == rungs


# -- switches ----------------------------------------------------------------------------------------------------------


def ladder(**options):
    torch.manual_seed(1)
    return AdaptiveBackbones(ladder=[SmallCNN(width=width) for width in WIDTHS], **options)


def adaptive(method=None, every=2, selection=None, rewarded="up", **options):
    """All clients begin on the second rung."""
    torch.manual_seed(2)
    settings = {"backbone": SmallCNN(width=6), "neck": NECK, "selection": selection or UCB(3)}
    settings["adaptive_backbones"] = ladder(every=every, rewarded=rewarded, caps=options.pop("caps", {}))
    return make_model(method or WeightedPav(), **settings | options)


def short():
    """A few batches of each client are enough to tell bits apart."""
    return make_data(limit_client_batches=3)


def states(model):
    return {name: client.private_state() for name, client in model.parts.clients.items()}


def everything(model):
    found = {f"global {arch}": vector(model, arch) for arch in model.parts.models}
    return found | {f"{c}/{n}": t for c, tensors in states(model).items() for n, t in tensors.items()}


def width_of(model, client):
    return model.parts.models[model.parts.archs[client]].network.backbone.conv1.out_channels


def reward(model):
    """Before the third round: nothing for town0, all for town2."""
    model.settings.selection.load_state_dict(
        {"H": {"town0": 0, "town1": 1, "town2": 2}, "N": dict.fromkeys(model.parts.archs, 2)}
    )
    model.server.round = 2


def ladder_of(model):
    return next(listener for listener in model.listeners if isinstance(listener, BackboneLadder))


@pytest.mark.parametrize("kept", [1000, 1])
def test_a_switch_keeps_the_classifier_and_nothing_else(kept, monkeypatch):
    """Also of clients that are made anew for it: their old head has the place of the old architecture."""
    monkeypatch.setattr(lazy_clients, "KEPT", kept)
    model = fit(adaptive(), rounds=2)
    before = {name: [t.clone() for t in client.head] for name, client in model.parts.clients.items()}
    assert model.parts.archs == dict.fromkeys(model.parts.archs, "smallcnn")  # not yet
    reward(model)
    stays = states(model)["town1"]["state"].clone()
    ladder_of(model).begin(2)
    assert [width_of(model, f"town{i}") for i in range(3)] == [4, 6, 8]
    assert torch.equal(states(model)["town1"]["state"], stays)
    assert model.server.num_clients == {"smallcnn": 1, model.parts.archs["town0"]: 1, model.parts.archs["town2"]: 1}
    for name in ("town0", "town2"):
        client, flat_model = model.parts.clients[name], model.parts.models[model.parts.archs[name]]
        assert client.model is flat_model
        assert torch.equal(client.private, flat_model.initial_private)
        for old, new in zip(before[name], client.head, strict=True):
            assert torch.equal(old, new)
        assert old.abs().sum() > 0
        client.load()
        receive(client, model.settings.method, model.server)
        model.settings.method.download(client)
        assert torch.equal(flat_model.shared, vector(model, model.parts.archs[name]))


@pytest.mark.parametrize("method", [Scaffold(), Ditto(), SKA()])
def test_what_a_method_keeps_begins_anew(method):
    model = fit(adaptive(method), rounds=2)
    assert all("kept." in "".join(state) for state in states(model).values())
    reward(model)
    for flat_model in model.parts.models.values():
        flat_model.flat.buffer.fill_(7.0)  # whoever was here last
    ladder_of(model).begin(2)
    for name in ("town0", "town2"):
        kept = {n.removeprefix("kept."): t for n, t in states(model)[name].items() if n != "state"}
        flat_model = model.parts.models[model.parts.archs[name]]
        flat_model.shared.copy_(vector(model, flat_model.arch))
        flat_model.flat.private.copy_(flat_model.initial_private)
        expected = method.initial_state(flat_model).client
        assert kept.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in kept.items())


@pytest.mark.parametrize("method", [Scaffold(), Ditto()])
def test_methods_that_keep_something_go_on_after_a_switch(method):
    model = fit(adaptive(method, selection=Fixed(3)), rounds=4)
    assert [width_of(model, f"town{i}") for i in range(3)] == [4, 4, 8]
    assert all(torch.isfinite(tensor).all() for tensor in everything(model).values())


class Fixed(UCB):
    """town2 is rewarded in the first two rounds, then town0."""

    def _rewards(self, round_, weights, seed):
        return {"town2" if round_ < 2 else "town0": 1.0}


def test_backbones_follow_rewards():
    seen = []

    class Watched(WeightedPav):
        def download(self, client):
            super().download(client)
            assert torch.equal(client.model.shared, model.server.vector(client.model.arch))
            seen.append((client.round, client.client_name, client.model.network.backbone.conv1.out_channels))

    model = adaptive(Watched(), selection=Fixed(3))
    fit(model, rounds=7)
    by_round = {t: {c: w for round_, c, w in seen if round_ == t} for t in range(7)}
    middle = {"town0": 6, "town1": 6, "town2": 6}
    assert by_round[0] == by_round[1] == middle
    # mean rewards 0, 0, 1: town2 up, the others down
    assert by_round[2] == by_round[3] == {"town0": 4, "town1": 4, "town2": 8}
    # 1/2, 0, 1/2: the first and the last tie at the top
    assert by_round[4] == by_round[5] == {"town0": 6, "town1": 4, "town2": 8}
    # 2/3, 0, 1/3
    assert by_round[6] == {"town0": 8, "town1": 4, "town2": 8}
    assert {k: v for k, v in model.round_metrics.items() if k.startswith("backbone/")} == {
        "backbone/town0": 3, "backbone/town1": 1, "backbone/town2": 3,
    }  # fmt: skip
    assert all(
        model.parts.ledger.round[c].down == model.parts.models[model.parts.archs[c]].shared_bytes
        for c in model.parts.archs
    )


def test_caps_hold():
    model = fit(adaptive(selection=Fixed(3), caps={"town2": 2}), rounds=3)
    assert [width_of(model, f"town{i}") for i in range(3)] == [4, 4, 6]


def test_models_are_scored_on_the_architectures_that_clients_have_now():
    data = make_data(val="identities", val_fraction=0.3)
    model = fit(adaptive(selection=Fixed(3)), data, rounds=3, limit_val_batches=1.0, check_val_every_n_epoch=1)
    assert width_of(model, "town2") == 8
    assert set(model.scores) >= {f"val/{kind}/town2/mAP" for kind in ("local", "personalised")}


def play_on_two(folder):
    """What each of two ranks does."""
    for method in METHODS:
        model = fit(adaptive(method, selection=Fixed(3)), short(), rounds=5, devices=2)
        torch.save(everything(model), folder / f"{type(method).__name__}{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    for method in METHODS:
        one, found = everything(fit(adaptive(method, selection=Fixed(3)), short(), rounds=5)), {}
        for rank in range(2):
            found |= torch.load(tmp_path / f"{type(method).__name__}{rank}.pt", weights_only=True)
        assert found.keys() == one.keys()
        for key, tensor in one.items():
            assert torch.equal(tensor, found[key]), (method, key)


class Keep(Callback):
    """Keeps a checkpoint of every round: ``folder/ROUNDS.ckpt``."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch + 1}.ckpt")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_continues_after_a_switch_in_the_same_bits(method, tmp_path):
    whole = fit(adaptive(method, selection=Fixed(3)), short(), rounds=6, callbacks=[Keep(tmp_path)])
    for rounds in (2, 3, 5):  # right before a switch, after one, after two
        path = tmp_path / f"{rounds}.ckpt"
        resumed = fit(adaptive(method, selection=Fixed(3)), short(), rounds=6, ckpt_path=path)
        assert resumed.parts.archs == whole.parts.archs
        assert resumed.server.num_clients == whole.server.num_clients
        a, b = everything(whole), everything(resumed)
        assert a.keys() == b.keys()
        for key, tensor in a.items():
            assert torch.equal(tensor, b[key]), (rounds, key)


ADAPTIVE = """
model:
  method: WeightedPav
  selection: {class_path: UCB, init_args: {count: 4, reward: soft}}
  neck: {kind: linear, dim: 16}
  adaptive_backbones:
    every: 1
    caps: {town0: 1}
    ladder:
      - {class_path: SmallCNN, init_args: {width: 8}}
      - {class_path: SmallCNN, init_args: {width: 10}}
"""


def test_a_config_can_say_it(tiny, tmp_path, capsys):
    config = tmp_path / "adaptive.yaml"
    config.write_text(ADAPTIVE)
    options = ["--config", str(tiny), "--config", str(config), "--run_dir", str(tmp_path / "run")]
    assert main(["describe", *options]) == 0
    assert "smallcnn2" in capsys.readouterr().out
    assert main(["fit", *options]) == 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rungs = [row["backbone/town0"] for row in csv.DictReader(file) if row["backbone/town0"]]
    assert rungs == ["1.0"] * 3
    assert main(["test", *options, "--ckpt_path=last"]) == 0


# -- errors ------------------------------------------------------------------------------------------------------------


def rungs(*widths):
    return [SmallCNN(width=width) for width in widths]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ladder": rungs(4)}, "ladder: 1 backbones leave no choice"),
        ({"ladder": rungs(4, 4)}, "ladder: two backbones are the same"),
        ({"ladder": rungs(4, 6), "every": 0}, "every: 0"),
        ({"ladder": rungs(4, 6), "share": 0.6}, "share: 0.6"),
        ({"ladder": rungs(4, 6), "caps": {"town0": 3}}, "caps.town0: 3 is not a rung; choose from 1 to 2"),
    ],
)
def test_wrong_numbers(options, says):
    with pytest.raises(ConfigError, match=rf"model\.adaptive_backbones\.{says}"):
        AdaptiveBackbones(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"selection": None}, "needs rewards, which AllClients does not have; use UCB"),
        ({"backbone": SmallCNN(width=5)}, r"ladder: lacks the backbone that client town0 begins with"),
        ({"caps": {"north": 1}}, "there is no client north; choose from town0"),
        ({"caps": {"town1": 1}}, r"caps\.town1: it begins on rung 2"),
        ({"neck": Neck(kind="bnneck")}, "embeddings of equal width"),
        ({"method": FedAvg()}, "does not share the head"),
    ],
)
def test_settings_that_do_not_go_together(options, says):
    caps = options.pop("caps", {})
    settings = {"method": WeightedPav(), "backbone": SmallCNN(width=6), "neck": NECK, "selection": UCB(3)} | options
    settings = {name: value for name, value in settings.items() if value is not None}
    model = make_model(settings.pop("method"), **settings, adaptive_backbones=ladder(caps=caps))
    with pytest.raises(ConfigError, match=rf"model\.adaptive_backbones.*{says}"):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))


def test_clients_can_begin_on_different_rungs():
    own = {"town1": ClientOverride(backbone=SmallCNN(width=8))}
    model = adaptive(clients=own)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    assert ladder_of(model).rungs == {"town0": 2, "town1": 3, "town2": 2}
    assert len(model.parts.models) == 3


def test_a_checkpoint_of_backbones_that_stay_is_of_another_run(tmp_path):
    def model(adapts):
        own = {"town1": ClientOverride(backbone=SmallCNN(width=8))}
        adaptive_backbones = AdaptiveBackbones(ladder=rungs(6, 8)) if adapts else None
        settings = {"backbone": SmallCNN(width=6), "neck": NECK, "selection": UCB(3), "clients": own}
        return make_model(WeightedPav(), **settings, adaptive_backbones=adaptive_backbones)

    path = tmp_path / "stays.ckpt"
    fit(model(adapts=False), rounds=1).trainer.save_checkpoint(path)
    with pytest.raises(ConfigError, match=r"ckpt_path: model\.adaptive_backbones"):
        fit(model(adapts=True), ckpt_path=path)
