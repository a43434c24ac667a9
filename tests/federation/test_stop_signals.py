"""Runs that a scheduler or a user asks to end: within the time of grace, with a checkpoint, resumable."""

import json
import os
import signal
import time

import pytest

from failing import (
    PATIENCE,
    Run,
    assert_equal,
    await_round,
    await_true,
    begin_again,
    finish,
    fit,
    go_on,
    last,
    launch,
    read_result,
    results,
    resume,
)
from fedsim.core.versions import current_version
from fedsim.federation.callbacks import RoundCallback
from fedsim.federation.events import was_stopped
from fedsim.methods import FedPav
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit as fit_here
from small import make_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROUNDS = 7
SHOWN = ["--trainer.enable_progress_bar=true"]  # a line after each round
SLOW = ["--trainer.callbacks+=failing.Slow", "--trainer.callbacks.delay=0.1", "--trainer.callbacks.start=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result after each round of the run that nothing interrupts."""
    return results(tmp_path_factory.mktemp("whole") / "run", rounds=ROUNDS)


def assert_stopped(folder, rounds, whole):
    """The run has not finished, and its checkpoint is that of ``rounds`` rounds."""
    assert not json.loads((folder / "summary.json").read_text())["finished"]
    assert read_checkpoint(last(folder))["epoch"] == rounds - 1
    assert_equal(read_result(last(folder)), whole[rounds - 1])


def assert_finished(folder, whole):
    assert json.loads((folder / "summary.json").read_text())["finished"]
    assert_equal(read_result(last(folder)), whole)


# The parts of each run below go on where the part before them was stopped: so it is tried, too, that they can.


def test_a_run_ends_after_the_round_in_which_any_rank_is_asked_to(whole, tmp_path):
    folder, rounds = tmp_path / "run", 5
    options = [*SHOWN, f"--trainer.max_epochs={rounds}"]
    asked = [("SIGTERM", 0), ("SIGUSR1", 0), ("SIGTERM", 1), ("SIGTERM", "*")]
    for part, (name, rank) in enumerate(asked):
        run = go_on(folder, part, *options, ranks=2, fail=f"mid-client@{part + 1}/{rank}", how=name)
        assert run.wait(timeout=PATIENCE) == [128 + getattr(signal, name), 0], run.output
        assert f"round {part + 1}/{rounds}" in run.log()
        assert f"round {part + 2}/{rounds}" not in run.log()
        assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
        assert f"fedsim: error: stopped by {name}" in run.log()
        assert "Traceback" not in run.output
        assert_stopped(folder, part + 1, whole)
    # in the last round it changes nothing
    finish(go_on(folder, len(asked), *options, ranks=2, fail=f"mid-client@{rounds}/0", how="SIGTERM"))
    assert_finished(folder, whole[rounds - 1])


def test_under_torchrun_all_ranks_end_with_the_signal(tmp_path):
    # an agent whose ranks all did well would wait minutes for the agents of other machines
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    run = fit(tmp_path / "run", ranks=2, fail="mid-client@1/0", how="SIGTERM", environment=torchrun)
    assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM] * 2, run.output
    assert run.output.count("fedsim: error:") == 1


ABANDONED = [  # (point, ranks, receiver, seconds of grace)
    ("mid-client", 1, 0, 0.0),
    ("mid-client", 2, 1, 0.0),
    ("mid-client", 2, 0, 0.3),
    ("before training", 2, 0, 0.0),
    ("before training", 2, 0, 120.0),  # a round that would only be cut short does not begin
    ("while saving", 2, 0, 0.0),  # a checkpoint takes its time
]


