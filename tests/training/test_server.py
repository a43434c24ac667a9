"""The server: adaptive optimizers, batch-norm statistics, the step of the global vector; and who takes part in a round.

References are scalar loops written from the papers' equations.
"""

import math

import pytest
import torch
from torch import nn

from fedsim.data import Augmentation
from fedsim.functional.normalise import normalise_images
from fedsim.models import BODY, Group, Neck, ReIDModel, SmallCNN, group_names
from fedsim.training.flat_model import FlatModel
from fedsim.training.public import PublicImages
from fedsim.training.server import Server
from fedsim.training.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedsim.training.statistics import BatchNormStatistics, shared_names
from plain_sums import exact_weighted_sum

# -- adaptive server optimizers: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2 ---------------


def adagrad(v, delta, beta2):
    return v + delta**2


def yogi(v, delta, beta2):
    difference = v - delta**2
    sign = (difference > 0) - (difference < 0)
    return v - (1 - beta2) * delta**2 * sign


def adam(v, delta, beta2):
    return beta2 * v + (1 - beta2) * delta**2


VARIANTS = [(FedAdagrad, adagrad), (FedYogi, yogi), (FedAdam, adam)]
START = [1.0, -2.0, 0.0, 0.3, 5.0]


def mean_of_round(t, i):
    """The clients' weighted mean of parameter i in round t; parameter 3 never moves."""
    return START[3] if i == 3 else math.sin(3 * t + i) * 10.0 ** (i - 2)


def algorithm_2(next_v, num_rounds, eta, beta1, beta2, tau):
    result = []
    for i, x in enumerate(START):
        m, v = 0.0, tau**2
        for t in range(num_rounds):
            delta = mean_of_round(t, i) - x
            m = beta1 * m + (1 - beta1) * delta
            v = next_v(v, delta, beta2)
            x += eta * m / (math.sqrt(v) + tau)
        result.append(x)
    return result


def play(optimizer, x, rounds):
    """Step with the pseudo-gradients of ``rounds``."""
    for t in rounds:
        mean = torch.tensor([mean_of_round(t, i) for i in range(len(START))], dtype=x.dtype)
        x.grad = x.detach() - mean
        optimizer.step()


def start():
    return nn.Parameter(torch.tensor(START, dtype=torch.float64))


@pytest.mark.parametrize(("optimizer", "next_v"), VARIANTS)
@pytest.mark.parametrize(("eta", "betas", "tau"), [(0.01, (0.9, 0.99), 1e-3), (0.5, (0.0, 0.5), 0.1)])
def test_algorithm_2(optimizer, next_v, eta, betas, tau):
    x = start()
    play(optimizer([x], lr=eta, betas=betas, tau=tau), x, range(5))
    assert x.tolist() == pytest.approx(algorithm_2(next_v, 5, eta, *betas, tau), rel=1e-11)
    assert x[3] == START[3]  # no difference, no step


@pytest.mark.parametrize(("optimizer", "next_v"), VARIANTS)
def test_defaults(optimizer, next_v):
    x = start()
    play(optimizer([x]), x, range(5))
    beta1 = 0.0 if optimizer is FedAdagrad else 0.9  # Section 3: FedAdagrad has no momentum
    assert x.tolist() == pytest.approx(algorithm_2(next_v, 5, 0.01, beta1, 0.99, 1e-3), rel=1e-11)


def test_fedavgm():
    """Hsu et al., 2019: the first step is all the way to the mean, the next ones add 0.9 of what was before."""
    x, expected, velocity = start(), list(START), [0.0] * len(START)
    play(FedAvgM([x]), x, range(5))
    for t in range(5):
        for i, value in enumerate(expected):
            velocity[i] = 0.9 * velocity[i] + mean_of_round(t, i) - value
            expected[i] = value + velocity[i]
    assert x.tolist() == pytest.approx(expected, rel=1e-11)


def test_yogi_keeps_v_where_it_equals_the_squared_difference():
    x = nn.Parameter(torch.tensor([0.0]))
    optimizer = FedYogi([x], lr=1.0, betas=(0.0, 0.9), tau=0.5)
    x.grad = torch.tensor([-0.5])
    optimizer.step()
    assert optimizer.state[x]["v"].item() == 0.25
    assert x.item() == 0.5 / (0.5 + 0.5)


@pytest.mark.parametrize(("optimizer", "next_v"), VARIANTS)
def test_resuming_changes_nothing(optimizer, next_v):
    straight, first = start(), start()
    play(optimizer([straight]), straight, range(5))
    interrupted = optimizer([first])
    play(interrupted, first, range(2))
    second = nn.Parameter(first.detach().clone())
    resumed = optimizer([second])
    resumed.load_state_dict(interrupted.state_dict())
    play(resumed, second, range(2, 5))
    assert torch.equal(second, straight)


