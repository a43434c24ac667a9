"""The privacy axis: noise and clipping against plain loops, the accountant against closed forms and printed values."""

import copy
import csv
import math
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.stats import norm

import plain_loops
from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.federation.components.privacy import DifferentialPrivacy, WhiteNoise, clip_norm, gaussian_epsilon
from fedsim.federation.components.selection import (
    UCB,
    AllClients,
    Availability,
    PoissonSampling,
    RandomFraction,
    Selection,
)
from fedsim.methods import FedAtt, FedAvg, FedNova, FedPav, FedProx, Scaffold, StyleBank
from fedsim.methods.base import Payload
from fedsim.methods.fedpav import Distillation
from fedsim.models import Neck, SmallCNN
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, play, sgd
from small import fit, make_data, make_model, named, vector

BETA = 0.05
UNIFORM = FedAvg(share_head=False, weighting="uniform")


@pytest.fixture
def accountant():
    """Skip without the optional dependency."""
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")


def still(method=UNIFORM, **options):
    """A federation whose parameters training does not move; running statistics do move."""
    training = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.0))
    return make_model(method, client=training, **options)


def draw(model, entries, std, *key):
    """Noise by tensor name, float64."""
    generator = numpy_generator(*key)
    return {e.name: std * torch.tensor(generator.standard_normal(e.shape, dtype=np.float32)).double() for e in entries}


# -- white noise -------------------------------------------------------------------------------------------------------


def test_eq14_noise_has_the_given_size_and_leaves_variances_alone():
    torch.manual_seed(0)
    backbone = SmallCNN(width=32)
    start = still(backbone=backbone)
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    before, plain = named(start), named(fit(still(backbone=backbone), rounds=1))
    noisy = fit(still(backbone=backbone, privacy=WhiteNoise(BETA)), rounds=1)
    parts = {"parameter": [], "mean": []}
    for name, after in named(noisy).items():
        if "running_var" in name:
            assert torch.equal(after, plain[name])
            assert not torch.equal(after, before[name])
        else:
            parts["mean" if "running_mean" in name else "parameter"].append((after - plain[name]).flatten())
    for draws in map(torch.cat, parts.values()):
        n = len(draws)
        assert abs(float(draws.mean())) < 4 * BETA / math.sqrt(n)
        assert abs(float(draws.square().mean()) / BETA**2 - 1) < 4 * math.sqrt(2 / n)
        assert draws.unique().numel() > 0.99 * n
    flat = noisy.parts.models["smallcnn"].flat
    padding = torch.ones(flat.num_shared, dtype=torch.bool)
    for entry in flat.shared_entries:
        padding[entry.span] = False
    assert padding.any()
    assert not vector(noisy)[padding].any()


@pytest.mark.parametrize(("aggregation", "download"), [(True, False), (False, True), (True, True)])
def test_eq14_and_eq15_are_what_plain_loops_do(aggregation, download):
    found = play(FedProx(mu=0.5, weighting="uniform"), 2, privacy=WhiteNoise(BETA, aggregation, download))
    entries = [e for e in found.parts.models["smooth"].flat.shared_entries if "running_var" not in e.name]
    reference = Federation()
    for t in range(2):
        states = []
        for client in reference.clients:
            received = copy.deepcopy(reference.model)
            if download:
                noise = draw(found, entries, BETA, 0, t, client.name, "noise in download")
                received.load_state_dict({k: v + noise.get(k, 0) for k, v in received.state_dict().items()})
            local, anchor = copy.deepcopy(received), dict(received.named_parameters())
            # the client is held near what it received, not near what the server has
            sgd(local, client.head, client.batches(t), correct=lambda n, p, a=anchor: 0.5 * (p - a[n].detach()))
            states.append(local.state_dict())
        reference.move_to(states, [1 / 3] * 3)
        if aggregation:
            noise = draw(found, entries, BETA, 0, t, "smooth", "noise in aggregation")
            state = reference.model.state_dict()
            reference.model.load_state_dict({k: v + noise.get(k, 0) for k, v in state.items()})
    plain_loops.assert_close(found, reference)


