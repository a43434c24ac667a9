"""The rounds in which each client took part, and its backbone in each (paper 002, Fig. 11)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import metric_name
from fedsim.report.figure import new_figure, save_figure
from fedsim.report.groups import RunGroup
from fedsim.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_participation(groups: Sequence[RunGroup], path: Path) -> None:
    """Draw a row of pictures per run into a file: participation, and the rungs if backbones follow rewards.

    Raises:
        DataError: if a log does not name the clients that trained, or the file cannot be written.
        ConfigError: if there are too many runs for a picture.
    """
    runs = [(f"{group.label}, seed {run.summary['seed']}", run) for group in groups for run in group.runs]
    if len(runs) > 8:
        raise ConfigError(f"--participation: {len(runs)} runs are too many for a picture; give at most 8")
    shares, rungs = [participation_of(run) for _, run in runs], [rungs_of(run) for _, run in runs]
    columns = 1 + any(of_run is not None for of_run in rungs)
    height = sum(1.2 + 0.22 * len(of_run) for of_run in shares)
    with new_figure(3.6 * columns + 0.8, height) as figure:
        axes = figure.subplots(len(runs), columns, squeeze=False)
        for row, (label, run), share, rung in zip(axes, runs, shares, rungs, strict=True):
            _heat_map(row[0], share, run, f"{label}: share of rounds with training", vmin=0, vmax=1, cmap="Blues")
            if rung is not None:
                _heat_map(row[1], rung, run, "backbone: rung of the ladder", vmin=1, cmap="viridis")
            elif columns > 1:
                row[1].set_axis_off()
        save_figure(figure, path, "--participation")


def _heat_map(axes: Axes, values: Shares, run: Run, title: str, **options: Any) -> None:
    """Draw a row per client, and a column per block of rounds."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    rounds, clients = sorted(run.log), clients_of(run)
    # the lengths of blocks differ by at most one round
    edges = [*(rounds[block[0]] - 0.5 for block in blocks_of(len(rounds))), rounds[-1] + 0.5]
    image = axes.pcolormesh(edges, np.arange(len(clients) + 1) - 0.5, values, **options)
    axes.set_yticks(range(len(clients)), clients)
    axes.invert_yaxis()
    axes.set(xlabel="round", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def clients_of(run: Run) -> list[str]:
    """Return the names of all clients; DataError if the run has too many to name them."""
    if not run.summary["clients"]:
        number = run.summary.get("num_clients", "no")
        raise DataError(f"{run.folder}: names none of its {number} clients, so --participation cannot draw them")
    return [str(name) for name in run.summary["clients"]]


def blocks_of(num_rounds: int) -> list[NDArray[np.int64]]:
    """Cut rounds 0, 1, ... into blocks, at most as many as a picture can show."""
    return [block for block in np.array_split(np.arange(num_rounds), min(num_rounds, _COLUMNS)) if len(block)]
