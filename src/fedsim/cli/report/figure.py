"""The report as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsim.cli.report.groups import Group
from fedsim.cli.report.rules import Rule
from fedsim.core.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "save_figure"]


def draw(columns: Sequence[tuple[Group, str]], names: dict[str, str], metric: str, rule: Rule, path: Path) -> None:
    """Draw curves and bars. Left: the primary model's mean over rounds, seen and unseen. Right: bars per test set.

    Args:
        columns: groups, and kinds of their models.
        names: test set -> how it is written.
        metric: what is drawn.
        rule: of the bars.
        path: the image file to write.

    Raises:
        DataError: if it cannot be written.
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
        save_figure(figure, path, "--figure")


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write an image file, of the kind that its name says.

    Args:
        figure: what is drawn.
        path: the file.
        option: of the command line, which gave its name.

    Raises:
        DataError: if it cannot be written.
    """
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