def test_no_noise_is_no_privacy():
    plain = vector(fit(make_model(UNIFORM)))
    assert torch.equal(vector(fit(make_model(UNIFORM, privacy=WhiteNoise(0.0, True, True)))), plain)
    assert not torch.equal(vector(fit(make_model(UNIFORM, privacy=WhiteNoise(1e-4)))), plain)


def test_downloads_differ_between_clients_and_rounds_and_the_server_keeps_its_model():
    class Watching(FedAvg):
        def train(self, client):
            seen[client.client_name, client.round] = client.received.vector.clone()

    seen = {}
    model = fit(still(Watching(share_head=False), privacy=WhiteNoise(BETA, False, True)), rounds=2)
    assert len({tuple(v[:8].tolist()) for v in seen.values()}) == 6
    mean = sum(seen[f"town{i}", 1] * c.data.num_images for i, c in enumerate(model.parts.clients.values()))
    mean = mean / sum(c.data.num_images for c in model.parts.clients.values())
    torch.testing.assert_close(vector(model), mean, rtol=0, atol=1e-6)


# -- differential privacy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_no_clipped_change_is_longer_than_the_bound(size, scale):
    for seed in range(20):
        x = scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
        for bound in (1e-3, 0.3, 5.0):
            clipped = clip_norm(x, bound)
            length = float(clipped.double().norm())
            assert length <= bound
            if float(x.double().norm()) <= bound:
                assert torch.equal(clipped, x)
            else:
                assert length > bound * (1 - 1e-6)
                torch.testing.assert_close(clipped.double() / length, x.double() / float(x.double().norm()))
    assert clip_norm(torch.tensor([math.nan, 1.0]), 1.0).isnan().any()
    assert clip_norm(torch.tensor([math.inf, 1.0]), 1.0).isnan().any()


CLIP, Z = 0.02, 2.0


def private(mode="central", **options):
    return DifferentialPrivacy(CLIP, Z, delta=1e-3, mode=mode, **options)


@pytest.mark.parametrize("mode", ["central", "local"])
def test_rounds_are_what_plain_loops_do(accountant, mode):
    selection, rounds = RandomFraction(0.6), 3
    found = play(UNIFORM, rounds, bn_stats="local", selection=selection, privacy=private(mode))
    entries = found.parts.models["smooth"].flat.shared_parameters
    reference = Federation()
    names, lengths = [c.name for c in reference.clients], []
    for t in range(rounds):
        theta = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
        total = {n: torch.zeros_like(p) for n, p in theta.items()}
        chosen = selection.select(t, names, 0)
        assert len(chosen) == 2
        for client in (c for c in reference.clients if c.name in chosen):
            local = copy.deepcopy(reference.model)
            sgd(local, client.head, client.batches(t))
            change = {n: p.detach() - theta[n] for n, p in local.named_parameters()}
            length = math.sqrt(sum(float(x.square().sum()) for x in change.values()))
            lengths.append(length)
            noise = draw(found, entries, Z * CLIP, 0, t, client.name, "local differential privacy")
            for name, x in change.items():
                total[name] += x * min(1, CLIP / length) + (noise[name] if mode == "local" else 0)
        if mode == "central":
            noise = draw(found, entries, Z * CLIP, 0, t, "smooth", "central differential privacy")
            total = {n: x + noise[n] for n, x in total.items()}
        with torch.no_grad():
            for name, p in reference.model.named_parameters():
                p += total[name] / 2
    assert min(lengths) < CLIP < max(lengths), "some are clipped, some are not"
    for name, tensor in named(found, "smooth").items():
        torch.testing.assert_close(tensor.double(), reference.model.get_parameter(name).detach(), rtol=0, atol=2e-6)


def change_of(**options):
    """How one round moves the shared parameters."""
    start = make_model(UNIFORM, bn_stats="local", **options)
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    before = vector(start).clone()
    return vector(fit(make_model(UNIFORM, bn_stats="local", **options), rounds=1)) - before


class Only(Selection):
    """One client, where three were expected."""

    def select(self, round_, clients, seed):
        return clients[:1]

    def expected_share(self, num_clients):
        return 1.0


