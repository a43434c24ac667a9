"""Run directories of ``fedsim fit``: the contents of their files, and checks by which damaged ones are recognised."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.metrics import ACCURACIES, OF_PRECISION, OF_RANKS
from fedsim.core.metrics_rows import metrics_files
from fedsim.core.names import metric_name, metric_parts
from fedsim.core.replaced_run import QUERIES_FILE
from fedsim.parsing.config_files import read_config
from fedsim.parsing.documents import parse_json
from fedsim.report.experiment import Experiment, doubts_about, doubts_about_log, experiment_of
from fedsim.settings.changes import Change, read_changes
from fedsim.settings.configuration import Flat, flat

STUDY_FILE = "trials.log"
"""in the folder of a search: Optuna's journal of its trials"""
KINDS = ("global", "local", "personalised", "ensemble")
METRICS = (*OF_PRECISION, *OF_RANKS.values(), *ACCURACIES)


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
    if (folder / STUDY_FILE).is_file():
        raise DataError(f"{folder}: is the folder of a search; give it alone, without a name, or run directories in it")
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


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Queries:
    """One kind of model on the Q queries of one test set."""

    scores: dict[str, Floats]
    """metric -> [Q] fractions of 1; NaN if a query does not count"""
    pids: NDArray[np.int64]
    """[Q] identity"""
    num_splits: int
    """number of random splits; their queries are concatenated"""
    cmc: Floats
    """[ranks] share of queries with a match among the first 1, 2, ... images; empty for classification"""


@dataclass(frozen=True, eq=False)
class QueryFile:
    """All kinds of models and test sets of one evaluation."""

    round_: int
    """from 1"""
    results: dict[str, Queries]
    """``kind/set`` -> results"""


def read_queries(path: Path) -> QueryFile | None:
    """Read a file of single queries' scores; return None without a file; raise DataError if it cannot be read."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:  # never a pickle: that is numpy's default
            arrays = {name: file[name] for name in file.files}
        results = {}
        for name in arrays:
            model, _, last = name.rpartition("/")
            if last == "cmc":
                of_set = model.partition("/")[2]
                scores = {
                    metric: arrays[f"{model}/{metric}"].astype(np.float64)
                    for metric in ("mAP", "mAP_trapezoid", "rank1", "top1")
                    if f"{model}/{metric}" in arrays
                }
                splits = len(arrays[f"{of_set}/splits"])
                results[model] = Queries(scores, arrays[f"{of_set}/pids"], splits, arrays[name].astype(np.float64))
                _check(results[model], model)
        return QueryFile(int(arrays["round"]), results)
    except Exception as error:  # numpy's and zip's readers raise many types for damaged files
        raise DataError(f"{path}: cannot be read ({error}); remove it, or evaluate again") from error


def _check(queries: Queries, name: str) -> None:
    """Raise ValueError if the arrays of one test set do not fit together."""
    if queries.pids.ndim != 1 or queries.pids.dtype.kind not in "iu" or queries.cmc.ndim != 1:
        raise ValueError(f"{name} has arrays of another shape or type")
    if not queries.scores or any(scores.shape != queries.pids.shape for scores in queries.scores.values()):
        raise ValueError(f"{name} has other numbers of scores than of queries")


Test = Callable[[Any], bool]
_LACKS = object()
"""stands for a field that is not there"""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number, of a size that a float can hold."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1e300
    return isinstance(value, float) and math.isfinite(value)


def _is_score(value: Any) -> bool:
    # a test set without any match has the score NaN
    return _is_number(value) or (isinstance(value, float) and math.isnan(value))


def _are_changes(value: Any) -> bool:
    try:
        read_changes(value)
    except ValueError:
        return False
    return True


def _map_of(test: Test) -> Test:
    return lambda value: isinstance(value, Mapping) and all(map(test, value.values()))


def _with(**fields: Test) -> Test:
    """Return the test of a mapping with these fields."""
    return lambda value: isinstance(value, Mapping) and all(fields[name](value.get(name, _LACKS)) for name in fields)


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _if_there(test: Test) -> Test:
    return lambda value: value is _LACKS or test(value)


_is_evaluation = _or_none(_with(round=_is_whole, metrics=_map_of(_is_score)))
_are_counts = _if_there(_or_none(_with(images=_is_whole, people=_or_none(_is_whole))))
_is_data_set = _with(train=_are_counts, query=_are_counts, gallery=_are_counts, pool=_are_counts)
_are_data = _or_none(_with(digest=_is_text, sets=_if_there(_map_of(_is_data_set))))
_is_least = _with(client=_is_text, answers=_is_whole, work=_is_number)
_are_answers = _with(least=_is_least, most=_is_whole, total=_is_whole, since=_is_whole, median=_is_number)
_is_identity = _with(files=_if_there(_with()), code=_if_there(_with()))

_FIELDS: dict[str, tuple[Test, str]] = {
    "finished": (lambda value: isinstance(value, bool), "true or false"),
    "method": (_is_text, "a name"),
    "fingerprint": (_is_text, "a text"),
    "seed": (_is_whole, "a whole number"),
    "rounds": (_is_whole, "a whole number"),
    "clients": (_are_names, "a list of names"),
    "unseen": (_are_names, "a list of names"),
    "primary": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    "final": (_is_evaluation, "a round with its metrics, or null"),
    "best": (_is_evaluation, "a round with its metrics, or null"),
}
"""fields of every summary.json -> the test of their values, and its name"""
_MAY_LACK: dict[str, tuple[Test, str]] = {
    "changes": (_are_changes, "a list of changed settings"),
    "data": (_are_data, "the counts of data sets"),
    "identity": (_is_identity, "hashes of the settings, of files and of code"),
    "answers": (_are_answers, "the numbers of the clients' answers"),
    "versions": (_map_of(_is_text), "names with versions"),
    "seconds": (_is_number, "a number"),
    "simulated_seconds": (_is_number, "a number"),
    "ranks": (_is_whole, "a whole number"),
    "threads": (_is_whole, "a whole number"),
    "device": (_is_text, "a name"),
    "written": (_is_text, "a date"),
}


def check_summary(summary: Mapping[str, Any], name: str) -> None:
    """Check the content of a summary.json, which the message calls ``name``.

    Raises:
        DataError: for the first field that no fit has written so.
    """
    for field in _FIELDS:
        if field not in summary:
            raise DataError(f"{name}: lacks {field}; was it edited?")
    of_bytes = {field: (_is_number, "a number of bytes") for field in summary if field.startswith("bytes_")}
    for field, (is_valid, expected) in {**_FIELDS, **_MAY_LACK, **of_bytes}.items():
        if field in summary and not is_valid(summary[field]):
            raise DataError(f"{name}: {field} is not {expected}; was it edited?")


def check_evaluation(evaluation: Mapping[str, Any], name: str) -> None:
    """Check the content of a file of ``fedsim test``; raise DataError if it is not one."""
    settings, data = evaluation.get("settings", {}), evaluation.get("data")
    if not (_is_evaluation({"round": 0, **evaluation}) and isinstance(settings, Mapping) and _are_data(data)):
        raise DataError(f"{name}: is not a round with its metrics; remove it, or test again")
