"""Median, trimmed mean, Krum, Bulyan and the geometric median against plain loops over numbers."""

import math
import random

import pytest
import torch

from fedsim.functional.robust import (
    bulyan_choice,
    coordinate_median,
    geometric_median_weights,
    krum_scores,
    mean_around_median,
    trimmed_mean,
)


def vectors(clients, length, seed):
    draw = random.Random(seed)
    return [[draw.choice([draw.gauss(0, 1), 1e6, -1e6]) for _ in range(length)] for _ in range(clients)]


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
def test_the_median_is_that_of_a_loop(clients):
    rows = vectors(clients, 9, clients)
    expected = []
    for column in zip(*rows, strict=True):
        ordered = sorted(column)
        expected.append((ordered[(clients - 1) // 2] + ordered[clients // 2]) / 2)
    found = coordinate_median(torch.tensor(rows))
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("clients", "cut"), [(3, 1), (5, 0), (5, 2), (10, 3)])
def test_the_trimmed_mean_is_that_of_a_loop(clients, cut):
    rows = vectors(clients, 9, clients)
    expected = [sum(sorted(column)[cut : clients - cut]) / (clients - 2 * cut) for column in zip(*rows, strict=True)]
    found = trimmed_mean(torch.tensor(rows), cut)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("clients", "bad"), [(3, 0), (5, 1), (9, 3)])
def test_krum_scores_are_those_of_a_loop(clients, bad):
    draw = random.Random(clients)
    x = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(clients)]
    expected = []
    for i in range(clients):
        distances = sorted(sum((a - b) ** 2 for a, b in zip(x[i], x[j], strict=True)) for j in range(clients) if j != i)
        expected.append(sum(distances[: clients - bad - 2]))
    rows = torch.tensor(x, dtype=torch.float64)
    found = krum_scores((rows[:, None] - rows).square().sum(2), bad)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def squared(rows):
    return [[sum((a - b) ** 2 for a, b in zip(r, s, strict=True)) for s in rows] for r in rows]


@pytest.mark.parametrize(("clients", "bad"), [(3, 0), (4, 0), (7, 1), (9, 1), (11, 2), (15, 3)])
def test_bulyan_chooses_and_averages_as_a_loop(clients, bad):
    draw = random.Random(clients)
    rows = [[draw.choice([draw.gauss(0, 1), draw.gauss(0, 1), 1e3]) for _ in range(5)] for _ in range(clients)]
    distances, left, chosen = squared(rows), list(range(clients)), []
    for _ in range(clients - 2 * bad):
        scores = {}
        for i in left:
            others = sorted(distances[i][j] for j in left if j != i)
            scores[i] = sum(others[: max(len(left) - bad - 2, 1)])
        best = min(left, key=lambda i: (scores[i], i))
        left.remove(best)
        chosen.append(best)
    exact = torch.tensor(distances, dtype=torch.float64)
    assert bulyan_choice(exact, bad) == sorted(chosen)
    expected = []
    for column in zip(*(rows[i] for i in chosen), strict=True):
        ordered = sorted(column)
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        closest = sorted(ordered, key=lambda x: abs(x - median))[: clients - 4 * bad]  # stable, as ordered
        expected.append(sum(closest) / len(closest))
    found = mean_around_median(torch.tensor([rows[i] for i in sorted(chosen)]), clients - 4 * bad)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def weiszfeld(rows, smoothing, iterations):
    """The point after some iterations of the algorithm on numbers."""
    point = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    for _ in range(iterations):
        weights = [1 / max(smoothing, math.dist(row, point)) for row in rows]
        point = [
            sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights)
            for column in zip(*rows, strict=True)
        ]
    return point


@pytest.mark.parametrize("seed", range(12))
def test_the_geometric_median_is_that_of_a_loop(seed):
    draw = random.Random(seed)
    clients, smoothing, iterations = draw.randint(1, 8), draw.choice([1e-6, 0.3]), draw.choice([1, 3, 40])
    rows = [[draw.gauss(0, draw.choice([1, 1, 30])) for _ in range(4)] for _ in range(clients)]
    weights = geometric_median_weights(torch.tensor(squared(rows), dtype=torch.float64), smoothing, iterations)
    found = weights @ torch.tensor(rows, dtype=torch.float64)
    expected = torch.tensor(weiszfeld(rows, smoothing, iterations), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_the_geometric_median_stays_among_the_honest(size):
    rows = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [size, size]]
    weights = geometric_median_weights(torch.tensor(squared(rows), dtype=torch.float64), 1e-6, 100)
    point = weights @ torch.tensor(rows, dtype=torch.float64)
    assert point.max() < 1.001
    found, best = (sum(math.dist(p, row) for row in rows) for p in (point.tolist(), weiszfeld(rows, 1e-6, 1000)))
    assert found - best < 1e-3


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_equal_vectors_are_their_own_middle(clients):
    rows = [[3.0, -4.0]] * clients
    weights = geometric_median_weights(torch.zeros(clients, clients, dtype=torch.float64), 1e-6, 5)
    torch.testing.assert_close(weights @ torch.tensor(rows, dtype=torch.float64), torch.tensor([3.0, -4.0]).double())
    assert torch.equal(mean_around_median(torch.tensor(rows), clients), torch.tensor([3.0, -4.0]))
