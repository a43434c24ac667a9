"""What the comparisons of methods in this folder share: runs that are not repeated, and scores over their seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.report import Run, read_run

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)


def fedsim(command: str, *options: str) -> str:
    """Run a command of fedsim, and return what it prints; configs can name classes of this folder."""
    line = [sys.executable, "-m", "fedsim", command, *options]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stderr}")
    return done.stdout


def is_finished(folder: Path) -> bool:
    """Return whether a folder has a run that came to its end."""
    return (folder / "summary.json").is_file() and bool(read_run(folder).summary["finished"])


def fit(folder: Path, *options: str) -> Run:
    """Run ``fedsim fit``, unless it has been run to its end."""
    if not is_finished(folder):
        fedsim("fit", *options, "--run_dir", str(folder), "--overwrite", "true")
    return read_run(folder)


def score(run: Run, kind: str, domain: str, metric: str = "mAP") -> float:
    """Return a score of the last evaluation, percent."""
    return 100 * float(run.summary["final"]["metrics"][f"test/{kind}/{domain}/{metric}"])


def show(values: NDArray[np.float64]) -> str:
    """Return mean and standard deviation over seeds."""
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}" if len(values) > 1 else f"{values.mean():.1f}"
