"""How long test functions take: ``make durations`` measures it.

``conftest.py`` marks the functions of the file as slow, lets the longest files begin, and leaves the cases of a long
function that are beyond a budget to ``make test-others``.
"""

import json
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

SLOW_FROM = 0.2
"""seconds of a function, with all its cases and fixtures, from which on it is slow"""
ALIKE = 1.5
"""a former number stays unless the new one is that many times larger or smaller: machines are never equally quick"""
FILE = Path(__file__).with_name("durations.json")


class Duration(NamedTuple):
    """Seconds of a test function."""

    whole: float
    """with all its cases and fixtures"""
    case: float
    """of one case in the mean, without the fixtures that it has in common with others"""


def function_of(nodeid):
    """Name a function by its file's name and its own: a file that moves to another folder keeps its numbers.

    pytest itself refuses two test files of one name.
    """
    path, _, rest = nodeid.partition("[")[0].partition("::")
    return f"{path.rpartition('/')[2]}::{rest}"


def read_durations(path=FILE):
    """Return slow function -> its duration."""
    return {name: Duration(*numbers) for name, numbers in json.loads(path.read_text()).items()} if path.exists() else {}


def seconds_of_files(durations):
    """Return name of a file -> seconds of its slow functions."""
    seconds = Counter()
    for name, duration in durations.items():
        seconds[_file_of(name)] += duration.whole
    return seconds


class Measurement:
    """A plugin that measures what functions take, and writes those that are slow to a file.

    A fixture of several tests is charged to each function that uses it, for the function takes so long when it runs
    alone. With pytest-xdist, the processes that run tests hand on what they measure with their reports, and the process
    that hands tests out adds it up. A run of some functions leaves the numbers of the others alone.
    """

    def __init__(self, path):
        self._path = path
        self._fixtures = defaultdict(float)  # (id of its file or folder, name) of a fixture of several tests -> seconds
        self._made = {}  # the same, of those that were made since the last report
        self._own, self._shared = defaultdict(float), defaultdict(dict)  # function -> seconds; -> fixture -> seconds
        self._cases = defaultdict(set)  # function -> ids of its cases
        self._passed, self._failed = set(), set()  # functions; those that are in neither were skipped

    # -- in a process that runs tests ----------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                seconds, key = time.perf_counter() - begin, (request.node.nodeid, fixturedef.argname)
                self._fixtures[key] += seconds
                self._made[key] = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        used = {(node.nodeid, name) for node in item.listchain() for name in item.fixturenames} | {*self._made}
        report.shared = {"::".join(key): self._fixtures[key] for key in used & {*self._fixtures}}
        report.made = sum(self._made.values())
        self._made.clear()
        return report

    # -- in the process that hands tests out ---------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report):
        name = function_of(report.nodeid)
        self._own[name] += report.duration - getattr(report, "made", 0)  # none: its process has crashed
        self._cases[name].add(report.nodeid)
        for fixture, seconds in getattr(report, "shared", {}).items():
            self._shared[name][fixture] = max(seconds, self._shared[name].get(fixture, 0))
        if report.failed:
            self._failed.add(name)
        elif report.passed and report.when == "call":
            self._passed.add(name)

    def pytest_sessionfinish(self, session, exitstatus):
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail  # by -x
        if ended and self._own and not hasattr(session.config, "workerinput"):
            write_durations(self._slow(session), self._path)

    def _slow(self, session):
        """Return the slow functions: those measured now, and others that are still there."""
        former = read_durations(self._path)
        measured = {
            name: Duration(own + sum(self._shared[name].values()), own / len(self._cases[name]))
            for name, own in self._own.items()
        }
        for name in {*former} & {*measured} - (self._passed - self._failed):
            measured[name] = Duration(*map(max, measured[name], former[name]))  # it did not run to its end
        seconds = {name: Duration(*map(settled, new, former.get(name, (0, 0)))) for name, new in measured.items()}
        texts = _texts_below(session.config.rootpath)
        kept = {name: duration for name, duration in former.items() if name not in measured and _is_in(texts, name)}
        return kept | {name: duration for name, duration in seconds.items() if duration.whole >= SLOW_FROM}


def write_durations(durations, path):
    """Write a line for each function, in order."""
    lines = (f"{json.dumps(name)}: [{whole:g}, {case:g}]" for name, (whole, case) in sorted(durations.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def settled(seconds, former):
    """Return one digit of a measurement, or the former number if that is about the same.

    >>> settled(0.234, 0), settled(17.1, 0), settled(17.1, 20), settled(0.15, 0.2), settled(0.1, 0.2)
    (0.2, 20.0, 20, 0.2, 0.1)
    """
    return former if former / ALIKE <= seconds <= former * ALIKE else float(f"{seconds:.0e}")


def _file_of(name):
    return name.partition("::")[0]


def _is_in(texts, name):
    """Whether a function that was not run, such as one of ``make test-others``, is still there."""
    file, _, function = name.partition("::")
    return re.search(rf"\b{re.split('[:.]', function)[-1]}\b", texts.get(file, "")) is not None


def _texts_below(root):
    """Return name -> text of the files that may have tests."""
    return {path.name: path.read_text() for folder in ("tests", "src") for path in (root / folder).rglob("*.py")}
