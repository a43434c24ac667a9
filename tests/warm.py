"""Workers of pytest-xdist that begin warm: forks of a process that has imported all and collected the tests.

Each worker would import torch and the tests for twenty seconds of a core, and its server of forked processes would
import torch again. Here, the Python of the workers is a small program that asks that process for a fork, lends it its
own input and output, and ends when the fork does.
"""

import gc
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

_PROGRAM = """#!{python} -IS
import os, pickle, socket, struct, sys

link = socket.socket(socket.AF_UNIX)
link.connect("\\0{name}")
content = pickle.dumps((sys.argv[-1], os.getcwd(), dict(os.environ)))
socket.send_fds(link, [struct.pack("q", len(content))], [0, 1, 2])
link.sendall(content)
link.recv(1)  # it ends
os._exit(0)
"""


class WarmWorkers:
    """A plugin of the process that hands tests out."""

    def pytest_xdist_setupnodes(self, config, specs):
        """Let the workers be forks."""
        import execnet  # where xdist is, it is

        self._folder = tempfile.TemporaryDirectory(prefix="fedsim-tests-warm-")
        program = Path(self._folder.name) / "python"
        name = f"fedsim-tests-{secrets.token_hex(8)}"
        program.write_text(_PROGRAM.format(python=sys.executable, name=name))
        program.chmod(0o700)
        # it reads its input to notice our end
        self._first = subprocess.Popen(
            [sys.executable, __file__, name, *config.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._first.stdout.read(1)  # it listens
        specs[:] = [execnet.XSpec(f"popen//python={program}//id={spec.id}") if spec.popen else spec for spec in specs]

    def pytest_unconfigure(self):
        """End that process."""
        if hasattr(self, "_first"):
            for end in (self._first.stdin, self._first.stdout):
                end.close()
            self._first.wait()
            self._folder.cleanup()


def _serve(name, paths):
    """Collect the tests; then give a fork to each that asks, until nobody is left who could."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"\0{name}")
    door.listen()
    os.write(1, b"1")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    is_ready = _prepare(paths)
    while door in select.select([door, 0], [], [])[0]:
        link, _ = door.accept()
        head, files, *_ = socket.recv_fds(link, 8, 3)
        content = link.recv(*struct.unpack("q", head), socket.MSG_WAITALL)
        if os.fork() == 0:
            door.close()
            _work(*pickle.loads(content), files, is_ready)
            return  # as a process ends; ``link`` was open until now
        for file in (*files, link.detach()):
            os.close(file)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    os._exit(0)


def _prepare(paths):
    """Do once what workers would do; return whether it went well: if not, they will say so."""
    import pytest

    collected = pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", *paths])
    is_ready = False
    if collected == pytest.ExitCode.OK:
        with suppress(Exception):
            from prepared import prepare

            prepare()
            is_ready = True
    gc.collect()
    gc.freeze()
    return is_ready


def _work(code, cwd, variables, files, has_server):
    """Do what a Python does that is called with ``-c code``."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor in (0, 2):  # not the worker's yet: Python tells of semaphores that killed ranks have left
        os.dup2(1, descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if has_server:
        _begin_server()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["-c"]
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - open to the end
    exec(code, {"__name__": "__main__"})


def _begin_server():
    """Fork the server of forked processes, in the place of a new Python."""
    from multiprocessing import forkserver, resource_tracker, util

    import failing  # noqa: F401 - it says what the server needs

    resource_tracker.ensure_running()  # a Python of its own
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_, words, descriptors):
    process = os.fork()
    if process:
        return process
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in descriptors:
                with suppress(OSError):  # that of the folder itself
                    os.close(number)
        exec(words[-1], {"__name__": "__main__"})
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)
    _serve(sys.argv[1], sys.argv[2:])
