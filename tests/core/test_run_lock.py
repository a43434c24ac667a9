"""The lock of a run directory: one owner, who is recognised when gone, on this machine and on another one."""

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest

from fedsim.core import run_lock
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.run_lock import LOCK_FILE, SILENCE, RunLock

HOLD = "import sys; from pathlib import Path; from fedsim.core.run_lock import RunLock\n"
HOLD += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """A process that holds a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def owner_in(folder):
    return json.loads((folder / LOCK_FILE).read_text())


def write(folder, **changes):
    """Leave a lock of another owner: ours, but for ``changes``."""
    lock = RunLock(folder)
    lock.acquire()
    owner = owner_in(folder) | changes
    lock.release()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps(owner))
    return folder / LOCK_FILE


def test_a_release_leaves_nothing(tmp_path):
    folder = tmp_path / "a" / "b"
    lock = RunLock(folder)
    lock.acquire()
    assert (folder / LOCK_FILE).is_file()
    lock.check()
    lock.release()
    lock.release()  # again, as after an error
    assert list(tmp_path.iterdir()) == []


def test_a_release_keeps_results(tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    (tmp_path / "run" / "metrics.csv").touch()
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("method", ["acquire", "look"])
def test_a_living_owner_is_named_and_a_dead_one_is_forgotten(tmp_path, holder, method):
    folder, before = tmp_path / "run", (tmp_path / "run" / LOCK_FILE).read_bytes()
    owner = owner_in(folder)
    for stopped in (False, True):
        if stopped:
            holder.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError) as refused:
            getattr(RunLock(folder), method)()
        for text in (f"run_dir: {folder} is in use", str(holder.pid), owner["host"], owner["since"], "--run_dir"):
            assert text in str(refused.value)
        assert (folder / LOCK_FILE).read_bytes() == before
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
    holder.kill()  # unreaped: a zombie writes nothing
    deadline = time.monotonic() + 60
    while run_lock._start_of(holder.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    lock = RunLock(folder)
    getattr(lock, method)()
    lock.release()


def test_this_process_is_refused_a_second_time(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    with pytest.raises(ConfigError, match="this process"):
        RunLock(tmp_path).acquire()
    lock.check()
    lock.release()


def test_a_number_that_was_given_again_is_no_owner(tmp_path, holder):
    pid, start = owner_in(tmp_path / "run")["pid"], owner_in(tmp_path / "run")["process"]
    folder = tmp_path / "other"
    write(folder, pid=pid, process=start)
    with pytest.raises(ConfigError):
        RunLock(folder).look()
    write(tmp_path / "third", pid=pid, process=f"{start}0")
    RunLock(tmp_path / "third").look()


def test_an_owner_on_another_machine_lives_as_long_as_it_shows(tmp_path):
    path = write(tmp_path / "run", host="node7", machine="node7 boot")
    with pytest.raises(ConfigError, match=r"on node7 .*sign of life \d+ s ago"):
        RunLock(tmp_path / "run").acquire()
    now = time.time()
    os.utime(path, (now, now - SILENCE + 60))
    with pytest.raises(ConfigError):
        RunLock(tmp_path / "run").acquire()
    os.utime(path, (now, now - SILENCE - 60))
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    assert owner_in(tmp_path / "run")["pid"] == os.getpid()
    lock.release()


def test_an_owner_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    lock = RunLock(tmp_path)
    lock.acquire()
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    deadline = time.monotonic() + 60
    while (tmp_path / LOCK_FILE).stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    lock.release()
    assert time.monotonic() < deadline


@pytest.mark.parametrize(("restarts", "job", "taken"), [("1", "7", True), ("0", "7", False), ("1", "8", False)])
def test_a_job_that_slurm_starts_again_takes_its_own_folder(tmp_path, monkeypatch, restarts, job, taken):
    write(tmp_path, host="node7", machine="node7 boot", job="7", restarts="0")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if taken:
        RunLock(tmp_path).look()
    else:
        with pytest.raises(ConfigError):
            RunLock(tmp_path).look()


@pytest.mark.parametrize("number", range(40))
def test_what_no_owner_has_written_holds_nothing(tmp_path, number):
    rng = random.Random(number)
    text = bytearray(write(tmp_path, host="node7", machine="node7 boot").read_bytes())
    kind = number % 4
    if kind == 0:
        text = text[: rng.randrange(len(text) - 2)]
    elif kind == 1:
        text = rng.randbytes(rng.randrange(100))
    elif kind == 2:
        text = json.dumps(rng.choice([1, [], "text", None, {}, {"pid": "many"}])).encode()
    else:
        owner = json.loads(text)
        owner[rng.choice(["host", "machine", "pid", "process", "since"])] = rng.choice([None, [], 1.5, {}])
        text = json.dumps(owner).encode()
    (tmp_path / LOCK_FILE).write_bytes(text)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.check()
    lock.release()


@pytest.mark.parametrize("removed", ["lock", "folder", "taken", "edited"])
def test_an_owner_notices_that_the_folder_is_not_its_own(tmp_path, removed):
    folder = tmp_path / "run"
    lock = RunLock(folder)
    lock.acquire()
    if removed == "folder":
        folder.rename(tmp_path / "moved")
    elif removed == "lock":
        lock.path.unlink()
    else:
        text = {"edited": "mine", "taken": json.dumps(owner_in(folder) | {"pid": 1, "host": "node7"})}[removed]
        lock.path.write_text(text)
    names = {"folder": [f"{folder}: was removed"], "lock": [f"{lock.path}: was removed"], "edited": ["it was changed"],
             "taken": ["process 1 on node7"]}  # fmt: skip
    with pytest.raises(DataError) as error:
        lock.check()
    assert all(name in str(error.value) for name in names[removed])
    lock.release()
    assert lock.path.exists() == (removed == "taken")


def test_a_copy_in_another_process_knows_its_owner(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    pickle.loads(pickle.dumps(lock)).check()
    lock.release()


def _race(folder, barrier, wins):
    barrier.wait(120)
    for _ in range(50):
        lock = RunLock(folder)
        try:
            lock.acquire()
        except ConfigError:
            continue
        try:
            (folder / "alone").touch(exist_ok=False)
            lock.check()
            (folder / "alone").unlink()
            wins.value += 1  # only the owner counts
        finally:
            lock.release()


def test_of_processes_that_come_together_one_is_the_owner(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(4), context.Value("i", 0, lock=False)
    path = write(tmp_path / "run", host="node7", machine="node7 boot")  # and all of them find a stale lock
    os.utime(path, (1, 1))
    processes = [context.Process(target=_race, args=(tmp_path / "run", barrier, wins)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 4
    assert wins.value >= 1


def test_a_folder_that_cannot_hold_a_lock_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / LOCK_FILE).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "run", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match=r"run_dir: .*name another"):
            RunLock(folder).acquire()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]
