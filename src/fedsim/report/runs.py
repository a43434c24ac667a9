"""Run directories of ``fedsim fit``: the contents of their files."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.core.errors import DataError
from fedsim.core.metrics import ACCURACIES, OF_PRECISION, OF_RANKS
from fedsim.core.metrics_rows import metrics_files
from fedsim.core.names import metric_name, metric_parts
from fedsim.core.replaced_run import QUERIES_FILE
from fedsim.parsing.config_files import read_config
from fedsim.parsing.documents import parse_json
from fedsim.report.damage import KINDS, check_evaluation, check_summary
from fedsim.report.experiment import Experiment, doubts_about, doubts_about_log, experiment_of
from fedsim.report.queries import QueryFile, read_queries
from fedsim.settings.changes import Change, read_changes
from fedsim.settings.configuration import Flat, flat

METRICS = (*OF_PRECISION, *OF_RANKS.values(), *ACCURACIES)
__all__ = ["KINDS", "METRICS", "Run", "metrics_files", "read_json", "read_run"]


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory. Files are read on first use."""

    folder: Path
    summary: dict[str, Any]
    """content of summary.json"""
    name: str = ""
    """that the user gives it in a report; empty: none"""

    @cached_property
    def log(self) -> dict[int, dict[str, float]]:
        """Round, from 1 -> its logged values: training, bytes, and scores (fractions of 1) if it was evaluated.

        A round that a continued run repeats counts once, with its last values.

        Raises:
            DataError: if there is no log, or it cannot be read.
        """
        paths = metrics_files(self.folder)
        if not paths:
            raise DataError(f"{self.folder}: holds no metrics.csv; was the run started with another logger only?")
        rounds: dict[int, dict[str, float]] = {}
        for path in paths:
            try:
                with path.open(newline="") as file:
                    for row in csv.DictReader(file):
                        numbers = {name: float(value) for name, value in row.items() if value}
                        numbers = self._spelled(numbers)
                        rounds.setdefault(_round_of(row["epoch"]), {}).update(numbers)
            except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
                raise DataError(f"{path}: is not a log of fedsim fit ({error}); was it edited?") from error
        return dict(sorted(rounds.items()))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved settings; empty for runs that were not started by the command line."""
        path = self.folder / "config.yaml"
        return read_config(str(path)) if path.is_file() else {}

    @cached_property
    def queries(self) -> QueryFile | None:
        """Scores of single queries at the last evaluation; None if the run has no such file."""
        return read_queries(self.folder / QUERIES_FILE)

    @cached_property
    def tested(self) -> dict[str, Any] | None:
        """The newest scores of ``fedsim test``: checkpoint, round, metrics; None if there are none."""
        paths = sorted((self.folder / "tests").glob("*.json"), key=lambda path: path.stat().st_mtime)
        if not paths:
            return None
        evaluation = read_json(paths[-1])
        check_evaluation(evaluation, str(paths[-1]))
        return {**evaluation, "metrics": self._spelled(evaluation["metrics"])}

    @cached_property
    def settings(self) -> Flat:
        """All settings by option, with defaults; empty without a config."""
        return flat(self.config) if self.config else {}

    @cached_property
    def experiment(self) -> Experiment:
        """All in which the run equals its repetitions with other seeds."""
        return experiment_of(self.summary, self.config, self.settings, self.changes)

    @cached_property
    def doubts(self) -> list[str]:
        """The reasons for which nothing can be certified of the run."""
        doubts = doubts_about(self.summary, self.config, self.settings, self.changes)
        return [*doubts, *doubts_about_log(self.summary, self.log if self.has_log else {})]

    @property
    def method(self) -> str:
        """The method; one that is not fedsim's by its whole path."""
        return str(self.settings["model.method"].value if "model.method" in self.settings else self.summary["method"])

    @property
    def changes(self) -> list[Change]:
        """The settings on which its numbers depend, and that it was continued with: it is of no single setting."""
        return [change for change in read_changes(self.summary.get("changes", [])) if change.counts]

    @property
    def has_log(self) -> bool:
        """Whether there is a log: a run may have had another logger only."""
        return bool(metrics_files(self.folder))

    @property
    def primary(self) -> str:
        """The kind of model that the method delivers."""
        return str(self.summary["primary"])

    @property
    def unseen(self) -> set[str]:
        """Test sets on which no client trained."""
        return set(self.summary["unseen"])

    @property
    def test_sets(self) -> list[str]:
        """Names of all test sets of the last evaluation, and ``seen`` and ``unseen``, the means over them.

        For a run without scores from its training, those of ``fedsim test``.
        """
        keys = _test_scores(self.summary["final"]) or _test_scores(self.tested)
        return list(dict.fromkeys(metric_parts(key)[2] for key in keys if key.count("/") == 3))

    @property
    def seen(self) -> list[str]:
        """Test sets of the clients that trained."""
        return [name for name in self.test_sets if name not in (*self.unseen, "seen", "unseen")]

    @property
    def classifies(self) -> bool:
        """Whether the run was scored by top-1 accuracy, not by retrieval."""
        return any(key.endswith("/top1") for key in (self.summary["final"] or {}).get("metrics", {}))

    def setting(self, option: str) -> Any:
        """Return a setting, classes by their names; None if it is not set."""
        return self.settings[option].value if option in self.settings else None

    def _spelled(self, scores: Mapping[str, float]) -> dict[str, float]:
        return spelled(scores, self.summary["clients"], self.summary["unseen"])

    def check(self) -> None:
        """Read every file that a report may need; raise DataError for the first damaged one."""
        if self.has_log:
            _ = self.log
        _ = self.config, self.queries, self.tested


