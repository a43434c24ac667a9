"""A command's process ends with its code and all its output, after its exit handlers, and takes nothing apart."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, sys, threading, time
from fedsim.core.quick_end import end_quickly, prepare_quick_end
class Large:
    def __del__(self):
        os.write(1, b"taken apart ")
prepare_quick_end()
atexit.register(os.write, 1, b"handled ")
large = Large()
threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread "))).start()
"""


@pytest.mark.parametrize(
    ("rest", "code", "output"),
    [
        ("sys.stdout.write('text'); end_quickly(3); sys.exit(3)", 3, "textthread handled "),
        ("end_quickly(0)", 0, "thread handled "),
        ("sys.exit(2)", 2, "thread handled taken apart "),  # its code is not known
        ("1 / 0", 1, "thread handled taken apart "),
        ("end_quickly(0); sys.stdout = None", 0, "thread handled "),
    ],
)
def test_a_process_ends_with_its_code_after_its_handlers(rest, code, output):
    done = subprocess.run([sys.executable, "-c", PROGRAM + rest], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, output)


def test_files_that_are_still_open_are_written(tmp_path):
    text, numbers = tmp_path / "notes.txt", tmp_path / "numbers"
    files = f"a, b = open({str(text)!r}, 'w'), open({str(numbers)!r}, 'wb')\n"
    rest = "a.write('note'); b.write(b'12'); end_quickly(0)"
    subprocess.run([sys.executable, "-c", PROGRAM + files + rest], check=True, timeout=60)
    assert (text.read_text(), numbers.read_bytes()) == ("note", b"12")


def test_a_fork_ends_by_itself():
    fork = "end_quickly(3)\nif os.fork() == 0: sys.exit(4)\nos.write(1, b'child %d ' % (os.wait()[1] >> 8))"
    done = subprocess.run([sys.executable, "-c", PROGRAM + fork], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "child 4" in done.stdout) == (3, True)


def test_the_command_ends_so():
    program = PROGRAM + "from fedsim.__main__ import command\nsys.argv[1:] = ['nonsense']\nsys.exit(command())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "thread handled ", 1)
