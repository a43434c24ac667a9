"""The files of a run directory: how they are read and checked, and the experiment that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.metrics import KINDS
from fedsim.core.names import metric_name
from fedsim.core.readable import has_file
from fedsim.parsing.documents import parse_json
from fedsim.settings.changes import Change, read_changes
from fedsim.settings.configuration import digest, fingerprint_from
from fedsim.settings.effects import Flat
from fedsim.settings.identity import is_as_sealed

OF_TEST = "the settings of fedsim test"


class Experiment(NamedTuple):
    """Runs of one experiment are equal in all fields; a field is empty if nothing is known."""

    settings: str
    """hash of all settings that results depend on"""
    start: str
    """the seed of the weights, if it is another one than that of the training"""
    data: str
    """hash of the data's digests, as the run found them"""
    files: str
    """hash of the files that settings name"""
    code: str
    """hash of the user's code"""
    changes: str
    """the settings with which the run went on"""
    end: str
    """the round after which it ended before its time: ``after round 37 of 300``"""
    test: str = ""
    """hash of the settings of ``fedsim test``, if its scores are shown, and those below"""
    tested_data: str = ""
    """hash of its data"""
    checkpoint: str = ""
    """``last`` or ``best``, or another name of the one that it has scored"""

    def differs_in(self, earlier: Experiment) -> list[str]:
        """Return the parts in which two experiments differ, for a sentence."""
        words = {"start": "the seed of the weights", "data": "the data", "files": "the content of a file",
                 "code": "the user's code",
                 "changes": "settings with which a run went on", "end": "the end of a run",
                 "test": OF_TEST, "tested_data": "the data of fedsim test",
                 "checkpoint": "the checkpoint of fedsim test"}  # fmt: skip
        return [word for part, word in words.items() if getattr(self, part) != getattr(earlier, part)]


def experiment_of(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change], test: Sequence[str]
) -> Experiment:
    """Return the experiment of a run; without a config, its settings are known by their fingerprint alone.

    ``test``: the last three fields, or nothing.
    """
    identity = summary.get("identity", {})
    return Experiment(
        fingerprint_from(settings)
        if config and not identity.get("unwritable")
        else f"of {summary['fingerprint']}, {summary['rounds']} rounds",
        str(identity.get("start", "")),
        summary["data"]["digest"] if summary.get("data") else "",
        digest(identity["files"]) if identity.get("files") else "",
        digest(identity["code"]) if identity.get("code") else "",
        "; ".join(map(str, changes)),
        end_of(summary, settings),
        *test,
    )


def limits_of(settings: Flat) -> tuple[Any, Any]:
    """Return the largest number of steps, and the time, after which a run ends before its last round."""
    steps, time = settings.get("trainer.max_steps"), settings.get("trainer.max_time")
    return steps and steps.value, time and time.value


def end_of(summary: Mapping[str, Any], settings: Flat) -> str:
    """Return where a run ended before its last round; empty if it did not, or one of its callbacks has ended it.

    An earlier version did not record what has ended a run; then it was a callback only if no limit can have ended it.
    """
    planned = settings.get("trainer.max_epochs")
    if planned is None or not planned.is_given:
        return ""
    steps, time = limits_of(settings)
    is_limited = time is not None or (isinstance(steps, int) and 0 <= steps <= summary["rounds"])
    is_stopped = summary["finished"] and summary.get("ended_by", "" if is_limited else "callback") == "callback"
    if is_stopped and settings["trainer.callbacks"].value:
        return ""
    if not isinstance(planned.value, int) or planned.value < 0:
        return f"after round {summary['rounds']}, without a last one"
    return f"after round {summary['rounds']} of {planned.value}" if summary["rounds"] < planned.value else ""


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
    if not has_file(path):
        return None
    try:
        with np.load(path) as file:  # never a pickle: that is numpy's default
            arrays = {name: file[name] for name in file.files}
        if "round" not in arrays:
            raise ValueError("it holds no per-query scores")
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


def _is_date(value: Any) -> bool:
    try:
        return value is _LACKS or bool(datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


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
    "ended_by": (_is_text, "a name"),
    "ranks": (_is_whole, "a whole number"),
    "threads": (_is_whole, "a whole number"),
    "device": (_is_text, "a name"),
    "written": (_is_text, "a date"),
    "logged": (_or_none(_with(rows=_is_whole, digest=_is_text)), "the number and the digest of logged rows"),
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


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read a file of ``fedsim test``; its ``kind`` is the name of the checkpoint.

    ``is_whole`` is false if the file was edited. Raises DataError if it is not one of ``fedsim test``.
    """
    evaluation = read_json(path)
    settings, data = evaluation.get("settings", {}), evaluation.get("data")
    is_whole = _is_evaluation({"round": 0, **evaluation}) and isinstance(settings, Mapping) and _are_data(data)
    if not is_whole or not _is_date(evaluation.get("written", _LACKS)):
        raise DataError(f"{path}: is not a round with its metrics; remove it, or test again")
    return {**evaluation, "kind": path.stem, "is_whole": is_as_sealed(evaluation)}


def written_at(evaluation: Mapping[str, Any]) -> float:
    """Return when an evaluation was written, in seconds; 0 if an earlier version did not say it."""
    return datetime.fromisoformat(evaluation["written"]).timestamp() if "written" in evaluation else 0.0
