"""How much of the package a reader must hold in the head: maps of rooms, and the files of a session and of settings.

    python benchmarks/house.py              # all rooms, the session of a client of the quickstart, and its settings
    python benchmarks/house.py federation   # one room, with its imports

A room's map counts its files and sub-rooms, the floors that their imports form, and the imports between them (arrows).
The session is that of one client with FedPav and 12 batches: a profiler notes each file whose functions are called.
The way to the settings is noted in the same way, from the words of ``fedsim fit --config quickstart`` to the checked
configuration, before objects are built from it; imports do not count.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from tabulate import tabulate

import fedsim

SOURCE = Path(fedsim.__file__).parent


@cache
def modules() -> dict[str, Path]:
    """Return the name of each module -> its file."""
    paths = sorted(SOURCE.rglob("*.py"))
    names = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths
    ]
    return dict(zip(names, paths, strict=True))


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of fedsim that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsim"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else str(node.module)


def map_of(room: str) -> dict[str, set[str]]:
    """Return each file or sub-room of a room -> those that it imports."""
    prefix = f"fedsim.{room}."
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        if name.startswith(prefix):
            part = name.removeprefix(prefix).partition(".")[0]
            targets = {
                target.removeprefix(prefix).partition(".")[0] for target in imports(path) if target.startswith(prefix)
            }
            graph.setdefault(part, set()).update(targets - {part})
    return graph


def floors(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports."""

    def height(part: str, above: tuple[str, ...] = ()) -> int:
        below = graph.get(part, set()) - {*above, part}
        return 1 + max((height(target, (*above, part)) for target in below), default=0)

    return max(map(height, graph), default=0)


def table_of_rooms() -> str:
    """Return a row for each room: lines, files and sub-rooms, floors, arrows."""
    rows = []
    for room in sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()):
        lines = sum(len(path.read_text().splitlines()) for path in (SOURCE / room).rglob("*.py"))
        graph = map_of(room)
        rows.append([room, lines, len(graph), floors(graph), sum(map(len, graph.values()))])
    return tabulate(rows, headers=["room", "lines", "files and sub-rooms", "floors", "arrows"])


def noting(calls: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that counts the calls of functions in each file of the package."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)) and frame.f_code.co_name != "<module>":
            calls[str(Path(file).relative_to(SOURCE))] += 1

    return note


def files_of_settings() -> Counter[str]:
    """Return the files between the words of a command line and its checked configuration, with their calls."""
    from fedsim.__main__ import main
    from fedsim.cli.fit import FedSimCLI

    calls: Counter[str] = Counter()

    class Settled(BaseException):
        """The end of the way."""

    def end(_: FedSimCLI) -> None:
        sys.setprofile(None)
        raise Settled

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(FedSimCLI, "instantiate_classes", end):
        sys.setprofile(noting(calls))
        with suppress(Settled):
            main(["fit", "--config", "quickstart", "--trainer.devices=1", f"--run_dir={folder}/run"])
    return calls


def files_of_a_session() -> Counter[str]:
    """Return the files that the first client's session enters in a fit of the quickstart, with their calls."""
    from fedsim.__main__ import main
    from fedsim.federation.rank_worker import RankWorker

    calls: Counter[str] = Counter()
    note = noting(calls)
    train, sessions = RankWorker._train_client, []

    def profiled(worker: RankWorker, *args: Any) -> Any:
        sessions.append(args)
        sys.setprofile(note if len(sessions) == 1 else None)
        try:
            return train(worker, *args)
        finally:
            sys.setprofile(None)

    options = ["--trainer.max_epochs=2", "--trainer.devices=1"]  # the last round is scored: not that of the session
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(RankWorker, "_train_client", profiled):
        main(["fit", "--config", "quickstart", *options, "--model.client.local_steps=12", f"--run_dir={folder}/run"])
    return calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="?")
    chosen = parser.parse_args().room
    if chosen:
        print(tabulate([[part, ", ".join(sorted(below))] for part, below in sorted(map_of(chosen).items())]))
    else:
        entered = files_of_a_session()
        print(f"\n{table_of_rooms()}\n\nA client's session enters {len(entered)} files:")
        print(tabulate(sorted(entered.items()), headers=["file", "calls"]))
        passed = files_of_settings()
        rooms = {Path(file).parts[0] for file in passed if "/" in file}
        print(f"\nrooms of settings: {len(rooms)}, with {len(passed)} files:")
        print(tabulate(sorted(passed.items()), headers=["file", "calls"]))
