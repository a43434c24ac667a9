"""Rounds, bytes and seconds until a run reaches a score (convergence), and how much clients differ (fairness).

Paper 002 names both (Table 9: rank-1, rounds until convergence) and defines neither; the definitions are below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import comparable
from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.rules import Rule
from fedsim.report.runs import METRICS, Run
from fedsim.report.series import fewest_answers, is_timed


class Reached(NamedTuple):
    """The round in which a score was reached for the first time, and the bytes and seconds until then."""

    round_: int
    """from 1"""
    num_bytes: float
    """sent to clients and back, in this round and all earlier ones"""
    seconds: float = 0.0
    """simulated, of the same rounds; 0 without ``model.hardware``"""


class Spread(NamedTuple):
    """The distribution of a score over several test sets."""

    mean: float
    deviation: float
    """population standard deviation, since the test sets are those of all clients, not a sample"""
    worst: float
    worst_set: str


def first_reaching(log: Mapping[int, Mapping[str, float]], key: str, target: float) -> Reached | None:
    """Return the first round with a score ``key`` of at least ``target``, in the same unit; None if there is none.

    ``log`` contains every round, from 1, in order, with its ``comm/down_bytes`` and ``comm/up_bytes``.

    >>> log = {r: {"comm/down_bytes": 10.0, "comm/up_bytes": 5.0, "mAP": 0.1 * r} for r in (1, 2, 3)}
    >>> first_reaching(log, "mAP", 0.2)
    Reached(round_=2, num_bytes=30.0, seconds=0.0)
    """
    num_bytes = seconds = 0.0
    for round_, row in log.items():
        num_bytes += row["comm/down_bytes"] + row["comm/up_bytes"]
        seconds += row.get("time/simulated_seconds", 0.0)
        if row.get(key, -np.inf) >= target:
            return Reached(round_, num_bytes, seconds)
    return None


def convergence_table(groups: Sequence[RunGroup], target: str) -> Block:
    """Return a table of the rounds and bytes until the delivered model reaches a score for the first time.

    With ``model.hardware``, also of the simulated seconds, and of the client with the fewest answers: rounds that do
    not wait for slow clients reach a score sooner, with fewer answers of these.

    Args:
        groups: the runs.
        target: ``METRIC=PERCENT``, the mean over clients' test sets, or ``SET/METRIC=PERCENT``.

    Raises:
        ConfigError: if ``target`` has another format, or a run has no such score.
        DataError: if logs are incomplete.
    """
    name, metric, percent = _parse(target)
    is_simulated = any("time/simulated_seconds" in row for g in groups for run in g.runs for row in run.log.values())
    rows, waits = [], dict[str, list[float]]()
    for group in groups:
        for run in group.runs:
            key = metric_name("test", run.primary, name, metric)
            scores = [row[key] for row in _complete_log(run).values() if key in row]
            if not scores:
                choices = ", ".join(f"{test_set}/{'top1' if run.classifies else 'rank1'}" for test_set in run.test_sets)
                raise ConfigError(f"--target: {run.folder} has no {key} in its logs; choose from {choices}")
            reached = first_reaching(run.log, key, percent / 100)
            cells = [f"not in {max(run.log)}", "-"]
            if reached is not None:
                cells = [str(reached.round_), f"{reached.num_bytes / 1e9:.3g}"]
            waits.setdefault(group.label, []).append(np.inf if reached is None else reached.seconds)
            cells.append(f"{100 * max(scores, key=comparable):.1f}")
            if is_simulated:
                cells += ["-" if reached is None else f"{reached.seconds:,.1f}", fewest_answers(run)]
            rows.append([group.label, str(run.summary["seed"]), run.primary, *cells])
    headers = ["run", "seed", "model", "round", "GB down and up", "highest"]
    headers += ["simulated seconds", "fewest answers"] if is_simulated else []
    subject = "mean over clients' test sets" if name == "seen" else name
    note = f"first evaluated round with {metric} of at least {percent:g} %, {subject}; 1 GB is 10^9 bytes"
    return Block(headers, rows, (note, _sooner(waits) if is_simulated else ""))


def _sooner(waits: Mapping[str, list[float]]) -> str:
    """Return a line with the mean simulated seconds of each group, and how many times sooner than the slowest it was.

    Groups in which a seed has not reached the score are left out.

    >>> _sooner({"synchronous": [20.0, 28.0], "buffered": [8.0]})
    'simulated seconds, means over seeds: synchronous 24.0, buffered 8.0 (3.0 times sooner)'
    """
    means = {label: float(np.mean(seconds)) for label, seconds in waits.items() if np.all(np.isfinite(seconds))}
    if len(means) < 2:
        return ""
    slowest = max(means.values())
    texts = (
        f"{label} {mean:,.1f}" + (f" ({slowest / mean:.1f} times sooner)" if 0 < mean < slowest else "")
        for label, mean in means.items()
    )
    return f"simulated seconds, means over seeds: {', '.join(texts)}"


def _parse(target: str) -> tuple[str, str, float]:
    match = re.fullmatch(r"(?:(.+)/)?([^/=]+)=([^=]+)", target)
    if match is None:
        raise ConfigError(f"--target: {target} is not METRIC=PERCENT or SET/METRIC=PERCENT, such as rank1=60")
    name, metric, number = match.groups()
    if metric not in METRICS:
        raise ConfigError(f"--target: {metric} is unknown; choose from {', '.join(METRICS)}")
    try:
        percent = float(number)
    except ValueError as error:
        raise ConfigError(f"--target: {number} is not a number; give a percentage") from error
    if not 1 < percent <= 100:  # 0.6 is meant as a share
        raise ConfigError(
            f"--target: must be above 1 and at most 100, got {number}; scores are percentages, as in the tables"
        )
    return name or "seen", metric, percent


def _complete_log(run: Run) -> dict[int, dict[str, float]]:
    for round_ in range(1, max(run.log, default=0) + 1):
        if "comm/up_bytes" not in run.log.get(round_, {}):
            raise DataError(
                f"{run.folder}: its logs lack round {round_}, so bytes until a later round are unknown; "
                "was the run continued from another run's checkpoint?"
            )
    return run.log


def fairness_table(groups: Sequence[RunGroup], metric: str, rule: Rule) -> Block:
    """Return a table of the spread of a score over the test sets of clients, per model; seeds are averaged."""
    rows, timed = [], any(is_timed(run) for group in groups for run in group.runs)
    for group in groups:
        for model_kind in group.distinct_kinds(rule):
            spreads = [s for run in group.runs if (s := _spread_in(run, model_kind, metric, rule)) is not None]
            if spreads:
                numbers = 100 * np.array([spread[:3] for spread in spreads]).T
                worst = " or ".join(dict.fromkeys(spread.worst_set for spread in spreads))
                answers = [" or ".join(dict.fromkeys(map(fewest_answers, group.runs)))] if timed else []
                rows.append([group.label, model_kind, *map(mean_and_spread, numbers), worst, *answers])
    headers = ["run", "model", "mean", "deviation", "worst", "worst set", *(["fewest answers"] if timed else [])]
    note = (
        f"{metric} in percent over the test sets of clients: mean, standard deviation between test sets, "
        "lowest; clients with the same test set count as one"
    )
    if not rows:
        note = "fairness: needs at least two test sets of clients that train"
    return Block(headers, rows, (note,), num_left=2)


def _spread_in(run: Run, model_kind: str, metric: str, rule: Rule) -> Spread | None:
    """Return mean, spread and the worst of a run's scores; among equals, the first one is the worst."""
    by_key = rule.scores(run)
    scores = {
        name: by_key[key] for name in run.seen if (key := metric_name("test", model_kind, name, metric)) in by_key
    }
    if len(scores) < 2:
        return None
    values, worst = np.array(list(scores.values())), min(scores, key=lambda name: comparable(scores[name]))
    return Spread(float(values.mean()), float(values.std()), scores[worst], worst)
