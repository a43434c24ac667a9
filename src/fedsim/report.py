"""``fedsim report``: a table over runs, with seeds grouped, and a figure."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.run_directory import metrics_files

__all__ = ["Group", "group_runs", "report"]

_METRICS = ("mAP", "mAP_trapezoid", "mINP", "rank1", "rank5", "rank10")
_MEANING = {
    "global": "global: the server's model",
    "local": "local: a client's own after training, before averaging",
    "personalised": "personalised: the client's private parts with what it shares",
}
_KINDS = tuple(_MEANING)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, one per seed."""

    label: str
    folders: tuple[Path, ...]
    summaries: tuple[dict[str, Any], ...]

    def values(self, key: str, best: bool) -> NDArray[np.float64]:
        """Return one score of each run, fractions of 1; runs without it are missing."""
        which = "best" if best else "final"
        scores = [(s[which] or {}).get("metrics", {}).get(key) for s in self.summaries]
        return np.array([score for score in scores if score is not None])


def report(runs: list[str], metric: str = "mAP", best: bool = False, figure: str | None = None) -> str:
    """Return a table: a row per domain, a column per method and model; each cell ``metric / rank1`` in percent.

    Args:
        runs: run directories.
        metric: the first number of each cell.
        best: the round with the best ``val/mAP`` of each run, instead of its last evaluation.
        figure: also draw curves over rounds and bars over domains into this image file.

    Raises:
        DataError: if a directory holds no run, or runs have nothing in common.
    """
    if metric not in _METRICS:
        raise ConfigError(f"--metric: {metric} is unknown; choose from {', '.join(_METRICS)}")
    groups = group_runs([Path(run) for run in runs])
    domains = list(dict.fromkeys(d for g in groups for s in g.summaries for d in _domains(s)))
    columns = [(group, kind) for group in groups for kind in _kinds(group, best)]
    if not columns:
        raise DataError(f"{runs[0]}: the run has no scores yet; wait for its first evaluation")
    text = _tables(columns, domains, metric, best)
    if figure is not None:
        _draw(groups, columns, domains, metric, best, Path(figure))
        text += f"\nwrote {figure}"
    return text


def group_runs(folders: list[Path]) -> list[Group]:
    """Read ``summary.json`` of each folder and put runs together that differ in the seed only."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    by_config: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder in folders:
        summary = _read(folder)
        by_config.setdefault(summary["fingerprint"], []).append((folder, summary))
    labels: dict[str, str] = {}
    for fingerprint, members in by_config.items():
        first = members[0][1]
        method = "Centralised" if first["clients"] == ["union"] else first["method"]
        taken = method in labels.values()
        labels[fingerprint] = f"{method} {members[0][0].name}" if taken else method
    return [
        Group(labels[fingerprint], tuple(f for f, _ in members), tuple(s for _, s in members))
        for fingerprint, members in by_config.items()
    ]


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(f"{folder}: holds no summary.json; give the run directories of fedsim fit")
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: is no JSON ({error}); was it edited?") from error
    return summary


def _domains(summary: dict[str, Any]) -> list[str]:
    keys = ((summary["final"] or {}).get("metrics", {})).keys()
    return list(dict.fromkeys(key.split("/")[2] for key in keys if key.startswith("test/") and key.count("/") == 3))


def _kinds(group: Group, best: bool) -> list[str]:
    """The group's models; local ones are left out where another model has the same scores (Local, Centralised)."""
    metrics = (group.summaries[0]["best" if best else "final"] or {}).get("metrics", {})
    scores = {
        kind: {k.split("/", 2)[2]: v for k, v in metrics.items() if k.startswith(f"test/{kind}/")} for kind in _KINDS
    }
    others = [scores["global"].items(), scores["personalised"].items()]
    repeats = any(scores["local"].items() <= other for other in others)
    return [kind for kind in _KINDS if scores[kind] and not (kind == "local" and repeats)]


def _order(domains: list[str]) -> list[str]:
    """Domains in their own order, then the two means."""
    means = [d for d in ("seen", "unseen") if d in domains]
    return [d for d in domains if d not in means] + means


