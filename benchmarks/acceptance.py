"""What README and docs promise of a machine with GPUs, one row each: pass, fail, or not here.

Each row runs in a process of its own, with a time limit; a row that fails, crashes or hangs leaves the others alone. At
the end comes a table in Markdown, for a record in benchmarks/results. Exit code 1: a row has failed.

    python benchmarks/acceptance.py                       # everything, within 30 minutes
    python benchmarks/acceptance.py --only market faiss
    python benchmarks/acceptance.py --reduced             # small sizes: tries the rows; a machine without a GPU does so
    python benchmarks/acceptance.py --list

Without a GPU, speed and memory are shown and not judged. benchmarks/results has a run on one H100; none had two GPUs.

Not tried at all: several machines, MPS, MIG, GPUs of different models, and drivers that are too old.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from acceptance_rows import components, fits, ranking, ranks, steps, training
from acceptance_rows.terms import Bench, NotHereError, Outcome, Row
from fedsim import __version__

HERE = Path(__file__).resolve().parent
PATIENCE = 5
"""times the limit that a row has without a GPU, on any computer"""
PASS, FAIL, NOT_HERE = "pass", "fail", "not here"

ROWS = [
    Row("doctor", "nothing stands in the way of a fit", "docs/cluster.md", 300, fits.doctor, quick=False),
    Row("repeat", "a deterministic fit ends in the same bits again", "README.md", 120, fits.repeated, quick=False),
    Row("ranks", "1 and 2 ranks end in the same bits", "README.md", 120, fits.equal_bits, quick=False, gpus=2),
    Row("nccl-alone", "1 rank with NCCL ends in the bits of one with gloo", "docs/gpus.md", 120, fits.nccl_alone,
        quick=False),
    Row("shared", "2 ranks on one GPU end in the bits of one rank", "docs/gpus.md", 120, fits.shared, quick=False),
    Row("shared-2x2", "2 ranks on each of two GPUs end in the bits of one rank", "docs/gpus.md", 120,
        ranks.two_on_each_of_two, quick=False, gpus=2),
    Row("groups", "ranks that share a client end in the bits of one rank", "docs/cluster.md", 120, ranks.groups,
        quick=False, gpus=2),
    Row("killed-rank", "a killed rank ends all ranks with a line", "docs/failures.md", 180, ranks.killed,
        quick=False, gpus=2),
    Row("frozen-rank", "a frozen rank ends all ranks with a line", "docs/failures.md", 180, ranks.frozen,
        quick=False, gpus=2),
    Row("killed-in-group", "a rank that is killed while ranks train a client together, too", "docs/failures.md", 180,
        ranks.killed_in_group, quick=False, gpus=2),
    Row("frozen-in-group", "a rank that is frozen while ranks train a client together, too", "docs/failures.md", 180,
        ranks.frozen_in_group, quick=False, gpus=2),
    Row("graph-bits", "graphs have the bits of plain steps", "docs/gpus.md", 120, steps.graph_bits, quick=False),
    Row("graph-fails", "a recording that fails leaves the bits of plain steps", "docs/gpus.md", 120, steps.graph_fails,
        quick=False),
    Row("prefetch", "copies ahead change no bit", "docs/gpus.md", 120, steps.prefetch, quick=False),
    Row("host-store", "states in the host's memory change no bit", "docs/gpus.md", 120, fits.host_store, quick=False),
    Row("resume", "a killed fit goes on to the same bits", "docs/failures.md", 120, fits.resumed, quick=False),
    Row("processes", "each rank's process is on its own GPU alone", "docs/gpus.md", 120, components.one_process,
        quick=False, gpus=2),
    Row("components", "attacks, rules, timings and styles with deterministic algorithms", "docs/gpus.md", 480,
        components.components, quick=False),
    Row("own-module", "a module of a user ends in the same bits after a pause, and on 2 ranks", "docs/own_module.md",
        180, components.own_module, quick=False),
    Row("formats", "maps keep their channels last through styles and norms", "docs/gpus.md", 60, components.formats),
    Row("robust", "seconds of robust rules", "docs/robust.md", 120, components.robust),
    Row("waits", "no wait for the device between batches", "training/client.py", 60, training.waits),
    Row("kernels", "launches per step of ResNet-50", "training/client.py", 60, training.kernels),
    Row("methods", "launches per step of methods with several passes, and no wait", "docs/gpus.md", 240,
        training.methods),
    Row("train-32", "ResNet-50, 256x128, bf16, batches of 32: time beside a loop by hand", "README.md", 90,
        partial(training.speed, batch_size=32)),
    Row("train-64", "the same with batches of 64", "README.md", 90, partial(training.speed, batch_size=64)),
    Row("graph-32", "batches of 32 beside the loop as a CUDA graph", "README.md", 90,
        partial(training.speed, batch_size=32, faster="capture")),
    Row("channels-32", "batches of 32 with channels last beside the usual loop", "docs/gpus.md", 90,
        partial(training.speed, batch_size=32, faster="channels_last")),
    Row("many", "50 clients of one batch each", "benchmarks/many_clients.py", 90, training.many),
    Row("evaluation", "features of an evaluation beside the same passes by hand", "docs/evaluation.md", 60,
        training.evaluation),
    Row("compile-32", "batches of 32 beside the loop with torch.compile", "README.md", 180,
        partial(training.speed, batch_size=32, faster="compile"), quick=False),
    Row("memory", "the peak is what describe says, and the activations", "fedsim describe", 60, training.memory),
    Row("memory-fedsam", "the same with FedSAM, whose clients have a copy of the weights", "fedsim describe", 60,
        training.copied_weights),
    Row("market", "Market-1501's queries are ranked, features on the GPU", "README.md", 60, ranking.market),
    Row("reciprocal", "re-ranking gives the CPU's distances", "docs/evaluation.md", 60, ranking.reciprocal),
    Row("faiss", "FAISS finds torch's neighbours", "docs/evaluation.md", 120, ranking.faiss),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A row's line of the table."""

    verdict: str
    figure: str
    bar: str
    seconds: float = 0.0


