"""Masks of pruning on a simulated GPU, where the smallest are found in another way than on a CPU."""

import math

import pytest
import torch

import simulated
from fedsim.functional.pruning import global_magnitude_mask, remaining

LAYERS = [slice(3, 23), slice(32, 132), slice(160, 167)]


@pytest.mark.parametrize("floor", [0.0, 0.6])
def test_global_masks_are_those_of_the_cpu(floor):
    generator, spent = torch.Generator().manual_seed(0), 0
    for _ in range(6):
        weights, mask = torch.randn(170, generator=generator), torch.rand(170, generator=generator) < 0.8
        expected = global_magnitude_mask(weights, mask, LAYERS, 0.35, floor)
        assert not torch.equal(expected, mask)
        with simulated.cuda(1):
            found = global_magnitude_mask(weights.to("cuda"), mask.to("cuda"), LAYERS, 0.35, floor)
        assert torch.equal(found.cpu(), expected)
        least = [math.ceil(floor * (layer.stop - layer.start)) for layer in LAYERS]
        spent += sum(left <= few for left, few in zip(remaining(mask, LAYERS), least, strict=True))
    assert (spent > 0) == (floor > 0), "a layer that has nothing to give"
