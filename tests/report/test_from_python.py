"""Runs are read and drawn from Python: no module of the command line is imported."""

import subprocess
import sys

from run_dirs import scores_of, training, write_run

SCRIPT = """
import sys
from pathlib import Path
from fedsim import report

folder, figure = map(Path, sys.argv[1:])
run = report.read_run(folder)
groups = report.group_runs([folder])
names = report.titles_of(report.all_sets(groups))
report.draw_curves(groups, names, "rank1", figure)
text = report.report([str(folder)], metric="rank1")
assert run.test_sets == ["a", "b"], run.test_sets
assert "40.0" in text, text
assert all(getattr(report, name).__doc__ for name in report.__all__)
print(*sorted(name for name in sys.modules if name.startswith("fedsim.cli")))
"""


def test_a_run_is_read_and_drawn_without_the_command_line(tmp_path):
    evaluations = {round_: scores_of({"a": 0.1 * round_, "b": 0.4}) | training() for round_ in (1, 2)}
    folder, figure = write_run(tmp_path / "run", evaluations), tmp_path / "curves.png"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, figure], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
