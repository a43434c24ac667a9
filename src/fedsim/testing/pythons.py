"""Processes for trials: forks of clean Pythons. Some have other hashes of texts, as each Python has that is started.

The order of a set of texts follows their hashes. Forks of one Python share them, the ranks of a run do not.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import cloudpickle

from fedsim.testing.findings import Findings, described

HASHES = "PYTHONHASHSEED"
REMEDY_OF_HASHES = (
    f"hash() of a text and the order of a set differ from process to process ({HASHES}): use hashlib, and sort sets"
)
_PRELOAD = "fedsim.testing.trials"
"""imported before a Python forks, as that takes seconds"""
_LONGEST = 120.0
"""seconds for an answer"""


def sent(content: Any) -> bytes | None:
    """Return an object by value, with classes of a script or a notebook; None if it cannot be sent."""
    try:
        return bytes(cloudpickle.dumps(content))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def received(content: bytes) -> Any:
    """Return the object that :func:`sent` was given; it must come from the process that has started this one."""
    return pickle.loads(content)


def clean_process(target: Callable[..., None], args: tuple[Any, ...], hashes: int = 0) -> Any:
    """Start a process that is the fork of a clean Python, and return it.

    ``hashes``: 0: it has the hashes of the others; each other number is a Python with hashes of its own.
    """
    multiprocessing.set_forkserver_preload([_PRELOAD])
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    with _without_main():  # a clean process has none
        if not hashes:
            process.start()
        else:
            connect = ready(hashes).connect_to_new_process
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
    return process


def ready(hashes: int) -> forkserver.ForkServer:
    """Let a Python with other hashes start, if it has not, and return the server of its forks, without waiting."""
    server = _server(hashes, os.getpid())
    with mock.patch.dict(os.environ, {HASHES: _seed(hashes)}):
        server.ensure_running()
    return server


@functools.cache
def _server(hashes: int, owner: int) -> forkserver.ForkServer:  # noqa: ARG001 - a fork begins anew
    server = forkserver.ForkServer()
    server.set_forkserver_preload([_PRELOAD])
    return server


def _seed(hashes: int) -> str:
    """Return a seed of hashes that this process does not have."""
    seed = os.environ.get(HASHES, "")
    return str(hashes + int(seed) if seed.isdigit() else hashes)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module for a while: processes that start would import it, and run a script that tests a method."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Question:
    """A call of ``function`` in other Pythons, by ``hashes``; see :func:`clean_process`."""

    def __init__(self, function: Callable[..., Any], *args: Any, hashes: Sequence[int]) -> None:
        self._asked: list[tuple[Any, Any]] = []
        content = sent((function, args))
        for number in hashes if content is not None else ():
            reader, writer = multiprocessing.Pipe(duplex=False)
            self._asked.append((clean_process(_answer, (content, writer), number), reader))
            writer.close()

    def answers(self, deed: str, findings: Findings) -> list[Any]:
        """Return the results; an error becomes a finding about ``deed``. What could not be sent gives none."""
        results = []
        for _, reader in self._asked:
            with suppress(EOFError):
                error, result = reader.recv() if reader.poll(_LONGEST) else ("did not end", None)
                if error:
                    findings.add(f"{deed} in another process: {error}")
                else:
                    results.append(result)
        self.end()
        return results

    def end(self) -> None:
        """End the processes."""
        for process, _ in self._asked:
            process.kill()
            process.join()
        self._asked.clear()


def _answer(content: bytes, writer: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    function, args = received(content)
    try:
        writer.send(("", function(*args)))
    except Exception as error:  # of code that is tried, any type
        writer.send((described(error), None))
