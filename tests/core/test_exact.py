"""Sums on the 2**-40 grid: right, the same bits in any order and on any ranks, and loud when they cannot be."""

import math
import random
from fractions import Fraction

import pytest
import torch

from fedsim.core.exact import GRID, MAX_MAGNITUDE, accumulate
from plain_sums import snap

SEEDS = range(8)


def random_case(seed, num_addends=None, size=16):
    """Weights that sum to 1, and float32 tensors whose entries span many magnitudes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_addends = num_addends or rng.randint(2, 12)
    raw = [rng.random() for _ in range(num_addends)]
    weights = [r / sum(raw) for r in raw]
    scales = 10.0 ** torch.randint(-6, 4, (num_addends, size), generator=generator)
    tensors = (torch.rand(num_addends, size, generator=generator) * 2 - 1) * scales
    return weights, list(tensors.float())


def grid_sum(weights, values):
    """The definition, in integers: each product rounded to the nearest 2**-40 (ties to even), then summed."""
    return Fraction(sum(round(Fraction(w * v) * 2**40) for w, v in zip(weights, values, strict=True)), 2**40)


def exact_weighted_sum(weights, tensors):
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for weight, x in zip(weights, tensors, strict=True):
        accumulate(total, weight, x)
    return total / GRID


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.int64), b.view(torch.int64))


def test_constants():
    assert GRID == 2**40
    assert MAX_MAGNITUDE == 4096


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_loop_over_integers(seed):
    weights, tensors = random_case(seed)
    total = exact_weighted_sum(weights, tensors)
    assert total.dtype is torch.float64
    for i, value in enumerate(total.tolist()):
        assert Fraction(value) == grid_sum(weights, [x[i].item() for x in tensors])


def test_snap_rounds_to_the_nearest_grid_point():
    step = 2.0**-40
    x = torch.tensor([0.0, 0.49 * step, 0.51 * step, 0.5 * step, 1.5 * step, -0.51 * step, 1.0])
    assert snap(1.0, x).tolist() == [0.0, 0.0, step, 0.0, 2 * step, -step, 1.0]


def test_largest_values_are_exact():
    largest = torch.full((3,), MAX_MAGNITUDE)
    assert exact_weighted_sum([1.0], [largest]).tolist() == [4096.0] * 3
    assert exact_weighted_sum([0.5, 0.5], [largest, -largest]).tolist() == [0.0] * 3
    almost = math.nextafter(4096.0, 0.0)  # not a float32, but a float64 on a finer grid than 2**-40
    total = exact_weighted_sum([1.0], [torch.tensor([almost], dtype=torch.float64)])
    assert Fraction(total.item()) == grid_sum([1.0], [almost])


@pytest.mark.parametrize("seed", SEEDS)
def test_permutation_changes_no_bit(seed):
    weights, tensors = random_case(seed)
    expected = exact_weighted_sum(weights, tensors)
    rng = random.Random(1000 + seed)
    for _ in range(20):
        order = rng.sample(range(len(weights)), len(weights))
        total = exact_weighted_sum([weights[k] for k in order], [tensors[k] for k in order])
        assert same_bits(total, expected)


def test_float32_sums_depend_on_the_order_and_exact_sums_do_not():
    weights, tensors = random_case(0, num_addends=12, size=256)
    rng = random.Random(0)
    float32, exact = set(), set()
    for _ in range(20):
        order = rng.sample(range(12), 12)
        plain = torch.zeros(256)
        for k in order:
            plain.add_(tensors[k], alpha=weights[k])
        float32.add(plain.numpy().tobytes())
        total = exact_weighted_sum([weights[k] for k in order], [tensors[k] for k in order])
        exact.add(total.numpy().tobytes())
    assert len(float32) > 1
    assert len(exact) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_partial_sums_of_any_ranks_give_the_same_bits(seed, num_ranks):
    weights, tensors = random_case(seed)
    expected = exact_weighted_sum(weights, tensors)
    rng = random.Random(2000 + seed)
    for _ in range(10):
        partial = [torch.zeros_like(expected) for _ in range(num_ranks)]
        for weight, x in zip(weights, tensors, strict=True):
            accumulate(partial[rng.randrange(num_ranks)], weight, x)  # a rank without clients contributes zeros
        rng.shuffle(partial)
        while len(partial) > 1:  # a random reduction tree
            partial.append(partial.pop(0) + partial.pop(0))
        assert same_bits(partial[0] / GRID, expected)  # they count grid points


@pytest.mark.parametrize("num_addends", [1, 2, 5, 50])
def test_error_is_at_most_half_a_grid_step_per_addend(num_addends):
    weights, tensors = random_case(num_addends, num_addends=num_addends, size=64)
    total = exact_weighted_sum(weights, tensors).tolist()
    for i, value in enumerate(total):
        truth = sum(Fraction(w * x[i].item()) for w, x in zip(weights, tensors, strict=True))
        assert abs(Fraction(value) - truth) <= num_addends * Fraction(1, 2**41)


@pytest.mark.parametrize("size", [0, 1, 2**17 - 1, 2**17, 2**17 + 1, 300_001])
def test_accumulating_in_blocks_is_snapping(size):
    x = (torch.rand(size, generator=torch.Generator().manual_seed(size)) - 0.5) * 2 * MAX_MAGNITUDE
    total = torch.full((size,), 3.0, dtype=torch.float64)
    accumulate(total, 1 / 3, x)
    assert same_bits((total - 3.0) / GRID, snap(1 / 3, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_addends_are_left_alone(dtype):
    x = torch.tensor([4.0, -8.0], dtype=dtype)
    assert snap(0.25, x).tolist() == [1.0, -2.0]
    assert x.tolist() == [4.0, -8.0]
    total = torch.zeros(2, dtype=torch.float64)
    accumulate(total, 0.25, x)
    assert x.tolist() == [4.0, -8.0]
