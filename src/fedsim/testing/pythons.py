"""Processes for trials: forks of clean Pythons. Some have other hashes of texts, as each Python has that is started.

The order of a set of texts follows their hashes. Forks of one Python share them, the ranks of a run do not.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, spawn
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
_log = logging.getLogger(__name__)


def sent(content: Any) -> bytes | None:
    """Return an object by value, with classes of a script or a notebook; None, and a line, if it cannot be sent."""
    modules = _out_of_reach()
    try:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(content))
    except Exception as error:  # of code that is tried, any type
        _log.warning(
            "fedsim.testing: the part cannot be sent to another Python (%s), so the checks do not see whether it "
            "depends on hash() of a text or on the order of a set", described(error),
        )  # fmt: skip
        return None
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _out_of_reach() -> list[types.ModuleType]:
    """Return imported modules that a clean process would not find, such as tests that pytest imports by their path."""
    path = spawn.get_preparation_data("")["sys_path"]
    imported = {name: module for name, module in [*sys.modules.items()] if getattr(module, "__file__", None)}
    with mock.patch.object(sys, "path", path):
        tops = {name.partition(".")[0] for name in imported} - {"__main__", "__mp_main__"}
        reached = {top: _is_found(top) for top in tops}
    return [module for name, module in imported.items() if not reached.get(name.partition(".")[0], True)]


def _is_found(name: str) -> bool:
    try:
        return any(finder.find_spec(name, None) is not None for finder in sys.meta_path)
    except Exception:  # of another package's finder
        return True


def received(content: bytes) -> Any:
    """Return the object that :func:`sent` was given; it must come from the process that has started this one."""
    try:
        return pickle.loads(content)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; add its folder to PYTHONPATH, where another Python finds it") from error


def clean_process(target: Callable[..., None], args: tuple[Any, ...], hashes: int = 0) -> Any:
    """Start a process that is the fork of a clean Python, and return it.

    ``hashes``: 0: it has the hashes of the others; each other number is a Python with hashes of its own.
    """
    multiprocessing.set_forkserver_preload([_PRELOAD])
    arguments = (dict(os.environ), target, args)  # a fork has the environment of the time when its server started
    process = multiprocessing.get_context("forkserver").Process(target=_begin, args=arguments)
    with _without_main():  # a clean process has none
        if not hashes:
            process.start()
        else:
            connect = ready(hashes).connect_to_new_process
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
    return process


def _begin(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    hashes = os.environ.get(HASHES)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name != HASHES})
    if hashes is not None:
        os.environ[HASHES] = hashes
    target(*args)


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
    return str((hashes + int(seed)) % 2**32 if seed.isdigit() else hashes)


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
            try:
                error, result = reader.recv() if reader.poll(_LONGEST) else ("did not end", None)
            except EOFError:
                error, result = "it ended the process", None
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
    try:
        function, args = received(content)
        writer.send(("", function(*args)))
    except Exception as error:  # of code that is tried, any type
        writer.send((described(error), None))
