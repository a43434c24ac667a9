"""Attacks that are made of the uploads of others: against plain loops, on any number of ranks, and after a pause."""

import copy
import math
import random
from statistics import NormalDist, fmean, pstdev

import pytest
import torch

from failing import run_on_ranks
from fedsim.core.errors import ConfigError, TrainingError
from fedsim.data import SyntheticReID
from fedsim.federation.components.collusion import ALIE, Collusion, InnerProduct, MinMax, MinSum, Numbers
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.privacy import DifferentialPrivacy
from fedsim.federation.components.robust import Aggregation, Median
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.components.timing import Buffered
from fedsim.methods import IFCA, FedAvg, FedPav, Local, LotteryFL, Scaffold
from fedsim.models import SmallCNN
from fedsim.training.settings import ClientOverride
from fedsim.training.uploads import Uploads
from plain_loops import Federation, play, sgd
from small import fit, make_data, make_model, named, refuse, state_of, vector

LIARS = ["town1", "town3"]


class Drift(Collusion):
    """Sends the global model plus minus twice the mean update: what its test needs, and no more."""

    def lie(self, uploads, received, numbers):
        return uploads.combine(lambda chunk, x: (3 * x.double() - 2 * chunk.double().mean(0)).float(), received)


class Counts(Collusion):
    """Sends the global model, and notes whom it knows."""

    def __init__(self, attackers, **options):
        super().__init__(attackers, **options)
        self.seen = []

    def lie(self, uploads, received, numbers):
        self.seen.append((uploads.clients, tuple(numbers)))
        return received.clone()


def five():
    return make_data(SyntheticReID(clients=5, unseen=0, scale=0.2))


# -- the exchange ------------------------------------------------------------------------------------------------------


def lie_of(attack, known, x, numbers):
    """The malicious upload as a loop over coordinates; ``known`` are lists of numbers, and ``x`` is one."""
    columns = [*zip(*known, strict=True)]
    means, spread = [fmean(column) for column in columns], [pstdev(column) for column in columns]
    if isinstance(attack, ALIE):
        n, m = numbers
        s = math.floor(n / 2 + 1) - m
        z = NormalDist().inv_cdf((n - m - s) / (n - m)) if attack.z is None else attack.z
        return [mu - z * sigma for mu, sigma in zip(means, spread, strict=True)]
    if isinstance(attack, Drift | InnerProduct):
        epsilon = 2 if isinstance(attack, Drift) else attack.epsilon
        return [a - epsilon * (mu - a) for a, mu in zip(x, means, strict=True)]
    updates = [mu - a for mu, a in zip(means, x, strict=True)]
    length = math.hypot(*updates) or 1.0
    p = {
        "unit": [-u / length for u in updates],
        "sign": [-math.copysign(bool(u), u) for u in updates],
        "std": [-sigma for sigma in spread],
    }[attack.direction]
    lie = lambda gamma: [mu + gamma * q for mu, q in zip(means, p, strict=True)]  # noqa: E731 - of this p
    if isinstance(attack, MinMax):
        bound = max(math.dist(a, b) for a in known for b in known)
        fits = lambda gamma: max(math.dist(lie(gamma), a) for a in known) <= bound  # noqa: E731 - one of two
    else:
        bound = max(sum(math.dist(a, b) ** 2 for b in known) for a in known)
        fits = lambda gamma: sum(math.dist(lie(gamma), a) ** 2 for a in known) <= bound  # noqa: E731 - one of two
    furthest = 2 * max(math.dist(a, b) for a in known for b in known)
    return lie(halve(fits, furthest / (math.hypot(*p) or 1.0)))


def halve(fits, largest):
    """The search of Min-Max and Min-Sum (Algorithm 1 of its paper): by steps of half the size, from ``largest``."""
    gamma, step, best = largest, largest, 0.0
    while step > 1e-9 * largest:
        step /= 2
        if fits(gamma):
            best, gamma = gamma, gamma + step
        else:
            gamma -= step
    return best