@pytest.mark.parametrize(("optimizer", "next_v"), VARIANTS)
def test_parameter_without_gradient_is_left_alone(optimizer, next_v):
    x, y = start(), start()
    server_optimizer = optimizer([x, y])
    x.grad = torch.ones_like(x)
    assert server_optimizer.step(lambda: 3.0) == 3.0
    assert y.tolist() == START
    assert y not in server_optimizer.state
    assert all(now < before for now, before in zip(x.tolist(), START, strict=True))  # it descends


# -- a flat model whose weights the tests write ------------------------------------------------------------------------


def make_flat_model(policy="mean", arch="smallcnn", seed=0):
    torch.manual_seed(seed)
    model = ReIDModel(SmallCNN(width=8), Neck(kind="bnneck", dropout=0.0))
    groups = group_names(model)
    return FlatModel(arch, model, shared_names(groups, BODY, policy), groups, max_classes=3)


def norms(model):
    return [m for m in model.network.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]


def random_vectors(model, num_clients):
    """Random uploads with positive variances, named a, b, ...; padding stays zero."""
    uploads = {}
    for k in range(num_clients):
        generator = torch.Generator().manual_seed(100 + k)
        for entry in model.flat.shared_entries:
            values = torch.randn(entry.numel, generator=generator)
            model.flat.buffer[entry.span] = values.square() + 0.1 if "running_var" in entry.name else values
        uploads["abcdefgh"[k]] = model.shared.clone()
    return uploads


def aggregate(statistics, uploads, weights, seed=0, round_=0):
    """The weighted mean of the uploads, statistics by their policy, as in the federation's round."""
    span = statistics.span
    encoded = {name: statistics.encode(vector) for name, vector in uploads.items()}
    own = [statistics.weight(name, weights, seed, round_) for name in uploads]
    parameters = exact_weighted_sum([weights[n] for n in uploads], [x[: span.start] for x in encoded.values()])
    buffers = exact_weighted_sum(own, [x[span] for x in encoded.values()])
    return statistics.decode(torch.cat([parameters, buffers])).float()


def read(model, vector):
    """name -> tensor of a global vector."""
    return {e.name: vector[e.span].view(e.shape) for e in model.flat.shared_entries}


# -- what is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mean", "first", "pooled", "recalibrate"])
def test_statistics_are_shared_with_the_body(policy):
    model = make_flat_model(policy)
    expected = [n for n, g in model.groups.items() if g is not Group.COUNTER]
    assert sorted(e.name for e in model.flat.shared_entries) == sorted(expected)
    assert model.serves("pool")


def test_local_statistics_stay_with_the_client():
    model = make_flat_model("local")
    private = {e.name for e in model.flat.entries if not e.shared}
    assert private == {n for n, g in model.groups.items() if g in {Group.STAT, Group.NECKSTAT}}
    assert len(private) == 2 * 5
    assert not model.serves("pool")
    statistics = BatchNormStatistics("local", model)
    assert statistics.span == slice(model.flat.num_shared, model.flat.num_shared)
    model.shared.fill_(0.5)
    model.flat.private.fill_(7.0)
    assert all((norm.running_mean == 7).all() and (norm.running_var == 7).all() for norm in norms(model))
    assert all((norm.weight == 0.5).all() for norm in norms(model))


def test_groups_that_are_not_shared_send_nothing():
    groups = {"w": Group.CONV, "s": Group.STAT, "n": Group.NECKSTAT, "h": Group.HEAD, "c": Group.COUNTER}
    assert shared_names(groups, frozenset({Group.CONV, Group.STAT}), "mean") == {"w", "s"}
    assert shared_names(groups, frozenset({Group.CONV, Group.STAT}), "local") == {"w"}
    assert shared_names(groups, frozenset({Group.HEAD, Group.COUNTER}), "mean") == {"h"}


# -- batch-norm statistics ---------------------------------------------------------------------------------------------


def test_span_holds_the_statistics_and_nothing_else():
    model = make_flat_model()
    statistics = BatchNormStatistics("mean", model)
    model.shared[statistics.span] = 9.0
    assert all((norm.running_mean == 9).all() and (norm.running_var == 9).all() for norm in norms(model))
    assert not any((p == 9).any() for p in model.network.parameters())


def test_means_and_variances_pair_up():
    model = make_flat_model("pooled")
    statistics = BatchNormStatistics("pooled", model)
    for k, norm in enumerate(norms(model)):
        norm.running_mean.copy_(torch.arange(norm.num_features) + 100 * k)
        norm.running_var.copy_(-norm.running_mean)
    assert len(statistics.means) == sum(norm.num_features for norm in norms(model)) == 8 + 16 + 32 + 32 + 32
    assert torch.equal(model.shared[statistics.means], -model.shared[statistics.variances])


