"""Selection by upper confidence bounds (paper 002, Fig. 8 and Eq. (11)): plain loops, ranks, checkpoints."""

import csv
import math
import random

import numpy as np
import pytest
import torch

from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_parts
from fedsim.core.seeding import numpy_generator
from fedsim.data import SyntheticReID
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.components.selection import UCB, AllClients, Availability, PowerOfChoice, RandomFraction
from fedsim.methods import FedPav
from fedsim.models import SmallCNN
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.messages import Report
from fedsim.training.settings import ClientOverride
from small import fit, make_data, make_model, vector

CLIENTS = list("abcdefghi")
TABLE_3 = [12936, 7365, 3744, 1940, 3107, 632, 450, 248, 4000]  # training images of paper 002's clients


def record(round_, weights, seed=0):
    """A round of which the weights are known; None: no answer."""
    answers = {c: weight for c, weight in weights.items() if weight is not None}
    return RoundRecord(round_, seed, list(weights), {c: Report(1, {}) for c in answers}, answers)


def simulate(selection, weigh, rounds, seed=0, clients=CLIENTS):
    """Who was selected in each round; ``weigh`` is (round, client) -> weight before it is normalised."""
    chosen = []
    for t in range(rounds):
        selected = selection.select(t, clients, seed)
        raw = {c: weigh(t, c) for c in selected}
        selection.observe(record(t, {c: value / sum(raw.values()) for c, value in raw.items()}, seed))
        chosen.append(selected)
    return chosen


def drift(seed):
    """How far clients move: as the root of their images, with 15 % of noise."""
    draw = random.Random(seed)
    size = dict(zip(CLIENTS, TABLE_3, strict=True))
    return lambda t, c: math.sqrt(size[c]) * (1 + 0.15 * draw.gauss(0, 1))


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["argmax", "argmin", "soft"])
@pytest.mark.parametrize(("count", "rho"), [(1, 0.5), (3, 1.0), (5, 2.0), (9, 1.0)])
def test_fig8_and_eq11_are_the_plain_loop(reward, count, rho):
    weigh, selection = drift(0), UCB(count, rho, reward)
    h, n = dict.fromkeys(CLIENTS, 0.0), dict.fromkeys(CLIENTS, 0)
    for t in range(1, 25):
        bounds = {}
        for c in CLIENTS:
            bounds[c] = math.inf if n[c] == 0 else h[c] / n[c] + rho * math.sqrt(math.log(t) / n[c])
            assert selection.bound(c, t - 1) == bounds[c]
        chosen = selection.select(t - 1, CLIENTS, 7)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == count
        others = [c for c in CLIENTS if c not in chosen]
        assert all(bounds[c] >= bounds[other] for c in chosen for other in others)
        raw = {c: weigh(t, c) for c in chosen}
        w = {c: raw[c] / sum(raw.values()) for c in chosen}
        selection.observe(record(t - 1, w, 7))
        for c in chosen:
            n[c] += 1
            if reward == "soft":
                h[c] += w[c]
            elif w[c] == (max if reward == "argmax" else min)(w.values()):
                h[c] += 1
        assert selection.rewards == {c: h[c] for c in selection.rewards}
        assert selection.num_selected == {c: n[c] for c in CLIENTS if n[c]}


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8])
def test_everybody_comes_once_before_anybody_comes_again(count):
    warm_up = math.ceil(len(CLIENTS) / count)
    for seed in range(10):
        chosen = simulate(UCB(count), drift(seed), warm_up, seed)
        first = [c for selected in chosen[:-1] for c in selected]
        assert len(first) == len(set(first))
        assert set(first) | set(chosen[-1]) == set(CLIENTS)


def test_the_first_rounds_are_random():
    orders = {tuple(map(tuple, simulate(UCB(3), drift(0), 3, seed))) for seed in range(10)}
    assert len(orders) == 10


