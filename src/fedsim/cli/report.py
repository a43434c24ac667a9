"""``fedsim report``: its options."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from fedsim.core.errors import ConfigError
from fedsim.parsing.error_lines import parsed
from fedsim.report.table import report

_FLAGS = {
    "fairness": "also print how much scores differ between clients' test sets",
    "significance": "also test whether methods differ, over seeds and over people, with 95 % confidence intervals",
    "unfinished": "also show runs that are not finished",
}


def run(args: list[str]) -> str:
    """Parse ``fedsim report RUN... [options]``."""
    parser = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, prog="fedsim report", description="Print a table over runs."
    )
    runs = "run directories of fedsim fit, or NAME=DIRECTORY; several seeds become mean and spread"
    parser.add_argument("runs", nargs="+", help=runs)
    parser.add_function_arguments(report, skip={"runs", *_FLAGS})
    parser.add_argument("--best", action="store_true", help="short for --rule best")
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    config = parsed(parser, args).as_dict()
    if config.pop("best"):
        if config["rule"] not in (None, "best"):
            raise ConfigError(f"--best: contradicts --rule {config['rule']}; give one of them")
        config["rule"] = "best"
    return report(**config)
