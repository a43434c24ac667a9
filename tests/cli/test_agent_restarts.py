"""A run of W&B's agent that was preempted goes on with the same settings, whatever the server passes back."""

import json
import signal
from pathlib import Path

import pytest
import torch

from fedsim.__main__ import main
from fedsim.federation.callbacks import Preemption
from fedsim.parsing.agent_words import keep_words, words_of_first_start
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import refuse
from tiny_run import TINY

pytest.importorskip("wandb", reason="W&B is not installed")
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from wandb_tools import as_args, logs

GOES_ON = ("--ckpt_path", "last")
FORMS = ("args", "args_no_equals", "args_no_boolean_flags", "args_no_hyphens")


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The folder in which an agent starts runs of a sweep, offline."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "r1", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def words(*draw):
    logger = "--trainer.logger=lightning.pytorch.loggers.WandbLogger"
    run = f"--run_dir={Path.cwd() / 'run'}"  # absolute: W&B keeps the folder of a process's first run
    return ["fit", "--config", "tiny.yaml", run, logger, "--trainer.max_epochs=3", *draw]


def stop_in_round(number, monkeypatch):
    """Stop a fit as a scheduler does, before the end of a round."""

    plain = Preemption.on_round_start

    def stop(self, round_, clients):
        if round_ == number:
            signal.raise_signal(signal.SIGTERM)
        plain(self, round_, clients)

    monkeypatch.setattr(Preemption, "on_round_start", stop)


def result(folder):
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    return checkpoint["state_dict"], json.loads((folder / "summary.json").read_text())["final"]["metrics"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("round_", [0, 1])
def test_a_preempted_run_goes_on_whatever_is_passed_back(agent, monkeypatch, form, round_):
    draw = ["--model.client.batch_size=6"]
    assert main([*words(*draw), f"--run_dir={agent / 'whole'}", "--trainer.logger=false"]) == 0
    with monkeypatch.context() as patch:
        stop_in_round(round_, patch)
        assert main(words(*draw)) == 128 + signal.SIGTERM
    folder = agent / "run"
    config = logs(folder)[0].config | {"_wandb": {"t": {"1": [1, 2]}}}
    assert main(words(*create_sweep_command_args({"args": as_args(config)})[form])) == 0
    (tensors, scores), (whole, of_whole) = result(folder), result(agent / "whole")
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert scores == of_whole


def test_a_run_that_begins_takes_its_own_words(agent, capsys):
    assert words_of_first_start(["--a=1"]) == ["--a=1"]
    (agent / "runs" / "mine").mkdir(parents=True)
    keep_words(agent / "runs" / "mine", ["--run_dir=runs/mine", "--a=1"])
    assert words_of_first_start(["--run_dir=runs/mine", "--a=2"]) == ["--run_dir=runs/mine", "--a=1", *GOES_ON]
    assert words_of_first_start(["--a=2"]) == ["--a=2"]
    keep_words(agent / "runs" / "mine", ["--a=3"])
    assert words_of_first_start(["--run_dir=runs/mine"]) == ["--run_dir=runs/mine", "--a=1", *GOES_ON]


def test_words_of_another_run_are_not_taken(agent, monkeypatch):
    keep_words(agent, ["--a=1"])
    monkeypatch.setenv("WANDB_RUN_ID", "r2")
    assert words_of_first_start([f"--run_dir={agent}", "--a=2"]) == [f"--run_dir={agent}", "--a=2"]
    keep_words(agent, ["--a=3"])
    assert words_of_first_start([f"--run_dir={agent}"]) == ["--a=3", *GOES_ON]
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert words_of_first_start([f"--run_dir={agent}"]) == [f"--run_dir={agent}"]


def test_a_run_that_replaced_another_goes_on_with_itself(agent):
    keep_words(agent, ["--overwrite", "true"])
    expected = ["--overwrite", "true", "--overwrite=false", *GOES_ON]
    assert words_of_first_start([f"--run_dir={agent}"]) == expected


def test_damaged_words_are_one_line(agent, capsys):
    (agent / "agent_words.json").write_text("{")
    assert "agent_words.json: cannot be read" in refuse(capsys, *words(f"--run_dir={agent}"))
