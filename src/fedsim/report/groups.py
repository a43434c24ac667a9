"""Runs that differ in their seed alone: one column of a report, and what they have sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError
from fedsim.report.layout import mean_and_spread
from fedsim.report.names import name_variants
from fedsim.report.rules import Rule
from fedsim.report.runs import KINDS, Run, read_run

_WAYS = ("down", "up", "extra")


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one configuration, one per seed."""

    label: str
    runs: tuple[Run, ...]

    def values(self, key: str, rule: Rule) -> NDArray[np.float64]:
        """Return one score of each run, fractions of 1; runs without it are missing."""
        scores = [rule.scores(run).get(key) for run in self.runs]
        return np.array([score for score in scores if score is not None])

    def cell(self, model: str, metrics: Sequence[str], rule: Rule, digits: int = 1) -> str:
        """Return scores below ``test/kind/set`` in percent, as a table shows them; ``-`` without the first."""
        found = [100 * self.values(f"{model}/{metric}", rule) for metric in metrics]
        return " / ".join(mean_and_spread(values, digits) for values in found) if len(found[0]) else "-"

    def costs(self, client: str) -> str:
        """Return what a client has pruned in the end, percent, and received and sent, GiB; ``-`` without traffic."""
        pruned, sent = [], []
        for run in self.runs:
            rounds = [run.log[round_] for round_ in sorted(run.log)]
            by_round = [[row.get(f"comm/{client}/{way}_bytes", 0.0) for way in _WAYS] for row in rounds]
            densities = [row[f"comm/{client}/density"] for row in rounds if f"comm/{client}/density" in row]
            pruned.append(100 * (1 - densities[-1]) if densities else 0.0)
            sent.append(sum(map(sum, by_round)) / 2**30)
        if not any(sent):
            return "-"
        return " / ".join(mean_and_spread(np.array(values), digits) for values, digits in ((pruned, 2), (sent, 2)))

    def kinds(self, rule: Rule) -> list[str]:
        """Return the models; local ones are left out where another has the same scores (Local, Centralised)."""
        metrics = rule.scores(self.runs[0])
        scores = {
            kind: {k.split("/", 2)[2]: v for k, v in metrics.items() if k.startswith(f"test/{kind}/")} for kind in KINDS
        }
        others = [scores["global"].items(), scores["personalised"].items()]
        repeats = any(scores["local"].items() <= other for other in others)
        return [kind for kind in KINDS if scores[kind] and not (kind == "local" and repeats)]

    def distinct_kinds(self, rule: Rule) -> list[str]:
        """Return the models without personalised ones that are the global one: those have its scores on every set."""
        scores = rule.scores(self.runs[0])

        def of(kind: str) -> set[tuple[str, float]]:
            return {(k.split("/", 2)[2], v) for k, v in scores.items() if k.startswith(f"test/{kind}/")}

        kinds = self.kinds(rule)
        repeats = "global" in kinds and of("personalised") <= of("global")
        return [kind for kind in kinds if not (kind == "personalised" and repeats)]


def group_runs(folders: list[Path]) -> list[RunGroup]:
    """Open run directories and put runs together that differ in the seed only."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    return group_opened([read_run(folder) for folder in folders])


def group_opened(opened: Sequence[Run]) -> list[RunGroup]:
    """Put runs together that differ in the seed only, and name the groups."""
    by_config: dict[str, list[Run]] = {}
    for run in opened:
        by_config.setdefault(run.summary["fingerprint"], []).append(run)
    labels = name_variants([runs[0] for runs in by_config.values()])
    return [RunGroup(label, tuple(runs)) for label, runs in zip(labels, by_config.values(), strict=True)]


def traffic(groups: Sequence[RunGroup]) -> str:
    """Return a line on what runs have sent so far, in GB (1e9 bytes), and their simulated time where there is one."""
    parts = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        gigabytes = _range([sum(s.get(f"bytes_{way}", 0) for way in _WAYS) / 1e9 for s in summaries])
        seconds = [s["simulated_seconds"] for s in summaries if "simulated_seconds" in s]
        simulated = f" in {_range(seconds)} simulated seconds" if seconds else ""
        parts.append(f"{group.label} {gigabytes} GB{simulated}")
    return f"sent by server and clients: {', '.join(parts)}"


def _range(values: Sequence[float]) -> str:
    """One number, or the smallest and the largest where seeds differ."""
    texts = [f"{v:,.1f}" if v >= 100 else f"{v:.3g}" for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))
