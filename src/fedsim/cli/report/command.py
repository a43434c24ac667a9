"""``fedsim report``: its options."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from fedsim.cli.report.table import report
from fedsim.core.errors import ConfigError


def run(args: list[str]) -> str:
    """Parse ``fedsim report RUN... [options]``."""
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
