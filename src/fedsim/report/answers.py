"""Rounds that do not wait for all clients: some answer seldom, and scores at the same simulated seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.runs import Run
from fedsim.report.series import Series, curves, seconds_of


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
