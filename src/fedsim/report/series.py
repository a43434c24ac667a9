"""The numbers of every picture: curves over rounds, bytes and seconds, bars, and CMC curves, over seeds.

Also the rounds in which each client took part, and its backbone in each (paper 002, Fig. 11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.runs import Rule, Run

Floats = NDArray[np.float64]
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
Axis = Callable[[Run], dict[int, float]]
"""A run -> round -> x coordinate of the round."""


@dataclass(frozen=True, eq=False)
class Series:
    """One line, or the bars of one colour; scores in percent."""

    label: str
    number: int
    """number of its style"""
    x: Floats
    mean: Floats
    """mean over seeds; NaN without a score"""
    spread: Floats
    """standard deviation over seeds; NaN for a single seed"""
    seeds: NDArray[np.int64]
    """number of seeds"""

    @property
    def low(self) -> Floats:
        """Mean minus spread; the mean for a single seed."""
        return self.mean - np.nan_to_num(self.spread)

    @property
    def high(self) -> Floats:
        """Mean plus spread; the mean for a single seed."""
        return self.mean + np.nan_to_num(self.spread)

    @property
    def has_spread(self) -> bool:
        """Whether any point has several seeds."""
        return bool(np.isfinite(self.spread).any())


def rounds_of(run: Run) -> dict[int, float]:
    """Return each round as its own x coordinate."""
    return {round_: float(round_) for round_ in run.log}


def bytes_of(run: Run) -> dict[int, float]:
    """Return the bytes that server and clients sent until the end of each round; empty if the log lacks them."""
    ways = [f"comm/{way}_bytes" for way in ("down", "up", "extra")]
    total, bytes_by_round = 0.0, {}
    for round_, row in run.log.items():
        if ways[0] not in row:
            continue
        # the logged total is right even if the log lacks rounds
        total = row.get("comm/total_bytes", total + sum(row.get(way, 0.0) for way in ways))
        bytes_by_round[round_] = total
    return bytes_by_round


def sums_of(run: Run, column: str) -> dict[int, float]:
    """Return the sum of a logged number until the end of each round; empty if the log lacks it."""
    total, sum_by_round = 0.0, {}
    for round_, row in run.log.items():
        if column in row:
            total += row[column]
            sum_by_round[round_] = total
    return sum_by_round


seconds_of: Axis = partial(sums_of, column="time/simulated_seconds")
"""a run -> the simulated seconds until the end of each round; empty if clients' hardware is not simulated"""


def curves(groups: Sequence[RunGroup], name: str, metric: str, axis: Axis = rounds_of) -> list[Series]:
    """Return a line per group that has any point: the delivered model's score on a test set, over ``axis``.

    If the delivered model has no such score, the line is that of the global model, and its label contains that word.
    """
    numbers = style_numbers(groups)
    lines = []
    for group in groups:
        logged = {key for run in group.runs for row in run.log.values() for key in row}
        model_kind = group.kind_scored(name, metric, logged)
        key = metric_name("test", model_kind, name, metric)
        points: dict[int, list[tuple[float, float]]] = {}
        for run in group.runs:
            places = axis(run)
            for round_, row in run.log.items():
                if key in row and round_ in places:
                    points.setdefault(round_, []).append((places[round_], row[key]))
        if points:
            columns = [np.array(points[round_]).T for round_ in sorted(points)]
            x = np.array([column[0].mean() for column in columns])
            lines.append(
                _series(label_of_line(group, model_kind), numbers[group, model_kind], x, [c[1] for c in columns])
            )
    return lines


def label_of_line(group: RunGroup, model_kind: str) -> str:
    """Return the label of a group; it includes the kind of a model that is not the delivered one."""
    return group.label if model_kind == group.runs[0].primary else f"{group.label}, {model_kind}"


_COSTS: Mapping[str, Axis] = {
    "sent by server and clients": bytes_of,
    "simulated seconds": seconds_of,
    "images trained on": partial(sums_of, column="train/images"),
}
"""name of an axis -> the cost of a run until each round"""


def tradeoffs(groups: Sequence[RunGroup], name: str, metric: str) -> dict[str, list[Series]]:
    """Return the lines over each cost that is logged: name of the axis -> lines; empty ones are left out.

    Over bytes, a method that sends none has one point, its last.
    """
    lines_by_axis = {}
    for title, axis in _COSTS.items():
        lines = [
            curve if np.ptp(curve.x) or len(curve.x) == 1 else _last(curve)
            for curve in curves(groups, name, metric, axis)
        ]
        largest = max((float(curve.x.max()) for curve in lines), default=0.0)
        if largest > 0:
            unit, factor = ("", 1.0) if axis is not bytes_of else next(u for u in _UNITS if largest >= u[1])
            lines_by_axis[f"{unit} {title}".strip()] = [replace(curve, x=curve.x / factor) for curve in lines]
    return lines_by_axis


def _last(curve: Series) -> Series:
    return replace(curve, x=curve.x[-1:], mean=curve.mean[-1:], spread=curve.spread[-1:], seeds=curve.seeds[-1:])


