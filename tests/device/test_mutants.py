"""Mistakes that a CPU does not show are found by a run on simulated GPUs."""

import pytest

import others
from mutants import MUTANTS, ON_RANKS, RUNS, play
from runs import HAS_GRAPHS

FOUND = (
    "SimulatedGPUError", "waits of sessions", "steps stay plain", "other bits", "captures of a step that fails",
    "BadUpdateError", "perform_nocolor_split", "device_id parameter must be", "groups of ranks",
    "NCCL of a rank that is alone", "launches of a batch", "maps lose their order", "numbers in the padding",
    "a rule on the host", "memory that describe does not count", "locked memory", "a driver that is too old",
)  # fmt: skip
"""Words of a refusal, of a broken budget, of a comparison; of a client whose gradient is none; of torch 2.15 and 2.10
where gloo splits no group."""


def test_there_are_many_and_all_of_them_apply():
    assert len(MUTANTS) >= 25
    assert {mutant.run for mutant in MUTANTS} == {*RUNS, *ON_RANKS}
    for mutant in MUTANTS:
        compile(mutant.texts()[1], mutant.file, "exec")


FIRST = {mutant.run: mutant for mutant in reversed(MUTANTS)}
"""Run -> the first mistake that it is to find"""
CHOSEN = {*[*RUNS][::3], *ON_RANKS}
"""The runs of ``make test``"""


def case(value, run, is_chosen=True):
    marks = others.unless(is_chosen and run in CHOSEN)
    if run in ON_RANKS:
        marks.append(pytest.mark.dist)
    if run.startswith("graph"):
        marks.append(pytest.mark.skipif(not HAS_GRAPHS, reason="graphs are refused"))
    return pytest.param(value, marks=[pytest.mark.slow, *marks], id=str(value))


@pytest.mark.parametrize("mutant", [case(mutant, mutant.run, mutant is FIRST[mutant.run]) for mutant in MUTANTS])
def test_a_mistake_is_found(mutant, tmp_path):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever the mistake leads to
        play(tmp_path, mutant.run, mutant)
    said = f"{raised.typename}: {raised.value}"
    assert any(word in said for word in FOUND), said


@pytest.mark.parametrize("run", [case(run, run) for run in (*RUNS, *ON_RANKS)])
def test_without_a_mistake_every_run_ends_well(run, tmp_path):
    """After all mistakes, so that none of them has left anything that fails by itself."""
    play(tmp_path, run)
