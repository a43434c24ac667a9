"""Seeds: frozen for ever, because a resumed run must draw what the interrupted one would have drawn."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch

from fedsim.core.seeding import derive_seed, numpy_generator, seeded_host, torch_generator


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0,), 7210762507766007076),
        ((0, 3, "client-a", "batches"), 6030953082986952247),
        ((1, "1"), 123110766828996268),
    ],
)
def test_golden_seeds(parts, seed):
    assert derive_seed(*parts) == seed


def test_seeds_are_distinct_and_in_range():
    purposes = ["batches", "augment", "dropout", "modules"]
    keys = list(itertools.product(range(3), range(50), [f"client{i}" for i in range(20)], purposes))
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) == 12000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # the range is used


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), ("1",)),
        ((0, "a", "bc"), (0, "ab", "c")),
        ((1, 23), (12, 3)),
        ((0, 1), (1, 0)),
        ((), ("",)),
        (("a",), ("a", "")),
        (("a, 'b'",), ("a", "b")),
        ((-1,), (1,)),
    ],
)
def test_parts_are_typed_and_separated(one, other):
    assert derive_seed(*one) != derive_seed(*other)


def test_torch_generators_are_reproducible_and_independent():
    first = torch.rand(5, generator=torch_generator(0, 1, "a"))
    torch.manual_seed(5)  # the global stream is no part of it
    assert torch.equal(torch.rand(5, generator=torch_generator(0, 1, "a")), first)
    assert not torch.equal(torch.rand(5, generator=torch_generator(0, 2, "a")), first)
    assert torch_generator(0, 1, "a").initial_seed() == derive_seed(0, 1, "a")


def test_torch_generator_leaves_the_global_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(100, generator=torch_generator(0, "a"))
    assert torch.equal(torch.rand(3), expected)


def test_a_block_draws_from_the_seeded_stream_of_the_host_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with mock.patch.object(torch.cuda, "manual_seed_all", side_effect=AssertionError("the streams of GPUs are reset")):
        with seeded_host(7):
            drawn = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.manual_seed(7) and torch.rand(3))


def test_numpy_generators_are_reproducible_and_independent():
    first = numpy_generator(0, 1, "a").random(5)
    assert np.array_equal(numpy_generator(0, 1, "a").random(5), first)
    assert not np.array_equal(numpy_generator(0, 1, "b").random(5), first)


def test_streams_of_neighbouring_rounds_are_uncorrelated():
    draws = np.array([numpy_generator(0, round_, "a").random(200) for round_ in range(20)])
    correlation = np.corrcoef(draws) - np.eye(20)
    assert abs(correlation).max() < 0.35  # five standard deviations