ATTACKS = {
    "drift": Drift(LIARS),
    "colluding drift": Drift(LIARS, knows="colluders"),
    "alie": ALIE(LIARS),
    "colluding alie": ALIE(LIARS, knows="colluders", z=1.5),
    "inner product": InnerProduct(LIARS, epsilon=2.5),
    "min-max std": MinMax(LIARS),
    "min-max unit": MinMax(LIARS, direction="unit"),
    "colluding min-max sign": MinMax(LIARS, knows="colluders", direction="sign"),
    "min-sum std": MinSum(LIARS),
    "min-sum sign": MinSum(LIARS, direction="sign"),
    "colluding min-sum": MinSum(LIARS, knows="colluders", direction="unit"),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("seed", range(4))
def test_lies_are_those_of_a_loop(name, seed):
    draw = random.Random(seed)
    count, size = draw.randint(1, 7), draw.randint(1, 9)
    known, [x] = ([[draw.gauss(1, 2) for _ in range(size)] for _ in range(k)] for k in (count, 1))
    rows = torch.tensor(known)
    numbers = Numbers(count + 2 + 3, 2)
    uploads = Uploads([str(i) for i in range(count)], size, lambda span: rows[:, span])
    found = ATTACKS[name].lie(uploads, torch.tensor(x), numbers)
    expected = lie_of(ATTACKS[name], known, x, numbers)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ATTACKS if "sign" not in name])  # of a rounding error it is random
def test_a_round_with_attackers_is_that_of_a_loop(name):
    attack, reference = ATTACKS[name], Federation(five())
    start, states = reference.model.state_dict(), {}
    for client in reference.clients:
        model = copy.deepcopy(reference.model)
        sgd(model, client.head, client.batches(0))
        states[client.name] = model.state_dict()
    parameters = [key for key, _ in reference.model.named_parameters()]
    flat = lambda state: torch.cat([state[key].flatten() for key in parameters])  # noqa: E731 - twice
    lies = attack.knows == "colluders"
    known = [flat(state).tolist() for client, state in states.items() if (client in LIARS) == lies]
    lie = torch.tensor(lie_of(attack, known, flat(start).tolist(), (5, 2)), dtype=torch.float64)
    sent = [lie if client in LIARS else flat(state) for client, state in states.items()]
    found = named(play(FedPav(weighting="uniform"), 1, data=five(), attack=attack), "smooth")
    torch.testing.assert_close(flat(found).double(), sum(sent) / 5, rtol=0, atol=5e-6)
    for key in found.keys() - {*parameters}:  # running statistics stay as they were trained
        mean = sum(state[key] for state in states.values()) / 5
        torch.testing.assert_close(found[key].double(), mean, rtol=0, atol=5e-6)


def test_the_malicious_uploads_are_made_of_those_that_count():
    for knows, expected in (("all", ("town0", "town2", "town4")), ("colluders", ("town1", "town3"))):
        attack = Counts(LIARS, start=2, knows=knows)
        model = fit(make_model(FedPav(), attack=attack), five(), rounds=3)
        assert attack.seen == [(expected, (5, 2))] * 2, "from the second round on"
        assert model.round_metrics["attack/clients"] == 2


def test_attackers_without_honest_clients_know_themselves():
    attack = Counts(1.0)
    fit(make_model(FedPav(), attack=attack), five(), rounds=1)
    assert attack.seen == [(tuple(f"town{i}" for i in range(5)), (5, 5))]


def test_only_clients_of_the_round_are_known():
    attack = Counts(LIARS)
    model = fit(make_model(FedPav(), attack=attack, selection=RandomFraction(0.6)), five(), rounds=6)
    assert len(attack.seen) in range(1, 7)
    for known, (clients, attackers) in attack.seen:
        assert clients == 3
        assert len(known) == clients - attackers
        assert not {*known} & {*LIARS}
    assert model.round_metrics["attack/clients"] in (0, 1, 2)


