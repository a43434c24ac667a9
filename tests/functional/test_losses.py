"""Losses, pooled statistics, schedules and weights against loops written from the equations."""

import math
import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedsim.functional.losses import batch_hard_triplet, soft_cross_entropy
from fedsim.functional.schedules import cosine_factor, milestone_factor, step_factor, warmup_factor
from fedsim.functional.statistics import central_variance, second_moments
from fedsim.functional.weighting import normalise, size_weights, uniform_weights


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- smoothed cross-entropy --------------------------------------------------------------------------------------------


def cross_entropy_loop(logits, labels, s):
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_sum = math.log(sum(math.exp(z) for z in row))
        for k, z in enumerate(row):
            target = (1 - s) * (k == label) + s / len(row)
            total -= target * (z - log_sum)
    return total / len(logits)


def soft_cross_entropy_loop(logits, soft, s):
    """``-sum_k t'_k log p_k``, ``t'_k = (1 - s) t_k + s w / Z``, w the sum of t: sum over the images, by B."""
    total = 0.0
    for row, t in zip(logits, soft, strict=True):
        log_sum, w = math.log(sum(math.exp(z) for z in row)), sum(t)
        for z, t_k in zip(row, t, strict=True):
            total -= ((1 - s) * t_k + s * w / len(row)) * (z - log_sum)
    return total / len(logits)


SOFT = [[0.0, 0.0, 1.0, 0.0], [0.25, 0.0, 0.5, 0.25], [0.0, 0.125, 0.0, 0.25], [0.25, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_soft_labels_of_any_mass(smoothing):
    logits = 3 * randn(4, 4)
    loss = soft_cross_entropy(logits, torch.tensor(SOFT, dtype=torch.float64), smoothing)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(soft_cross_entropy_loop(logits.tolist(), SOFT, smoothing), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_of_one_identity_the_weight_multiplies_the_terms_of_the_image(smoothing):
    logits, labels, weights = 3 * randn(4, 5), [0, 4, 2, 2], [1.0, 0.25, 0.5, 1.0]
    one_hot = torch.eye(5, dtype=torch.float64)[labels]
    targets = one_hot * torch.tensor(weights)[:, None]
    loss = soft_cross_entropy(logits, targets, smoothing)
    terms = [
        w * cross_entropy_loop([z], [y], smoothing) for w, z, y in zip(weights, logits.tolist(), labels, strict=True)
    ]
    assert loss.item() == pytest.approx(sum(terms) / 4, rel=1e-12)
    real = cross_entropy(logits, torch.tensor(labels), label_smoothing=smoothing)
    ones = soft_cross_entropy(logits, one_hot, smoothing)
    assert ones.item() == pytest.approx(real.item(), rel=1e-12)


def test_gradient_of_soft_labels_is_mass_times_softmax_minus_target():
    logits, soft = randn(4, 4).requires_grad_(), torch.tensor(SOFT, dtype=torch.float64)
    soft_cross_entropy(logits, soft, 0.2).backward()
    mass = soft.sum(1, keepdim=True)
    target = 0.8 * soft + 0.2 * mass / 4
    assert torch.allclose(logits.grad, (mass * logits.detach().softmax(1) - target) / 4)


# -- batch-hard triplet ------------------------------------------------------------------------------------------------


def triplet_loop(features, labels, margin, power=1):
    terms = []
    for a in range(len(labels)):
        positives, negatives = [], []
        for j in range(len(labels)):
            distance = math.dist(features[a], features[j]) ** power
            if labels[j] != labels[a]:
                negatives.append(distance)
            elif j != a:
                positives.append(distance)
        if positives and negatives:
            terms.append(max(0.0, margin + max(positives) - min(negatives)))
    return sum(terms) / len(terms) if terms else 0.0


@pytest.mark.parametrize(
    "labels",
    [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 2, 3, 4],  # 2, 3 and 4 have no positive
        [5, 0, 1, 2, 3, 4, 6, 5],  # only the first and the last count
    ],
)
@pytest.mark.parametrize("margin", [0.0, 0.3, 2.0])
def test_batch_hard_triplet(labels, margin):
    features = randn(8, 3)
    loss = batch_hard_triplet(features, torch.tensor(labels), margin)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(triplet_loop(features.tolist(), labels, margin), rel=1e-12)


@pytest.mark.parametrize("margin", [0.3, 8.0])
def test_eq8_of_paper_002_has_squared_distances(margin):
    features, labels = randn(8, 3), [0, 0, 0, 1, 1, 2, 2, 3]
    loss = batch_hard_triplet(features, torch.tensor(labels), margin, squared=True)
    assert loss.item() == pytest.approx(triplet_loop(features.tolist(), labels, margin, power=2), rel=1e-12)


@pytest.mark.parametrize("squared", [False, True])
def test_the_triplet_loss_draws_positives_near_and_pushes_negatives_away(squared):
    """Along its gradient; with the signs that Eq. (8) of paper 002 has in print it would be the other way round."""
    features = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.2], [4.0, 4.0]], requires_grad=True)
    labels = torch.tensor([0, 0, 1, 2])  # two anchors have a positive
    batch_hard_triplet(features, labels, 1.0, squared).backward()
    moved = (features - 0.01 * features.grad).detach()
    before = features.detach()
    assert torch.dist(moved[0], moved[1]) < torch.dist(before[0], before[1])
    assert torch.dist(moved[0], moved[2]) > torch.dist(before[0], before[2])