def bars(groups: Sequence[RunGroup], names: Sequence[str], metric: str, rule: Rule) -> list[Series]:
    """Return a series per group and kind of model, with one number per test set, NaN without a score.

    Kinds with the scores of another kind appear once.
    """
    columns, numbers, x = [], style_numbers(groups), np.arange(len(names), dtype=np.float64)
    for group, model_kind in [(member, model_kind) for member in groups for model_kind in member.distinct_kinds(rule)]:
        values = [group.values(metric_name("test", model_kind, name, metric), rule) for name in names]
        if any(len(of_seeds) for of_seeds in values):
            number = numbers.get((group, model_kind), len(numbers))
            columns.append(_series(label_of(group, model_kind, rule), number, x, values))
    return columns


def cmc(groups: Sequence[RunGroup], name: str) -> list[Series]:
    """Return a line per group: the share of queries with a match among the first 1, 2, ... images of a test set.

    The scores are those of the delivered model at the last evaluation, or of the global one, named in the label, if
    only that has scores. Runs without scores of single queries have ranks 1, 5 and 10.
    """
    numbers, lines = style_numbers(groups), []
    for group in groups:
        model_kind = group.kind_scored(name, "rank1")
        queries = [of_run for run in group.runs if (of_run := run.queries_of(name, model_kind)) is not None]
        if len(queries) == len(group.runs) and all(len(of_run.cmc) for of_run in queries):
            values = list(np.array([of_run.cmc for of_run in queries]).T)
            x = np.arange(1, len(values) + 1, dtype=np.float64)
        else:
            of_ranks = [
                group.values(metric_name("test", model_kind, name, f"rank{rank}"), Rule()) for rank in (1, 5, 10)
            ]
            if not all(len(of_rank) for of_rank in of_ranks):
                continue
            values, x = of_ranks, np.array([1.0, 5.0, 10.0])
        lines.append(_series(label_of_line(group, model_kind), numbers[group, model_kind], x, values))
    return lines


def style_numbers(groups: Sequence[RunGroup]) -> Mapping[tuple[RunGroup, str], int]:
    """Return the style number of each group and kind of model, the same in all pictures."""
    columns = [(group, model_kind) for group in groups for model_kind in group.distinct_kinds(Rule())]
    columns += [(group, model_kind) for group in groups for model_kind in (group.runs[0].primary, "global")]
    return {column: number for number, column in enumerate(dict.fromkeys(columns))}


def label_of(group: RunGroup, model_kind: str, rule: Rule) -> str:
    """Return the label of a group's model; it contains the kind if the group has several."""
    return group.label if group.distinct_kinds(rule) == [model_kind] else f"{group.label}, {model_kind}"


def _series(label: str, number: int, x: Floats, values: Sequence[Floats]) -> Series:
    """Return a series from the scores of single seeds, as fractions of 1."""
    nan = float("nan")
    mean = np.array([100 * np.mean(v) if len(v) else nan for v in values])
    spread = np.array([100 * np.std(v, ddof=1) if len(v) > 1 else nan for v in values])
    return Series(label, number, x, mean, spread, np.array([len(v) for v in values]))


_COLUMNS = 50
"""Largest number of blocks of rounds in a picture."""
Shares = NDArray[np.float64]
"""[clients, blocks of rounds]"""


def participation_of(run: Run) -> Shares:
    """Return each client's share of a block's rounds in which its update counted; DataError if the log lacks it."""
    clients, rounds = clients_of(run), sorted(run.log)
    trained = np.array(
        [[metric_name("train", name, "loss") in run.log[r] for r in rounds] for name in clients], dtype=np.float64
    )
    if not trained.any():
        raise DataError(
            f"{run.folder}: its log does not name the clients that trained; runs with more than 50 clients lack this"
        )
    return np.stack([trained[:, block].mean(axis=1) for block in blocks_of(len(rounds))], axis=1)


def rungs_of(run: Run) -> Shares | None:
    """Return each client's rung of the ladder at the end of each block; None if backbones do not follow rewards."""
    clients, rounds = clients_of(run), sorted(run.log)
    if not any(metric_name("backbone", name) in row for name in clients for row in run.log.values()):
        return None
    rungs = np.array([[run.log[r].get(metric_name("backbone", name), np.nan) for r in rounds] for name in clients])
    return np.stack([rungs[:, block[-1]] for block in blocks_of(len(rounds))], axis=1)


def runs_of(groups: Sequence[RunGroup]) -> list[tuple[str, Run]]:
    """Return each run with a label of its own."""
    return [(f"{group.label}, seed {run.summary['seed']}", run) for group in groups for run in group.runs]


def clients_of(run: Run) -> list[str]:
    """Return the names of all clients; DataError if the run has too many to name them."""
    if not run.summary["clients"]:
        number = run.summary.get("num_clients", "no")
        raise DataError(f"{run.folder}: names none of its {number} clients, so --participation cannot draw them")
    return [str(name) for name in run.summary["clients"]]


def blocks_of(num_rounds: int) -> list[NDArray[np.int64]]:
    """Cut rounds 0, 1, ... into blocks, at most as many as a picture can show."""
    return [block for block in np.array_split(np.arange(num_rounds), min(num_rounds, _COLUMNS)) if len(block)]
