"""The supervised loss against loops over images, that it changes nothing, and paper 002's balance of its terms."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.methods import FedPav
from fedsim.models import Neck
from fedsim.models.reid import Features, ReIDModel, make_head
from fedsim.papers.files import read_paper
from fedsim.training.batch import Batch
from fedsim.training.flat_model import Output
from fedsim.training.metric_loss import MetricLoss
from fedsim.training.objective import CenterLoss, Objective, loss_terms, supervised_loss
from fedsim.training.settings import LocalTraining
from small import fit, make_model, vector

B, D, C, Z = 64, 256, 320, 751
"""images, features of the neck, pooled features, identities"""
SMOOTHING, MARGIN = 0.1, 0.3


class LabelledNorm(torch.nn.Module):
    """A metric loss that is easy to write as a loop: the mean of label times squared length."""

    def forward(self, features, labels):
        return (labels * features.square().sum(1)).mean()


def drawn(dtype=torch.float64):
    """An output for 16 people with 4 images each, its batch, and centers of the pooled features [Z, C]."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    labels = torch.randperm(Z, generator=generator)[: B // 4].repeat_interleave(4)
    features, head = Features(pool=randn(B, C).requires_grad_(), neck=randn(B, D).requires_grad_()), randn(Z, D) / 16
    return Output(features, features.neck @ head.T, head), Batch(None, labels), randn(Z, C)


def settings(*terms, squared=False, unit_length=False, layer="neck"):
    """An objective with these terms beside the cross-entropy."""
    return Objective(
        cross_entropy=0.7, label_smoothing=SMOOTHING, margin=MARGIN, squared=squared, unit_length=unit_length,
        triplet=0.4 if "triplet" in terms else 0.0, triplet_on=layer,
        center=CenterLoss(weight=0.003) if "center" in terms else None,
        metric=MetricLoss(name=f"{__name__}.LabelledNorm", weight=0.002) if "metric" in terms else None,
    )  # fmt: skip


# -- each term, and their sum ------------------------------------------------------------------------------------------


