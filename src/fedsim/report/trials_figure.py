"""The figure of a search: parallel coordinates of its trials, the best so far, and the importance of each option."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution

from fedsim.core.errors import DataError
from fedsim.report.figure import new_figure, save_figure
from fedsim.report.study import SearchTrials, TrialRow
from fedsim.report.style import style_of
from fedsim.report.trials import importances, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

_WIDTH, _PER_AXIS = 7.2, 1.2  # inches: of two columns of a paper, and of an axis of many
_LETTERS = 18  # of a value at an axis, and of a line of the metric's name
_GREY = "#9a9a9a"


@dataclass(frozen=True)
class _Scale:
    """A vertical axis of the parallel coordinates; heights are from 0 to 1."""

    distribution: BaseDistribution

    def height(self, value: Any) -> float:
        """Return the height of a value."""
        scale: Any = self.distribution
        if isinstance(scale, CategoricalDistribution):
            return float(scale.choices.index(value) + 0.5) / len(scale.choices)
        low, high = scale.low, scale.high
        if low == high:
            return 0.5
        if scale.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return float((value - low) / (high - low))

    def ticks(self) -> list[Any]:
        """Return the values that are written at the axis: all of a list, the ends of a range."""
        scale: Any = self.distribution
        if isinstance(scale, CategoricalDistribution):
            return list(scale.choices)
        return [scale.low, scale.high]


def draw_trials(trials: SearchTrials, path: Path) -> None:
    """Draw a search into an image file.

    A line of the parallel coordinates is a trial; colours are scores of complete ones, others are grey and broken.

    Raises:
        DataError: if no trial is complete, or the image file cannot be written.
    """
    if not trials.complete:
        raise DataError(f"{path}: cannot draw the trials, as none is complete; wait for the first one")
    options = list(dict.fromkeys(option for row in trials.rows for option in row.settings))
    shares = importances(trials)
    with new_figure(min(20.0, max(_WIDTH, _PER_AXIS * len(options))), 4.8) as figure:
        rows = "aa;bc" if shares else "aa;bb"
        pictures = figure.subplot_mosaic(rows, height_ratios=(5, 4), width_ratios=(3, 2))
        _draw_parallel(pictures["a"], trials, options)
        _draw_best(pictures["b"], trials)
        if shares:
            _draw_shares(pictures["c"], shares)
        save_figure(figure, path, "--figure")


def _draw_parallel(axes: Axes, trials: SearchTrials, options: list[str]) -> None:
    import matplotlib as mpl
    from matplotlib.colors import Normalize

    scales = [_Scale(trials.distributions[option]) for option in options]
    scores = [row.score for row in trials.complete if row.score is not None]
    colours = mpl.colormaps["viridis_r" if trials.maximize else "viridis"]  # dark is good, also in grey
    shade = Normalize(min(scores), max(scores))
    for row in sorted(trials.rows, key=lambda row: _rank(row, trials)):  # the best lines lie above the others
        if row.settings.keys() >= set(options):
            heights = [scale.height(row.settings[option]) for scale, option in zip(scales, options, strict=True)]
            axes.plot(range(len(options)), heights, **_line(row, trials, colours, shade))
    for position, scale in enumerate(scales):
        _draw_scale(axes, position, scale)
    axes.set_xticks(range(len(options)), short_names(options))
    axes.set(yticks=[], ylim=(-0.05, 1.05), xlim=(-0.1, len(options) - 0.75), title="settings of the trials")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = axes.figure.colorbar(mpl.cm.ScalarMappable(shade, colours), ax=axes, pad=0.01, aspect=30)
    bar.set_label(textwrap.fill(trials.metric, _LETTERS))


def _draw_scale(axes: Axes, position: int, scale: _Scale) -> None:
    """Draw a vertical axis, with its values on white."""
    axes.axvline(position, color="#333333", linewidth=0.8)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
    for value in scale.ticks():
        label = f"{value:.3g}" if isinstance(value, float) else _shortened(str(value))
        place = position, scale.height(value)
        axes.annotate(label, place, (3, 0), textcoords="offset points", fontsize=6.5, va="center", bbox=box)


def _shortened(name: str) -> str:
    """Return the beginning of a long value, without the package of a class: there is room up to the next axis.

    >>> _shortened("fedsim.methods.FedPav"), _shortened("configs/recipes/mine.yaml"), _shortened("0.1")
    ('FedPav', 'configs/recipes/m…', '0.1')
    """
    name = re.sub(r"^(\w+\.)+(?=[A-Z]\w*$)", "", name)
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"


def _rank(row: TrialRow, trials: SearchTrials) -> float:
    if row.score is None or math.isnan(row.score):
        return -math.inf
    return row.score if trials.maximize else -row.score


def _line(row: TrialRow, trials: SearchTrials, colours: Colormap, shade: Normalize) -> dict[str, Any]:
    if row not in trials.complete:
        return {"color": _GREY, "linestyle": "--", "linewidth": 0.7, "alpha": 0.7}
    is_best = row is trials.records[-1]
    return {"color": colours(shade(row.score or 0.0)), "linewidth": 2.2 if is_best else 1.0}


def _draw_best(axes: Axes, trials: SearchTrials) -> None:
    """Draw the score of each trial, the best so far, and the last score of pruned trials."""
    from matplotlib.ticker import MaxNLocator

    style, complete = style_of(0), trials.complete
    axes.plot([row.number for row in complete], [row.score or 0.0 for row in complete], style.marker,
              color=style.colour, markersize=3.5, label="complete")  # fmt: skip
    pruned = [row for row in trials.rows if row.state == "pruned" and row.seen]
    if pruned:
        axes.plot([row.number for row in pruned], [row.seen[max(row.seen)] for row in pruned], "x", color=_GREY,
                  markersize=3.5, label="pruned, last score")  # fmt: skip
    records = [*trials.records, trials.records[-1]]
    numbers = [*(row.number for row in trials.records), trials.rows[-1].number]
    axes.step(numbers, [row.score or 0.0 for row in records], where="post", color="#333333", linewidth=1.1,
              label="best so far")  # fmt: skip
    axes.set(title="best so far", xlabel="trial", ylabel=textwrap.fill(trials.metric, _LETTERS))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def _draw_shares(axes: Axes, shares: dict[str, float]) -> None:
    """Draw a bar per option, the largest above."""
    options = list(reversed(shares))
    bars = axes.barh(short_names(options), [shares[option] for option in options], color=style_of(0).colour)
    axes.bar_label(bars, [f"{shares[option]:.2f}" for option in options], padding=2, fontsize=7)
    axes.set(title="share of the score's variance (fANOVA)", xlim=(0, 1.12), xticks=[0, 0.5, 1])
    axes.spines[["top", "right"]].set_visible(False)
