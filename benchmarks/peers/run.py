"""The same federated averaging in pfl-research, Flower, FedLab, BlazeFL, fedsim and a plain loop, measured in turns.

python benchmarks/peers/run.py            # makes the environments first: several GB
python benchmarks/peers/run.py --help

Needs Linux (it adds up memory from /proc) and nothing but the standard library; each engine has an environment of its
own. Exits with 1 if the engines' losses differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
import venv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bars import check_bars
from launch import HERE, QUIET, SCRIPTS, Case, EngineError, Run, call, run_engine, wait_until_quiet

TOLERANCE = 1e-5
"""largest difference between two engines' losses"""
MODELS = ["cnn", "linear", "cifar"]
NOT_FOR = {"cifar": ("flower", "fedlab")}
"""model -> engines that do not run it"""
TITLES = {
    "plain": "plain loop", "pfl": "pfl-research", "flower": "Flower", "fedlab": "FedLab", "blazefl": "BlazeFL",
    "fedsim": "fedsim",
}  # fmt: skip
INTERPRETERS = {"blazefl": "python3.14t"}
"""engine -> the Python that it needs, other than this one"""


# -- environments ------------------------------------------------------------------------------------------------------


def make_environment(engine: str, folder: Path) -> Path:
    """Return the Python of an engine's environment, installed before if its requirements have not changed.

    Raises:
        EngineError: if that fails.
    """
    home, wanted = folder / engine, (HERE / f"requirements-{engine}.txt").read_text()
    python, stamp = home / "bin" / "python", home / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    note(f"installing {engine} into {home}")
    if (needed := INTERPRETERS.get(engine)) is None:
        venv.create(home, clear=True, symlinks=True, with_pip=True)
    elif shutil.which(needed) is None:
        raise EngineError(f"{TITLES[engine]} needs {needed}, which is not on PATH; give --python {engine}=PATH")
    else:
        call([needed, "-m", "venv", "--clear", home])
    call([python, "-m", "pip", "install", "--quiet", "-r", f"requirements-{engine}.txt"])
    stamp.write_text(wanted)
    return python


# -- all runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What all runs showed."""

    runs: dict[Case, list[Run]]
    """one per repeat; none for a case that failed"""
    failures: dict[Case, str]
    """why a case failed; it is not tried again"""


def measure(pythons: dict[str, Path | str], works: dict[str, Path], args: argparse.Namespace) -> Outcome:
    """Run all cases in turns, so that whatever else the machine does hits all engines alike.

    Args:
        pythons: engine -> its Python, or why it has none.
        works: model -> its work file.
        args: the command line.
    """
    outcome = Outcome({}, {})
    for repeat, model, workers, engine in product(range(args.repeats), works, args.workers, pythons):
        case, python = (engine, model, workers), pythons[engine]
        if case in outcome.failures or engine in NOT_FOR.get(model, ()):
            continue
        try:
            if isinstance(python, str):
                raise EngineError(python)
            run = run_quietly(python, case, works[model], args.patience)
        except EngineError as error:
            outcome.runs.pop(case, None)
            outcome.failures[case] = str(error)
            note(f"{engine} failed: {error}")
            continue
        outcome.runs.setdefault(case, []).append(run)
        title = f"{repeat + 1}/{args.repeats} {model:6} {workers} {engine:6}"
        note(f"{title} {1000 * run.seconds:7.1f} ms/round, others {run.others:.2f} cores")
    return outcome


def run_quietly(python: Path, case: Case, work: Path, patience: float) -> Run:
    """Run an engine, again while others disturb it and ``patience`` seconds last; return the best try."""
    tries, deadline = [], time.monotonic() + patience
    while True:
        wait_until_quiet(deadline - time.monotonic())
        tries.append(run_engine(python, case, work))
        if tries[-1].others < QUIET or time.monotonic() > deadline:
            return min(tries, key=lambda run: run.others)


def check_losses(runs: dict[Case, list[Run]]) -> list[str]:
    """Return what is wrong with the losses, one line per model."""
    problems = []
    for model in sorted({model for _, model, _ in runs}):
        losses = {(e, w, r.loss) for (e, m, w), repeats in runs.items() for r in repeats if m == model}
        values = [loss for *_, loss in losses]
        if values and max(values) - min(values) > TOLERANCE:
            problems.append(f"{model}: the engines did not do the same work: {sorted(losses)}")
    return problems


# -- the table ---------------------------------------------------------------------------------------------------------


