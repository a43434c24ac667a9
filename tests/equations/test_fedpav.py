"""FedPav's line 9 (paper 003, Algorithm 1): three clients, exact numbers; tests/test_round.py tests the round."""

import pytest

from fedsim.method import Report
from fedsim.methods import FedAvg, FedPav

REPORTS = {"a": Report(10, {}), "b": Report(30, {}), "c": Report(60, {})}


def test_line_9_weighs_by_size():
    assert FedPav().weights(REPORTS) == {"a": 0.1, "b": 0.3, "c": 0.6}


def test_n_is_the_size_of_the_participants():
    assert FedPav().weights({name: REPORTS[name] for name in ("a", "b")}) == {"a": 0.25, "b": 0.75}


def test_uniform_is_one_over_k():
    assert FedPav(weighting="uniform").weights(REPORTS) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})


def test_fedavg_weighs_as_fedpav():
    assert FedAvg().weights(REPORTS) == FedPav().weights(REPORTS)
