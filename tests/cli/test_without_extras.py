"""A plain installation, without FAISS and wandb: every command of a run works."""

import os
import subprocess
import sys

import pytest

from tiny_run import TINY


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that runs a command of fedsim where the two libraries cannot be imported."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("faiss", "wandb"):
        (folder / f"{name}.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})\n')
    (folder / "tiny.yaml").write_text(TINY.replace("max_epochs: 3, check_val_every_n_epoch: 3", "max_epochs: 1"))
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words):
        command = [sys.executable, "-m", "fedsim", *words]
        environ = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)

    return run


@pytest.mark.others
def test_a_run_needs_no_extra(plain):
    commands = (
        ["fit", "--config", "tiny.yaml", "--run_dir", "run", "--trainer.check_val_every_n_epoch", "1"],
        ["test", "--ckpt_path", "run"], ["predict", "--ckpt_path", "run"], ["report", "run"],
    )  # fmt: skip
    for words in commands:
        done = plain(*words)
        assert done.returncode == 0, done.stderr


@pytest.mark.others
def test_a_setting_that_needs_one_names_it(plain):
    done = plain("fit", "--config", "tiny.yaml", "--run_dir", "other", "--model.evaluation.backend", "faiss")
    assert done.returncode == 2
    assert "pip install 'fedsim-reid[faiss]', or use torch" in done.stderr
