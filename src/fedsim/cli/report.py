"""``fedsim report``: its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from fedsim.cli.commands import add_options
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.core.readable import has_file
from fedsim.parsing.error_lines import parsed
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.projection import Projector
from fedsim.report.runs import STUDY_FILE
from fedsim.report.table import report

_QUERIES = (
    "worst, best, or a list of names of files: also draw these queries of each test set, with the first images of "
    "their lists, into RUN/queries"
)
_CONFUSION = "also show from which data set and camera wrong first images come, where galleries are joined"
_PROJECTION = (
    "pca (principal components) or tsne (t-SNE): also draw features of test images as points of the plane, coloured by "
    "data set and by camera, into RUN/projections"
)


def run(args: list[str]) -> str:
    """Parse ``fedsim report RUN... [options]``."""
    parser = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, prog="fedsim report", description="Print a table over runs."
    )
    runs = "run directories of fedsim fit, or NAME=DIRECTORY; several seeds become mean and spread; or a search"
    parser.add_argument("runs", nargs="+", help=runs)
    add_options(parser, report, ("fairness", "significance", "unfinished"), skip=["runs", "further"])
    parser.add_argument("--queries", type=str | list[str] | None, default=None, help=_QUERIES)
    parser.add_argument("--confusion", action="store_true", help=_CONFUSION)
    parser.add_argument("--projection", type=Projector | None, default=None, help=_PROJECTION)
    parser.add_argument("--best", action="store_true", help="short for --rule best")
    config = parsed(parser, args).as_dict()
    if any(has_file(Path(folder) / STUDY_FILE) for folder in config["runs"]):
        return _report_on_trials(config, parser.get_defaults().as_dict())
    if config.pop("best"):
        if config["rule"] not in (None, "best"):
            raise ConfigError(f"--best: contradicts --rule {config['rule']}; give one of them")
        config["rule"] = "best"
    further = _further(config.pop("queries"), config.pop("confusion"), config.pop("projection"))
    return report(**config, further=further)


def _report_on_trials(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the report on the folder of a search, which has few options."""
    folder = config["runs"][0]
    if len(config["runs"]) > 1:
        raise ConfigError(f"runs: {folder} is the folder of a search; give it alone, or run directories")
    for option, value in config.items():
        if option not in ("runs", "format", "figure", "html") and value != defaults[option]:
            raise ConfigError(f"--{option}: is not for the folder of a search, {folder}; give run directories in it")
    trials = load_extra("fedsim.report.trials", folder, "search")
    return str(trials.trials_report(Path(folder), config["format"], config["figure"], config["html"]))


def _further(
    queries: str | list[str] | None, confusion: bool, projection: Projector | None
) -> Callable[[Sequence[RunGroup]], list[Block]] | None:
    if queries is None and not confusion and projection is None:
        return None

    def blocks(groups: Sequence[RunGroup]) -> list[Block]:
        from fedsim.cli.queries import feature_blocks  # imports torch

        return feature_blocks(groups, queries, confusion, projection)

    return blocks