def test_the_literal_rule_includes_the_client_that_moves_most():
    def counts(count, rho):
        """Mean over 30 runs: the largest client, the second largest, the others."""
        runs = [simulate(UCB(count, rho), drift(seed), 20, seed) for seed in range(30)]
        mean = {c: sum(c in selected for run in runs for selected in run) / len(runs) for c in CLIENTS}
        return mean["a"], mean["b"], [mean[c] for c in CLIENTS[2:]]

    largest, second, others = counts(5, 1.0)
    assert largest >= 18.5  # of 20 rounds; in the first it may not have had its turn yet
    assert second < 16
    assert all(8.5 <= count <= 11.5 for count in others)
    narrow, _, rest = counts(3, 1.0)
    assert narrow > 13
    assert all(count < 8 for count in rest)
    assert counts(5, 2.0)[1] < second - 0.5  # exploration flattens


def test_in_the_end_the_client_that_moves_most_is_in_every_round():
    for seed in range(5):
        chosen = simulate(UCB(5, 1.0), lambda t, c: CLIENTS.index(c) + 1.0, 20, seed)
        assert all("i" in selected for selected in chosen[2:])


def test_ties_are_decided_by_the_seed():
    selection = UCB(2)
    winners = set()
    for seed in range(40):
        selection = UCB(2)
        selection.observe(record(0, dict.fromkeys("abc", 1 / 3), seed))
        assert sorted(selection.rewards.values()) == [0, 0, 1]
        winners.add(max(selection.rewards, key=selection.rewards.get))
    assert winners == set("abc")
    equal = [UCB(2).select(3, CLIENTS, seed) for seed in (1, 1, 2, 3, 4)]
    assert equal[0] == equal[1]
    assert len({tuple(chosen) for chosen in equal}) > 2


def test_who_does_not_answer_was_selected_without_reward():
    selection = UCB(2)
    selection.observe(record(0, {"a": None, "b": 1.0}))
    assert selection.state_dict() == {"H": {"a": 0.0, "b": 1.0}, "N": {"a": 1, "b": 1}}
    selection.observe(record(1, {"a": None}))  # nobody answered
    assert selection.state_dict() == {"H": {"a": 0.0, "b": 1.0}, "N": {"a": 2, "b": 1}}


def test_as_many_as_there_are():
    assert UCB(5).select(0, ["a", "b"], 0) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "says"), [({"count": 0}, "count"), ({"rho": -1.0}, "rho"), ({"rho": math.inf}, "rho")]
)
def test_wrong_numbers(options, says):
    with pytest.raises(ConfigError, match=rf"model\.selection\.{says}"):
        UCB(**options)


def test_nothing_is_promised_to_differential_privacy():
    assert UCB().expected_share(9) is None
    assert UCB().probability is None


def test_who_learns():
    assert UCB().learns
    assert not any(selection.learns for selection in (AllClients(), RandomFraction()))


# -- in a federation ---------------------------------------------------------------------------------------------------


def towns():
    return make_data(SyntheticReID(clients=5, unseen=0, scale=0.2))


def ucb_model(**options):
    return make_model(FedPav(weighting="cdw"), selection=UCB(2), **options)


class Watching(UCB):
    """Remembers what it is told."""

    def observe(self, record):
        super().observe(record)
        self.told = [*getattr(self, "told", []), {name: record.weights.get(name) for name in record.selected}]


def test_a_round_tells_the_aggregation_weights():
    selection = Watching(2)
    model = fit(make_model(FedPav(), selection=selection), rounds=2)
    size = {c.name: c.num_images for c in model.parts.federated.clients}
    for weights in selection.told:
        assert len(weights) == 2
        total = sum(size[name] for name in weights)
        assert weights == pytest.approx({name: size[name] / total for name in weights})
    assert model.round_metrics["selection/town0/N"] + model.round_metrics["selection/town1/N"] <= 4


