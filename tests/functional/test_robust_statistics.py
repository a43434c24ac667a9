"""Median, trimmed mean and Krum against plain loops over numbers."""

import random

import pytest
import torch

from fedsim.functional.robust import coordinate_median, krum_scores, trimmed_mean


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
