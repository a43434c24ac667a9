"""Python's end after a failure of a rank: it may wait for ever, and a process that goes on is left alone."""

import subprocess
import sys

import pytest

BEGIN = "import atexit, time; from fedsim.strategy.channel import end_with_python; "


def ran(program):
    return subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=120)


def test_an_end_that_waits_for_ever_is_cut_with_a_line_and_code_2():
    done = ran("atexit.register(time.sleep, 3600); end_with_python(0.1); end_with_python(0.1); raise ValueError('why')")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: why" in done.stderr
    assert done.stderr.endswith("fedsim: error: the end of Python takes longer than 0 s after a rank has failed; "
                                "this process ends\n")  # fmt: skip


def test_so_is_the_end_of_groups_that_came_after_an_earlier_failure():
    done = ran("end_with_python(0.1); atexit.register(time.sleep, 3600); end_with_python(0.1)")
    assert done.returncode == 2, done.stderr


LATE = """
import threading
from fedsim.strategy import channel
counted = threading.Event()
channel.time.sleep = lambda seconds: (counted.set(), threading.Event().wait())  # a pause that no slow machine outlasts
end_with_python(0.1)
print("the pause began" if counted.wait(0.5) else "went on")
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(7)"])
def test_a_program_that_catches_the_error_and_goes_on_ends_by_itself(end):
    done = ran(LATE + end)
    assert (done.returncode, done.stdout, done.stderr) == (7 if end else 0, "went on\n", "")