def test_rewards_compare_clients_of_all_architectures():
    """Of its own architecture town1 has all the weight; among all clients it has its share."""
    selection = Watching(3)
    own = {"town1": ClientOverride(backbone=SmallCNN(width=6))}
    model = fit(make_model(FedPav(), selection=selection, clients=own), rounds=1)
    size = {c.name: c.num_images for c in model.parts.federated.clients}
    assert selection.told == [pytest.approx({name: n / sum(size.values()) for name, n in size.items()})]
    apart = UCB(3, reward="soft", among="architecture")
    fit(make_model(FedPav(), selection=apart, clients=own), rounds=1)
    mean = (size["town0"] + size["town2"]) / 2
    assert apart.rewards == pytest.approx({"town0": size["town0"] / mean, "town1": 1.0, "town2": size["town2"] / mean})


def of_two_architectures(distances, archs):
    """The record of a round in which all clients took part."""
    weights = {client: distance / sum(distances.values()) for client, distance in distances.items()}
    return RoundRecord(0, 5, list(weights), {c: Report(1, {}) for c in weights}, weights, archs)


def test_rewards_may_compare_within_an_architecture():
    """One architecture moves ten times as far; ``b`` moves 1.5 times as far as the mean of its own, ``d`` 1.2 times."""
    distances, archs = {"a": 1.0, "b": 3.0, "c": 24.0, "d": 36.0}, {"a": "cnn", "b": "cnn", "c": "net", "d": "net"}
    for reward, of_all, of_own in (("argmax", "d", "b"), ("argmin", "a", "a")):
        for among, expected in (("all", of_all), ("architecture", of_own)):
            selection = UCB(4, reward=reward, among=among)
            selection.observe(of_two_architectures(distances, archs))
            assert [c for c, rewards in selection.rewards.items() if rewards] == [expected], (reward, among)
    soft = UCB(4, reward="soft", among="architecture")
    soft.observe(of_two_architectures(distances, archs))
    assert soft.rewards == pytest.approx({"a": 0.5, "b": 1.5, "c": 0.8, "d": 1.2})
    alone = UCB(4, reward="soft", among="architecture")
    alone.observe(of_two_architectures({"a": 0.0, "b": 0.0, "c": 7.0}, {"a": "cnn", "b": "cnn", "c": "net"}))
    assert alone.rewards == {"a": 0.0, "b": 0.0, "c": 1.0}


@pytest.mark.parametrize(("count", "clients", "warns"), [(1, 2, True), (1, 1, False), (2, 9, False)])
def test_a_selection_of_one_client_is_warned_of(count, clients, warns, caplog):
    UCB(count).prepare(dict.fromkeys(CLIENTS[:clients], 10))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == warns
    assert all("model.selection.count: 1" in line and "\n" not in line for line in lines)


@pytest.mark.parametrize("reward", ["argmax", "argmin", "soft"])
def test_with_one_client_per_round_clients_take_turns_whatever_they_weigh(reward):
    rounds = simulate(UCB(1, 1.0, reward), drift(0), 90)
    times = [sum(client in selected for selected in rounds) for client in CLIENTS]
    assert times == [10] * len(CLIENTS)


def test_rewards_across_architectures_are_warned_of_once(caplog):
    selection, own = UCB(4), UCB(4, among="architecture")
    for _ in range(3):
        for one in (selection, own):
            one.observe(of_two_architectures({"a": 1.0, "b": 2.0}, {"a": "cnn", "b": "cnn"}))
    assert not caplog.records
    for _ in range(2):
        for one in (selection, own):
            one.observe(of_two_architectures({"a": 1.0, "b": 2.0}, {"a": "cnn", "b": "net"}))
    (said,) = caplog.records
    assert "model.selection.among: architecture" in said.getMessage()


def test_drop_outs_are_told_as_such():
    selection = Watching(3)
    fit(make_model(FedPav(), selection=selection, availability=Availability(drop=0.5)), rounds=3)
    told = [weight for weights in selection.told for weight in weights.values()]
    assert len(told) == 9
    assert None in told
    assert any(weight is not None for weight in told)


