"""Commands that need no trainer: typed functions, whose arguments are the options."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from fedsim.core.errors import ConfigError, DrawsFailedError
from fedsim.data_commands import call, run_data_command
from fedsim.export import export
from fedsim.local_sweep import check_results, command_line, plan_jobs, run_jobs, table_of
from fedsim.rank import rank
from fedsim.report import report
from fedsim.sweep import read_sweep

__all__ = ["run_plain_command"]


def run_plain_command(command: str, args: list[str]) -> str:
    """Run ``data``, ``export``, ``rank``, ``report`` or ``sweep``.

    Args:
        command: its name.
        args: what follows it.

    Returns:
        what is to be printed.
    """
    if command == "rank":
        return _rank(args)
    if command == "report":
        return _report(args)
    if command == "sweep":
        return _sweep(args)
    if command == "export":
        return call(export, args, "export")
    return run_data_command(args)


def _rank(args: list[str]) -> str:
    """Parse ``fedsim rank FEATURES.npz [options]``; the options are those of :func:`fedsim.rank.rank`."""
    parser = ArgumentParser(exit_on_error=False, prog="fedsim rank", description="Score features from any program.")
    parser.add_argument("features", type=str, help="an npz file, as fedsim predict writes it")
    flags = ("invalid_as_zero", "single_gallery_shot", "rerank", "json")
    parser.add_function_arguments(rank, skip={"features", *flags})
    for flag, text in zip(flags, (
        "average over all queries, those without a match as zeros",
        "CMC on galleries with one random image per identity, in expectation",
        "re-rank by k-reciprocal encoding",
        "print JSON instead of a table",
    ), strict=True):  # fmt: skip
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    return rank(**parser.parse_args(args).as_dict())


def _report(args: list[str]) -> str:
    """Parse ``fedsim report RUN... [options]``; the options are those of :func:`fedsim.report.report`."""
    parser = ArgumentParser(exit_on_error=False, prog="fedsim report", description="Print a table over runs.")
    parser.add_argument("runs", nargs="+", help="run directories of fedsim fit; several seeds become mean and spread")
    parser.add_function_arguments(report, skip={"runs", "fairness"})
    parser.add_argument("--best", action="store_true", help="short for --rule best")
    parser.add_argument(
        "--fairness", action="store_true", help="also say how clients' test sets differ in their scores"
    )
    config = parser.parse_args(args).as_dict()
    if config.pop("best"):
        if config["rule"] not in (None, "best"):
            raise ConfigError(f"--best: contradicts --rule {config['rule']}; give one of them")
        config["rule"] = "best"
    return report(**config)


def _sweep(args: list[str]) -> str:
    """Parse and run ``fedsim sweep FILE``."""
    parser = ArgumentParser(
        exit_on_error=False, prog="fedsim sweep", description="Run a W&B sweep file without W&B's server."
    )
    parser.add_argument("file", type=str, help="a sweep in W&B's format, method grid or random; see configs/sweeps")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the draws' command lines")
    parser.add_argument("--local", action="store_true", help="run the draws one after another on this machine")
    parser.add_argument("--count", type=int | None, help="at most so many draws; a random sweep needs it")
    parser.add_argument("--seed", type=int, default=0, help="of random draws")
    parser.add_argument("--run_dir", type=str | None, help="where the draws' run directories go; default: runs/FILE")
    config = parser.parse_args(args)
    if config.dry_run == config.local:
        raise ConfigError(
            "fedsim sweep: give --dry-run or --local, one of them; on W&B's server run wandb sweep FILE instead"
        )
    path = Path(config.file)
    sweep = read_sweep(path)
    jobs = plan_jobs(sweep, Path(config.run_dir or f"runs/sweep-{path.stem}"), config.count, config.seed)
    if config.dry_run:
        return "\n".join(map(command_line, jobs))
    results = run_jobs(jobs, sweep.metric)
    table = table_of(results, sweep)
    try:
        check_results(results)
    except DrawsFailedError:
        sys.stdout.write(f"{table}\n")  # the others' scores are there
        raise
    return table
