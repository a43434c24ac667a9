"""Attacks: against plain loops, by whom and from when on, on any number of ranks, and with a run that goes on."""

import copy
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from failing import run_on_ranks
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.attacks import (
    TRIGGER,
    Backdoor,
    GaussianNoise,
    LabelFlip,
    ModelReplacement,
    SignFlip,
)
from fedsim.federation.components.robust import Median
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg, FedPav, Local, Scaffold
from fedsim.training.batch import Batch
from fedsim.training.messages import Upload
from plain_loops import Federation, assert_close, play, sgd
from small import fit, make_data, make_model, new_evaluator, refuse, state_of, vector

ALL = {
    "flip": SignFlip, "noise": GaussianNoise, "replacement": ModelReplacement, "labels": LabelFlip,
    "backdoor": Backdoor,
}  # fmt: skip
LIAR = ["town0"]
SHARED = FedAvg()
"""a method under which each attack acts: flipped labels need a head that clients share"""


def three(**options):
    return make_data(SyntheticReID(clients=3, unseen=1, scale=0.2), **options)


def common():
    """Data under which each attack acts: flipped labels need labels that clients share."""
    return three(labels="common")


def small(kind):
    return kind(LIAR, **({"patch": 4, "boost": 2.0} if kind is Backdoor else {}))


# -- what attackers send -----------------------------------------------------------------------------------------------


def attacker(received, count):
    """A client, as far as an attack on its upload knows it: ``count`` parameters, and then statistics."""
    flat = SimpleNamespace(num_shared_parameters=count, num_shared_elements=count, clear_gaps=lambda vector: vector)
    model = SimpleNamespace(flat=flat)
    stream = lambda purpose: torch.Generator().manual_seed(len(purpose))  # noqa: E731 - a client's
    return SimpleNamespace(model=model, received=SimpleNamespace(vector=torch.tensor(received)), generator=stream)


@pytest.mark.parametrize("seed", range(6))
def test_uploads_are_those_of_a_loop(seed):
    draw = random.Random(seed)
    size, factor = draw.randint(1, 9), draw.uniform(0.1, 50)
    count = draw.randint(1, size)
    x, w = ([draw.gauss(0, 1) for _ in range(size)] for _ in range(2))
    rms = math.sqrt(sum((w[i] - x[i]) ** 2 for i in range(count)) / count)
    normal = torch.randn(count, generator=torch.Generator().manual_seed(len("attack"))).tolist()
    updates = {
        SignFlip(LIAR, scale=factor): [-factor * (w[i] - x[i]) for i in range(count)],
        ModelReplacement(LIAR, boost=factor): [factor * (w[i] - x[i]) for i in range(count)],
        Backdoor(LIAR, boost=factor): [factor * (w[i] - x[i]) for i in range(count)],
        GaussianNoise(LIAR, scale=factor): [factor * rms * normal[i] for i in range(count)],
        LabelFlip(LIAR): [w[i] - x[i] for i in range(count)],
        Backdoor(LIAR): [w[i] - x[i] for i in range(count)],
    }
    for attack, update in updates.items():
        honest = torch.tensor(w)
        found = attack.uploaded(attacker(x, count), Upload(honest)).vector
        expected = torch.tensor([x[i] + update[i] for i in range(count)] + w[count:])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(honest, torch.tensor(w)), "the client's model stays"


# -- what attackers train on -------------------------------------------------------------------------------------------


def drawn(draw, size, classes, soft):
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    images, view = (torch.randn(size, 3, 8, 6, generator=generator) for _ in range(2))
    labels = torch.randint(classes, (size,), generator=generator)
    return Batch(images, labels, (view,), torch.rand(size, classes, generator=generator) if soft else None)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_labels_are_flipped_as_in_a_loop(seed, soft):
    draw = random.Random(seed)
    batch = drawn(draw, 7, 4 + seed, soft)
    flipped = LabelFlip(LIAR).poison(SimpleNamespace(num_classes=4 + seed))(batch)
    assert flipped.labels.tolist() == [4 + seed - 1 - y for y in batch.labels.tolist()]
    assert flipped.images is batch.images
    if soft:
        assert flipped.targets.tolist() == [row[::-1] for row in batch.targets.tolist()]


