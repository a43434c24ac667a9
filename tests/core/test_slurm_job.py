"""A Slurm job asks to be started again."""

import os

import pytest

from fedsim.core.slurm_job import requeue


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A program of that name; returns what it was asked."""

    def make(code):
        path = tmp_path / "bin" / "scontrol"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\necho "Job is\n unknown" >&2\nexit {code}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
        return lambda: (tmp_path / "asked").read_text()

    return make


def test_a_job_or_its_task_is_started_again(scontrol):
    asked = scontrol(0)
    task = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert requeue({"SLURM_JOB_ID": "12"}) == "Slurm starts job 12 again"
    assert requeue(task) == "Slurm starts job 12_3 again"
    assert requeue({}) == ""
    assert asked() == "requeue 12\nrequeue 12_3\n"


def test_what_slurm_refuses_is_one_line(scontrol):
    scontrol(1)
    line = "job 12 does not start again by itself: scontrol requeue failed (Job is unknown)"
    assert requeue({"SLURM_JOB_ID": "12"}) == line


def test_a_missing_scontrol_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scontrol" in requeue({"SLURM_JOB_ID": "12"})