def test_architectures_are_attacked_apart():
    own = {f"town{i}": ClientOverride(backbone=SmallCNN(width=6)) for i in (0, 1)}
    attack = Counts(LIARS)
    fit(make_model(FedAvg(share_head=False), attack=attack, clients=own), five(), rounds=1)
    assert sorted(attack.seen) == [(("town0",), (2, 1)), (("town2", "town4"), (3, 1))]


def test_an_attack_on_nobody_changes_no_bit():
    honest = fit(make_model(FedPav()), five())
    later = fit(make_model(FedPav(), attack=Drift(LIARS, start=3)), five())
    assert torch.equal(vector(later), vector(honest)), "whether uploads wait or not"


@pytest.mark.parametrize("name", ["colluding alie", "min-max unit", "min-sum std"])
def test_one_chunk_and_many_give_the_same_bits(name, monkeypatch):
    play_one = lambda: vector(fit(make_model(FedPav(), attack=ATTACKS[name]), five()))  # noqa: E731 - twice
    whole = play_one()
    monkeypatch.setattr("fedsim.training.uploads.CHUNK", 4 * 100)
    assert torch.equal(play_one(), whole)


def play_all(devices=1):
    """Every attack, under a mean and under a rule; with the number of ranks."""
    models = {
        name: fit(make_model(FedPav(), attack=attack), five(), devices=devices) for name, attack in ATTACKS.items()
    }
    models["median"] = fit(make_model(FedPav(), attack=MinMax(LIARS), aggregation=Median()), five(), devices=devices)
    return {name: vector(model) for name, model in models.items()}


