"""The report as a picture; who took part in which rounds, and with which backbone (paper 002, Fig. 11)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.cli.report.groups import Group
from fedsim.cli.report.rules import Rule
from fedsim.cli.report.runs import Run
from fedsim.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 50
"""Blocks of rounds that a picture shows at most."""

Shares = NDArray[np.float64]
"""[clients, blocks of rounds]"""


def draw(columns: Sequence[tuple[Group, str]], names: dict[str, str], metric: str, rule: Rule, path: Path) -> None:
    """Draw curves and bars. Left: the primary model's mean over rounds, seen and unseen. Right: bars per test set.

    ``columns`` are groups with kinds of their models; ``names``: test set -> how it is written; ``rule``: of the bars.

    Raises:
        DataError: if the image file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        curves, bars = figure.subplots(1, 2, width_ratios=(2, 3))
        for colour, group in enumerate(dict.fromkeys(group for group, _ in columns)):
            for domain, style in (("seen", "-"), ("unseen", "--")):
                rounds, scores = _curve(group, f"test/{group.runs[0].primary}/{domain}/{metric}")
                if len(rounds):
                    label = f"{group.label}, {domain} domains"
                    curves.plot(rounds, 100 * scores, style, color=f"C{colour}", label=label)
        curves.set(xlabel="round", ylabel=f"{metric} (%)", title="mean over domains")
        curves.legend(frameon=False)
        step = 0.8 / len(columns)
        for i, (group, kind) in enumerate(columns):
            found = [group.values(f"test/{kind}/{name}/{metric}", rule) for name in names]
            heights = [100 * np.mean(values) if len(values) else 0 for values in found]
            bars.bar(np.arange(len(names)) + (i + 0.5) * step - 0.4, heights, step, label=f"{group.label}, {kind}")
        bars.set_xticks(range(len(names)), list(names.values()), rotation=30, ha="right")
        bars.set(ylabel=f"{metric} (%)", title="per data set")
        bars.legend(frameon=False)
        for axes in (curves, bars):
            axes.spines[["top", "right"]].set_visible(False)
        _save(figure, path, "--figure")


def draw_curves(groups: Sequence[Group], names: dict[str, str], metric: str, path: Path) -> None:
    """Draw a picture per test set: the delivered model's score over rounds, means over seeds, a line per group.

    ``names``: test set -> how it is written.

    Raises:
        DataError: if no run has logged the score, or the image file cannot be written.
    """
    from matplotlib.figure import Figure

    lines = {
        name: [(group.label, *_curve(group, f"test/{group.runs[0].primary}/{name}/{metric}")) for group in groups]
        for name in names
    }
    lines = {name: found for name, found in lines.items() if any(len(rounds) for _, rounds, _ in found)}
    if not lines:
        raise DataError(
            f"{groups[0].runs[0].folder}: the run has no {metric} over rounds; wait for its first evaluation"
        )
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    pictures = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, found) in zip(pictures, lines.items(), strict=False):
        for label, rounds, scores in found:
            axes.plot(rounds, 100 * scores, marker="o" if len(rounds) == 1 else None, label=label)
        axes.set(title=names[name], xlabel="round", ylabel=f"{metric} (%)")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in pictures[len(lines) :]:
        axes.set_axis_off()
    pictures[0].legend(frameon=False)
    _save(figure, path, "--curves")


def _save(figure: Figure, path: Path, option: str) -> None:
    """Write an image file, of the kind that its name says, which ``option`` of the command line has given."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot write the figure ({error}); choose another {option}") from error


def _curve(group: Group, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (rounds, mean over seeds) of a logged score."""
    series: dict[int, list[float]] = {}
    for run in group.runs:
        for round_, row in run.log.items():
            if key in row:
                series.setdefault(round_, []).append(row[key])
    rounds = sorted(series)
    return np.array(rounds, dtype=np.float64), np.array([np.mean(series[r]) for r in rounds])


def participation_of(run: Run) -> Shares:
    """Return in which share of a block's rounds each client's update counted; DataError if the log does not say it."""
    clients, rounds = _clients(run), sorted(run.log)
    trained = np.array([[f"train/{name}/loss" in run.log[r] for r in rounds] for name in clients], dtype=np.float64)
    if not trained.any():
        raise DataError(f"{run.folder}: its log does not say who trained; runs of more than 50 clients do not")
    return np.stack([trained[:, block].mean(axis=1) for block in _blocks(len(rounds))], axis=1)


def rungs_of(run: Run) -> Shares | None:
    """Return each client's rung of the ladder at the end of each block; None: backbones do not follow rewards."""
    clients, rounds = _clients(run), sorted(run.log)
    if not any(f"backbone/{name}" in row for name in clients for row in run.log.values()):
        return None
    rungs = np.array([[run.log[r].get(f"backbone/{name}", np.nan) for r in rounds] for name in clients])
    return np.stack([rungs[:, block[-1]] for block in _blocks(len(rounds))], axis=1)


def draw_participation(groups: Sequence[Group], path: Path) -> None:
    """Draw a row of pictures for each run into a file: who took part, and the rungs if backbones follow rewards.

    Raises:
        DataError: if a log does not say who trained, or the file cannot be written.
        ConfigError: if there is more than a picture can show.
    """
    from matplotlib.figure import Figure  # slow to import

    runs = [(f"{group.label}, seed {run.summary['seed']}", run) for group in groups for run in group.runs]
    if len(runs) > 8:
        raise ConfigError(f"--participation: {len(runs)} runs are too many for a picture; give at most 8")
    shares, rungs = [participation_of(run) for _, run in runs], [rungs_of(run) for _, run in runs]
    columns = 1 + any(found is not None for found in rungs)
    height = sum(1.2 + 0.22 * len(found) for found in shares)
    figure = Figure(figsize=(6 * columns, height), layout="constrained")
    axes = figure.subplots(len(runs), columns, squeeze=False)
    for row, (label, run), share, rung in zip(axes, runs, shares, rungs, strict=True):
        _heat_map(row[0], share, run, f"{label}: share of rounds with training", vmin=0, vmax=1, cmap="Blues")
        if rung is not None:
            _heat_map(row[1], rung, run, "backbone: rung of the ladder", vmin=1, cmap="viridis")
        elif columns > 1:
            row[1].set_axis_off()
    _save(figure, path, "--participation")


def _heat_map(axes: Axes, values: Shares, run: Run, title: str, **how: Any) -> None:
    """Draw a row per client, and a column per block of rounds."""
    rounds, clients = sorted(run.log), _clients(run)
    # blocks differ by a round in length
    edges = [*(rounds[block[0]] - 0.5 for block in _blocks(len(rounds))), rounds[-1] + 0.5]
    image = axes.pcolormesh(edges, np.arange(len(clients) + 1) - 0.5, values, **how)
    axes.set_yticks(range(len(clients)), clients)
    axes.invert_yaxis()
    axes.set(xlabel="round", title=title)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _clients(run: Run) -> list[str]:
    return [str(name) for name in run.summary["clients"]]


def _blocks(num_rounds: int) -> list[NDArray[np.int64]]:
    """Cut rounds 0, 1, ... into at most so many blocks as a picture can show."""
    return [block for block in np.array_split(np.arange(num_rounds), min(num_rounds, _COLUMNS)) if len(block)]
