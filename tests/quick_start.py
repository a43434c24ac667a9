"""A Python that has imported fedsim already, for commands that start others.

Sweeps, several seeds, ``fedsim augment --processes`` and the scripts in ``benchmarks/`` start a Python each, which
imports torch and Lightning for seconds. Here, ``sys.executable`` is a small program that asks the test's process for a
forked one, lends it its own input and output, passes signals on to it, and ends as it does. Whoever claims something of
the start itself does without.
"""

import multiprocessing.connection
import os
import pickle
import runpy
import secrets
import shlex
import socket
import stat
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch.utilities import rank_zero_only

from failing import Forked, room
from fedsim.core import spares
from fedsim.strategy.ready_ranks import LAUNCHER_ID

_PROGRAM = """#!/bin/sh
''''exec {python} -IS "$0" "$@" # '''
import os, pickle, signal, socket, struct, sys

link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
content = pickle.dumps(({words!r} + sys.argv[1:], os.getcwd(), dict(os.environ), sys.argv[0]))
socket.send_fds(link, [struct.pack("q", len(content))], [0, 1, 2])
link.sendall(content)


def number():
    return struct.unpack("q", link.recv(8, socket.MSG_WAITALL))[0]


process = number()
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
    signal.signal(getattr(signal, name), lambda which, _: os.kill(process, which))
code = number()
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""It imports next to nothing, so it starts in a hundredth of a second. To the shell, its second line is a command; to
Python, a text: a first line alone cannot name a Python whose path has a space."""


class QuickPython:
    """Answers the small programs ``python`` and ``fedsim`` in a folder, until it is closed."""

    def __init__(self, folder):
        self.asked = []
        """the words of each call"""
        self.python, self.fedsim = folder / "python", folder / "fedsim"
        address = (
            f"\0fedsim-tests-{secrets.token_hex(8)}"  # of no file, and of no server before: it may be answering still
        )
        for path, words in ((self.python, []), (self.fedsim, ["-m", "fedsim"])):
            path.write_text(_PROGRAM.format(python=shlex.quote(sys.executable), address=address, words=words))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(address)
        self._door.listen()
        room()  # now, for two threads that ask for it at once would get two
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self):
        """Answer nobody any more."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _answer(self):
        with suppress(OSError):  # closed
            while True:
                link, _ = self._door.accept()
                threading.Thread(target=_serve, args=(link, self.asked), daemon=True).start()


def _serve(link, asked):
    """Start a process for a program, and tell the program its number and its end; it ends with the program."""
    with link:
        head, descriptors, *_ = socket.recv_fds(link, 8, 3)
        (length,) = struct.unpack("q", head)
        content = link.recv(length, socket.MSG_WAITALL)
        files = [multiprocessing.connection.Connection(descriptor) for descriptor in descriptors]
        words = pickle.loads(content)
        asked.append(words[0])
        process = Forked(_run, (*words, files))
        process.start()
        for file in files:
            file.close()
        with suppress(OSError):
            link.sendall(struct.pack("q", process.pid))
        if link in multiprocessing.connection.wait([process.sentinel, link]):
            process.kill()
        process.join()
        with suppress(OSError):
            link.sendall(struct.pack("q", process.exitcode))


def _run(words, cwd, variables, program, files):
    """Do what a Python does that is called with ``words``."""
    for descriptor, file in enumerate(files):
        os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = str(Path(program).with_name("python"))
    if (rank := variables.get("RANK", "")).isdecimal():  # Lightning reads it when it is imported
        rank_zero_only.rank = int(rank)
    if "OMP_NUM_THREADS" in variables:  # torch reads it when it is imported
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    _take_parent()
    while words[0] in ("-P", "-u"):
        words = words[1:]
    if words[0] == "-c":
        sys.argv, become = ["-c"], spares.become_rank

        def become_rank():
            become()
            _take_parent()

        with mock.patch.object(spares, "become_rank", become_rank):
            exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        for name in (words[1], f"{words[1]}.__main__"):  # imported already, of which runpy would warn
            sys.modules.pop(name, None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _take_parent():
    """A rank looks whether its parent is still the one that started it: here, that is another process."""
    if LAUNCHER_ID in os.environ:
        os.environ[LAUNCHER_ID] = str(os.getppid())
