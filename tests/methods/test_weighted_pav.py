"""Weighted partial aggregation (paper 002): Eqs. (2), (10), (13), (14) against plain loops; the distance's digits."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.functional.distances import cosine_distance_of_products, products_of_parameters
from fedsim.methods import WeightedPav
from fedsim.models import Neck, SmallCNN
from fedsim.training.messages import Report
from fedsim.training.settings import ClientOverride
from small import fit, make_data, make_model, named, vector

# -- the distance ------------------------------------------------------------------------------------------------------


def models(change, numel=1_000_000, seed=0):
    """Parameters of a model and of one that differs by ``change``, relative to its size; two tensors each."""
    draw = torch.Generator().manual_seed(seed)
    w = 0.02 * torch.randn(numel, generator=draw)
    v = w + change * 0.02 * torch.randn(numel, generator=draw)
    return [(v[:1000], w[:1000]), (v[1000:].view(-1, 3), w[1000:].view(-1, 3))], v, w


def cosine_distance(pairs):
    return cosine_distance_of_products(products_of_parameters(pairs).flatten().tolist())


def truth(v, w):
    """1 - cos in float64, whose 16 digits leave few of a distance of 1e-9."""
    v, w = v.double(), w.double()
    return float(1 - v.dot(w) / (v.dot(v).sqrt() * w.dot(w).sqrt()))


@pytest.mark.parametrize("change", [1e-1, 1e-2, 1e-3, 1e-4])
def test_the_distance_keeps_its_digits_where_float32_has_none(change):
    pairs, v, w = models(change)
    expected = truth(v, w)
    assert expected == pytest.approx(change**2 / 2, rel=0.01)
    assert cosine_distance(pairs) == pytest.approx(expected, rel=1e-4)
    if change <= 1e-2:  # what one would write first
        assert abs(float(1 - F.cosine_similarity(v, w, dim=0)) - expected) > 0.3 * expected
    if change <= 1e-4:
        three_dots = 1 - v.dot(w) / (v.dot(v).sqrt() * w.dot(w).sqrt())
        assert abs(float(three_dots) - expected) > 0.3 * expected


def test_the_distance_is_the_exact_one():
    """In fractions, but for the roots."""
    v, w = [0.5, -1.25, 3.0, 0.75], [0.5, -1.0, 3.0, 0.8125]
    dot = sum(Fraction(a) * Fraction(b) for a, b in zip(v, w, strict=True))
    squares = [sum(Fraction(a) ** 2 for a in x) for x in (v, w)]
    expected = 1 - float(dot) / math.sqrt(squares[0] * squares[1])
    assert cosine_distance([(torch.tensor(v), torch.tensor(w))]) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e6])
def test_the_distance_does_not_depend_on_scale(factor):
    pairs, _, _ = models(1e-3, numel=10_000)
    of_both = [(factor * v.double(), factor * w.double()) for v, w in pairs]
    of_one = [(factor * v.double(), w.double()) for v, w in pairs]
    expected = cosine_distance(pairs)
    assert cosine_distance(of_both) == pytest.approx(expected, rel=1e-9)
    assert cosine_distance(of_one) == pytest.approx(expected, abs=1e-9)


def test_models_that_do_not_differ():
    pairs, _, w = models(0.0, numel=10_000)
    assert cosine_distance(pairs) == 0.0
    assert 0.0 <= cosine_distance([(w * 1.1, w)]) < 1e-12  # longer, not turned
    zero = torch.zeros(3)
    assert cosine_distance([(zero, zero)]) == 0.0
    assert cosine_distance([(zero, torch.ones(3))]) == 1.0
    assert cosine_distance([(-torch.ones(3), torch.ones(3))]) == pytest.approx(2.0)


# -- weights -----------------------------------------------------------------------------------------------------------


def weights(method, *distances):
    reports = {name: Report(10, {"cdw_param": m}) for name, m in zip("abc", distances, strict=True)}
    return method.weights(reports).clients


def test_eq10_weighs_by_distance():
    assert weights(WeightedPav(), 1e-9, 3e-9, 4e-9) == pytest.approx({"a": 0.125, "b": 0.375, "c": 0.5})
    assert weights(WeightedPav(), 0.0, 3e-9, 1e-9) == pytest.approx({"a": 0.0, "b": 0.75, "c": 0.25})
    assert weights(WeightedPav(), 0.0, 0.0, 0.0) == dict.fromkeys("abc", 1 / 3)


def test_the_prose_is_the_inverse():
    # 1/1, 1/2, 1/4 over 7/4
    assert weights(WeightedPav(invert=True), 1e-9, 2e-9, 4e-9) == pytest.approx({"a": 4 / 7, "b": 2 / 7, "c": 1 / 7})
    assert weights(WeightedPav(invert=True), 0.0, 2e-9, 0.0) == {"a": 0.5, "b": 0.0, "c": 0.5}
    assert weights(WeightedPav(invert=True), 0.0, 0.0, 0.0) == dict.fromkeys("abc", 1 / 3)


def test_eq2_is_performance_times_hardware():
    def reports(*scores):
        return {n: Report(10, {"accuracy": p}, speed=h) for n, (p, h) in zip("abc", scores, strict=True)}

    method = WeightedPav(weighting="performance")
    expected = {"a": 0.5 * 100 / 175, "b": 0.25 * 500 / 175, "c": 0.0}
    assert method.weights(reports((0.5, 100.0), (0.25, 500.0), (0.0, 9.0))).clients == pytest.approx(expected)
    assert method.weights(reports((0.0, 1.0), (0.0, 5.0), (0.0, 9.0))).clients == dict.fromkeys("abc", 1 / 3)


# -- rounds ------------------------------------------------------------------------------------------------------------


class Watched(WeightedPav):
    """Remembers parameters before and after training, and uploads."""

    def train(self, client):
        before = parameters(client)
        super().train(client)
        seen[client.client_name] = [before, parameters(client), client.model.shared.double(), client]

    def upload(self, client):
        upload = super().upload(client)
        metrics = client.session.metrics
        guesses, labels = torch.cat(metrics._guesses).tolist(), torch.cat(metrics._labels).tolist()
        right = sum(guess == label for guess, label in zip(guesses, labels, strict=True))
        seen[client.client_name] += [right / len(labels)]
        return upload


seen = {}


def parameters(client):
    """Backbone parameters in one list of doubles; buffers, neck and head are not among them."""
    return [x for p in client.model.network.backbone.parameters() for x in p.detach().double().flatten().tolist()]


def by_loops(w, v):
    """1 - cos, in float64 and one number after another."""
    dot = math.fsum(a * b for a, b in zip(w, v, strict=True))
    return 1 - dot / math.sqrt(math.fsum(a * a for a in w)) / math.sqrt(math.fsum(b * b for b in v))


@pytest.mark.parametrize("invert", [False, True])
def test_eq13_and_eq14_are_what_plain_loops_do(invert):
    seen.clear()
    model = fit(make_model(Watched(invert=invert)), rounds=1)
    m = {name: by_loops(before, after) for name, (before, after, *_) in seen.items()}
    assert len(m) == 3
    assert min(m.values()) > 1e-6  # five seeds, one thread and two: 0.0052 +- 0.0016, 0.003 at least
    raw = {name: 1 / value for name, value in m.items()} if invert else m
    w = {name: value / sum(raw.values()) for name, value in raw.items()}
    assert len(set(w.values())) == 3
    for name in m:
        assert model.round_metrics[f"train/{name}/cdw_param"] == pytest.approx(m[name], rel=1e-6)
        assert model.round_metrics[f"train/{name}/weight"] == pytest.approx(w[name], rel=1e-6)
    mean = sum(w[name] * upload for name, (_, _, upload, *_) in seen.items())
    torch.testing.assert_close(vector(model).double(), mean, rtol=0, atol=1e-6)


SLOW = Hardware(
    down_mbit=1.0, up_mbit=1.0, images_per_second=10.0, clients={"town1": ClientHardware(images_per_second=40.0)}
)


def test_eq2_weighs_by_accuracy_and_speed():
    seen.clear()
    model = fit(make_model(Watched(weighting="performance"), hardware=SLOW), rounds=1)
    accuracy = {name: found[-1] for name, found in seen.items()}
    raw = {name: p * (40 if name == "town1" else 10) for name, p in accuracy.items()}
    assert max(accuracy.values()) > 0  # five seeds, one thread and two: 0.42 +- 0.05
    for name in raw:
        assert model.round_metrics[f"train/{name}/accuracy"] == accuracy[name]
        assert model.round_metrics[f"train/{name}/weight"] == pytest.approx(raw[name] / sum(raw.values()))


def test_frozen_parameters_do_not_count():
    def distance(frozen):
        backbone = SmallCNN(width=8)
        if frozen:
            backbone.conv1.weight.requires_grad_(False)
            backbone.conv1.weight.data.mul_(30)  # would make every angle small
        seen.clear()
        model = fit(make_model(Watched(), backbone=backbone), rounds=1)
        return model.round_metrics["train/town0/cdw_param"], *seen["town0"][:2]

    value, before, after = distance(frozen=True)
    skipped = 8 * 3 * 9
    assert before[:skipped] == after[:skipped]
    assert value == pytest.approx(by_loops(before[skipped:], after[skipped:]), rel=1e-6)
    assert value > 10 * by_loops(before, after)  # five seeds, one thread and two: 21.6 +- 1.2 times


def test_embedding_and_classifier_stay_with_the_client():
    model = fit(make_model(WeightedPav(), neck=Neck(kind="linear", dim=128, dropout=0.0)))
    assert all(name.startswith("backbone.") for name in named(model))
    states = [client.private_state()["state"][:128] for client in model.parts.clients.values()]
    assert not torch.equal(states[0], states[1])
    shares = fit(make_model(WeightedPav(share_neck=True)), rounds=1)
    assert any(name.startswith("neck.") for name in named(shares))


def test_one_client_of_an_architecture_makes_its_global_model():
    own = {"town1": ClientOverride(backbone=SmallCNN(width=6))}
    seen.clear()
    model = fit(make_model(Watched(), clients=own), rounds=1)
    torch.testing.assert_close(vector(model, "smallcnn2").double(), seen["town1"][2], rtol=0, atol=1e-7)
    m = {name: by_loops(*seen[name][:2]) for name in ("town0", "town2")}
    mean = sum(m[name] / sum(m.values()) * seen[name][2] for name in m)
    torch.testing.assert_close(vector(model, "smallcnn").double(), mean, rtol=0, atol=1e-6)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_settings_that_do_not_go_together():
    with pytest.raises(ConfigError, match=r"model\.method\.invert"):
        WeightedPav(weighting="performance", invert=True)


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        (None, r"model\.hardware: WeightedPav.*images_per_second"),
        (Hardware(down_mbit=1.0, up_mbit=1.0, images_per_second=math.inf), "client town0's is infinite"),
    ],
)
def test_eq2_needs_speeds(hardware, says):
    model = make_model(WeightedPav(weighting="performance"), hardware=hardware)
    with pytest.raises(ConfigError, match=says):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
