"""Folders in memory that end with their owner, however it ends."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from failing import PATIENCE, await_true
from fedsim.core.owned_folders import make_owned_folder, remove_abandoned_folders, remove_owned_folder

OWNER = """
import sys, time
from pathlib import Path
from fedsim.core.owned_folders import make_owned_folder, remove_owned_folder
for name in sys.argv[1:]:
    make_owned_folder(Path(name))
    (Path(name) / "images").write_bytes(bytes(1000))
    (Path(name) / "is_ready").touch()
time.sleep(600)
"""


def start_owner(*folders):
    process = subprocess.Popen([sys.executable, "-c", OWNER, *map(str, folders)])
    await_true(lambda: (folders[-1] / "is_ready").exists(), PATIENCE, lambda: "the owner does not start")
    return process


@pytest.fixture
def owner_of():
    """Start processes that own folders; they are killed in the end."""
    processes = []
    yield lambda *folders: processes.append(start_owner(*folders)) or processes[-1]
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_owner_removes_its_folders(owner_of, tmp_path, number):
    folders = [tmp_path / "fedsim-a-0", tmp_path / "fedsim-b-0"]
    owner = owner_of(*folders)
    owner.send_signal(number)
    assert owner.wait(PATIENCE) == -number
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_a_killed_owner_are_removed_and_those_of_a_living_one_are_not(owner_of, tmp_path):
    dead, living = tmp_path / "fedsim-a-0", tmp_path / "fedsim-b-0"
    killed, _ = owner_of(dead), owner_of(living)
    assert remove_abandoned_folders([tmp_path]) == 0
    killed.kill()
    killed.wait()
    assert remove_abandoned_folders([tmp_path, tmp_path]) == 1
    assert not dead.exists()
    assert sorted(path.name for path in living.iterdir()) == ["images", "is_ready", "owner"]


def test_a_stopped_owner_lives(owner_of, tmp_path):
    owner = owner_of(tmp_path / "fedsim-a-0")
    owner.send_signal(signal.SIGSTOP)
    assert remove_abandoned_folders([tmp_path]) == 0
    owner.send_signal(signal.SIGCONT)


def foreign(folder, kind, outside):
    """Make something that is no abandoned folder."""
    if kind == "file":
        folder.write_text("mine")
        return
    folder.mkdir()
    (folder / "mine").write_text("mine")
    if kind == "link as owner":
        (folder / "owner").symlink_to(outside)
    elif kind == "folder as owner":
        (folder / "owner").mkdir()


def test_nothing_else_is_removed(tmp_path):
    """The judge against drawn neighbours: other names, no owner, an owner that is no file."""
    drawn, outside = random.Random(5), tmp_path / "outside"
    place = tmp_path / "memory"
    place.mkdir()
    outside.write_text("mine")
    kinds, names = ("file", "no owner", "link as owner", "folder as owner", "other name"), "abcdef0123456789"
    for number in range(300):
        kind = drawn.choice(kinds)
        prefix = drawn.choice(["fedsi-", "xfedsim-", "torch_", "Fedsim-"]) if kind == "other name" else "fedsim-"
        folder = place / f"{prefix}{''.join(drawn.choices(names, k=8))}-{number}"
        foreign(folder, kind, outside)
        if kind == "other name":
            (folder / "owner").touch()
    before = sorted(map(str, place.rglob("*")))
    assert remove_abandoned_folders([place]) == 0
    assert sorted(map(str, place.rglob("*"))) == before
    assert outside.read_text() == "mine"


def test_handlers_and_locks_are_as_before_afterwards(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    folders = [tmp_path / "fedsim-a-0", tmp_path / "fedsim-b-0"]
    for folder in folders:
        make_owned_folder(folder)
    for folder in folders:
        remove_owned_folder(folder)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    assert list(tmp_path.iterdir()) == []
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in held if str(tmp_path) in path]


def test_a_fork_of_the_owner_owns_nothing(tmp_path):
    make_owned_folder(tmp_path / "fedsim-a-0")
    if (pid := os.fork()) == 0:
        from fedsim.core.owned_folders import remove_owned_folders

        remove_owned_folders()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "fedsim-a-0").is_dir()
    remove_owned_folder(tmp_path / "fedsim-a-0")
