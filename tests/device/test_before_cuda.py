"""Whether CUDA starts, in a process of its own: where a GPU was simulated, torch asks no more."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_cuda_starts_when_a_rank_has_its_gpu():
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run([*words, str(Path(__file__).with_name("before_cuda.py"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
