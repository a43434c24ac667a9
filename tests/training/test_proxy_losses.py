"""The losses of paper 004, Eqs. (2)-(7), against loops over images and proxies in float64."""

import math

import pytest
import torch
from torch.testing import assert_close

from fedsim.training.proxies import Proxies
from fedsim.training.proxy_loss import (
    ProxyLoss,
    across_cameras,
    camera_aware_loss,
    inter_camera_loss,
    intra_camera_loss,
    similarities,
)

TAU = 0.07


def draw(num_clusters=9, num_cameras=3, batch=12, dim=6, seed=0, missing=0.3):
    """Proxies of which some clusters lack a camera, and a batch; float64."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (cluster, camera)
        for cluster in range(num_clusters)
        for camera in range(num_cameras)
        if camera == cluster % num_cameras or torch.rand((), generator=generator) > missing
    ]
    memory = torch.nn.functional.normalize(torch.randn(len(pairs), dim, generator=generator, dtype=torch.float64))
    clusters, cameras = (torch.tensor(column) for column in zip(*pairs, strict=True))
    features = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, len(pairs), (batch,), generator=generator)
    return Proxies(memory, clusters, cameras), features, labels


CASES = [draw(), draw(num_clusters=40, num_cameras=8, batch=32, seed=1), draw(num_cameras=2, seed=2), draw(1, 1, 4)]


@pytest.fixture(params=range(len(CASES)), ids=["three cameras", "eight", "two", "one proxy"])
def case(request):
    return CASES[request.param]


# -- the references ----------------------------------------------------------------------------------------------------


def exponent(proxies, feature, p):
    """K[p] . f / tau"""
    f = feature / feature.norm()
    return float(sum(a * b for a, b in zip(proxies.memory[p].tolist(), f.tolist(), strict=True))) / TAU


def intra(proxies, feature, j):
    """Eq. (3)."""
    own = [p for p in range(len(proxies)) if proxies.cameras[p] == proxies.cameras[j]]
    total = sum(math.exp(exponent(proxies, feature, p)) for p in own)
    return -math.log(math.exp(exponent(proxies, feature, j)) / total)


def soft(proxies, feature, positives, negatives):
    """What Eqs. (4) and (6) have in common."""
    total = sum(math.exp(exponent(proxies, feature, u)) for u in [*positives, *negatives])
    terms = [math.log(math.exp(exponent(proxies, feature, p)) / total) for p in positives]
    return -sum(terms) / len(positives)


def hardest(proxies, feature, without, count):
    """Eqs. (5) and (7): the most similar other proxies."""
    others = [p for p in range(len(proxies)) if p not in without]
    return sorted(others, key=lambda p: -exponent(proxies, feature, p))[:count]


def inter(proxies, feature, j, count):
    """Eqs. (4), (5)."""
    positives = [p for p in range(len(proxies)) if proxies.clusters[p] == proxies.clusters[j]]
    return soft(proxies, feature, positives, hardest(proxies, feature, positives, count))


def camera_aware(proxies, feature, num_positives, count):
    """Eqs. (6), (7)."""
    best = []
    for camera in sorted(set(proxies.cameras.tolist())):
        members = [p for p in range(len(proxies)) if proxies.cameras[p] == camera]
        best.append(max(members, key=lambda p: exponent(proxies, feature, p)))
    positives = sorted(best, key=lambda p: -exponent(proxies, feature, p))[:num_positives]
    return soft(proxies, feature, positives, hardest(proxies, feature, positives, count))


def over_cameras(proxies, labels, losses):
    """Sum over cameras of means over their images."""
    total = 0.0
    for camera in set(proxies.cameras[labels].tolist()):
        own = [loss for loss, j in zip(losses, labels.tolist(), strict=True) if proxies.cameras[j] == camera]
        total += sum(own) / len(own)
    return total


def each(case, function, *options):
    proxies, features, labels = case
    return [function(proxies, f, int(j), *options) for f, j in zip(features, labels, strict=True)]


# -- the terms ---------------------------------------------------------------------------------------------------------


def close(found, expected):
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_eq3_is_cross_entropy_within_a_camera(case):
    proxies, features, labels = case
    close(intra_camera_loss(similarities(features, proxies, TAU), labels, proxies), each(case, intra))


@pytest.mark.parametrize("count", [0, 4, 50])
def test_eq4_and_eq5(case, count):
    proxies, features, labels = case
    found = inter_camera_loss(similarities(features, proxies, TAU), labels, proxies, count)
    close(found, each(case, inter, count))


@pytest.mark.parametrize(("positives", "negatives"), [(3, 30), (1, 2), (5, 0)])
def test_eq6_and_eq7(case, positives, negatives):
    proxies, features, _ = case
    found = camera_aware_loss(similarities(features, proxies, TAU), proxies, positives, negatives)
    expected = each(case, lambda proxies, f, j: camera_aware(proxies, f, positives, negatives))
    close(found, expected)


def test_a_lone_proxy_has_no_inter_camera_loss():
    proxies, features, labels = draw(1, 1, 4)
    similarity = similarities(features, proxies, TAU)
    assert_close(inter_camera_loss(similarity, labels, proxies), torch.zeros(4).double())


def test_two_cameras_have_two_positives():
    proxies, features, _ = draw(num_cameras=2, seed=3)
    similarity = similarities(features, proxies, TAU)
    three, two, one = (camera_aware_loss(similarity, proxies, count, 0) for count in (3, 2, 1))
    assert torch.equal(three, two)
    assert (one != two).any()


@pytest.mark.parametrize("weights", [(0.6, 0.7, 0.7), (1.0, 0.5, 0.0), (1.0, 0.0, 0.0)])
def test_eq2_sums_the_terms_over_cameras(case, weights):
    proxies, features, labels = case
    loss = ProxyLoss(intra=weights[0], inter=weights[1], camera=weights[2])
    terms = [each(case, intra), each(case, inter, 50)]
    terms.append(each(case, lambda proxies, f, j: camera_aware(proxies, f, 3, 30)))
    expected = sum(w * over_cameras(proxies, labels, term) for w, term in zip(weights, terms, strict=True))
    similarity = similarities(features, proxies, TAU)
    close(loss(similarity, labels, proxies), expected)


def test_gradients_reach_images_and_not_the_memory():
    proxies, features, labels = draw()
    features.requires_grad_()

    def total(x):
        return ProxyLoss()(similarities(x, proxies, TAU), labels, proxies)

    assert torch.autograd.gradcheck(total, features)
    assert not proxies.memory.requires_grad


def test_cameras_count_alike_whatever_the_number_of_their_images():
    losses, cameras = torch.tensor([1.0, 3.0, 10.0]), torch.tensor([5, 5, 1])
    assert float(across_cameras(losses, cameras)) == 12.0
