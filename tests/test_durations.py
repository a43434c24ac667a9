"""The measurement of test functions, in a project of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path

from durations import Measurement


def pytest_configure(config):
    config.pluginmanager.register(Measurement(Path(__file__).with_name("durations.json")))
"""
TESTS = """
import time

import pytest


@pytest.fixture(scope="module")
def house():
    time.sleep(0.3)


@pytest.fixture(scope="module")
def shed():
    time.sleep(0.3)


@pytest.fixture
def bed():
    time.sleep(0.15)


@pytest.mark.parametrize("case", ["a/b", "c[d]"])
def test_both_cases_count(case, bed):
    pass


def test_quick():
    pass


def test_first_in_the_house(house):
    pass


def test_second_in_the_house(house):
    pass


def test_third_in_the_house(house):
    pass


def test_asks_for_a_shed(request):
    request.getfixturevalue("shed")


def test_fails():
    raise AssertionError


def test_fails_late():
    time.sleep(0.6)
    raise AssertionError


@pytest.mark.parametrize("case", range(2))
def test_fails_once(case):
    assert case


@pytest.mark.parametrize("case", range(2))
def test_not_always(case):
    if case:
        pytest.skip("not now")


def test_not_now():
    pytest.skip("not now")


@pytest.mark.others
def test_deselected():
    pass
"""
BEFORE = {
    "test_gone.py::test_x": [5, 5],
    "test_left_alone.py::test_x": [5, 5],
    "test_left_alone.py::test_y": [5, 5],
    "test_rooms.py::test_deselected": [5, 5],
    "test_rooms.py::test_fails": [3, 3],
    "test_rooms.py::test_fails_once": [3, 3],
    "test_rooms.py::test_gone": [5, 5],
    "test_rooms.py::test_not_always": [3, 3],
    "test_rooms.py::test_not_now": [3, 3],
    "test_rooms.py::test_quick": [3, 3],
    "test_rooms.py::test_second_in_the_house": [0.35, 0.35],
}


@pytest.fixture
def project(tmp_path):
    """A project with two folders of tests, and its durations of another day."""
    for path, text in (
        ("conftest.py", CONFTEST),
        ("a/test_rooms.py", TESTS),
        ("b/test_left_alone.py", "def test_x(): ..."),
    ):
        (tmp_path / "tests" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / path).write_text(text)
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / "durations.json").write_text(json.dumps(BEFORE))
    return tmp_path


def measured(project, *words):
    """Run the tests; return the exit code, and the file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not others", *words, "tests/a"]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    return result.returncode, (project / "tests" / "durations.json").read_text()


@pytest.mark.parametrize("processes", [("-n", "0"), ("-n", "2", "--dist", "loadfile")], ids=["one", "several"])
def test_a_measurement_lists_what_is_slow(project, processes):
    code, text = measured(project, *processes)
    assert code == pytest.ExitCode.TESTS_FAILED, "which is no obstacle"
    now = json.loads(text)
    assert text.splitlines()[1:-1] == sorted(text.splitlines()[1:-1]), "one line each, in order"
    assert [name for name in now if "rooms" not in name] == ["test_left_alone.py::test_x"], "its file was not run"
    assert {name.removeprefix("test_rooms.py::test_") for name in now if "rooms" in name} == {
        "both_cases_count", "first_in_the_house", "second_in_the_house", "third_in_the_house", "asks_for_a_shed",
        "fails", "fails_late", "fails_once", "not_now", "deselected",
    }  # fmt: skip
    for name in ("fails", "fails_once", "not_now"):
        assert now[f"test_rooms.py::test_{name}"] == [3, 3], "it did not run to its end"
    first, third = (now[f"test_rooms.py::test_{number}_in_the_house"] for number in ("first", "third"))
    assert first[0] < 1.5 * third[0], "the house is counted once for each"
    assert first[1] < 0.1, "a case alone is quick"
    assert now["test_rooms.py::test_second_in_the_house"][0] == 0.35, "about the same as before"
    whole, case = now["test_rooms.py::test_both_cases_count"]
    assert whole >= 0.3, "as both take as long"
    assert 0.1 <= case <= 0.7 * whole, "the mean of both"


@pytest.mark.parametrize("words", [["-x"], ["--collect-only"], ["-k", "nothing"]], ids=lambda words: words[0])
def test_a_run_that_does_not_end_writes_nothing(project, words):
    assert json.loads(measured(project, "-n", "0", *words)[1]) == BEFORE