def test_triplet_by_hand():
    # anchors at 0, 1 | 5: the first two have a positive at 1 and negatives at 5 and 4; the third has no positive
    features, labels = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([7, 7, 8])
    assert batch_hard_triplet(features, labels, margin=3.5) == pytest.approx((0.0 + 0.5) / 2)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [1, 1, 1, 1]])
def test_triplet_of_a_batch_without_triplets_is_zero(labels):
    features = randn(4, 3).requires_grad_()
    loss = batch_hard_triplet(features, torch.tensor(labels), 0.3)
    assert loss == 0.0
    loss.backward()
    assert torch.equal(features.grad, torch.zeros(4, 3, dtype=torch.float64))


def test_triplet_gradient():
    features = randn(8, 3).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])  # the last anchor does not count
    assert torch.autograd.gradcheck(lambda x: batch_hard_triplet(x, labels, 0.3), features)


@pytest.mark.parametrize("twin", [1, 2])
def test_triplet_gradient_is_finite_when_features_coincide(twin):
    features = randn(6, 3).float()
    features[twin] = features[0]  # 1: a positive of 0; 2: a negative of 0
    features.requires_grad_()
    labels = [0, 0, 1, 1, 2, 2]
    loss = batch_hard_triplet(features, torch.tensor(labels), 0.3)
    loss.backward()
    assert features.grad.isfinite().all()
    assert features.grad.any()
    assert loss.item() == pytest.approx(triplet_loop(features.tolist(), labels, 0.3), abs=1e-5)


def test_triplet_of_a_collapsed_batch_is_the_margin():
    features = torch.ones(4, 3, requires_grad=True)
    loss = batch_hard_triplet(features, torch.tensor([0, 0, 1, 1]), 0.3)
    loss.backward()
    assert loss.item() == pytest.approx(0.3)
    assert features.grad.isfinite().all()


# -- pooled statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(10, 10), (3, 50, 7), (1, 4)])
def test_pooled_variance_is_the_variance_of_the_pooled_samples(sizes):
    samples = [randn(n, 4, seed=n) * (k + 1) + 3 * k for k, n in enumerate(sizes)]  # different means and variances
    weights = [n / sum(sizes) for n in sizes]
    means, variances = [x.mean(0) for x in samples], [x.var(0, correction=0) for x in samples]
    mean = sum(w * m for w, m in zip(weights, means, strict=True))
    second = sum(w * second_moments(m, v) for w, m, v in zip(weights, means, variances, strict=True))
    pooled = torch.cat(samples)
    assert torch.allclose(mean, pooled.mean(0))
    assert torch.allclose(central_variance(mean, second), pooled.var(0, correction=0))
    between = sum(w * v for w, v in zip(weights, variances, strict=True))
    assert (central_variance(mean, second) > between).all()  # the mean of the variances misses the spread of the means