def make_table(outcome: Outcome, engines: Iterable[str], models: list[str], workers: list[int]) -> str:
    """Return the Markdown table, and under it why what is missing is missing.

    Cells are medians over repeats. Ratios are to the plain loop with one worker in the same repeat; in brackets the
    smallest and the largest.
    """
    columns = ["engine", "version"]
    for model in models:
        columns += [f"{model} ms/round", "ratio", *(f"ratio, {w} workers" for w in workers if w > 1)]
    for model in models:
        columns += [f"{model} start-up s", "peak MB", "private MB", "loss"]
    rows = [columns, ["---"] * len(columns), *(make_row(engine, outcome.runs, models, workers) for engine in engines)]
    reasons = [
        f"- {TITLES[engine]}, {model}, {count} worker{'s' * (count > 1)} failed: {reason}"
        for (engine, model, count), reason in outcome.failures.items()
    ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *reasons])


def make_row(engine: str, runs: dict[Case, list[Run]], models: list[str], workers: list[int]) -> list[str]:
    """Return an engine's cells."""
    ran = [run for (name, *_), repeats in runs.items() for run in repeats if name == engine]
    cells = [TITLES[engine], ran[0].version if ran else "?"]
    for model in models:
        cells.append(median(runs.get((engine, model, 1)), lambda run: 1000 * run.seconds, ".1f"))
        cells += [ratios(runs, (engine, model, count)) for count in workers]
    for model in models:
        first = runs.get((engine, model, 1))
        cells += [median(first, lambda run: run.startup, ".1f"), median(first, lambda run: run.peak, ",.0f")]
        cells += [median(first, lambda run: run.private, ",.0f"), median(first, lambda run: run.loss, ".6f")]
    return cells


def median(runs: list[Run] | None, figure: Callable[[Run], float], form: str) -> str:
    """Return the median over repeats as text."""
    return format(statistics.median(figure(run) for run in runs), form) if runs else "-"


def ratios(runs: dict[Case, list[Run]], case: Case) -> str:
    """Return the time per round over the plain loop's in the same repeat: median, smallest, largest."""
    _, model, _ = case
    if case not in runs or ("plain", model, 1) not in runs:
        return "-"
    values = [run.seconds / plain.seconds for run, plain in zip(runs[case], runs["plain", model, 1], strict=True)]
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


# -- the command -------------------------------------------------------------------------------------------------------


def note(message: str) -> None:
    """Print what goes on, apart from the table."""
    print(message, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="folder of environments and logs")
    parser.add_argument("--engines", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[1, 2], help="numbers of workers; 1 must be among them"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60, help="seconds per run to wait for others to be quiet")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="use this Python for an engine")
    args = parser.parse_args()
    if 1 not in args.workers:
        parser.error("--workers: ratios are to the plain loop with 1 worker; give 1, too")
    args.workers.sort()
    return args


def prepare(args: argparse.Namespace, folder: Path) -> dict[str, Path | str]:
    """Make the environments; return engine -> its Python, or why it has none. fedsim is always among them."""
    pythons: dict[str, Path | str] = {}
    paths = dict(pair.split("=", 1) for pair in args.python)
    for engine in ["fedsim", *args.engines]:
        try:
            pythons[engine] = Path(paths[engine]).absolute() if engine in paths else make_environment(engine, folder)
        except EngineError as error:
            pythons[engine] = f"cannot be installed: {error}"
            note(f"{engine} {pythons[engine]}")
    return pythons


def write_work(python: Path | str, work: Path, model: str) -> Path:
    """Let fedsim write a model's work file, and return its path; stop where it cannot."""
    try:
        if isinstance(python, str):
            raise EngineError(python)
        call([python, "make_work.py", work, model])
    except EngineError as error:
        sys.exit(f"fedsim, which writes the work file: {error}")
    return work


def main() -> None:
    """Measure, print the table, check the losses."""
    args = parse_arguments()
    folder = args.envs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pythons = prepare(args, folder)
    works = {model: write_work(pythons["fedsim"], folder / f"work-{model}.npz", model) for model in args.models}
    note(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    outcome = measure({engine: pythons[engine] for engine in args.engines}, works, args)
    print(make_table(outcome, args.engines, args.models, args.workers))
    print("\n".join(check_bars(outcome.runs)))
    ran = [run for repeats in outcome.runs.values() for run in repeats]
    disturbed = sum(run.others >= QUIET for run in ran)
    print(f"torch {', '.join(sorted({run.torch for run in ran}))}; {disturbed} of {len(ran)} runs disturbed by others")
    if problems := check_losses(outcome.runs):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
