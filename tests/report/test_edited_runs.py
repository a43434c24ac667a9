"""Each edit of a file of a true run shows, and no state in which a kill or a resume leaves one is doubted.

``benchmarks/forgeries.py --edits 200`` draws many, this a few of each file.
"""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import forgeries


def test_edits_of_a_true_run_show(tmp_path, monkeypatch):
    slipped, counts = forgeries.draw_edits(40, 3, tmp_path)
    assert slipped == []
    assert {*counts} == {f"edited: {name}" for name in ("summary.json", "metrics.csv", "tests/best.json")}
    run, again = tmp_path / "true" / "run", tmp_path / "again"
    monkeypatch.setattr(forgeries.true_runs, "true_run", lambda folder: run)
    monkeypatch.setattr(forgeries.true_runs, "edited", lambda rng, run, copy: f"{shutil.copytree(run, copy)}: nothing")
    assert len(forgeries.draw_edits(3, 0, again)[0]) == 3, "the true run is not doubted, and the draw finds what slips"


@pytest.mark.parametrize("history", forgeries.true_runs.HISTORIES)
def test_honest_states_are_shown_without_a_doubt(history, tmp_path):
    doubted, counts = forgeries.judge_states(tmp_path, [history])
    assert doubted == []
    assert counts[history] > 1
