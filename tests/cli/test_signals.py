"""Signals end a command with one line at any time, and Slurm starts a fit again whose time is up."""

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module

import pytest

from fedsim.__main__ import main
from fedsim.core import stop_signals
from fedsim.core.errors import StopSignal
from fedsim.core.stop_signals import listening
from tiny_run import TINY

AT_AN_IMPORT = """
import os, sys
sys.argv, module, number = ["fedsim", *sys.argv[3:]], sys.argv[1], int(sys.argv[2])
class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Signals())
from fedsim.__main__ import main
sys.exit(main())
"""
"""A process of fedsim that gets a signal when it first imports a module."""
PLACES = {
    "yaml": (signal.SIGTERM, "before the command line is read"),
    "torch": (signal.SIGUSR1, "in the longest imports"),
    "numpy.linalg": (signal.SIGTERM, "where torch's C code imports NumPy, and ignores an error"),
    "lightning.pytorch.cli": (signal.SIGINT, "after torch"),
    "fedsim.evaluation.evaluator": (signal.SIGUSR1, "in the import of fedsim"),
}


@pytest.fixture(autouse=True)
def ctrl_c():
    """Lightning ignores Ctrl-C from the first one to the end of the process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of Slurm whose scontrol keeps its words."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return lambda: (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""


@pytest.fixture
def fit(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return ["fit", "--config", str(tmp_path / "tiny.yaml"), "--run_dir", str(tmp_path / "run"), "--trainer.devices=1"]


def line_of(number):
    return "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"


@pytest.mark.slow
@pytest.mark.parametrize("module", PLACES)
def test_a_signal_in_the_start_is_one_line(module, fit, slurm, tmp_path):
    number = PLACES[module][0]
    words = [sys.executable, "-c", AT_AN_IMPORT, module, str(int(number)), *fit]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 128 + number, done.stderr
    again = "; Slurm starts job 12 again" if number == signal.SIGUSR1 else ""
    assert done.stderr == f"fedsim: error: {line_of(number)}{again}\n"
    assert slurm() == ("requeue 12\n" if again else "")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_ranks_that_a_launcher_stops_in_their_start_have_no_line_of_their_own(rank, lines, fit, tmp_path):
    words = [sys.executable, "-c", AT_AN_IMPORT, "yaml", str(int(signal.SIGTERM)), *fit]
    environ = os.environ | {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert len(done.stderr.splitlines()) == lines, done.stderr
    assert done.returncode == 128 + signal.SIGTERM or (rank == "1" and done.returncode == 0), "rank 0's code counts"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "place",
    [
        "fedsim.data.datamodule.FederatedDataModule.setup",
        "fedsim.cli.fit.check_fit",
        "fedsim.federation.federation.Federation.on_fit_start",
        "fedsim.cli.outcome.report",
    ],
)
def test_a_signal_around_the_training_is_one_line(place, number, fit, slurm, monkeypatch, capsys):
    def raised(*args, **kwargs):
        os.kill(os.getpid(), number)

    monkeypatch.setattr(place, raised)
    assert main(fit) == 128 + number
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedsim: error: ")]
    again = "; Slurm starts job 12 again" if number == signal.SIGUSR1 else ""
    assert lines == [f"fedsim: error: {line_of(number)}{again}"]
    assert slurm() == ("requeue 12\n" if again else "")
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_in_an_evaluation_is_one_line(number, fit, slurm, monkeypatch, capsys):
    assert main(fit) == 0
    monkeypatch.setattr("fedsim.federation.federation.Federation.test_step", lambda *_: os.kill(os.getpid(), number))
    capsys.readouterr()
    assert main(["test", "--ckpt_path", fit[4]]) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == f"fedsim: error: {line_of(number)}"
    assert slurm() == ""


def test_a_command_without_a_trainer_is_one_line(slurm, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fedsim.cli.data.folders.findings_in", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    assert main(["data", "check", str(tmp_path)]) == 138
    assert capsys.readouterr().err == "fedsim: error: stopped by SIGUSR1\n"
    assert slurm() == ""


def test_handlers_of_other_code_stay():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with listening(to_the_end=True):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_no_module_is_imported_by_half(number, tmp_path, monkeypatch):
    program = f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(0.01)\nis_whole = True\n"
    (tmp_path / "met_by_a_signal.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    expected = KeyboardInterrupt if number == signal.SIGINT else StopSignal
    with listening(to_the_end=False), pytest.raises(expected):
        threading.Event().wait(60 if import_module("met_by_a_signal").is_whole else 0)
    assert sys.modules.pop("met_by_a_signal").is_whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_does_not_interrupt_the_end():
    with listening(to_the_end=False):
        with pytest.raises(StopSignal, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_fork_ends_as_without_a_handler():
    with listening(to_the_end=False):
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_other_threads_leave_signals_alone():
    handlers = []

    def look():
        with listening(to_the_end=False):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


STUCK = """
import ctypes, os, signal, threading
from fedsim.core import stop_signals
stop_signals._UNHEARD = stop_signals._PATIENCE = 0.1
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with stop_signals.listening(to_the_end=True):
    lock(mutex)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        WAIT
    finally:
        lock(mutex)
"""


@pytest.mark.parametrize("waiting", ["threading.Event().wait(600)", "lock(mutex)"])
def test_a_command_whose_main_thread_is_stuck_ends(waiting):
    """In its end after it has heard the signal, or in foreign code, in which no handler runs."""
    words = [sys.executable, "-c", STUCK.replace("WAIT", waiting)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "fedsim: error: stopped by SIGTERM; its main thread was stuck\n")


def test_a_signal_of_a_fork_is_not_that_of_its_parent(monkeypatch):
    monkeypatch.setattr(stop_signals, "_UNHEARD", 0.0)
    with listening(to_the_end=False):
        for _ in range(30):  # the signal often comes before the fork has run at all
            child = os.fork() or os.execvp("sleep", ["sleep", "600"])
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            os.kill(os.getpid(), signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