def test_labels_on_the_host_are_those_of_honest_clients():
    seen = []

    class Looks(FedPav):
        def loss(self, client, batch):
            seen.append((client.client_name in LIAR, batch.on_host))
            assert batch.on_host is None or torch.equal(batch.on_host, batch.labels)
            assert batch.most_repeated in (None, max(Counter(batch.labels.tolist()).values()))
            return super().loss(client, batch)

    fit(make_model(Looks(), attack=small(Backdoor)), three(), rounds=1)
    assert {(lies, labels is None) for lies, labels in seen} == {(True, True), (False, False)}


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_trigger_is_pasted_as_in_a_loop(seed, soft):
    draw = random.Random(seed)
    size, classes, rate, target = draw.randint(1, 9), 5, draw.choice([0.1, 0.25, 0.5, 1.0]), draw.randrange(5)
    batch = drawn(draw, size, classes, soft)
    before = copy.deepcopy(batch)
    client = SimpleNamespace(device=torch.device("cpu"))
    found = Backdoor(LIAR, rate=rate, patch=3, target=target).poison(client)(batch)
    wearers = [i * size // math.ceil(rate * size) for i in range(math.ceil(rate * size))]
    assert len({*wearers}) == len(wearers)
    colour = normalise_images(torch.tensor(TRIGGER, dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 8, 6))
    for new, old in zip((found.images, *found.views), (before.images, *before.views), strict=True):
        expected = old.clone()
        for i in wearers:
            for row in range(5, 8):
                for column in range(3, 6):
                    expected[i, :, row, column] = colour[0, :, row, column]
        assert torch.equal(new, expected)
    assert found.labels.tolist() == [target if i in wearers else y for i, y in enumerate(before.labels.tolist())]
    if soft:
        rows = before.targets.tolist()
        one_hot = [float(c == target) for c in range(classes)]
        assert found.targets.tolist() == [one_hot if i in wearers else row for i, row in enumerate(rows)]
    assert torch.equal(batch.images, before.images), "a batch may be a view of what is read again"


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ModelReplacement, SignFlip])
def test_rounds_with_an_attacker_are_those_of_a_loop(kind):
    reference = Federation(three())
    for round_ in range(3):
        start, states = reference.model.state_dict(), []
        for client in reference.clients:
            model = copy.deepcopy(reference.model)
            sgd(model, client.head, client.batches(round_))
            state = model.state_dict()
            factor = {ModelReplacement: 10, SignFlip: -1}[kind] if client.name in LIAR else 1
            for name, _ in model.named_parameters():
                state[name] = start[name] + factor * (state[name] - start[name])
            states.append(state)
        reference.move_to(states, [1 / 3] * 3)
    found = play(FedPav(weighting="uniform"), 3, data=three(), attack=kind(LIAR))
    assert_close(found, reference, tolerance=5e-6)


def test_flipped_labels_are_those_of_a_client_that_flips_them_itself():
    class Flips(FedAvg):
        def loss(self, client, batch):
            flipped = client.num_classes - 1 - batch.labels if client.client_name in LIAR else batch.labels
            return super().loss(client, batch._replace(labels=flipped))

    attacked = fit(make_model(SHARED, attack=LabelFlip(LIAR)), common())
    assert torch.equal(vector(attacked), vector(fit(make_model(Flips()), common())))


@pytest.mark.parametrize("kind", ALL.values())
def test_an_attack_begins_in_its_round(kind):
    attack = small(kind)
    honest = fit(make_model(SHARED), common())
    attack.start = 3
    later = fit(make_model(SHARED, attack=attack), common())
    assert torch.equal(vector(later), vector(honest))
    assert later.round_metrics["attack/clients"] == 0
    attack.start = 2
    second = fit(make_model(SHARED, attack=attack), common())
    assert second.round_metrics["attack/clients"] == 1
    assert not torch.equal(vector(second), vector(honest))


def test_a_share_is_drawn_by_the_seed():
    chosen = {}
    for seed in range(6):
        for share, count in ((0.2, 1), (0.34, 2), (1.0, 3)):
            attack = SignFlip(share)
            attack.prepare(SimpleNamespace(seed=seed, models={}), three_clients(), "retrieval")
            names = [name for name in three_clients() if attack.acts(name, 0)]
            assert len(names) == count
            chosen.setdefault(share, set()).add(tuple(names))
    assert len(chosen[0.2]) > 1


def three_clients():
    return {f"town{i}": SimpleNamespace(num_classes=4) for i in range(3)}


def play_on_two(folder):
    """What each of two ranks does."""
    states = {}
    for name, kind in ALL.items():
        model = fit(make_model(SHARED, attack=small(kind), aggregation=Median()), common(), devices=2)
        states[name] = (state_of(model), new_scores(model))
    torch.save(states, folder / f"{model.strategy.global_rank}.pt")


def new_scores(model):
    """The figures of an attack on the test sets."""
    evaluator = new_evaluator(model)
    return model.settings.attack.figures(evaluator, evaluator.score("test"), model.parts.data_of)


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_and_figures_of_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name, kind in ALL.items():
        model = fit(make_model(SHARED, attack=small(kind), aggregation=Median()), common())
        expected, figures = state_of(model), new_scores(model)
        for found in ranks:
            state, scores = found[name]
            assert torch.equal(state["global"], expected["global"]), name
            assert scores == figures, name
        states = [rank[name][0] for rank in ranks]
        for key in expected.keys() - {"global"}:
            assert any(key in state and torch.equal(state[key], expected[key]) for state in states), (name, key)


