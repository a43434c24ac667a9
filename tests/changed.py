"""Print the tests that a change touches: those of its rooms, and those of all rooms that know them.

python tests/changed.py main    # all that differs from where the branch began, and new files
"""

import subprocess
import sys
from pathlib import Path

from test_house import GRAPH, KNOWN, imports, room

ROOT = Path(__file__).parents[1]
ALWAYS = "tests/test_house.py"
OF_TEXTS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "benchmarks")
OF_COMMANDS = ("configs", "slurm")


def files_since(base):
    """Files that differ from where the branch left ``base``, and new ones, relative to the checkout."""
    lists = (["diff", "--name-only", "--merge-base", base], ["ls-files", "--others", "--exclude-standard"])
    return [
        line for words in lists for line in subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()
    ]


def rooms_above(rooms):
    """Rooms, and all that know one of them, directly or through others.

    >>> rooms_above({"cli"}) == {"cli", "__main__"}, "methods" in rooms_above({"functional"})
    (True, True)
    """
    above = set(rooms)
    while more := {room(a) for a, names in GRAPH.items() if {room(name) for name in names} & above} - above - {""}:
        above |= more
    return above


def touched_by(files):
    """Arguments of pytest for the tests that files touch.

    >>> touched_by(["src/fedsim/cli/fit.py"])
    ['src/fedsim/cli', 'tests/cli', 'tests/device', 'tests/test_house.py']
    """
    chosen, rooms = {ALWAYS}, set()
    for file in files:
        match Path(file).parts:
            case ["src", "fedsim", name, _, *_]:
                rooms.add(name)
                chosen.add(f"src/fedsim/{name}")
            case ["tests", _] if Path(file).name.startswith("test_"):
                chosen.add(file)
            case ["tests", folder, _, *_]:
                chosen.add(f"tests/{folder}")
            case [first, *_] if first in OF_TEXTS:
                chosen |= {"tests/test_docs.py", "tests/test_records.py"}
            case [first, *_] if first in OF_COMMANDS:
                chosen |= {"tests/cli", "tests/parsing", "tests/test_docs.py"}
            case _:
                return ["tests", "src"]
    above = rooms_above(rooms)
    of_device = {room(name) for path in (ROOT / "tests" / "device").rglob("*.py") for name in imports(path, KNOWN)}
    chosen |= {f"tests/{name}" for name in above | ({"device"} if above & of_device else set())}
    return sorted(name for name in chosen if (ROOT / name).exists())


if __name__ == "__main__":
    sys.stdout.write(" ".join(touched_by(files_since(sys.argv[1]))) + "\n")
