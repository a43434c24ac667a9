"""``fedsim report``: its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser

from fedsim.cli.commands import add_options
from fedsim.core.errors import ConfigError
from fedsim.parsing.error_lines import parsed
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.table import report

_QUERIES = (
    "worst, best, or a list of names of files: also draw these queries of each test set, with the first images of "
    "their lists, into RUN/queries"
)
_CONFUSION = "also show from which data set and camera wrong first images come, where galleries are joined"


def run(args: list[str]) -> str:
    """Parse ``fedsim report RUN... [options]``."""
    parser = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, prog="fedsim report", description="Print a table over runs."
    )
    runs = "run directories of fedsim fit, or NAME=DIRECTORY; several seeds become mean and spread"
    parser.add_argument("runs", nargs="+", help=runs)
    add_options(parser, report, ("fairness", "significance", "unfinished"), skip=["runs", "further"])
    parser.add_argument("--queries", type=str | list[str] | None, default=None, help=_QUERIES)
    parser.add_argument("--confusion", action="store_true", help=_CONFUSION)
    parser.add_argument("--best", action="store_true", help="short for --rule best")
    config = parsed(parser, args).as_dict()
    if config.pop("best"):
        if config["rule"] not in (None, "best"):
            raise ConfigError(f"--best: contradicts --rule {config['rule']}; give one of them")
        config["rule"] = "best"
    further = _further(config.pop("queries"), config.pop("confusion"))
    return report(**config, further=further)


def _further(queries: str | list[str] | None, confusion: bool) -> Callable[[Sequence[RunGroup]], list[Block]] | None:
    if queries is None and not confusion:
        return None

    def blocks(groups: Sequence[RunGroup]) -> list[Block]:
        from fedsim.cli.queries import query_blocks  # imports torch

        return query_blocks(groups, queries, confusion)

    return blocks
