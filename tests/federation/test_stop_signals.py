"""Runs that a scheduler or a user asks to end: within the time of grace, with a checkpoint, resumable."""

import json
import os
import signal

import pytest

from failing import PATIENCE, assert_equal, await_round, finish, fit, last, launch, read_result, resume
from fedsim.federation.callbacks import RoundCallback
from fedsim.federation.events import was_stopped
from fedsim.methods import FedPav
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit as fit_here
from small import make_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# rounds of a second, and a line after each
LONG = ["--trainer.callbacks+=failing.Slow", "--trainer.callbacks.delay=0.1", "--trainer.enable_progress_bar=true"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(fit(folder))
    return read_result(last(folder))


def grace(seconds):
    return ["--trainer.callbacks+=fedsim.federation.callbacks.Preemption", f"--trainer.callbacks.grace={seconds}"]


def assert_resumable(folder, rounds, whole, ranks=1):
    """The checkpoint is of ``rounds`` rounds, the run is not finished, and what continues it ends in the same bits."""
    assert read_checkpoint(last(folder))["epoch"] == rounds - 1
    assert not json.loads((folder / "summary.json").read_text())["finished"]
    finish(resume(folder, "--trainer.callbacks=failing.Failing", ranks=ranks))
    assert json.loads((folder / "summary.json").read_text())["finished"]
    assert_equal(read_result(last(folder)), whole)


@pytest.mark.parametrize(
    ("number", "receivers"),
    [(signal.SIGTERM, (0,)), (signal.SIGUSR1, (0,)), (signal.SIGTERM, (1,)), (signal.SIGTERM, (0, 1))],
)
def test_a_run_ends_after_the_round_in_which_any_rank_is_asked_to(whole, tmp_path, number, receivers):
    folder = tmp_path / "run"
    run = fit(folder, *LONG, ranks=2)
    await_round(folder, 2, lambda: run.output)
    run.signal(number, *receivers)
    assert run.wait(timeout=PATIENCE) == [128 + number, 0], run.output
    assert "round 2/3" in run.log()
    assert "round 3/3" not in run.log()
    assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
    assert f"fedsim: error: stopped by {signal.Signals(number).name}" in run.log()
    assert "Traceback" not in run.output
    assert_resumable(folder, 2, whole, ranks=2)


def test_under_torchrun_all_ranks_end_with_the_signal(tmp_path):
    # an agent whose ranks all did well would wait minutes for the agents of other machines
    folder = tmp_path / "run"
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    run = fit(folder, *LONG, ranks=2, environment=torchrun)
    await_round(folder, 2, lambda: run.output)
    run.signal(signal.SIGTERM, 0)
    assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM] * 2, run.output
    assert run.output.count("fedsim: error:") == 1


@pytest.mark.parametrize(("seconds", "ranks", "receiver"), [(0.0, 1, 0), (0.0, 2, 1), (0.3, 2, 0)])
def test_a_round_that_takes_longer_than_the_grace_is_abandoned(whole, tmp_path, seconds, ranks, receiver):
    folder = tmp_path / "run"
    run = fit(folder, *LONG, *grace(seconds), ranks=ranks)
    await_round(folder, 2, lambda: run.output)
    run.signal(signal.SIGTERM, receiver)
    assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM, 0][:ranks], run.output
    assert "round 2/3" not in run.log()
    assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
    assert "Traceback" not in run.output
    assert_resumable(folder, 1, whole)


@pytest.mark.parametrize("seconds", [0.0, 120.0])
def test_a_run_that_is_asked_between_rounds_keeps_the_round_that_is_done(whole, tmp_path, seconds):
    folder = tmp_path / "run"
    run = fit(folder, *LONG, *grace(seconds), ranks=2)
    run.await_text("round 1/3")
    run.signal(signal.SIGTERM, 0)
    assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM, 0], run.output
    assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
    assert_resumable(folder, 1, whole)


def test_a_signal_in_the_last_round_changes_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    run = fit(folder, *LONG, ranks=2)
    await_round(folder, 3, lambda: run.output)
    run.signal(signal.SIGTERM, 0)
    finish(run)
    assert json.loads((folder / "summary.json").read_text())["finished"]
    assert_equal(read_result(last(folder)), whole)


@pytest.fixture
def launched(tmp_path):
    """A run in its second round, started as people do."""
    run = launch(tmp_path / "run", *LONG)
    try:
        await_round(run.folder, 2, lambda: run.log)
        yield run
    finally:
        run.kill()


def test_ctrl_c_ends_a_run_within_the_round(whole, launched):
    os.killpg(launched.process.pid, signal.SIGINT)
    assert launched.await_end(timeout=PATIENCE) == 128 + signal.SIGINT
    assert "Traceback" not in launched.log
    assert f"continue with: fedsim fit --ckpt_path {launched.folder}" in launched.log
    assert_resumable(launched.folder, 1, whole)


def test_a_terminated_launcher_takes_its_ranks_along(whole, launched):
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.await_end(timeout=PATIENCE) == 128 + signal.SIGTERM
    assert launched.log.count("fedsim: error:") == 1
    assert_resumable(launched.folder, 2, whole)


def test_ranks_agree_on_the_round_after_which_they_end():
    class Asking(RoundCallback):
        def on_client_batch(self, report):
            federation.strategy.request_stop(signal.SIGTERM)

    federation = make_model(FedPav())
    fit_here(federation, rounds=3, callbacks=[Asking()])
    assert federation.round_metrics["round"] == 1
    assert was_stopped(federation.trainer)
