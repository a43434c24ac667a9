"""How many small faults the tests find: mutants of fedsim, drawn by a fixed seed.

A mutant is fedsim with one change: a comparison turned, a term dropped, a sign or an operator changed, two arguments
swapped, a number too large by one. They are drawn from the parts where a silent fault costs most: the round, the sums,
the ledger, the losses, the ranking, the methods and the local training, and the simulated time, ten from each of seven.
A mutant is killed if a test fails. First the fast tests run, then all others.

    python benchmarks/mutants.py --list                      # the seventy
    python benchmarks/mutants.py --areas time                # those of the simulated time only
    python benchmarks/mutants.py --rooms --each 8            # instead eight from each room of the package
    python benchmarks/mutants.py --out mutants.jsonl         # try them; goes on where it was interrupted
    python benchmarks/mutants.py --out mutants.jsonl --table
    python benchmarks/mutants.py --coverage .coverage        # after make coverage: only test files that run the line
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import CoverageData
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
AREAS = {
    "round": [
        "federation/round.py",
        "federation/rank_worker.py",
        "federation/round_table.py",
        "federation/scheduling/scheduler.py",
    ],
    "sums": ["core/exact.py", "core/flat.py", "federation/aggregation/sums.py", "federation/aggregation/masked.py"],
    "ledger": ["federation/components/ledger.py", "federation/components/hardware.py", "functional/encodings.py"],
    "losses": [
        "functional/losses.py",
        "functional/similarity.py",
        "functional/weighting.py",
        "functional/pruning.py",
        "training/objective.py",
    ],
    "ranking": ["evaluation/ranking.py", "evaluation/ranker.py", "evaluation/retrieval.py", "evaluation/reranking.py"],
    "training": ["training/client.py", "training/optimizer.py", "training/session.py", "training/server.py", "methods"],
    "time": [
        "federation/components/window.py",
        "federation/components/clock.py",
        "federation/components/buffered_clock.py",
        "federation/components/timing.py",
        "federation/scheduling/replay.py",
        "functional/staleness.py",
        "training/old_models.py",
    ],
}
ROOMS = {file.parent.name: [file.parent.name] for file in sorted((ROOT / "src" / "fedsim").glob("*/__init__.py"))}
LIMIT = 2400  # seconds for all tests of one mutant: one that hangs is killed, too
STAGES = (("fast", "not (slow or dist or others or cluster)"), ("slow", "(slow or dist) and not (others or cluster)"))
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
EQUAL = ("max", "min")  # the order of their arguments changes nothing
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    area: str
    file: str
    """relative to src/fedsim"""
    line: int
    start: int
    """of the changed text, in characters of the file"""
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """Line and change."""
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def all_mutants(area: str, file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = file.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def made(node: ast.expr, after: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        name = file.relative_to(ROOT / "src" / "fedsim").as_posix()
        return Mutant(area, name, node.lineno, start, end, source[start:end], after)

    for node in _of_code(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield made(node, f"{ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)}")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                yield made(node, f"({ast.unparse(left)} {ARITHMETIC[type(op)]} {ast.unparse(right)})")
                if isinstance(op, ast.Add | ast.Sub):
                    yield made(node, f"({ast.unparse(left)})")
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield made(node, f"({word.join(f'({ast.unparse(value)})' for value in values)})")
            case ast.Call(func=func, args=[first, second, *tail], keywords=keywords) if ast.unparse(func) not in EQUAL:
                swapped = ast.Call(func=func, args=[second, first, *tail], keywords=keywords)
                yield made(node, ast.unparse(swapped))
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield made(node, str(value + 1))


def _of_code(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield expressions that decide a number: no annotation, decorator, message or text, nothing outside functions."""
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef):
            waiting: list[ast.AST] = list(outer.body)
            while waiting:
                node = waiting.pop(0)
                if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef):
                    continue
                if isinstance(node, ast.AnnAssign):
                    waiting += [node.value] if node.value else []
                    continue
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "isinstance", "zip")):
                    continue
                if isinstance(node, ast.expr):
                    yield node
                waiting += ast.iter_child_nodes(node)


def draw(seed: int, areas: Mapping[str, Sequence[str]], each: int) -> list[Mutant]:
    """Return ``each`` mutants of each area, the same for the same source."""
    rng, drawn = random.Random(seed), []
    for area, names in areas.items():
        files = [path for name in names for path in _files(ROOT / "src" / "fedsim" / name)]
        mutants = {(m.file, m.start, m.after): m for file in files for m in all_mutants(area, file) if _is_new(m)}
        drawn += rng.sample([mutants[key] for key in sorted(mutants)], each)
    return drawn


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _is_new(mutant: Mutant) -> bool:
    # in brackets: an expression of several lines may have stood in some
    try:
        before, after = (ast.dump(ast.parse(f"({text})", mode="eval")) for text in (mutant.before, mutant.after))
    except SyntaxError:  # a term that needs brackets of its own
        return False
    return before != after