def read_run(folder: Path, name: str = "") -> Run:
    """Open a run directory; raise DataError if the folder is not one, or its summary is damaged."""
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(f"{folder}: holds no summary.json; give the run directories of fedsim fit")
    summary = read_json(path)
    check_summary(summary, str(path))
    for part in ("final", "best"):
        if summary[part] is not None:
            summary[part]["metrics"] = spelled(summary[part]["metrics"], summary["clients"], summary["unseen"])
    return Run(folder, summary, name)


def spelled(scores: Mapping[str, float], clients: Collection[str], unseen: Collection[str]) -> dict[str, float]:
    """Return the numbers of a run with names as :func:`metric_name` makes them: older runs have slashes in names.

    ``clients`` and ``unseen`` are names of clients, and of data sets on which no client trains.

    >>> list(spelled({"val/global/site/a/mAP": 0.5, "test/local/new/a/b/mAP": 0.4}, ["a/b"], ["new"]))
    ['val/global/site%2Fa/mAP', 'test/local/new/a%2Fb/mAP']
    """
    if not any("/" in name for name in clients) and not any(key.count("/") > 3 for key in scores):
        return dict(scores)
    parts = {f"{data_set}/{client}": (data_set, client) for data_set in unseen for client in clients}
    current = {metric_name(*pair) for pair in parts.values()}

    def spelling(key: str) -> str:
        first, *words = key.split("/")
        if first in ("val", "test") and len(words) > 3 and (middle := "/".join(words[1:-1])) not in current:
            return metric_name(first, words[0], *parts.get(middle, (middle,)), words[-1])
        if first not in ("val", "test") and (client := "/".join(words[:-1])) in clients:
            return metric_name(first, client, words[-1])
        return metric_name(first, "/".join(words)) if "/".join(words) in clients else key

    return {spelling(key): value for key, value in scores.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that fedsim has written; raise DataError if it cannot be read."""
    try:
        json_text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); does the file exist?") from error
    content = parse_json(json_text, str(path))
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a JSON object; was it edited?")
    return content


def _test_scores(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    metrics = (evaluation or {}).get("metrics", {})
    return {name: value for name, value in metrics.items() if name.startswith("test/")}


def _round_of(epoch: str) -> int:
    """Return the round of a line, from 1; Lightning counts from 0."""
    number = int(epoch)
    if number < 0:
        raise ValueError(f"epoch {number}")
    return number + 1
