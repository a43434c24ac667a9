"""Cases of which ``make test`` takes some, and ``make test-others`` the others.

A file chooses cases that differ most, by :func:`some` and its kin. Of what is chosen, a function has as many cases in
``make test`` as take :data:`BUDGET` seconds, by the measurement of ``make durations``: at least one, unless that alone
takes longer than :data:`LONGEST`.
"""

import argparse
import re
import zlib
from collections import defaultdict

import pytest

from durations import function_of

BUDGET = 0.5
"""seconds of the cases of a function in ``make test``"""
LONGEST = 2
"""seconds of a case there"""

METHODS = (
    "ditto", "feature_concatenation", "fedavg_d", "fedbn", "fedcapr", "feddip", "fedklpr", "fedpav", "fedpav_kd_cdw",
    "fedreid", "fedureid", "ifca", "pfedme", "scaffold", "ska", "subfedavg",
)  # fmt: skip
"""Configs that differ in what clients and server exchange and keep"""


def unless(is_chosen):
    """The marks of a case."""
    return [] if is_chosen else [pytest.mark.others]


def some(cases, chosen):
    """The cases as parameters of a test: those that are not chosen are for ``make test-others``."""
    assert {*chosen} <= {*cases}, "a case has another name now"
    return [pytest.param(case, marks=unless(case in chosen)) for case in cases]


def each_third(cases):
    """As :func:`some`: of many files, every third."""
    return some(cases, [*cases][::3])


def each_second(cases):
    """As :func:`some`: of settings that are alike, every second."""
    return some(cases, [*cases][::2])


def first_of_each_table(rows):
    """As :func:`some`: of names as ``003/table4_batch_32``, the first of each table."""
    first = {}
    for row in rows:
        first.setdefault(row.partition("_")[0], row)
    return some(rows, first.values())


def names_in(request, test):
    """The values of ``name`` with which this run has a test of the module; ``request``: of the module's fixture."""
    begin = f"{request.node.nodeid}::{test}["
    return [item.callspec.params["name"] for item in request.session.items if item.nodeid.startswith(begin)]


def mark_beyond_budget(items, durations):
    """Mark the cases of long functions that are beyond the budget; those that stay are spread over all."""
    cases = defaultdict(list)
    for item in items:
        if function_of(item.nodeid) in durations and not any(map(item.get_closest_marker, ("others", "cluster"))):
            cases[function_of(item.nodeid)].append(item)
    for function, alike in cases.items():
        number = number_in_budget(durations[function].case, len(alike))
        chosen = {index * len(alike) // number for index in range(number)}
        for index, item in enumerate(alike):
            if index not in chosen:
                item.add_marker(pytest.mark.others)


def number_in_budget(seconds, cases):
    """Return how many of the cases, which take some seconds each, are within the budget.

    >>> number_in_budget(0.2, 10), number_in_budget(0.2, 1), number_in_budget(2, 9), number_in_budget(3, 9)
    (2, 1, 1, 0)
    """
    if seconds > LONGEST:
        return 0
    return max(1, min(cases, int(BUDGET / seconds) if seconds else cases))


def share_of(text):
    """Return the number of a share and that of all shares in a text such as 3/12."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is no share; the third of twelve is 3/12")
    return int(match[1]), int(match[2])


def is_in_share(item, share):
    """Whether a test is in a share: functions are dealt out by their names."""
    number, shares = share
    return zlib.crc32(function_of(item.nodeid).encode()) % shares == number - 1