def play_on_two(folder):
    """What each of two ranks does."""
    model = fit(ucb_model(), towns(), rounds=5, devices=2)
    state = {
        "vector": vector(model),
        **{f"N {k}": torch.tensor(v) for k, v in model.settings.selection.num_selected.items()},
    }
    state |= {f"H {k}": torch.tensor(v) for k, v in model.settings.selection.rewards.items()}
    torch.save(state, folder / f"{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_select_as_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    one = fit(ucb_model(), towns(), rounds=5)
    assert sum(one.settings.selection.num_selected.values()) == 10
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(state["vector"], vector(one))
        assert {k[2:]: int(v) for k, v in state.items() if k[0] == "N"} == one.settings.selection.num_selected
        assert {k[2:]: float(v) for k, v in state.items() if k[0] == "H"} == one.settings.selection.rewards


UCB_RUN = [
    "--model.selection=UCB",
    "--model.selection.count=2",
    "--model.method=FedPav",
    "--model.method.weighting=cdw",
]


def log_of(folder):
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k.startswith("selection/")} for row in csv.DictReader(file)]


def test_a_run_logs_its_bounds_and_continues_in_the_same_bits(tiny, tmp_path):
    def run(name, *options):
        assert main(["fit", "--config", str(tiny), *UCB_RUN, "--run_dir", str(tmp_path / name), *options]) == 0
        return read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")

    validates = "--trainer.limit_val_batches=0"
    whole = run("whole", validates, "--trainer.max_epochs=5")
    run("part", validates, "--trainer.max_epochs=3")
    last = tmp_path / "part" / "checkpoints" / "last.ckpt"
    resumed = run("resumed", validates, "--trainer.max_epochs=5", f"--ckpt_path={last}")
    assert whole["fedsim"]["selection"] == resumed["fedsim"]["selection"]
    assert sum(whole["fedsim"]["selection"]["N"].values()) == 10
    for key, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key])
    rows = log_of(tmp_path / "whole")
    last_row = {k: float(v) for k, v in rows[-1].items() if v}
    for client, times in whole["fedsim"]["selection"]["N"].items():
        reward = whole["fedsim"]["selection"]["H"][client]
        assert last_row[f"selection/{client}/N"] == times
        assert last_row[f"selection/{client}/H"] == reward
        bound = reward / times + math.sqrt(math.log(6) / times)
        assert last_row[f"selection/{client}/A"] == pytest.approx(bound)


def test_describe_says_that_it_cannot_know_who_takes_part(tiny, capsys):
    assert main(["describe", "--config", str(tiny), *UCB_RUN]) == 0
    assert "The selection of clients depends on the run" in capsys.readouterr().out
    assert main(["describe", "--config", str(tiny)]) == 0
    assert "The selection of clients depends on the run" not in capsys.readouterr().out


def test_a_checkpoint_of_another_selection_starts_anew(tiny, tmp_path, caplog):
    options = ["fit", "--config", str(tiny), "--run_dir", str(tmp_path / "run"), "--trainer.limit_val_batches=0"]
    assert main([*options, "--trainer.max_epochs=1"]) == 0
    assert main([*options, *UCB_RUN[:2], "--trainer.max_epochs=2", "--ckpt_path=last"]) == 0
    assert "every client counts as never selected" in caplog.text
    assert (
        sum(read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["fedsim"]["selection"]["N"].values()) == 2
    )


# -- power of choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", [UCB(count=2), PowerOfChoice(count=2, candidates=3)])
def test_numbers_of_clients_have_names_that_can_be_read_back(selection):
    names = ["site/a", "b", "c%2Fd"]
    selection.prepare(dict.fromkeys(names, 10))
    reports = {name: Report(1, loss=1.0) for name in names}
    selection.observe(RoundRecord(0, 0, names, reports, dict.fromkeys(names, 1 / 3)))
    metrics = selection.metrics(0, names)
    assert {metric_parts(name)[1] for name in metrics} == set(names)
    assert all(len(metric_parts(name)) == 3 for name in metrics)


