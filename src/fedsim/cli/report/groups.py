"""Runs that differ in their seed alone: one column of a report, and what they have sent."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.cli.report.layout import mean_and_spread
from fedsim.cli.report.rules import Rule
from fedsim.cli.report.runs import KINDS, Run, read_run
from fedsim.core.errors import ConfigError

_WAYS = ("down", "up", "extra")


@dataclass(frozen=True, eq=False)
class Group:
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


def group_runs(folders: list[Path]) -> list[Group]:
    """Open run directories and put runs together that differ in the seed only."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    by_config: dict[str, list[Run]] = {}
    for folder in folders:
        run = read_run(folder)
        by_config.setdefault(run.summary["fingerprint"], []).append(run)
    variants: dict[str, list[list[Run]]] = {}
    for runs in by_config.values():
        method = "Centralised" if runs[0].summary["clients"] == ["union"] else str(runs[0].summary["method"])
        variants.setdefault(method, []).append(runs)
    labels = {
        id(runs): label
        for method, same in variants.items()
        for runs, label in zip(same, _labels(method, [runs[0] for runs in same]), strict=True)
    }
    return [Group(labels[id(runs)], tuple(runs)) for runs in by_config.values()]


def _labels(method: str, runs: Sequence[Run]) -> list[str]:
    """Return a name for each variant of a method: with the setting in which they differ, or their folders."""
    if len(runs) == 1:
        return [method]
    settings = [_flat({name: run.config.get(name) for name in ("model", "data", "trainer")}) for run in runs]
    differing = [name for name in dict(ChainMap(*settings)) if len({str(of.get(name)) for of in settings}) > 1]
    values = [str(of.get(differing[0])) for of in settings] if len(differing) == 1 else []
    if len(set(values)) == len(runs):
        return [f"{method} {differing[0].rpartition('.')[2]} {value}" for value in values]
    names = [run.folder.name for run in runs]
    return [f"{method} {n if names.count(n) == 1 else run.folder}" for n, run in zip(names, runs, strict=True)]


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted names of settings -> values."""
    if not isinstance(content, Mapping) or not content:
        return {prefix: content}
    return {k: v for name, value in content.items() for k, v in _flat(value, f"{prefix}.{name}".lstrip(".")).items()}


def traffic(groups: Sequence[Group]) -> str:
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
