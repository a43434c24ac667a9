"""The control channel, on a store in this process."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from failing import PATIENCE, await_true
from fedsim.core.errors import PeerError
from fedsim.strategy.channel import ControlChannel
from fedsim.strategy.stopped import continue_process, identity, is_stopped


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Ranks look at each other five times as often, so that tests wait less."""
    monkeypatch.setattr("fedsim.strategy.channel._PERIOD", 0.1)


class Shelf:
    """A key-value store."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def multi_get(self, keys):
        return [self.values[key] for key in keys]


def pair(silence):
    shelf = Shelf()
    channels = [ControlChannel(shelf, rank, 2, silence) for rank in range(2)]
    for channel in channels:
        channel.start()
    return channels


def test_rank_0_does_not_wait_for_goodbyes_of_the_dead():
    zero, _ = pair(silence=0.3)  # the other one never gives another sign of life
    zero.watch()
    closing = threading.Thread(target=zero.close, daemon=True)
    closing.start()
    closing.join(timeout=PATIENCE)
    assert not closing.is_alive()


def test_rank_0_waits_for_goodbyes_of_the_living():
    zero, one = pair(silence=60.0)
    for channel in (zero, one):
        channel.watch()
    closing = threading.Thread(target=zero.close, daemon=True)
    closing.start()
    time.sleep(0.5)
    assert closing.is_alive()
    one.check()  # nothing is wrong
    one.close()
    closing.join(timeout=PATIENCE)
    assert not closing.is_alive()


def test_ranks_leave_together_however_rarely_they_look_at_each_other(monkeypatch):
    monkeypatch.setattr("fedsim.strategy.channel._PERIOD", 3600.0)
    channels = pair(silence=7200.0)
    for channel in channels:
        channel.watch()
    closings = [threading.Thread(target=channel.close, daemon=True) for channel in channels]
    for closing in closings:
        closing.start()
    for closing in closings:
        closing.join(timeout=PATIENCE)
        assert not closing.is_alive()


def test_a_failure_is_heard_with_rank_and_activity():
    zero, one = pair(silence=60.0)
    for channel in (zero, one):
        channel.watch()
    one.activity = "round 3, client town1"
    one.fail("no more paper")
    with pytest.raises(PeerError, match="rank 1 stopped in round 3, client town1: no more paper"):
        zero.check()
    zero.close()
    one.close()


def test_a_rank_that_ended_is_named_with_its_activity():
    zero, one = pair(silence=60.0)
    one.activity = "round 3, client town1"
    one.start()  # its last sign of life
    zero.watch()
    time.sleep(0.3)
    with pytest.raises(PeerError, match="rank 1 ended without a word, or did not answer in time, in round 3, client"):
        zero.await_news()
    zero.close()


def test_before_a_busy_rank_is_ended_by_a_signal_it_does_its_last_act(monkeypatch):
    ends = []
    monkeypatch.setattr("fedsim.strategy.channel.end_process", lambda message, code=2: ends.append((message, code)))
    monkeypatch.setattr("fedsim.strategy.channel._PATIENCE", 0.5)
    zero, one = pair(silence=60.0)
    zero.last_act = lambda signum: ends.append(signum)
    zero.watch()
    one.watch()
    one.abandon(signal.SIGUSR1)
    deadline = time.monotonic() + PATIENCE
    while len(ends) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ends[:2] == [signal.SIGUSR1, ("stopped by SIGUSR1", 128 + signal.SIGUSR1)]
    zero.close()
    one.close()


def test_ranks_that_end_because_of_another_are_not_named_in_its_place():
    shelf = Shelf()
    zero, one, two = (ControlChannel(shelf, rank, 3, 60.0) for rank in range(3))
    for channel in (zero, one, two):
        channel.start()
    zero.watch()
    one.dead_ranks = lambda: [2]  # rank 1 knows that rank 2 was killed, and ends because of it
    one.watch()
    with pytest.raises(PeerError, match="rank 2 ended without a word"):
        one.await_news()
    deadline = time.monotonic() + PATIENCE
    while zero._error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(PeerError, match="rank 2 ended without a word") as heard:
        zero.check()
    assert heard.value.rank == 2
    for channel in (one, zero):
        channel.close()


def test_the_only_other_rank_is_named_however_late_its_last_sign_came():
    zero, one = pair(silence=60.0)
    zero.watch()
    beating = threading.Event()

    def beat():
        while not beating.wait(0.02):
            one.start()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    with pytest.raises(PeerError, match="rank 1 ended without a word"):
        zero.await_news()
    beating.set()
    thread.join()
    zero.close()


FOLLOWER = """
import os, signal, sys, time
from fedsim.strategy.channel import end_with_launcher
end_with_launcher(os.getppid())
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
LAUNCHER = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {FOLLOWER!r}])
time.sleep(600)
"""


def test_a_stopped_rank_ends_with_its_launcher():
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    try:
        await_true(lambda: is_stopped(pid), PATIENCE, lambda: "it does not stop")
        launcher.kill()
        await_true(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), PATIENCE, lambda: "it is still there")
    finally:
        launcher.kill()
        launcher.communicate()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_zombie(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_only_stopped_processes_of_this_machine_are_continued(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr("fedsim.strategy.stopped.is_stopped", lambda pid: pid != 7)
    machine = identity().rpartition(" ")[0]
    for line in ("", "12", f"{machine} ", f"{machine} x", f"{machine} -1", f"{machine} 7", f"other {machine} 12"):
        continue_process(line)
    assert sent == []
    continue_process(f"{machine} 12")
    assert sent == [(12, signal.SIGCONT)]