def test_policy_mean():
    model = make_flat_model()
    uploads, weights = random_vectors(model, 3), {"a": 0.5, "b": 0.3, "c": 0.2}
    mean = aggregate(BatchNormStatistics("mean", model), uploads, weights)
    expected = sum(weights[name] * uploads[name].double() for name in uploads)
    assert torch.allclose(mean.double(), expected, atol=1e-7)


def test_policy_first_takes_the_statistics_of_one_participant():
    model = make_flat_model("first")
    statistics = BatchNormStatistics("first", model)
    uploads, weights = random_vectors(model, 3), {"a": 0.5, "b": 0.3, "c": 0.2}
    chosen = []
    for round_ in range(30):
        by_client = {name: statistics.weight(name, weights, 0, round_) for name in weights}
        assert sorted(by_client.values()) == [0.0, 0.0, 1.0]
        chosen.append(max(by_client, key=by_client.get))
    assert set(chosen) == {"a", "b", "c"}
    assert chosen == [n for t in range(30) for n in weights if statistics.weight(n, weights, 0, t)]  # reproducible
    assert chosen != [n for t in range(30) for n in weights if statistics.weight(n, weights, 1, t)]  # keyed by the seed

    span = statistics.span
    mean = aggregate(statistics, uploads, weights, round_=7)
    assert torch.allclose(mean[span], uploads[chosen[7]][span], rtol=0, atol=2**-41)
    plain = sum(weights[name] * uploads[name].double() for name in uploads)
    assert torch.allclose(mean[: span.start].double(), plain[: span.start], atol=1e-7)  # parameters are averaged


def test_policy_pooled_gives_the_statistics_of_the_pooled_data():
    model = make_flat_model("pooled")
    sizes = {"a": 40, "b": 10, "c": 25}
    uploads, samples = {}, {}
    for k, (client, n) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(k)
        for i, norm in enumerate(norms(model)):
            x = torch.randn(n, norm.num_features, generator=generator) * (k + 1) + k + i
            norm.running_mean.copy_(x.mean(0))
            norm.running_var.copy_(x.var(0, correction=0))
            samples.setdefault(i, []).append(x)
        uploads[client] = model.shared.clone()
    weights = {client: n / 75 for client, n in sizes.items()}
    mean = aggregate(BatchNormStatistics("pooled", model), uploads, weights)
    model.shared.copy_(mean)
    for i, norm in enumerate(norms(model)):
        pooled = torch.cat(samples[i])
        assert torch.allclose(norm.running_mean, pooled.mean(0), rtol=1e-5, atol=1e-6)
        assert torch.allclose(norm.running_var, pooled.var(0, correction=0), rtol=1e-5)


def test_encoding_leaves_uploads_alone():
    model = make_flat_model("pooled")
    upload = random_vectors(model, 1)["a"]
    before = upload.clone()
    encoded = BatchNormStatistics("pooled", model).encode(upload)
    assert torch.equal(upload, before)
    assert not torch.equal(encoded, before)


def test_pooling_equal_uploads_changes_nothing():
    model = make_flat_model("pooled")
    upload = random_vectors(model, 1)["a"]
    mean = aggregate(BatchNormStatistics("pooled", model), {"a": upload, "b": upload}, {"a": 0.25, "b": 0.75})
    assert torch.allclose(mean, upload, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mean", "first", "local", "recalibrate"])
def test_other_policies_encode_nothing(policy):
    model = make_flat_model(policy)
    statistics, upload = BatchNormStatistics(policy, model), model.shared.clone()
    assert torch.equal(statistics.encode(upload), model.shared)
    assert torch.equal(statistics.decode(upload.double()), model.shared.double())


def test_recalibration_averages_over_batches_of_public_images():
    model = make_flat_model("recalibrate")
    server = Server({"smallcnn": model})
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 8, 8), generator=generator, dtype=torch.uint8)
    server.public = PublicImages(images, Augmentation(), 0, torch.device("cpu"))
    span = BatchNormStatistics("recalibrate", model).span
    server.vector("smallcnn")[span] = 50.0  # to be forgotten
    parameters = server.vector("smallcnn")[: span.start].clone()
    server.recalibrate(batch_size=4)

    model.shared.copy_(server.vector("smallcnn"))
    conv, norm = model.network.backbone.conv1, model.network.backbone.bn1
    with torch.no_grad():
        batches = [normalise_images(some) for some in images.split(4)]
        maps = [conv(batch).transpose(0, 1).flatten(1) for batch in batches]
    assert torch.allclose(norm.running_mean, sum(x.mean(1) for x in maps) / 3, atol=1e-5)
    assert torch.allclose(norm.running_var, sum(x.var(1) for x in maps) / 3, rtol=1e-4)  # unbiased, as torch keeps it
    assert all(n.running_mean.abs().max() < 50 and n.running_var.max() != 50 for n in norms(model))
    assert torch.equal(server.vector("smallcnn")[: span.start], parameters)
