"""``fedsim slurm`` writes the scripts of the repository, and they know in which folder they are."""

import random
import re
import subprocess

import pytest

from fedsim.__main__ import main
from shared_fixtures import ROOT
from small import refuse

SCRIPTS = sorted((ROOT / "slurm").iterdir())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_scripts_come_with_the_package(folder, capsys):
    assert main(["slurm"]) == 0
    for script in SCRIPTS:
        written = folder / "slurm" / script.name
        assert written.read_text() == script.read_text()
        assert written.stat().st_mode & 0o700 == 0o700
    assert "slurm/fit.sbatch" in capsys.readouterr().out


def test_in_another_folder_they_name_that_folder(folder):
    assert main(["slurm", "jobs/queue"]) == 0
    for path in (folder / "jobs/queue").iterdir():
        named = re.findall(r"([\w/]*)/\w+\.(?:sbatch|sh)\b", path.read_text())
        assert {*named} <= {"jobs/queue"}, path.name
    chain = (folder / "jobs/queue/chain.sh").read_text()
    assert "submit --job-name=fedsim-test jobs/queue/command.sbatch" in chain


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_they_are_bash(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


def test_no_file_is_replaced(folder, capsys):
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.sh").write_text("mine")
    line = refuse(capsys, "slurm")
    assert "slurm/site.sh exists already" in line
    assert [path.read_text() for path in (folder / "slurm").iterdir()] == ["mine"]


@pytest.mark.parametrize("number", range(30))
def test_a_folder_that_scripts_cannot_name_is_refused(folder, capsys, number):
    rng = random.Random(number)
    name = rng.choice(
        ["a b", "../x", "/tmp/x", "~/x", "$HOME", "a\nb", "", ".", "a;b", "a/../..", "a'b", "\udcff", "ä"]
    )
    line = refuse(capsys, "slurm", "--folder", name)
    assert "--folder" in line
    assert not list(folder.iterdir())


def end(folder, code, **environ):
    """Call end_job of site.sh; return its exit code, and the arguments that scontrol got."""
    fake = folder / "scontrol"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    fake.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", **environ}
    site = ROOT / "slurm" / "site.sh"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", f". '{site}'; end_job {code}"], env=environ, cwd=folder)
    asked = folder / "asked"
    return done.returncode, asked.read_text().split() if asked.exists() else []


def test_a_job_whose_time_is_up_is_started_again(tmp_path):
    """Also if fedsim cannot ask: in a container, or before it listens to signals."""
    assert end(tmp_path, 138) == (138, ["requeue", "12"])


def test_of_an_array_only_the_task_is(tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "13"}
    assert end(tmp_path, 138, **array) == (138, ["requeue", "12_0"])


@pytest.mark.parametrize(
    ("code", "environ"),
    [(0, {}), (2, {}), (143, {}), (138, {"FEDSIM_REQUEUE": "no"})],
)
def test_other_ends_start_no_job(tmp_path, code, environ):
    assert end(tmp_path, code, **environ) == (code, [])


def test_each_script_that_fits_ends_so():
    for name in ("fit", "array", "augment"):
        text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
        assert re.search(r'^"\$\{FEDSIM_SRUN\[@\]\}" fedsim .* \|\| end_job "\$\?"$', text, re.MULTILINE), name