def _tables(columns: list[tuple[Group, str]], domains: list[str], metric: str, best: bool) -> str:
    """Cut the columns into tables that fit the terminal."""
    width = max(8, *(len(d) for d in domains)) + 10
    spread = any(len(group.summaries) > 1 for group, _ in columns)
    cell = (26 if spread else 15) + 2
    per_table = max(1, (shutil.get_terminal_size((100, 24)).columns - width) // cell)
    unseen = {d for group, _ in columns for s in group.summaries for d in s["unseen"]}
    parts = []
    for start in range(0, len(columns), per_table):
        part = columns[start : start + per_table]
        headers = ["data set", *(f"{group.label}\n{kind}" for group, kind in part)]
        rows = [
            [_name(d, unseen), *(_cell(group, kind, d, metric, best) for group, kind in part)] for d in _order(domains)
        ]
        parts.append(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * len(part))))
    seeds = "; ".join({f"{group.label}: {_describe(group)}": None for group, _ in columns})
    when = "round with the best val/mAP" if best else "last evaluation"
    numbers = "rank-1" if metric == "rank1" else f"{metric} / rank-1"
    legend = f"{numbers} in percent, {when}" + (", mean +- standard deviation over seeds" if spread else "")
    kinds = "; ".join(text for kind, text in _MEANING.items() if any(kind == k for _, k in columns))
    return "\n\n".join(parts) + f"\n\n{legend}\n{kinds}\n{seeds}"


def _name(domain: str, unseen: set[str]) -> str:
    if domain in ("seen", "unseen"):
        return f"mean {domain}"
    return f"{domain} (unseen)" if domain in unseen else domain


def _describe(group: Group) -> str:
    seeds = sorted({int(s["seed"]) for s in group.summaries})
    rounds = sorted({int(s["rounds"]) for s in group.summaries})
    unfinished = sum(not s["finished"] for s in group.summaries)
    plural = "s" if len(seeds) > 1 else ""
    text = f"{'/'.join(map(str, rounds))} rounds, seed{plural} {', '.join(map(str, seeds))}"
    return text + (f", {unfinished} not finished" if unfinished else "")


def _cell(group: Group, kind: str, domain: str, metric: str, best: bool) -> str:
    numbers = [group.values(f"test/{kind}/{domain}/{m}", best) for m in dict.fromkeys((metric, "rank1"))]
    if not len(numbers[0]):
        return "-"
    return " / ".join(_mean_and_spread(100 * n) for n in numbers)


def _mean_and_spread(values: NDArray[np.float64]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{values.mean():.1f}+-{values.std(ddof=1):.1f}"


def _draw(
    groups: list[Group], columns: list[tuple[Group, str]], domains: list[str], metric: str, best: bool, path: Path
) -> None:
    """Left: the primary model's mean over rounds, seen and unseen. Right: bars per domain."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        curves, bars = figure.subplots(1, 2, width_ratios=(2, 3))
        for colour, group in enumerate(groups):
            for domain, style in (("seen", "-"), ("unseen", "--")):
                rounds, scores = _curve(group, f"test/{group.summaries[0]['primary']}/{domain}/{metric}")
                if len(rounds):
                    curves.plot(
                        rounds, 100 * scores, style, color=f"C{colour}", label=f"{group.label}, {domain} domains"
                    )
        curves.set(xlabel="round", ylabel=f"{metric} (%)", title="mean over domains")
        curves.legend(frameon=False)
        shown = _order(domains)
        step = 0.8 / len(columns)
        for i, (group, kind) in enumerate(columns):
            heights = [
                100 * np.mean(v) if len(v := group.values(f"test/{kind}/{d}/{metric}", best)) else 0 for d in shown
            ]
            bars.bar(np.arange(len(shown)) + (i + 0.5) * step - 0.4, heights, step, label=f"{group.label}, {kind}")
        bars.set_xticks(range(len(shown)), [_name(d, set()) for d in shown], rotation=30, ha="right")
        bars.set(ylabel=f"{metric} (%)", title="per data set")
        bars.legend(frameon=False)
        for axes in (curves, bars):
            axes.spines[["top", "right"]].set_visible(False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot write the figure ({error}); choose another --figure") from error


def _curve(group: Group, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (rounds, mean over seeds) of a logged score."""
    series: dict[int, list[float]] = {}
    for folder in group.folders:
        scores: dict[int, float] = {}
        for path in metrics_files(folder):
            with path.open(newline="") as file:
                scores |= {int(row["epoch"]) + 1: float(row[key]) for row in csv.DictReader(file) if row.get(key)}
        for round_, score in scores.items():
            series.setdefault(round_, []).append(score)
    rounds = sorted(series)
    return np.array(rounds, dtype=np.float64), np.array([np.mean(series[r]) for r in rounds])
