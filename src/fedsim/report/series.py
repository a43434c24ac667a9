"""The numbers and styles of every picture: curves over rounds, bytes and seconds, bars, and CMC curves, over seeds.

Also the price of rounds that do not wait for all clients: who answers seldom, and scores at the same simulated seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.rules import Rule
from fedsim.report.runs import Queries, Run

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


def seconds_of(run: Run) -> dict[int, float]:
    """Return the simulated seconds until the end of each round; empty if clients' hardware is not simulated."""
    total, seconds_by_round = 0.0, {}
    for round_, row in run.log.items():
        if "time/simulated_seconds" in row:
            total += row["time/simulated_seconds"]
            seconds_by_round[round_] = total
    return seconds_by_round


def curves(groups: Sequence[RunGroup], name: str, metric: str, axis: Axis = rounds_of) -> list[Series]:
    """Return a line per group that has any point: the delivered model's score on a test set, over ``axis``.

    If the delivered model has no such score, the line is that of the global model, and its label contains that word.
    """
    numbers = style_numbers(groups)
    lines = []
    for group in groups:
        logged = {key for run in group.runs for row in run.log.values() for key in row}
        model_kind = _kind_of_line(group, name, metric, logged)
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


def _kind_of_line(group: RunGroup, name: str, metric: str, logged: Container[str]) -> str:
    """Return the kind of model of a group's line: the delivered one, or global if only that has the score.

    The latter is the case on unseen data sets if the delivered model is a client's own. ``name``: of the test set;
    ``logged``: the names of all scores.
    """
    kinds = (group.runs[0].primary, "global")
    return next(
        (model_kind for model_kind in kinds if metric_name("test", model_kind, name, metric) in logged), kinds[0]
    )


def kind_of_last(group: RunGroup, name: str, metric: str) -> str:
    """Return the kind of model scored on a test set at the last evaluation: the delivered one, or else global."""
    return _kind_of_line(group, name, metric, {key for run in group.runs for key in Rule().scores(run)})


def label_of_line(group: RunGroup, model_kind: str) -> str:
    """Return the label of a group; it includes the kind of a model that is not the delivered one."""
    return group.label if model_kind == group.runs[0].primary else f"{group.label}, {model_kind}"


def tradeoffs(groups: Sequence[RunGroup], name: str, metric: str) -> dict[str, list[Series]]:
    """Return the lines over sent bytes, and over simulated seconds: name of the axis -> lines; empty ones are left out.

    A method that sends nothing has one point, its last.
    """
    lines_by_axis = {}
    for title, axis in (("sent by server and clients", bytes_of), ("simulated seconds", seconds_of)):
        lines = [
            curve if np.ptp(curve.x) or len(curve.x) == 1 else _last(curve)
            for curve in curves(groups, name, metric, axis)
        ]
        largest = max((float(curve.x.max()) for curve in lines), default=0.0)
        if largest > 0:
            unit, factor = ("", 1.0) if axis is seconds_of else next(u for u in _UNITS if largest >= u[1])
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
        model_kind = kind_of_last(group, name, "rank1")
        queries = [of_run for run in group.runs if (of_run := queries_of(run, name, model_kind)) is not None]
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


def queries_of(run: Run, name: str, model_kind: str | None = None) -> Queries | None:
    """Return a model's results on single queries at the last evaluation; None if the run has no such file.

    ``model_kind``: kind of the model; None: the delivered one.
    """
    file = run.queries
    if file is None or file.round_ != (run.summary["final"] or {}).get("round"):
        return None
    return file.results.get(metric_name(model_kind or run.primary, name))


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


@dataclass(frozen=True)
class Price:
    """The price of rounds that do not wait: the answers of the client that has done the least work, and of others."""

    client: str
    """with the least work: where all answers are whole, with the fewest answers"""
    count: float
    """its answers: rounds in which its update counted"""
    median: float
    """over all clients"""
    most: float
    """of a client"""
    total: float
    """of all clients"""
    work: float = 1.0
    """mean share of its work that the client did for an answer; 1: always all of it"""
    since: int = 1
    """the first round that is counted"""

    @property
    def is_partial(self) -> bool:
        """Whether the client answered with less than its work."""
        return self.count > 0 and self.work < 1

    def __str__(self) -> str:
        """Return ``4 of 90 (town0)``, or ``20 of 200, 0.31 of its work (town0)``."""
        work = f", {self.work:.2g} of its work" if self.is_partial else ""
        return f"{self.count:g} of {self.total:g}{work} ({self.client}){self.beginning}"

    @property
    def beginning(self) -> str:
        """A text if rounds before the first counted one are missing; else empty."""
        return f" since round {self.since}" if self.since > 1 else ""