def test_the_denominator_does_not_depend_on_who_answers(accountant):
    quiet = partial(DifferentialPrivacy, CLIP, 1e-9, 0.1)
    one = change_of(selection=Only(), privacy=quiet())
    assert float(one.norm()) == pytest.approx(CLIP / 3, rel=1e-4)
    assert float(change_of(selection=Only(), privacy=quiet(mode="local")).norm()) == pytest.approx(CLIP, rel=1e-4)


def test_noise_is_added_even_if_nobody_answers(accountant):
    nobody = change_of(availability=Availability(drop=1.0), privacy=private())
    drawn = nobody[nobody != 0]
    assert float(drawn.std()) == pytest.approx(Z * CLIP / 3, rel=4 / math.sqrt(2 * len(drawn)))
    assert not change_of(availability=Availability(drop=1.0), privacy=private("local")).any()


def test_poisson_samples_are_independent_draws(accountant):
    clients, rounds = [f"c{i}" for i in range(20)], 500
    chosen = [PoissonSampling(0.3).select(t, clients, 0) for t in range(rounds)]
    counts = torch.tensor([float(len(names)) for names in chosen])
    assert float(counts.mean()) == pytest.approx(6, abs=4 * math.sqrt(20 * 0.21 / rounds))
    assert float(counts.var()) == pytest.approx(20 * 0.21, rel=4 * math.sqrt(2 / rounds))
    assert all(names == sorted(names, key=clients.index) for names in chosen)
    model = fit(make_model(UNIFORM, bn_stats="local", selection=PoissonSampling(0.2), privacy=private()), rounds=3)
    assert model.round_metrics["privacy/epsilon"] == gaussian_epsilon(Z, 3, 1e-3, 0.2)


def test_only_poisson_sampling_in_mode_central_is_amplified(accountant):
    def spent(selection, mode):
        model = make_model(UNIFORM, bn_stats="local", selection=selection, privacy=private(mode))
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
        return model.settings.privacy.metrics(4, ())["privacy/epsilon"]

    whole = gaussian_epsilon(Z, 5, 1e-3)
    assert spent(AllClients(), "central") == spent(RandomFraction(0.4), "central") == whole
    assert spent(PoissonSampling(0.4), "central") < whole
    # two clipped changes are 2 C apart
    assert spent(PoissonSampling(0.4), "local") == spent(AllClients(), "local") == gaussian_epsilon(Z / 2, 5, 1e-3)


# -- the accountant ----------------------------------------------------------------------------------------------------


def renyi(q, sigma, order):
    """Of one sampled Gaussian, integer orders (Mironov, Talwar, Zhang, arXiv:1908.10530, Section 3.3)."""
    terms = (
        math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / (2 * sigma**2))
        for k in range(order + 1)
    )
    return math.log(sum(terms)) / (order - 1)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "printed", "best"),
    [
        # Abadi et al. (CCS 2016), Section 5.1: moments accountant, sigma 4, q 0.01, delta 1e-5, E = 100 epochs
        (0.01, 4.0, 10_000, 1.26, None),
        # TensorFlow Privacy's tutorial on MNIST: 15 epochs, batches of 250 of 60,000, "eps = 1.18 ... order is 17"
        (250 / 60_000, 1.3, 3600, 1.18, 17),
    ],
)
def test_printed_epsilons(accountant, q, sigma, steps, printed, best):
    delta, classic, tight = 1e-5, {}, {}
    for order in range(2, 33):
        spent = steps * renyi(q, sigma, order)
        classic[order] = spent + math.log(1 / delta) / (order - 1)  # Mironov (CSF 2017), Proposition 3
        # Balle et al. (AISTATS 2020), Theorem 21: since then the same Renyi divergences give less
        tight[order] = spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
    smallest = min(classic, key=classic.get)
    assert classic[smallest] == pytest.approx(printed, abs=0.006)
    assert best in (None, smallest)
    assert 0.85 * min(tight.values()) < gaussian_epsilon(sigma, steps, delta, q) < min(tight.values())


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (1.0, 100), (5.0, 100), (50.0, 300), (0.1, 3)])
def test_without_sampling_the_bound_is_near_the_exact_value(accountant, sigma, rounds):
    epsilon = gaussian_epsilon(sigma, rounds, 1e-5)
    mu = math.sqrt(rounds) / sigma

    def delta(e):  # Balle and Wang (ICML 2018), Theorem 8: exact for one Gaussian, and so for their composition
        return norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu))

    assert delta(epsilon) <= 1e-5
    assert delta(0.999 * epsilon) > 1e-5


