"""A lock in a folder, so that only one process writes a run there: with host, process and a sign of life.

The lock is a file. A file lock of the operating system alone would not do: on a file system of several machines it may
be missing, or stay after a machine was lost. Here, an owner on this machine is looked up among its processes, and one
on another machine shows by the time of the file that it lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder, missing_folders, remove_empty

LOCK_FILE = "fit.lock"
WAYS = "give another --run_dir, --overwrite true to replace it, or --ckpt_path last to continue it"
"""the remedy of the command line for a folder that holds a run"""
HEARTBEAT = 20.0
"""seconds between two signs of life of an owner"""
SILENCE = 240.0
"""seconds without a sign of life after which the owner on another machine counts as lost"""


class RunLock:
    """Holds a folder from :meth:`acquire` to :meth:`release`; a process that ends without a release leaves no hold.

    Args:
        folder: the folder; ``acquire`` makes it and its parents, and ``release`` removes those that are still empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK_FILE
        self._owner: dict[str, Any] | None = None
        self._made: list[Path] = []
        self._ended = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot go to another process: the one that acquired the lock shows the signs of life."""
        return {name: value for name, value in vars(self).items() if name != "_ended"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take the attributes of :meth:`__getstate__`."""
        vars(self).update(state, _ended=threading.Event())

    def acquire(self) -> None:
        """Take the folder, also from an owner that has ended.

        Raises:
            ConfigError: if a process that may be alive has it (the message names host, process and time), or if it
                cannot be written.
        """
        self._made = missing_folders(self.folder)
        try:
            make_folder(self.folder, "run_dir")
            with _guarded(self.path) as file:
                owner = _read(file)
                if owner is not None and (refusal := _reason_in_use(self.path, owner)):
                    raise ConfigError(f"run_dir: {self.folder} is in use: {refusal}")
                self._write(file, _this_process())
        except OSError as error:
            self._remove_folders()
            raise ConfigError(f"run_dir: {self.path} cannot be written ({error.strerror}); name another") from error
        except ConfigError:
            self._remove_folders()
            raise
        threading.Thread(target=self._show_life, name="run lock", daemon=True).start()

    def look(self) -> None:
        """Raise ConfigError, as :meth:`acquire`, if another process may be writing into the folder; write nothing."""
        with suppress(OSError):  # there is none, or acquire() will say why it cannot be read
            owner = _parsed(self.path.read_bytes())
            if owner is not None and (refusal := _reason_in_use(self.path, owner)):
                raise ConfigError(f"run_dir: {self.folder} is in use: {refusal}")

    def check(self) -> None:
        """Make sure, before something is written, that the folder is still ours.

        Raises:
            DataError: if folder or file were removed or renamed, or another process has them.
        """
        if self._owner is None:
            return
        try:
            owner = _parsed(self.path.read_bytes())
        except OSError as error:
            removed = self.path if self.folder.is_dir() else self.folder
            raise DataError(
                f"{removed}: was removed while the run wrote into its folder ({error.strerror}); leave a run directory "
                "as it is until the run ends"
            ) from error
        if owner != self._owner:
            by = "it was changed" if owner is None else f"{_name(owner)} has taken it"
            raise DataError(f"{self.path}: is not this run's any more: {by}; give each fit its own --run_dir")

    def release(self) -> None:
        """Give the folder back, if this process has it; folders that are empty as they were made are removed."""
        self._ended.set()
        if self._owner is None:
            return
        with suppress(OSError):
            if self.folder.is_dir():
                with _guarded(self.path) as file:
                    if _read(file) in (None, self._owner):
                        self.path.unlink(missing_ok=True)
        self._owner = None
        self._remove_folders()

    def _remove_folders(self) -> None:
        remove_empty(self._made)
        self._made = []

    def _write(self, file: int, owner: dict[str, Any]) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, (json.dumps(owner) + "\n").encode(), 0)
        os.fsync(file)
        self._owner = owner

    def _show_life(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with suppress(OSError):  # check() reports a folder that is gone
                os.utime(self.path)


def message_of_change(folder: Path, error: OSError) -> str:
    """Return a message if an error shows that a file below a folder was taken from its writer; else nothing."""
    name = error.filename2 or error.filename
    if not isinstance(name, str) or error.errno not in _CHANGES:
        return ""
    if folder.absolute() not in Path(name).absolute().parents:
        return ""
    return (
        f"{name}: was removed or replaced while the run wrote it ({error.strerror}); leave a run directory as it is "
        "until the run ends"
    )


_CHANGES = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE)


@contextmanager
def _guarded(path: Path) -> Iterator[int]:
    """Open a file that may be missing, and let no other process of this machine decide about it in the meantime."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # some file systems have no such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file still has its name: its owner may have just removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _read(file: int) -> dict[str, Any] | None:
    """Return the owner in an open file; None if nothing is in it that an owner has written."""
    return _parsed(os.pread(file, 10_000, 0))


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        owner = json.loads(content)
    except (ValueError, RecursionError):
        return None
    is_owner = isinstance(owner, dict) and all(isinstance(owner.get(key), cls) for key, cls in _FIELDS.items())
    return owner if is_owner else None


_FIELDS = {"host": str, "machine": str, "pid": int, "process": str, "since": str}


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": name_of_machine(),
        "pid": os.getpid(),
        "process": _start_of(os.getpid()) or "",
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": os.environ.get("SLURM_RESTART_COUNT") or "0",
    }


def name_of_machine() -> str:
    """Return a name of this machine, since it was booted, with its processes: containers have the host's boot only."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str | None:
    """Return the time at which a process of this machine started, in clock ticks since the boot; None if there is none.

    A number of a process may be given again; together with this time it is not. "" if the system does not say it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:  # it is another user's
            pass
        return ""
    return None if fields[0] in "ZX" else fields[19]  # a zombie writes nothing


def _reason_in_use(path: Path, owner: Mapping[str, Any]) -> str:
    """Return the reason why the folder cannot be taken from an owner; empty if the owner has ended."""
    if owner["machine"] == name_of_machine():
        if owner["process"] != _start_of(owner["pid"]):
            return ""
        if owner["pid"] == os.getpid():
            return "this process writes a run there already; give another --run_dir"
        return f"{_name(owner)} writes a run there; wait until it ends, end it, or give another --run_dir"
    if _is_start_before(owner):
        return ""
    age = _now(path.parent) - path.stat().st_mtime
    if age > SILENCE:
        return ""
    return (
        f"{_name(owner)} writes a run there, as its sign of life {max(age, 0):.0f} s ago shows; if it has ended, "
        f"begin again in {SILENCE / 60:.0f} minutes, or give another --run_dir"
    )


def _is_start_before(owner: Mapping[str, Any]) -> bool:
    """Return whether the owner was an earlier start of this very job: Slurm starts a job again when it has ended."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT") or "0"
    earlier = str(owner.get("restarts"))
    if job is None or owner.get("job") != job or not (restarts.isdigit() and earlier.isdigit()):
        return False
    return int(earlier) < int(restarts)


def _name(owner: Mapping[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"


def _now(folder: Path) -> float:
    """Return the time by the clock of a folder's file system: that of another machine may differ from ours."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{LOCK_FILE}.") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