def test_second_moments():
    assert second_moments(torch.tensor([3.0, -2.0]), torch.tensor([0.5, 0.0])).tolist() == [9.5, 4.0]


def test_central_variance_is_never_negative():
    mean = torch.tensor([1.0, 2.0, 2.0])
    assert central_variance(mean, torch.tensor([1.0 - 1e-6, 3.9, 5.0])).tolist() == [0.0, 0.0, 1.0]


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_step_factor():
    factors = [step_factor(t, step=3, gamma=0.1) for t in range(8)]
    assert factors == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])
    assert all(isinstance(f, float) for f in factors)
    assert step_factor(500, step=1, gamma=1.0) == 1.0


def test_milestone_factor():
    assert [milestone_factor(t, (2, 5), 0.1) for t in range(7)] == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])
    assert milestone_factor(9, (), 0.1) == 1.0


def test_cosine_factor():
    assert cosine_factor(0, 20) == 1.0
    for t in range(20):
        assert cosine_factor(t, 20) == pytest.approx(math.cos(math.pi * t / 40) ** 2)  # the half-angle formula
        assert cosine_factor(t, 20) > cosine_factor(t + 1, 20)
    assert [cosine_factor(t, 20) for t in (20, 21, 400)] == [0.0, 0.0, 0.0]


def test_warmup_factor():
    assert [warmup_factor(t, 5, 0.1) for t in range(7)] == pytest.approx([0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0])
    assert warmup_factor(5, 5, 0.1) == 1.0
    assert warmup_factor(0, 0, 0.1) == 1.0  # no warm-up


# -- weights -----------------------------------------------------------------------------------------------------------


def random_weights(seed):
    rng = random.Random(seed)
    return {f"client{k}": rng.random() * 10 ** rng.randint(-3, 3) for k in range(rng.randint(1, 12))}


@pytest.mark.parametrize("weigh", [normalise, size_weights, uniform_weights])
@pytest.mark.parametrize("seed", range(5))
def test_weights_sum_to_one(weigh, seed):
    raw = random_weights(seed)
    weights = weigh(raw)
    assert list(weights) == list(raw)
    assert math.fsum(weights.values()) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("scale", [1e-9, 0.3, 7.0, 1e9])
def test_weights_do_not_depend_on_the_scale(scale):
    raw = random_weights(0)
    assert normalise({k: scale * w for k, w in raw.items()}) == pytest.approx(normalise(raw), rel=1e-14)


def test_size_weights_are_the_shares_of_the_images():
    assert size_weights({"a": 16522, "b": 12936, "c": 7365}) == {
        "a": 16522 / 36823,
        "b": 12936 / 36823,
        "c": 7365 / 36823,
    }


def test_a_weight_of_zero_stays_zero():
    assert normalise({"a": 0, "b": 3, "c": 1}) == {"a": 0.0, "b": 0.75, "c": 0.25}


def test_all_zero_is_uniform():
    assert normalise({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}) == dict.fromkeys("abcd", 0.25)
    assert size_weights({"a": 0, "b": 0}) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("bad", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weigh", [normalise, size_weights])
def test_weights_that_are_not_weights_are_refused(weigh, bad):
    with pytest.raises(ValueError, match="client b: the aggregation weight"):
        weigh({"a": 1.0, "b": bad})


def test_one_client_and_none():
    assert normalise({"a": 0.1}) == {"a": 1.0}
    assert normalise({}) == uniform_weights({}) == {}
