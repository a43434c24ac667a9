"""``fedsim sweep``: its options, and the order of its steps."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fedsim.core.checks import SEED
from fedsim.core.errors import ConfigError, DataError, RunsFailedError
from fedsim.core.extras import load_extra
from fedsim.core.files import make_folder
from fedsim.core.paths import FILE, PAGE, run_folder
from fedsim.parsing.error_lines import parsed
from fedsim.parsing.output import print_text
from fedsim.report import find_table
from fedsim.sweep.file import read_content, sweep_of
from fedsim.sweep.left_out import UNSEEN, repeated, repetitions, report_left_out
from fedsim.sweep.local import (
    Result,
    SweepRun,
    check_names,
    check_varied,
    compare_results,
    run_of_sample,
    runs_of_sweep,
    table_of,
)
from fedsim.sweep.made import sweep_of_method, sweep_of_paper
from fedsim.sweep.running import execute, execute_runs, refuse_elsewhere
from fedsim.sweep.sampling import Sweep, num_runs

log = logging.getLogger(__name__)


def _sweep_parser() -> ArgumentParser:
    parser = ArgumentParser(
        exit_on_error=False,
        allow_abbrev=False,
        prog="fedsim sweep",
        description="Run a W&B sweep file without W&B's server. Options after -- are given to every run.",
    )
    parser.add_argument("file", type=str | None, nargs="?", help="a sweep in W&B's format: grid, random or bayes")
    parser.add_argument("--method", type=str | None, help="instead: the sweep of a method, such as fedpav")
    parser.add_argument("--paper", type=str | None, help="instead: a sweep of a paper, such as 003/figure4_batch_sizes")
    parser.add_argument(
        "--config", action="append", default=[],
        help="with --method: the data, instead of configs/quickstart.yaml; with --paper: configs after its own",
    )  # fmt: skip
    parser.add_argument("--print", action="store_true", help="print the sweep as a file for wandb sweep")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the command lines of the runs")
    parser.add_argument("--local", action="store_true", help="run the sweep on this machine")
    parser.add_argument(
        "--parallel", type=int, default=1, help="number of runs at the same time, each with GPUs or cores of its own"
    )
    parser.add_argument(
        "--left_out", nargs="+", default=[],
        help="data sets: each run of a grid once without each of them; then also one page of fedsim report --left_out",
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="each run of a grid once with each of them")
    parser.add_argument("--html", type=str | None, help="also write that page into this file")
    parser.add_argument("--count", type=int | None, help="largest number of runs; random and bayes need it")
    parser.add_argument("--seed", type=int, default=0, help="seed of random and bayes")
    parser.add_argument(
        "--run_dir",
        type=str | None,
        help="folder for the run directories of the runs; default: runs/sweep-FILE, sweep-METHOD",
    )
    parser.add_argument(
        "--compare", nargs="+", default=[],
        help="then print the runs beside a paper's published numbers: 003, or tables of it: 000/table2 000/table3",
    )  # fmt: skip
    return parser


def run(args: list[str]) -> str:
    """Run ``fedsim sweep ... [-- OPTION...]``; the options after the hyphens are for every run."""
    sweep_args, common = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    config = parsed(_sweep_parser(), sweep_args)
    _check(config)
    name, content = _chosen_sweep(config)
    sweep = _with_common(repeated(sweep_of(content, name), config.left_out, config.seeds), common)
    _check_page(config.html, sweep)
    if config.print:
        printed = {**content, "parameters": content["parameters"] | repetitions(sweep, config.left_out, config.seeds)}
        return yaml.safe_dump({**printed, "command": list(sweep.command)}, sort_keys=False).rstrip()
    for table in config.compare:
        find_table(table)  # a wrong name is reported before hours of training
    run_dir = config.run_dir
    root = run_folder(f"runs/sweep-{Path(name).stem}" if run_dir is None else run_dir, "--run_dir")
    if config.dry_run and sweep.method == "bayes":
        raise ConfigError("--dry-run: bayes chooses each run by the results before it; give --local")
    if sweep.is_search and config.local:
        return _search(sweep, root, config)
    runs = runs_of_sweep(sweep, root, config.count, config.seed)
    _check_names(runs, config.local)
    if config.dry_run:
        return "\n".join(shlex.join(sweep_run.command) for sweep_run in runs)
    make_folder(root, "--run_dir")
    results = execute_runs(runs, sweep.metric, config.parallel)
    print_text(f"{table_of(results, sweep)}\n")  # before the comparison, which may fail
    failed = sum(result.code != 0 for result in results)
    is_whole = not failed and len(results) == len(runs) and config.count is None
    if is_whole and (page := report_left_out(results, config.html)):
        print_text(f"{page}\n")
    _compare([result for result in results if result.code == 0], config.compare)
    if failed:
        raise RunsFailedError(f"{failed} of {len(results)} runs failed; call the sweep again to repeat only those")
    refuse_elsewhere(results, runs)
    return f"{len(results)} runs in {root}"


def _with_common(sweep: Sweep, common: Sequence[str]) -> Sweep:
    """Return the sweep with options for every run."""
    for word in common:
        if word.partition("=")[0] in ("--run_dir", "--ckpt_path"):
            raise ConfigError(f"{word}: leave it out after --: every run gets a run directory of its own")
    whole = replace(sweep, command=(*sweep.command, *common))
    check_varied(whole)
    return whole


def _check_names(runs: Sequence[SweepRun], is_local: bool) -> None:
    """Check the options of each run; runs that begin elsewhere may have configs that are not here: a warning."""
    unread = set[str]()
    for sweep_run in runs:
        try:
            check_names(sweep_run.command)
        except DataError as error:
            if is_local:
                raise
            unread.add(str(error))
    for line in sorted(unread):
        log.warning(line)


def _search(sweep: Sweep, root: Path, config: Namespace) -> str:
    """Run the trials of a search, and print them."""
    for line in sweep.ignored:
        log.warning(line)
    field = "method: bayes" if sweep.method == "bayes" else "early_terminate or metric.target"
    search = load_extra("fedsim.sweep.search", f"{sweep.name}: {field}", "search")
    trials = load_extra("fedsim.report.trials", sweep.name, "search")
    for sample in search.first_samples(sweep, config.seed):
        check_names(run_of_sample(sweep, sample, root).command)
    source = search.Search(sweep, root, num_runs(sweep, config.count), config.seed)
    execute(source, sweep.metric, config.parallel)
    print_text(f"{trials.trials_report(root)}\n")
    _compare([result for result in source.results() if result.code == 0], config.compare)
    if failed := source.num_failed():
        raise RunsFailedError(f"{failed} trials failed; call the sweep again to repeat only those")
    return f"fedsim report {shlex.quote(str(root))} --figure FILE.png, or --html FILE.html, draws these trials"


def _compare(results: Sequence[Result], tables: Sequence[str]) -> None:
    """Print complete runs beside published numbers, if there are any."""
    for table in tables if results else []:
        print_text(f"{compare_results(results, table)}\n")


def _check(config: Namespace) -> None:
    if config.dry_run + config.local + config.print != 1:
        raise ConfigError(
            "fedsim sweep: give one of --dry-run, --local and --print; on W&B's server run wandb sweep FILE instead"
        )
    if config.parallel < 1 or (config.parallel > 1 and not config.local):
        raise ConfigError("--parallel: must be at least 1, and more than 1 needs --local")
    SEED.check(config.seed, "--seed")
    if config.paper is not None and config.left_out:
        raise ConfigError("--left_out: is not for --paper, whose rows have their own data; leave it out")
    if config.count is not None and (config.left_out or config.seeds or config.html):
        raise ConfigError("--count: tables of left-out data sets need all runs; leave it out")
    if config.compare and not config.local:
        raise ConfigError("--compare: without --local, no run is trained that could be compared; give --local")


def _check_page(page: str | None, sweep: Sweep) -> None:
    """Raise an error before hours of training if the page cannot be written after them."""
    if page is not None:
        if sweep.is_search:
            raise ConfigError("--html: is a page of left-out data sets; fedsim report FOLDER --html writes a search's")
        if sweep.method != "grid" or UNSEEN not in sweep.parameters or len(sweep.parameters[UNSEEN].values) < 2:
            raise ConfigError(
                "--html: is a page of left-out data sets, and these runs are no grid over several; give --left_out"
            )
        PAGE.check(page, "--html")
        import fedsim.report.html.page  # noqa: F401 - needs an optional library


def _chosen_sweep(config: Namespace) -> tuple[str, Any]:
    """Return name and content of the chosen sweep; runs on this machine do without W&B where it is not installed."""
    file, configs = config.file, config.config
    if sum(choice is not None for choice in (file, config.method, config.paper)) != 1:
        raise ConfigError("fedsim sweep: give one of FILE, --method NAME and --paper PAPER/SWEEP")
    if file is not None and configs:
        raise ConfigError("--config: is for --method and --paper; write it into the command of the file")
    if file is not None:
        return file, read_content(Path(FILE.check(file, "FILE")))
    if config.method is not None:
        content = sweep_of_method(config.method, configs, bool(config.print) or find_spec("wandb") is not None)
    else:
        content = sweep_of_paper(str(config.paper), configs)
    return content["name"], content