def test_power_of_choice_takes_the_largest_losses_among_the_candidates():
    selection = PowerOfChoice(count=2, candidates=4)
    selection.prepare(dict(zip(CLIENTS, TABLE_3, strict=True)))
    draw, losses = random.Random(0), {}
    for t in range(300):
        chosen = selection.select(t, CLIENTS, 3)
        p = np.array(TABLE_3) / sum(TABLE_3)
        candidates = [CLIENTS[i] for i in numpy_generator(3, t, "power of choice").choice(9, 4, replace=False, p=p)]
        best = []
        for _ in range(2):  # the first of the largest, twice
            left = [c for c in candidates if c not in best]
            best.append(max(left, key=lambda c: losses.get(c, math.inf)))
        assert chosen == sorted(best)
        answers = [c for c in chosen if draw.random() < 0.8]
        told = {c: draw.random() for c in answers}
        selection.observe(RoundRecord(t, 3, chosen, {c: Report(1, loss=loss) for c, loss in told.items()}))
        losses |= told
    assert selection.state_dict() == {"loss": losses}
    assert set(losses) == set(CLIENTS)


def test_candidates_are_drawn_in_proportion_to_their_images():
    selection, rounds = PowerOfChoice(count=1, candidates=1), 4000
    selection.prepare(dict(zip(CLIENTS, TABLE_3, strict=True)))
    counts = dict.fromkeys(CLIENTS, 0)
    for t in range(rounds):
        [chosen] = selection.select(t, CLIENTS, 0)
        counts[chosen] += 1
    for client, size in zip(CLIENTS, TABLE_3, strict=True):
        p = size / sum(TABLE_3)
        assert abs(counts[client] - rounds * p) < 5 * math.sqrt(rounds * p * (1 - p))  # five standard deviations


def test_power_of_choice_hears_the_losses_of_a_run_and_continues_with_them(tmp_path):
    def model():
        return make_model(FedPav(), selection=PowerOfChoice(count=2, candidates=3))

    whole, part = fit(model(), towns(), rounds=4), fit(model(), towns(), rounds=2)
    part.trainer.save_checkpoint(tmp_path / "part.ckpt")
    continued = fit(model(), towns(), rounds=4, ckpt_path=tmp_path / "part.ckpt")
    assert torch.equal(vector(whole), vector(continued))
    assert whole.settings.selection.losses == continued.settings.selection.losses
    for name, report in whole.reports.items():
        assert whole.settings.selection.losses[name] == report.loss
        assert whole.round_metrics[f"selection/{name}/loss"] == report.loss


@pytest.mark.parametrize(("options", "says"), [({"count": 0}, "count"), ({"count": 3, "candidates": 2}, "candidates")])
def test_power_of_choice_refuses(options, says):
    with pytest.raises(ConfigError, match=rf"model\.selection\.{says}"):
        PowerOfChoice(**options)


@pytest.mark.parametrize(("count", "is_told"), [(2, False), (3, True), (4, True)])
def test_exploration_without_effect_is_told(count, is_told, caplog):
    caplog.set_level("INFO", logger="fedsim")
    UCB(count=count).prepare({"town0": 4, "town1": 4, "town2": 4})
    assert any("without effect: model.selection.rho" in message for message in caplog.messages) is is_told


@pytest.mark.parametrize("selection", [UCB(2), PowerOfChoice(1, 2)])
def test_a_selection_of_a_second_federation_has_forgotten_the_first(selection):
    selection.load_state_dict({"H": {"a": 1.0}, "N": {"a": 2}, "loss": {"a": 0.5}})
    assert selection.metrics(1, ["a"])
    selection.prepare(dict.fromkeys("abc", 10))
    assert selection.metrics(1, ["a"]) == {}
