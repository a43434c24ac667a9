"""Workers of pytest-xdist that begin warm: forks of a process that has imported everything and collected the tests.

Each worker would import torch and the tests for twenty seconds of a core, and its fork server would
import torch again. Here, the Python of the workers is a small program that asks that process for a fork, lends it its
own input and output, and ends when the fork does.
"""

import gc
import os
import pickle
import secrets
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from unittest import mock

_PROGRAM = """
import os, pickle, signal, socket, struct, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker has its own
link = socket.socket(socket.AF_UNIX)
link.connect("\\0{name}")
content = pickle.dumps((sys.argv[-1], os.getcwd(), dict(os.environ)))
socket.send_fds(link, [struct.pack("q", len(content))], [0, 1, 2])
link.sendall(content)
link.recv(1)  # returns when the fork has ended
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
        program.write_text(_PROGRAM.format(name=name))
        python = shlex.join([sys.executable, "-IS", str(program)])
        # one thread: a fork has no others, and would wait for those that its parent had
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment.pop("PYTEST_ADDOPTS", None)  # for us
        # it reads its input to notice our end
        self._source = subprocess.Popen(
            [sys.executable, __file__, name, *config.args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        assert self._source.stdout.read(1), "the process of which workers are forks has ended"
        specs[:] = [execnet.XSpec(f"popen//python={python}//id={spec.id}") if spec.popen else spec for spec in specs]

    def pytest_unconfigure(self):
        """End that process."""
        if hasattr(self, "_source"):
            for end in (self._source.stdin, self._source.stdout):
                end.close()
            try:
                self._source.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._source.kill()
            self._folder.cleanup()


def _serve(name, paths):
    """Collect the tests; then give a fork to each that asks, until nobody is left who could."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"\0{name}")
    door.listen()
    os.write(1, b"1")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    has_server, workers = _prepare(paths), []
    while door in select.select([door, 0], [], [])[0]:
        link, _ = door.accept()
        head, files, *_ = socket.recv_fds(link, 8, 3)
        content = link.recv(*struct.unpack("q", head), socket.MSG_WAITALL) if len(head) == 8 else b""
        if content:
            worker = os.fork()
            if worker == 0:
                door.close()
                _work(*pickle.loads(content), files, has_server)
                return  # as a process ends; ``link`` was open until now
            workers.append(worker)
        for file in (*files, link.detach()):
            os.close(file)
    _end(workers)
    os._exit(0)


def _end(workers):
    """Give the workers ten seconds; kill those that hang."""
    deadline = time.monotonic() + 10
    for worker in workers:
        while os.waitpid(worker, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.02)


def _prepare(paths):
    """Do once what workers would do; return whether it went well. If not, they do it themselves, and say why not."""
    import pytest

    collected = pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", *paths])
    is_ready = False
    if collected == pytest.ExitCode.OK:
        try:
            from prepared import prepare

            prepare()
            is_ready = True
        except Exception:
            traceback.print_exc()
    gc.collect()
    gc.freeze()
    return is_ready


def _work(code, cwd, variables, files, has_server):
    """Do what a Python does that is called with ``-c code``."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor in (0, 2):
        os.dup2(1, descriptor)  # nowhere, yet
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if has_server:
        _begin_server(files[2])
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["-c"]
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - open to the end
    exec(code, {"__name__": "__main__"})


def _begin_server(stderr):
    """Start multiprocessing's fork server as a fork, not as a new Python."""
    from multiprocessing import forkserver, resource_tracker, util

    import failing  # noqa: F401 - it says what the server needs

    resource_tracker.ensure_running()  # it would tell of semaphores that killed ranks have left
    os.dup2(stderr, 2)
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