def test_one_sampled_round_is_above_the_exact_value(accountant):
    q, sigma = 0.3, 1.0
    epsilon = gaussian_epsilon(sigma, 1, 1e-3, q)

    def delta(e):  # Balle, Barthe, Gaboardi (NeurIPS 2018), Theorem 8
        inner, mu = math.log1p(math.expm1(e) / q), 1 / sigma
        return q * (norm.cdf(mu / 2 - inner / mu) - math.exp(inner) * norm.cdf(-mu / 2 - inner / mu))

    assert delta(epsilon) <= 1e-3
    assert delta(0.999 * epsilon) > 1e-3


@pytest.mark.parametrize(
    ("sigma", "q", "rounds"), [(1.0, 0.01, 300), (1.0, 0.1, 100), (1.0, 0.5, 12), (2.0, 0.05, 100)]
)
def test_sampled_rounds_are_near_a_sum_of_their_losses(accountant, sigma, q, rounds):
    """The distribution of the sum of losses, log(p / p0) of a draw from p, is the power of a Fourier transform."""
    step, size = 1e-3, 2**17
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    losses = np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
    drawn = (1 - q) * norm.pdf(x, 0, sigma) + q * norm.pdf(x, 1, sigma)
    below = np.floor(losses / step)
    one = np.zeros(size)
    for place, weight in ((below, below + 1 - losses / step), (below + 1, losses / step - below)):  # keeps the mean
        np.add.at(one, place.astype(int) % size, weight * drawn * (x[1] - x[0]))
    whole = np.fft.irfft(np.fft.rfft(one) ** rounds, size)
    total = step * np.fft.fftfreq(size, 1 / size)

    def delta(e):
        return float((whole * np.clip(-np.expm1(e - total), 0, None)).sum())

    epsilon = gaussian_epsilon(sigma, rounds, 1e-5, q)
    assert delta(1.005 * epsilon) < 1e-5 < delta(0.98 * epsilon)
    assert epsilon < 0.95 * min(gaussian_epsilon(sigma, rounds, 1e-5), 1000)


@pytest.mark.parametrize("q", [None, 0.1])
@pytest.mark.parametrize(
    ("sigma", "delta"), [(1e-9, 1e-5), (1e-3, 1e-5), (0.02, 1e-5), (1e3, 1e-5), (1e9, 1e-5), (1.0, 0.5)]
)
def test_there_is_a_bound_for_every_noise(accountant, sigma, delta, q):
    assert 0 <= gaussian_epsilon(sigma, 10, delta, q) < math.inf


# -- any number of ranks -----------------------------------------------------------------------------------------------

OPTIONS = {
    "white": {"privacy": WhiteNoise(1e-3, True, True)},
    "central": {"privacy": private(), "bn_stats": "local"},
    "local": {"privacy": private("local"), "bn_stats": "local"},
}


def play_private(name, devices):
    neck = Neck(dim=8, dropout=0.2)
    return fit(make_model(UNIFORM, neck=neck, selection=PoissonSampling(0.7), **OPTIONS[name]), devices=devices)


def play_on_two(folder):
    """What each of two ranks does."""
    for path in folder.glob("*.wanted"):
        model = play_private(path.stem, 2)
        torch.save(vector(model), folder / f"{path.stem}-{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    names = list(OPTIONS) if find_spec("dp_accounting") else ["white"]
    for name in names:
        (tmp_path / f"{name}.wanted").touch()
    run_on_ranks(play_on_two, tmp_path)
    for name in names:
        one = vector(play_private(name, 1))
        for rank in range(2):
            assert torch.equal(one, torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)), name