def cross_entropy_of(logits, labels):
    """``-sum over z of q_z log p_z``, q = (1 - s) onehot + s / Z: a mean over the images."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_sum = math.log(sum(math.exp(z) for z in row))
        for z, logit in enumerate(row):
            total -= ((1 - SMOOTHING) * (z == label) + SMOOTHING / Z) * (logit - log_sum)
    return total / B


def triplet_of(features, labels, squared, unit_length):
    """``max(0, m + farthest image of the person - nearest one of another person)``: a mean over the images."""
    x, total = features, 0.0
    if unit_length:
        x = [[value / math.hypot(*row) for value in row] for row in features]
    for i in range(B):
        distances = [math.dist(x[i], row) ** (2 if squared else 1) for row in x]
        positive = max(distances[j] for j in range(B) if labels[j] == labels[i] and j != i)
        negative = min(distances[j] for j in range(B) if labels[j] != labels[i])
        total += max(0.0, MARGIN + positive - negative)
    return total / B


def center_of(features, labels, centers):
    """``1/2 |f - c_y|^2``: a mean over the images."""
    return sum(math.dist(row, centers[label]) ** 2 / 2 for row, label in zip(features, labels, strict=True)) / B


def metric_of(features, labels):
    return sum(label * sum(value**2 for value in row) for row, label in zip(features, labels, strict=True)) / B


def loops(objective, output, batch, centers):
    """The terms by name."""
    pool, neck, y = output.features.pool.tolist(), output.features.neck.tolist(), batch.labels.tolist()
    x = neck if objective.triplet_on == "neck" else pool
    return {
        "cross_entropy": cross_entropy_of(output.logits.tolist(), y),
        "triplet": triplet_of(x, y, objective.squared, objective.unit_length),
        "center": center_of(pool, y, centers.tolist()),
        "metric": metric_of(neck, y),
    }


@pytest.mark.parametrize(
    ("squared", "unit_length", "layer"), [(False, False, "neck"), (True, True, "neck"), (False, True, "pool")]
)
def test_each_term_and_their_weighted_sum_equal_loops_over_images(squared, unit_length, layer):
    objective = settings("triplet", "center", "metric", squared=squared, unit_length=unit_length, layer=layer)
    output, batch, centers = drawn()
    expected = loops(objective, output, batch, centers)
    scored = supervised_loss(objective, output, batch, centers)
    for name, part in zip(objective.parts, scored.parts, strict=True):
        assert part.item() == pytest.approx(expected[name], rel=1e-10), name
    total = sum(objective.weights[name] * value for name, value in expected.items())
    assert scored.loss.item() == pytest.approx(total, rel=1e-10)
    assert all(expected.values())
    logits = output.logits.tolist()
    assert scored.guesses.tolist() == [max(range(Z), key=row.__getitem__) for row in logits]
    assert torch.equal(scored.truth, batch.labels)


TERMS = [
    [name for name, is_in in zip(("triplet", "center", "metric"), chosen, strict=True) if is_in]
    for chosen in product((False, True), repeat=3)
]


@pytest.mark.parametrize("terms", TERMS, ids="+".join)
def test_a_loss_has_the_terms_that_have_a_weight(terms):
    objective, (output, batch, centers) = settings(*terms), drawn()
    expected = loops(objective, output, batch, centers)
    assert list(loss_terms(objective, output, batch, centers)) == list(objective.weights) == ["cross_entropy", *terms]
    scored = supervised_loss(objective, output, batch, centers)
    total = sum(objective.weights[name] * expected[name] for name in ("cross_entropy", *terms))
    assert scored.loss.item() == pytest.approx(total, rel=1e-10)
    assert len(scored.parts) == len(objective.parts) == (1 + len(terms) if terms else 0)
    assert scored.loss.requires_grad
    assert not any(part.requires_grad for part in scored.parts)


def test_the_gradient_is_the_weighted_sum_of_the_terms_gradients():
    objective, (output, batch, centers) = settings("triplet", "center", "metric"), drawn()
    terms, loss = loss_terms(objective, output, batch, centers), supervised_loss(objective, output, batch, centers).loss

    def gradient(scalar):
        found = torch.autograd.grad(scalar, output.features, retain_graph=True, materialize_grads=True)
        return torch.cat(found, 1)

    total = sum(objective.weights[name] * gradient(term) for name, term in terms.items())
    assert torch.allclose(gradient(loss), total, rtol=1e-12, atol=1e-14)


def test_it_changes_nothing_that_it_is_given():
    objective, (output, batch, centers) = settings("triplet", "center", "metric"), drawn(torch.float32)
    tensors = [*output.features, output.logits, output.head, batch.labels, centers]
    before, versions = [tensor.detach().clone() for tensor in tensors], [tensor._version for tensor in tensors]
    random, asked = torch.get_rng_state(), str(objective)
    first, second = (supervised_loss(objective, output, batch, centers) for _ in range(2))
    second.loss.backward()
    assert [tensor._version for tensor in tensors] == versions
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert str(objective) == asked
    assert torch.equal(first.loss, second.loss)
    assert all(torch.equal(*pair) for pair in zip(first.parts, second.parts, strict=True))


# -- Eq. (9) of paper 002 ----------------------------------------------------------------------------------------------


def test_eq9_weighs_the_two_losses():
    """Half a loss with plain SGD is half the rate: lambda = 1/2 of both."""

    def play(lr, **objective):
        how = partial(torch.optim.SGD, lr=lr)
        client = LocalTraining(batch_size=8, sampler="identity", optimizer=how)
        model = make_model(FedPav(), client=client, objective=Objective(**objective))
        fit(model, rounds=1)
        return vector(model), model.round_metrics["train/loss"]

    half, half_loss = play(0.02, cross_entropy=0.5, triplet=0.5, squared=True)
    whole, whole_loss = play(0.01, cross_entropy=1.0, triplet=1.0, squared=True)
    assert torch.equal(half, whole)
    assert half_loss == pytest.approx(whole_loss / 2)
    other, _ = play(0.02, cross_entropy=0.25, triplet=0.75, squared=True)
    assert not torch.equal(half, other)
    plain, _ = play(0.02, cross_entropy=0.5, triplet=0.5)
    assert not torch.equal(half, plain)


def gradient_ratio(seed, **triplet):
    """Norm of the triplet loss's gradient on the pooled features over that of the cross-entropy, at paper 002's size:
    2,048 pooled and 128 embedded features, 32 images of 8 people, of Market-1501's 751."""
    torch.manual_seed(seed)
    model = ReIDModel(Pooled(), Neck(kind="linear", dim=128, dropout=0.0))
    head = make_head(128, 751)
    labels = torch.randperm(751)[:8].repeat_interleave(4)
    images = (0.5 * torch.randn(8, 2048).repeat_interleave(4, 0) + torch.randn(32, 2048)).relu().requires_grad_()
    features = model(images)
    objective = Objective(cross_entropy=0.5, triplet=0.5, **triplet)
    scored = supervised_loss(objective, Output(features, head(features.neck), head.weight), Batch(None, labels))
    assert scored.loss.item() == pytest.approx(0.5 * sum(part.item() for part in scored.parts))
    alone = torch.nn.functional.cross_entropy(head(features.neck), labels) / 2
    (of_entropy,) = torch.autograd.grad(alone, images, retain_graph=True)
    (of_both,) = torch.autograd.grad(scored.loss, images)
    return ((of_both - of_entropy).norm() / of_entropy.norm()).item()


