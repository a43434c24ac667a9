"""A report certifies no forged run as a paper's row, and calls no honest one another experiment.

``benchmarks/forgeries.py`` draws many, this a few of each kind.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import forgeries


def test_no_forged_run_is_certified_and_no_honest_one_is_another_experiment(monkeypatch):
    rows = [row for row in forgeries.printed_rows() if row[:2] in ROWS]
    monkeypatch.setattr(forgeries, "certified_rows", lambda: rows)
    found, counts = forgeries.draw(30, 20, seed=5)
    assert found == []
    assert {*forgeries.KINDS} <= {*counts}
    assert len(counts) == len(forgeries.KINDS) + len(forgeries.HONEST)


ROWS = (("003", "table4_batch_32"), ("003", "table2_by_identity"), ("001", "table2_fedreid"), ("000", "table2_fedprox"))


def test_the_draw_finds_what_slips_through(monkeypatch):
    """A judge that looks at nothing certifies most forged runs."""
    rows = [row for row in forgeries.printed_rows() if row[:2] == ROWS[0]]
    monkeypatch.setattr(forgeries, "certified_rows", lambda: rows)
    monkeypatch.setattr(forgeries, "text_of", lambda *folders, made: "- FedPav has all settings of 'FedPav' (003/x)\n")
    found, _ = forgeries.draw(20, 0, seed=1)
    assert len(found) == 20