# -- what people see ---------------------------------------------------------------------------------------------------

PRIVATE = """
model:
  method: {class_path: FedAvg, init_args: {share_head: false, weighting: uniform}}
  bn_stats: local
  selection: {class_path: PoissonSampling, init_args: {rate: 0.5}}
  privacy: {class_path: DifferentialPrivacy, init_args: {clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-3}}
"""


def test_describe_predicts_what_a_fit_logs(accountant, tiny, tmp_path, capsys):
    config = tmp_path / "private.yaml"
    config.write_text(PRIVATE)
    files = ["--config", str(tiny), "--config", str(config)]
    assert main(["describe", *files]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "privacy/epsilon after 3 rounds" in line]
    assert main(["fit", *files, "--run_dir", str(tmp_path / "run")]) == 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        spent = [float(row["privacy/epsilon"]) for row in csv.DictReader(file) if row["privacy/epsilon"]]
    assert spent == [gaussian_epsilon(1.0, rounds, 1e-3, 0.5) for rounds in (1, 2, 3)]
    assert line.split()[-1] == f"{spent[-1]:.2f}"


# -- errors ------------------------------------------------------------------------------------------------------------


class Unknown(Selection):
    def select(self, round_, clients, seed):
        return list(clients)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bn_stats": "mean"}, "model.bn_stats: .* set bn_stats: local"),
        ({"bn_stats": "pooled"}, "model.bn_stats"),
        ({"method": FedAvg(share_head=False)}, "weighting: uniform"),
        ({"method": FedNova()}, "model.method: FedNova.*signals"),
        ({"method": FedAtt()}, "model.method: FedAtt.*signals"),
        ({"method": FedPav(weighting="cdw")}, "model.method: FedPav.*signals"),
        ({"method": Scaffold()}, "model.method: Scaffold uploads control"),
        ({"method": StyleBank(weighting="uniform")}, "model.method: StyleBank uploads styles"),
        ({"method": FedPav(weighting="uniform", distillation=Distillation(every=2))}, "FedPav.*public images"),
        ({"selection": Unknown()}, "model.selection: Unknown"),
        ({"selection": UCB(2)}, "model.selection: UCB"),
    ],
)
def test_what_would_void_the_guarantee_is_refused(accountant, options, says):
    options = {"method": UNIFORM, "bn_stats": "local", "privacy": private()} | options
    with pytest.raises(ConfigError, match=says):
        make_model(**options).assemble(make_data(public="new0"), 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WhiteNoise(-1.0), "model.privacy.beta"),
        (lambda: WhiteNoise(math.nan), "model.privacy.beta"),
        (lambda: WhiteNoise(0.1, False, False), "model.privacy: in_aggregation"),
        (lambda: DifferentialPrivacy(0.0, 1.0), "model.privacy.clip"),
        (lambda: DifferentialPrivacy(math.inf, 1.0), "model.privacy.clip"),
        (lambda: DifferentialPrivacy(1.0, 0.0), "model.privacy.noise_multiplier"),
        (lambda: DifferentialPrivacy(1.0, 1.0, delta=1.0), "model.privacy.delta"),
        (lambda: PoissonSampling(0.0), "model.selection.rate"),
    ],
)
def test_wrong_numbers(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_missing_accountant_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    model = make_model(UNIFORM, bn_stats="local", privacy=private())
    with pytest.raises(ConfigError, match=r"pip install 'fedsim-reid\[privacy\]'"):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))


def test_extras_of_a_later_round_are_refused(accountant):
    class Late(FedAvg):
        def payload(self, server, arch, round_):
            return Payload(up={"late": (1,)} if round_ else {})

        def upload(self, client):
            upload = super().upload(client)
            return type(upload)(upload.vector, {"late": torch.zeros(1)} if client.round else {})

    with pytest.raises(ConfigError, match="round 2: the method uploads late"):
        fit(make_model(Late(share_head=False, weighting="uniform"), bn_stats="local", privacy=private()))
