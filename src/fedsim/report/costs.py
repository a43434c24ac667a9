"""Costs of runs: bytes, simulated seconds, images, steps, and answers of clients; also until a score (convergence).

Paper 002 names convergence (Table 9: rank-1, rounds until convergence) and does not define it; the definition is below.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import comparable
from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.runs import METRICS, Run


class Reached(NamedTuple):
    """The round in which a score was reached for the first time, and the bytes and seconds until then."""

    round_: int
    """from 1"""
    num_bytes: float
    """sent to clients and back, in this round and all earlier ones"""
    seconds: float = 0.0
    """simulated, of the same rounds; 0 without ``model.hardware``"""


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


_WAYS = ("down", "up", "extra")
EQUAL_WORK = 0.05
"""Largest relative difference of images trained on, or of steps, for which no line is printed."""
_ROLES = {"second": "second model", "personal": "personal", "server": "server"}


def traffic(groups: Sequence[RunGroup]) -> str:
    """Return a line with the bytes that runs have sent, in GB (1e9 bytes), and their simulated time if there is one."""
    parts = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        gigabytes = _range([sum(s.get(f"bytes_{way}", 0) for way in _WAYS) / 1e9 for s in summaries])
        seconds = [s["simulated_seconds"] for s in summaries if "simulated_seconds" in s]
        simulated = f" in {_range(seconds)} simulated seconds" if seconds else ""
        parts.append(f"{group.label} {gigabytes} GB{simulated}")
    return f"sent by server and clients: {', '.join(parts)}"


def work(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line with the images and steps of the runs' training, and one for each of both that is not equal.

    A run whose log lacks them, of an earlier version, is left out; of several seeds the mean is compared.
    """
    images, steps = (
        {group: counts for group in groups if (counts := totals_of(group, f"train/{unit}"))}
        for unit in ("images", "steps")
    )
    texts = []
    for group, counts in images.items():
        of_roles = {role: [totals_of(group, f"train/{u}_{role}", 0.0) for u in ("images", "steps")] for role in _ROLES}
        roles = [
            f"{_ROLES[role]} {_counts(first)} in {_counts(second)}"
            for role, (first, second) in of_roles.items()
            if any(first + second)
        ]
        in_steps = f" in {_counts(steps[group])} steps" if group in steps else ""
        texts.append(f"{group.label} {_counts(counts)} images{in_steps}" + (f" ({'; '.join(roles)})" if roles else ""))
    if texts:
        yield f"trained on: {', '.join(texts)}"
    yield from _unequal(images, "trained on", "images")
    yield from _unequal(steps, "took", "steps")


def _unequal(totals: Mapping[RunGroup, Sequence[float]], verb: str, unit: str) -> Iterator[str]:
    """Yield a line if the means of two groups differ by more than :data:`EQUAL_WORK`."""
    means = {group.label: float(np.mean(counts)) for group, counts in totals.items()}
    if means and (most := max(means.values())) > (1 + EQUAL_WORK) * (least := min(means.values())):
        names = {value: label for label, value in means.items()}
        more = f"{most / least - 1:.0%} more" if least else "more"
        yield f"NOT EQUAL WORK: {names[most]} {verb} {more} {unit} than {names[least]}; this may change scores"


def _counts(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))))


def _range(values: Sequence[float]) -> str:
    """Return one number, or the smallest and the largest if seeds differ."""
    texts = [f"{v:,.1f}" if v >= 100 else f"{v:.3g}" for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))


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


def left_out_work(methods: Sequence[tuple[str, Mapping[str, RunGroup]]]) -> Block:
    """Return a table of the images and steps of each method by left-out data set.

    A line below names each method whose images or steps are not those of the first one. Counts are means over seeds,
    ``-`` of runs that have not logged them.
    """
    names = list(dict.fromkeys(name for _, rotations in methods for name in rotations))
    lines = [
        [label, *(_mean_work(rotations[name]) if name in rotations else "-" for name in names)]
        for label, rotations in methods
    ]
    notes = ["images of all training passes / steps of optimizers, over all rounds, counted where they are computed"]
    first, base = methods[0]
    for label, rotations in methods[1:]:
        pairs = {name: [base[name], rotations[name]] for name in names if name in base and name in rotations}
        if unequal := [name for name, pair in pairs.items() if any("NOT EQUAL WORK" in line for line in work(pair))]:
            notes.append(f"NOT EQUAL WORK: {label} and {first}, without {', '.join(unequal)}; this may change scores")
    return Block(["method", *names], lines, notes)


def _mean_work(group: RunGroup) -> str:
    totals = [totals_of(group, f"train/{unit}") for unit in ("images", "steps")]
    return " / ".join(f"{np.mean(of_unit):,.0f}" if of_unit else "-" for of_unit in totals)


def pruned_and_sent(group: RunGroup, client: str) -> str:
    """Return a client's pruned share at the end, in percent, and its traffic, in GiB; ``-`` without traffic."""
    pruned, sent, density = [], [], metric_name("comm", client, "density")
    for run in group.runs:
        rounds = [run.log[round_] for round_ in sorted(run.log)]
        by_round = [[row.get(metric_name("comm", client, f"{way}_bytes"), 0.0) for way in _WAYS] for row in rounds]
        densities = [row[density] for row in rounds if density in row]
        pruned.append(100 * (1 - densities[-1]) if densities else 0.0)
        sent.append(sum(map(sum, by_round)) / 2**30)
    if not any(sent):
        return "-"
    return " / ".join(mean_and_spread(np.array(values), digits) for values, digits in ((pruned, 2), (sent, 2)))


def totals_of(group: RunGroup, metric: str, missing: float | None = None) -> list[float]:
    """Return each run's sum of a metric over its rounds, where ``missing`` stands for a value that is not logged.

    None: there are no sums if a round of a run has not logged it.
    """
    logs = [[row for row in run.log.values() if "train/clients" in row] for run in group.runs if run.has_log]
    values = [[row.get(metric, missing) for row in rows] for rows in logs]
    sums = [sum(value for value in of_run if value is not None) for of_run in values]
    return sums if len(logs) == len(group.runs) and all(of_run and None not in of_run for of_run in values) else []