def answers_of(run: Run) -> Price | None:
    """Return the answers of a run's clients; None if neither its summary nor its log has them.

    Timed runs count them in their summary. Others do not: their log names the clients if there are few, and it has
    their number, from which those of a run in which all clients answer in every round follow.
    """
    if (counted := run.summary.get("answers")) is not None:
        least = counted["least"]
        return Price(
            str(least["client"]), least["answers"], counted["median"], counted["most"], counted["total"],
            least["work"], counted["since"],
        )  # fmt: skip
    if not run.has_log:
        return None
    names = run.summary["clients"]
    keys = {name: metric_name("train", name, "loss") for name in names}
    counts = {name: sum(key in row for row in run.log.values()) for name, key in keys.items()}
    if any(counts.values()):
        fewest, numbers = min(counts, key=counts.__getitem__), counts.values()
        return Price(fewest, counts[fewest], statistics.median(numbers), max(numbers), sum(numbers))
    number, rounds = len(names) or run.summary.get("num_clients"), len(run.log)
    if number and rounds and all(row.get("train/clients") == number for row in run.log.values()):
        return Price(names[0] if names else "each", rounds, rounds, rounds, number * rounds)
    return None


def is_timed(run: Run) -> bool:
    """Return whether rounds do not wait for all clients (``model.timing``)."""
    return "answers" in run.summary or (run.has_log and any("time/clock" in row for row in run.log.values()))


def fewest_answers(run: Run) -> str:
    """Return the answers of the client with the least work, and of all, see :class:`Price`; ``-`` if unknown."""
    answers = answers_of(run)
    return "-" if answers is None else str(answers)


def answers_line(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line with the fewest answers of a client, the median and the most, if a run does not wait for all.

    They are means over seeds.
    """
    if any(is_timed(run) for group in groups for run in group.runs):
        texts = (f"{group.label} {_span(group)}" for group in groups)
        yield f"answers of a client, fewest, median and most: {'; '.join(texts)}"


def _span(group: RunGroup) -> str:
    counted = [answers for run in group.runs if (answers := answers_of(run)) is not None]
    if not counted:
        return "unknown"
    fewest, median, most, work = (
        statistics.fmean(values) for values in zip(*((a.count, a.median, a.most, a.work) for a in counted), strict=True)
    )
    is_partial = any(answers.is_partial for answers in counted)
    if fewest == most and not is_partial:
        return f"{most:g} each{counted[0].beginning}"
    names = " or ".join(dict.fromkeys(answers.client for answers in counted))
    done = f", {work:.2g} of its work" if is_partial else ""
    return f"{fewest:g} ({names}{done}), {median:g}, {most:g}{counted[0].beginning}"


_PARTS = 3
"""number of times, evenly spread until the shortest run's last evaluation"""


def scores_line(groups: Sequence[RunGroup], names: Sequence[str], metric: str) -> Iterator[str]:
    """Yield a line with scores at common simulated times, if a run does not wait for all clients.

    A score is that of the newest evaluation until then, a mean over seeds; ``names``: all test sets, with ``seen`` and
    ``unseen`` for the means over them, of which the first one there is counts.
    """
    if not any(is_timed(run) for group in groups for run in group.runs):
        return
    name = next((mean for mean in ("seen", "unseen") if mean in names), names[0])
    lines = [curve for curve in curves(groups, name, metric, seconds_of) if curve.x[-1] > 0]
    if not lines:
        return
    times = min(float(curve.x[-1]) for curve in lines) * np.arange(1, _PARTS + 1) / _PARTS
    texts = (f"{curve.label} {', '.join(_score_at(curve, time) for time in times)}" for curve in lines)
    subject = f"mean {name}" if name in ("seen", "unseen") else name
    seconds = ", ".join(f"{time:,.1f}" for time in times)
    yield f"{metric} in percent, {subject}, until {seconds} simulated seconds: {'; '.join(texts)}"


def _score_at(curve: Series, time: float) -> str:
    """Return the score of the newest evaluation until a time; ``-`` if there is none."""
    position = int(np.searchsorted(curve.x, time * (1 + 1e-12), side="right")) - 1  # sums of seconds are rounded
    return f"{curve.mean[position]:.1f}" if position >= 0 else "-"