def judge(row: Row, bench: Bench) -> Result:
    """Run a row in this process; whatever it raises is its failure."""
    if bench.is_gpu and bench.gpus < row.gpus:
        return Result(NOT_HERE, f"needs {row.gpus} GPUs", "")
    try:
        outcome: Outcome = row.check(bench)
    except NotHereError as why:
        return Result(NOT_HERE, str(why), "")
    except Exception as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        return Result(FAIL, f"{type(error).__name__}: {line[:200]}", "")
    if outcome.of_speed and (bench.reduced or not bench.is_gpu):
        return Result(NOT_HERE, f"{outcome.figure} (small sizes)", outcome.bar)
    return Result(PASS if outcome.holds else FAIL, outcome.figure, outcome.bar)


def run_apart(row: Row, folder: Path, reduced: bool, limit: float) -> Result:
    """Run a row in a process of its own, which is ended with all that it has started after ``limit`` seconds."""
    command = [sys.executable, str(HERE / "acceptance.py"), "--row", row.name, "--folder", str(folder)]
    command += ["--reduced"] * reduced
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return Result(FAIL, f"no end within {limit:.0f} s", "", limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start
    with suppress(json.JSONDecodeError, IndexError, TypeError):
        return Result(**json.loads(out.splitlines()[-1]), seconds=seconds)
    last_line = next(reversed(err.strip().splitlines()), "")
    return Result(FAIL, f"its process ended with code {process.returncode}: {last_line[:200]}", "", seconds)


def table(results: dict[str, Result], gpus: int) -> str:
    """Return the table for a record, and below it what a machine with so few GPUs cannot try at all."""
    rows = [
        [f"{row.promise} ({row.where})", result.verdict, result.figure, result.bar or "-", f"{result.seconds:.0f}"]
        for row in ROWS
        if (result := results.get(row.name)) is not None
    ]
    shown = tabulate(rows, ["promise", "verdict", "figure", "bar", "s"], tablefmt="github", disable_numparse=True)
    return shown if gpus > 1 else f"{shown}\n\nSums among GPUs were not tried: that needs two GPUs."


def not_tried(rows: list[Row], gpus: int) -> str:
    """Return what this machine will not show, whatever its table says."""
    beyond = [row.name for row in rows if 0 < gpus < row.gpus]
    needs = f"\nFor lack of a second GPU, nor are: {', '.join(beyond)}." * bool(beyond)
    return str(__doc__).strip().splitlines()[-1] + needs


def machine() -> str:
    """Return a line about hardware and versions."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cards = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    commit = f", commit {git.stdout.strip()}" if git.returncode == 0 else ""
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {cards}; {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, fedsim {__version__}{commit}"
    )


def run_all(rows: list[Row], reduced: bool, minutes: float) -> dict[str, Result]:
    """Run rows one after another; those for which no time is left have failed."""
    deadline = time.monotonic() + 60 * minutes
    results = {}
    with tempfile.TemporaryDirectory(prefix="fedsim-acceptance-") as folder:
        for row in rows:
            left = deadline - time.monotonic()
            limit = min(row.seconds * (1 if torch.cuda.device_count() else PATIENCE), left)
            result = run_apart(row, Path(folder), reduced, limit) if left > 0 else Result(FAIL, "no time was left", "")
            results[row.name] = result
            print(f"{row.name:<15} {result.verdict:<8} {result.figure}", file=sys.stderr, flush=True)
    return results


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--reduced", action="store_true", help="small sizes")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all rows together")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--row", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_bench(folder: Path, reduced: bool) -> Bench:
    """Return this machine's bench; without a GPU sizes are small."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")  # not yet used: in exclusive mode it is a fit's
    return Bench(device, gpus, folder, reduced or not gpus)


def main() -> int:
    """Run the rows; return the exit code."""
    args = parse_arguments()
    if args.list:
        print(tabulate([[row.name, row.promise, row.where] for row in ROWS], tablefmt="plain"))
        return 0
    if args.row:
        warnings.simplefilter("ignore")
        [row] = [row for row in ROWS if row.name == args.row]
        result = judge(row, make_bench(args.folder, args.reduced))
        print("\n" + json.dumps({"verdict": result.verdict, "figure": result.figure, "bar": result.bar}))
        return 0
    rows = [row for row in ROWS if row.name in args.only]
    print(not_tried(rows, torch.cuda.device_count()), file=sys.stderr)
    results = run_all(rows, args.reduced, args.minutes)
    print(f"{machine()}\n\n{table(results, torch.cuda.device_count())}")
    counts = [
        f"{sum(outcome.verdict == verdict for outcome in results.values())} {verdict}"
        for verdict in (PASS, FAIL, NOT_HERE)
    ]
    print(f"\n{', '.join(counts)}")
    return int(any(outcome.verdict == FAIL for outcome in results.values()))


if __name__ == "__main__":
    sys.exit(main())
