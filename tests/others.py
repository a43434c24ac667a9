"""Cases of which ``make test`` takes some, and ``make test-others`` the others."""

import pytest

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