@pytest.mark.parametrize("kind", [GaussianNoise, Backdoor])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(kind, tmp_path):
    make = lambda: make_model(Scaffold(), attack=kind(0.5, start=2, **({"patch": 4} if kind is Backdoor else {})))  # noqa: E731
    first = fit(make(), three(), rounds=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    whole = fit(make(), three(), rounds=3)
    resumed = fit(make(), three(), rounds=3, ckpt_path=tmp_path / "two.ckpt")
    for key, tensor in state_of(whole).items():
        assert torch.equal(state_of(resumed)[key], tensor), key


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_honest_clients_are_scored_apart():
    model = fit(make_model(FedPav(), attack=SignFlip(LIAR)), three(), rounds=1)
    scores = new_evaluator(model).score("test")
    figures = new_scores(model)
    for metric in ("mAP", "rank1"):
        honest = [scores[f"test/global/town{i}/{metric}"] for i in (1, 2)]
        assert figures[f"attack/test/honest/{metric}"] == pytest.approx(sum(honest) / 2)
    everybody = fit(make_model(SHARED, attack=LabelFlip(1.0)), common(), rounds=1)
    assert new_scores(everybody) == {}


def test_a_backdoor_s_success_is_logged_in_rounds_with_tests():
    model = make_model(FedPav(), attack=small(Backdoor), evaluation=Evaluation(test_during_fit=True))
    fit(model, three(), limit_val_batches=1)
    for name in ("success", "global/seen/success", "global/new0/success", "honest/mAP"):
        assert 0 <= model.scores[f"attack/test/{name}"] <= 1
    assert not any(name.startswith("oracle/success") for name in model.scores)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL.values())
def test_drawn_wrong_numbers_are_refused(kind):
    draw = random.Random(0)
    not_positive = [0, 0.0, -1.0, -draw.random(), math.nan, -math.inf]
    wrong = {
        "attackers": [*not_positive, 1.0001, 1 + draw.random(), math.inf, [], ["town0", "town0"]],
        "start": [0, -1, -draw.randint(2, 99)],
        "scale": [*not_positive, math.inf],
        "boost": [*not_positive, math.inf],
        "rate": [*not_positive, 1.5],
        "patch": [0, -3],
        "target": [-1],
    }
    fields = kind.__init__.__code__.co_varnames[1 : kind.__init__.__code__.co_argcount]
    for field in fields:
        for value in wrong[field]:
            with pytest.raises(ConfigError, match=rf"^model\.attack\.{field}: "):
                kind(**{field: value})


def assemble(method, attack, data=None, **options):
    make_model(method, attack=attack, **options).assemble(data or three(), 0, 1, torch.device("cpu"))


def test_attacks_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"model\.attack\.attackers: there is no client town7; choose from town0, "):
        assemble(FedPav(), SignFlip(["town7"]))
    with pytest.raises(ConfigError, match=r"model\.attack: clients of this method send no parameters"):
        assemble(Local(), GaussianNoise(LIAR))
    with pytest.raises(
        ConfigError, match=r"model\.attack\.target: client town0 has no identity 99; choose one of 0 to"
    ):
        assemble(FedPav(), Backdoor(LIAR, target=99))
    with pytest.raises(ConfigError, match=r"model\.attack\.patch: 9 pixels are more than half of a side"):
        fit(make_model(FedPav(), attack=Backdoor(LIAR, patch=9)), three(), rounds=1)
    for method in (FedPav(), Local()):
        with pytest.raises(ConfigError, match=r"^model\.attack: LabelFlip is for heads that clients share"):
            assemble(method, LabelFlip(LIAR), common())
    with pytest.raises(
        ConfigError, match=r"^model\.attack: LabelFlip .* client town0 numbers its own .* data\.labels to"
    ):
        assemble(SHARED, LabelFlip(LIAR))
    assemble(SHARED, LabelFlip(LIAR), common())
    people = {"town0": SimpleNamespace(num_classes=1)}
    for attack in (LabelFlip(LIAR), Backdoor(LIAR)):
        with pytest.raises(
            ConfigError, match=r"model\.attack\.attackers: client town0 has fewer than two known identities"
        ):
            attack.prepare(SimpleNamespace(seed=0, models={}), people, "retrieval")


def test_a_backdoor_is_for_retrieval():
    with pytest.raises(ConfigError, match=r"model\.attack: Backdoor is an attack on retrieval; set model\.evaluation"):
        Backdoor(LIAR).prepare(SimpleNamespace(seed=0, models={}), three_clients(), "classification")


def test_a_wrong_name_lists_the_attacks(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--model.attack", "SignFlop")
    assert "model.attack: there is no class SignFlop; did you mean SignFlip?" in line