def test_a_round_that_takes_longer_than_the_grace_is_abandoned_and_one_that_is_done_is_kept(whole, tmp_path):
    folder = tmp_path / "run"
    for part, (point, ranks, receiver, seconds) in enumerate(ABANDONED):
        done = part + 1
        preemption = "fedsim.federation.callbacks.Preemption"
        options = [*SHOWN, *SLOW[:2], f"--trainer.callbacks.start={done + 1}", f"--trainer.callbacks+={preemption}",
                   f"--trainer.callbacks.grace={seconds}", f"--trainer.max_epochs={ROUNDS}"]  # fmt: skip
        at = done if point == "while saving" else done + 1
        run = (begin_again if part else fit)(
            folder, *options, ranks=ranks, fail=f"{point}@{at}/{receiver}", how="SIGTERM"
        )
        assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM, 0][:ranks], run.output
        assert f"round {done}/{ROUNDS}" in run.log()
        assert f"round {done + 1}/{ROUNDS}" not in run.log()
        assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
        assert "Traceback" not in run.output
        assert_stopped(folder, done, whole)
    finish(resume(folder, "--trainer.callbacks=failing.Failing"))
    assert_finished(folder, whole[-1])


@pytest.fixture
def launched(tmp_path):
    """A run in its second round, started as people do."""
    run = launch(tmp_path / "run", *SLOW)
    try:
        await_round(run.folder, 2, lambda: run.log)
        yield run
    finally:
        run.kill()


def test_ctrl_c_ends_a_run_within_the_round(whole, launched):
    os.killpg(launched.process.pid, signal.SIGINT)
    assert launched.await_end() == 128 + signal.SIGINT
    assert "Traceback" not in launched.log
    assert f"continue with: fedsim fit --ckpt_path {launched.folder}" in launched.log
    assert_stopped(launched.folder, 1, whole)


def test_a_terminated_launcher_takes_its_ranks_along(whole, launched):
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.await_end() == 128 + signal.SIGTERM
    assert launched.log.count("fedsim: error:") == 1
    assert_stopped(launched.folder, 2, whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stuck_run_ends_soon_after_its_grace(tmp_path, ranks):
    """No batch ends any more: the main thread is in a read that never returns."""
    preemption = ["--trainer.callbacks+=fedsim.federation.callbacks.Preemption", "--trainer.callbacks.grace=0.1"]
    stuck = ["--model.method=failing.Hanging", "--model.method.how=pipe", *preemption, *SHOWN]
    folder = tmp_path / "run"
    run = fit(folder, *stuck, ranks=ranks)
    run.await_text("round 1/")
    await_true(lambda: current_version(last(folder)) is not None, PATIENCE, lambda: run.output)
    time.sleep(1)  # then it is in the next round
    run.signal(signal.SIGTERM, 0)
    codes = run.wait(timeout=PATIENCE)
    assert set(codes) <= {0, 128 + signal.SIGTERM}, run.output
    assert codes[0] == 128 + signal.SIGTERM
    assert "fedsim: error: stopped by SIGTERM" in run.log()
    assert f"continue with: fedsim fit --ckpt_path {folder}" in run.log()
    assert "Traceback" not in run.output


def test_sigterm_ends_a_test_of_a_checkpoint(tmp_path):
    """Its own handler of Lightning would only set a flag."""
    finish(fit(tmp_path / "run", "--trainer.max_epochs=1"))
    waiting = ["--trainer.callbacks+=failing.Scoring", f"--trainer.callbacks.ready={tmp_path / 'ready'}"]
    run = Run(tmp_path / "logs", "test", "--ckpt_path", tmp_path / "run", *waiting)
    await_true((tmp_path / "ready").exists, PATIENCE, lambda: run.output)
    run.signal(signal.SIGTERM, 0)
    assert run.wait(timeout=PATIENCE) == [128 + signal.SIGTERM], run.output
    assert "fedsim: error: stopped by SIGTERM" in run.log()
    assert "Traceback" not in run.output


def test_ranks_agree_on_the_round_after_which_they_end():
    class Asking(RoundCallback):
        def on_client_batch(self, report):
            federation.strategy.request_stop(signal.SIGTERM)

    federation = make_model(FedPav())
    fit_here(federation, rounds=3, callbacks=[Asking()])
    assert federation.round_metrics["round"] == 1
    assert was_stopped(federation.trainer)
