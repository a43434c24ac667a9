"""The Slurm job of this process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping


def requeue(environ: Mapping[str, str] = os.environ) -> str:
    """Ask Slurm to start this job's script again, and return a line on it; Slurm then ends this job.

    The line is empty outside Slurm.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return ""
    if "SLURM_ARRAY_JOB_ID" in environ:  # this task only, not the whole array
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        problem = "" if result.returncode == 0 else re.sub(r"\s+", " ", result.stderr.strip()) or "without a reason"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        return f"job {job} does not start again by itself: scontrol requeue failed ({problem})"
    return f"Slurm starts job {job} again"
