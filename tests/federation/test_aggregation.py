"""Sums of uploads: which of them ranks exchange together with their reports."""

import pytest
import torch

from fedsim.federation.aggregation.sums import Aggregator
from fedsim.methods.base import Weights

MOST = 2**20 // 8  # numbers of float64 in 1 MiB


class Shared:
    """Stands for the statistics of an architecture: the sums ask it for their length alone."""

    def __init__(self, length):
        self.num_shared = length


@pytest.mark.parametrize(
    ("length", "reduction", "are_known", "is_ready"),
    [
        (MOST, "exact", True, True),
        (MOST + 1, "exact", True, False),  # too large: gloo's own way, or shared memory, is quicker
        (MOST, "fp32", True, False),  # these are added in the order of the ranks
        (MOST, "exact", False, False),  # uploads still wait for their weights
    ],
)
def test_small_exact_sums_of_known_weights_are_ready(length, reduction, are_known, is_ready):
    sums = Aggregator(None, {"a": Shared(length)}, {"town0": "a"}, reduction, torch.device("cpu"), seed=0)
    sums.begin(0, {"a": {}}, {"a": Weights({"town0": 1.0})} if are_known else None)
    assert [len(total) for total in sums.ready()] == ([length] if is_ready else [])