def files_that_run(mutant: Mutant, coverage: CoverageData) -> list[str]:
    """Return the test files that run a line of a mutant's expression; those of doctests are files of ``src``."""
    lines, files = range(mutant.line, mutant.line + mutant.before.count("\n") + 1), set[str]()
    for path in coverage.measured_files():
        if path.endswith(f"src/fedsim/{mutant.file}"):
            contexts = coverage.contexts_by_lineno(path)
            files |= {context for line in lines for context in contexts.get(line, [])}
    return sorted(files - {""})


def kill(mutant: Mutant, suite: Path, jobs: int, coverage: CoverageData | None = None) -> dict[str, object]:
    """Run the tests in ``suite`` on a mutant, until one fails; return its fate."""
    started = time.monotonic()
    files = None if coverage is None else files_that_run(mutant, coverage)
    if files == []:
        return {**asdict(mutant), "fate": "", "seconds": 0}
    with tempfile.TemporaryDirectory(prefix="fedsim-mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src")
        path = Path(folder) / "src" / "fedsim" / mutant.file
        source = path.read_text()
        assert source[mutant.start : mutant.end] == mutant.before, f"{mutant.file} is not the file it was drawn from"
        path.write_text(source[: mutant.start] + mutant.after + source[mutant.end :])
        environment = os.environ | {"PYTHONPATH": str(Path(folder) / "src")}
        paths = ["tests", str(Path(folder) / "src")] if files is None else [str(_moved(f, folder)) for f in files]
        for stage, marks in STAGES:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "-n", str(jobs), "--dist", "loadfile",
                       "-p", "no:cacheprovider", *paths]  # fmt: skip
            left = LIMIT - (time.monotonic() - started)
            fate = _run(command, suite, environment, left)
            if fate:
                return {**asdict(mutant), "fate": f"{stage}: {fate}", "seconds": round(time.monotonic() - started)}
    return {**asdict(mutant), "fate": "", "seconds": round(time.monotonic() - started)}


def _moved(file: str, folder: str) -> Path:
    """Return where a test file is while a mutant is tried: doctests are part of the mutated source."""
    return Path(folder) / file if file.startswith("src/") else Path(file)


def _run(command: list[str], suite: Path, environment: dict[str, str], limit: float) -> str:
    """Return the first test that failed, or an empty string."""
    with subprocess.Popen(
        command, cwd=suite, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=max(limit, 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "it hangs"
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "" if process.returncode in (0, 5) else failed[0] if failed else "the tests do not start"


def table(results: list[dict[str, object]]) -> str:
    """Return killed and drawn mutants per area, and the survivors."""
    drawn, killed = Counter(r["area"] for r in results), Counter(r["area"] for r in results if r["fate"])
    rows = [[area, killed[area], drawn[area]] for area in drawn]
    rows.append(["all", sum(killed.values()), sum(drawn.values())])
    left = [f"{r['file']}:{r['line']}: {r['before']} -> {r['after']}" for r in results if not r["fate"]]
    return "\n".join([tabulate(rows, ["area", "killed", "drawn"]), "", "survivors:", *left])


def main() -> None:
    """List the mutants, try them, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", nargs="+", help="areas, or rooms; all")
    parser.add_argument("--rooms", action="store_true", help="draw from each room")
    parser.add_argument("--each", type=int, default=10, help="mutants of an area or a room")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--suite", type=Path, default=ROOT, help="the repository whose tests run, to compare suites")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--coverage", type=Path, help="what make coverage has measured: run only files that can see it")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print(table(done))
        return
    coverage = None
    if args.coverage:
        coverage = CoverageData(str(args.coverage))
        coverage.read()
    written = {(r["file"], r["start"], r["after"]) for r in done}
    drawn = draw(args.seed, ROOMS if args.rooms else AREAS, args.each)
    for mutant in (mutant for mutant in drawn if not args.areas or mutant.area in args.areas):
        if args.list:
            print(f"{mutant.area:9} {mutant.name}")
        elif (mutant.file, mutant.start, mutant.after) not in written:
            result = kill(mutant, args.suite, args.jobs, coverage)
            with args.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['fate'] or 'SURVIVED':70} {mutant.name}", flush=True)


if __name__ == "__main__":
    main()
