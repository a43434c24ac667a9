"""The choice of the cases that ``make test`` leaves to ``make test-others``."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from durations import Duration
from others import is_in_share, mark_beyond_budget, share_of


class Item:
    """A test as pytest collects it: its id and its marks."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.path, self.marks = nodeid, Path(nodeid.partition("::")[0]), [*marks]

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.append(mark.name)


def cases(function, number, *marks):
    return [Item(f"tests/a/test_a.py::{function}[{index}]", *marks) for index in range(number)]


@pytest.mark.parametrize(("seconds", "kept"), [(0.05, range(9)), (0.15, [0, 3, 6]), (2, [0]), (3, [])])
def test_a_function_has_as_many_cases_as_the_budget_allows(seconds, kept):
    items = cases("test_long", 9)
    mark_beyond_budget(items, {"test_a.py::test_long": Duration(9 * seconds, seconds)})
    assert [index for index, item in enumerate(items) if "others" not in item.marks] == [*kept]


def test_chosen_cases_and_those_of_a_cluster_are_left_alone():
    """Marked cases do not count either."""
    chosen, cluster = cases("test_long", 3, "others"), cases("test_slurm", 3, "cluster")
    quick, usual = cases("test_quick", 3), cases("test_long", 2)
    slow = Duration(5, 0.2)
    durations = {"test_a.py::test_long": slow, "test_a.py::test_slurm": slow}
    mark_beyond_budget(chosen + cluster + quick + usual, durations)
    assert all(item.marks == ["others"] for item in chosen)
    assert all(item.marks == ["cluster"] for item in cluster)
    assert all(item.marks == [] for item in quick + usual)


@pytest.mark.parametrize("shares", [1, 12])
def test_each_test_is_in_one_share_with_all_cases_of_its_function(shares):
    items = [item for number in range(60) for item in cases(f"test_{number}", 2)]
    dealt = [[item for item in items if is_in_share(item, share_of(f"{k}/{shares}"))] for k in range(1, shares + 1)]
    assert sorted(item.nodeid for share in dealt for item in share) == sorted(item.nodeid for item in items)
    for share in dealt:
        assert share, "sixty functions are enough for twelve shares"
        functions = {item.nodeid.partition("[")[0] for item in share}
        assert len(share) == 2 * len(functions), "with both cases"


@pytest.mark.parametrize("text", ["", "3", "0/12", "13/12", "-1/2", "a/b", "1/0"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="the third of twelve is 3/12"):
        share_of(text)