class Pooled(torch.nn.Module):
    out_channels = 2048

    def forward(self, images):
        return images


@pytest.mark.parametrize("seed", range(3))
def test_both_parts_of_paper_002s_loss_count(seed):
    """As shipped: 44 to 46 times over five seeds, before the head has learned. With the root of the distance of raw
    features, the common recipe (Luo et al., 2019), 203 to 238 times; with their squared distance 6,200 to 7,200."""
    printed = read_paper("002").content["protocol"]["model"]["objective"]
    assert printed["squared"]
    assert (printed["cross_entropy"], printed["triplet"]) == (0.5, 0.5)
    shipped = {name: value for name, value in printed.items() if name not in ("cross_entropy", "triplet")}
    assert 1 < gradient_ratio(seed, **shipped) < 100
    assert gradient_ratio(seed, squared=True) > 1000


def test_both_parts_are_logged_for_each_client():
    """Their weighted sum is the loss; without a triplet loss there are no parts."""
    client = LocalTraining(batch_size=8, sampler="identity", optimizer=partial(torch.optim.SGD, lr=0.02))
    model = make_model(FedPav(), client=client, objective=Objective(cross_entropy=0.25, triplet=0.75, unit_length=True))
    found = fit(model, rounds=1).round_metrics
    for name in model.parts.names:
        entropy, triplet = (found[f"train/{name}/{part}"] for part in ("cross_entropy", "triplet"))
        assert 0 < triplet < 2.3  # unit vectors are at most 2 apart
        assert found[f"train/{name}/loss"] == pytest.approx(0.25 * entropy + 0.75 * triplet)
    plain = fit(make_model(FedPav()), rounds=1).round_metrics
    assert not [name for name in plain if name.endswith(("cross_entropy", "triplet"))]


def test_eq9_needs_one_of_them():
    assert Objective(cross_entropy=0.0, triplet=1.0).cross_entropy == 0
    with pytest.raises(ConfigError, match=r"model\.objective\.cross_entropy: -1"):
        Objective(cross_entropy=-1.0)
    with pytest.raises(ConfigError, match="nothing would be learnt"):
        Objective(cross_entropy=0.0)
