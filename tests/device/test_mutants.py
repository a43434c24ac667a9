"""Mistakes that a CPU does not show are found by a run on pretended GPUs."""

import multiprocessing

import pytest

from mutants import MUTANTS, RUNS, play

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "torchvision", "lightning", "jsonargparse", "torchmetrics", "faiss", "scipy"])


def ends_well(folder, run):
    """Play a run in a process of its own; return whether it ends well, and what it says."""
    log = folder / "log.txt"
    process = _server.Process(target=play, args=(folder, run, log), daemon=False)  # it may start ranks
    process.start()
    process.join(300)
    process.kill()
    return process.exitcode == 0, log.read_text()


def test_there_are_many_and_all_of_them_apply():
    assert len(MUTANTS) >= 25
    assert {mutant.run for mutant in MUTANTS} == set(RUNS)
    for mutant in MUTANTS:
        compile(mutant.mutated(), mutant.file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.dist) if "GPUs" in run else run for run in RUNS])
def test_without_a_mistake_every_run_ends_well(run, tmp_path):
    from mutants import SOURCE

    (tmp_path / "fedsim").symlink_to(SOURCE)
    good, said = ends_well(tmp_path, run)
    assert good, said


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_found(mutant, tmp_path):
    mutant.apply(tmp_path)
    good, said = ends_well(tmp_path, mutant.run)
    assert not good, "nothing was noticed"
    assert any(word in said for word in FOUND), said


FOUND = (
    "PretendError", "waits of visits", "same device", "cuda", "race", "NCCL refuses", "steps stay plain", "other bits",
)  # fmt: skip
"""Words of a refusal, or of a budget that is broken."""
