"""Processes that wait to become ranks: they become one, end when nobody needs them, and leave Ctrl-C to rank 0."""

import os
import signal
import sys

import pytest

from failing import PATIENCE, await_true
from fedsim.core import spares

PROGRAM = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fedsim.core.spares import become_rank
said = Path({said!r})
said.write_text("waits")
become_rank()
now = signal.getsignal(signal.SIGINT).__name__
said.write_text(f"{{sys.argv[1:]}} {{os.environ['LOCAL_RANK']}} {{'HOME' in os.environ}} {{now}}")
"""


@pytest.fixture
def said(tmp_path):
    """Where a process writes."""
    return tmp_path / "said"


@pytest.fixture
def spare(said):
    """A process that waits."""
    spares.start(1, PROGRAM.format(said=str(said)))
    [process] = spares.take()
    yield process
    process.kill()
    process.wait()


def test_a_spare_becomes_the_rank_that_it_is_told(spare, said):
    spares.begin(spare, ["fit", "--config", "a.yaml"], {"LOCAL_RANK": "3"})
    assert spare.wait() == 0
    assert said.read_text() == "['fit', '--config', 'a.yaml'] 3 False default_int_handler"


def test_a_spare_does_not_wait_for_forks_of_the_first_rank(spare, said):
    held = os.dup(spare.stdin.fileno())  # as a process has it that reads images
    spares.begin(spare, [], {"LOCAL_RANK": "1"})
    await_true(lambda: spare.poll() is not None, PATIENCE, lambda: "it waits")
    os.close(held)
    assert said.read_text().startswith("[] 1 False")


def test_a_spare_whose_message_is_cut_off_ends_without_a_word(spare, said):
    with spare.stdin as pipe:
        pipe.write(b'{"arguments": [')
    assert spare.wait() == 0
    assert said.read_text() == "waits"


def test_a_spare_that_nobody_needs_ends_without_a_word(spare, said):
    spare.stdin.close()  # as when the first rank ends, however it does
    assert spare.wait() == 0
    assert said.read_text() == "waits"


def test_ctrl_c_is_for_the_first_rank(spare, said):
    await_true(said.exists, PATIENCE, lambda: "it does not start")
    os.kill(spare.pid, signal.SIGINT)
    spares.begin(spare, [], {"LOCAL_RANK": "1"})
    assert spare.wait() == 0
    assert said.read_text().startswith("[] 1 False")


def test_spares_are_dismissed():
    spares.start(2, "from fedsim.core.spares import become_rank; become_rank()")
    assert spares.count() == 2
    spares.dismiss()
    assert spares.count() == 0
    spares.dismiss()


@pytest.mark.parametrize(
    ("program", "environ", "may"),
    [
        ("bin/fedsim", {}, True),
        ("fedsim/__main__.py", {"HOME": "/"}, True),
        ("bin/pytest", {}, False),
        ("train.py", {}, False),
        ("", {}, False),
        ("-c", {}, False),
        (".", {}, False),
        ("missing/fedsim", {}, False),
        ("bin/fedsim", {"LOCAL_RANK": "1"}, False),
        ("bin/fedsim", {"SLURM_NTASKS": "4"}, False),
        ("bin/fedsim", {"TORCHELASTIC_RUN_ID": "a"}, False),
    ],
)
def test_only_the_command_itself_starts_spares_and_no_launcher_s_process(monkeypatch, tmp_path, program, environ, may):
    home = tmp_path / "a clone" / "fedsim"  # the name that git clone gives it
    for name in ("bin/fedsim", "bin/pytest", "fedsim/__main__.py", "train.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", [program])
    assert spares.may_start(environ) is may