def play_on_two(folder):
    """What each of two ranks does."""
    torch.save(play_all(devices=2), folder / f"{torch.distributed.get_rank()}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    expected = play_all()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["alie", "colluding min-sum"])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(name, tmp_path):
    make = lambda: make_model(Scaffold(), attack=ATTACKS[name])  # noqa: E731 - three times
    first = fit(make(), five(), rounds=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    whole = fit(make(), five(), rounds=3)
    resumed = fit(make(), five(), rounds=3, ckpt_path=tmp_path / "two.ckpt")
    for key, tensor in state_of(whole).items():
        assert torch.equal(state_of(resumed)[key], tensor), key


# -- what attacks claim ------------------------------------------------------------------------------------------------


class Looks(Aggregation):
    """The mean, and a look at the uploads."""

    def aggregate(self, server, arch, uploads, reports):
        count = server.models[arch].flat.num_shared_parameters
        rows = torch.cat([chunk for _, chunk in uploads.chunks()], 1)[:, :count].double()
        self.start = server.vector(arch)[:count].double()
        honest = torch.tensor([name not in LIARS for name in uploads.clients])
        self.honest, self.lies = rows[honest], rows[~honest]
        return uploads.combine(lambda chunk: chunk.mean(0))


@pytest.mark.parametrize("name", [name for name in ATTACKS if "drift" not in name and "colluding" not in name])
def test_each_attack_does_what_it_claims(name):
    seen, attack = Looks(), ATTACKS[name]
    model = fit(make_model(FedPav(), attack=attack, aggregation=seen), five(), rounds=1)
    [lie, other], honest = seen.lies, seen.honest
    assert torch.equal(lie, other)
    mean, step = honest.mean(0), vector(model)[: len(lie)] - seen.start
    if isinstance(attack, InnerProduct):
        assert float(step @ (mean - seen.start)) < 0, "three honest clients for two, and epsilon above 1.5"
    elif isinstance(attack, ALIE):  # z_max is that of five clients: 3 honest ones, of which one is a supporter
        away = (lie - mean).abs() <= NormalDist().inv_cdf(2 / 3) * honest.std(0, correction=0) + 1e-6
        assert bool(away.all())
    else:
        distances = torch.cdist(honest, honest).square()
        of_lie = (honest - lie).square().sum(1)
        largest = (
            (of_lie.max(), distances.max()) if isinstance(attack, MinMax) else (of_lie.sum(), distances.sum(1).max())
        )
        torch.testing.assert_close(*largest, rtol=1e-4, atol=0)  # as far as it may go, and no further
    shift = float((step - (mean - seen.start)).norm())
    assert shift == pytest.approx(2 / 5 * float((lie - mean).norm()), rel=1e-3)


# -- refusals ----------------------------------------------------------------------------------------------------------


def assemble(method, attack, **options):
    make_model(method, attack=attack, **options).assemble(five(), 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (Local(), {}, r"^model\.attack: clients of this method send no parameters; choose another method"),
        (IFCA(), {}, r"^model\.attack: Drift .* IFCA has its own aggregation; choose another attack"),
        (LotteryFL(), {}, r"^model\.attack: Drift .* LotteryFL has its own aggregation; choose another attack"),
        (
            FedPav(weighting="uniform"),
            {"privacy": DifferentialPrivacy(clip=1.0, noise_multiplier=1.0), "bn_stats": "local"},
            r"^model\.attack: Drift .* model\.privacy has clipped theirs before; leave one of them out",
        ),
        (
            FedPav(),
            {"timing": Buffered(buffer=2), "hardware": Hardware(down_mbit=1, up_mbit=1, images_per_second=1)},
            r"^model\.attack: Drift .* Buffered of model\.timing .* choose another attack, or Deadline",
        ),
    ],
)
def test_federations_without_comparable_uploads_are_refused(method, options, says):
    with pytest.raises(ConfigError, match=says):
        assemble(method, Drift(LIARS), **options)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_wrong_numbers(value):
    for kind, field in ((ALIE, "z"), (InnerProduct, "epsilon")):
        with pytest.raises(ConfigError, match=rf"^model\.attack\.{field}: "):
            kind(LIARS, **{field: value})


@pytest.mark.parametrize("name", ["knows", "direction"])
def test_wrong_words(name, capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--model.attack", "MinMax", f"--model.attack.{name}", "nobody")
    assert f"model.attack.{name}: " in line
    assert {"knows": "colluders", "direction": "unit"}[name] in line


def test_a_little_is_enough_for_fewer_than_half():
    half = ["town0", "town1", "town2"]
    with pytest.raises(ConfigError, match=r"^model\.attack\.z: 3 of 5 clients attack, .* set it, or name fewer"):
        assemble(FedPav(), ALIE(half))
    assemble(FedPav(), ALIE(half, z=1.0))
    in_some_round = make_model(FedPav(), attack=ALIE(LIARS), selection=RandomFraction(0.4))
    fit(in_some_round, five(), rounds=9)  # half of some round attack: then z is that of all


class Huge(Collusion):
    """Sends one number in all parameters."""

    def __init__(self, attackers, value):
        super().__init__(attackers)
        self.value = value

    def lie(self, uploads, received, numbers):
        return torch.full_like(received, self.value)


@pytest.mark.parametrize("value", [4097.0, -4097.0, float("inf"), float("nan")])
def test_a_lie_beyond_exact_sums_ends_the_run(value):
    with pytest.raises(TrainingError, match=r"^client town1, round 1: its malicious upload has values up to .*; lower"):
        fit(make_model(FedPav(), attack=Huge(LIARS, value)), five(), rounds=1)


def test_a_rule_and_plain_sums_meet_a_lie_beyond_exact_sums():
    for options in ({"aggregation": Median()}, {"reduction": "fp32"}):
        model = fit(make_model(FedPav(), attack=Huge(["town1"], 5000.0), **options), five(), rounds=1)
        assert (float(vector(model).abs().max()) > 500) == ("reduction" in options)
    with pytest.raises(TrainingError, match="values up to nan"):
        fit(make_model(FedPav(), attack=Huge(LIARS, float("nan")), aggregation=Median()), five(), rounds=1)
