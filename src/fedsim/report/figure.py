"""Figures for papers, drawn by matplotlib, from the numbers of :mod:`fedsim.report.series`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import MEANS
from fedsim.report import series
from fedsim.report.costs import answers_line
from fedsim.report.groups import RunGroup
from fedsim.report.layout import axes_of, new_figure, save_figure, style_of
from fedsim.report.runs import Rule, Run
from fedsim.report.series import Series, Shares, blocks_of, clients_of, participation_of, rungs_of, runs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2
"""Inches: two columns of a paper."""
_LETTER = 0.065
"""Inches: approximate width of a letter in a legend."""
_LINE = 0.17
"""Inches: height of a line of a legend."""
_MANY = 40
"""Points of a line above which only some have a marker."""
_RANKS = 20
"""Ranks of a CMC curve."""
_BEYOND = 3
"""Percent beyond both ends of a CMC curve's axis, so that markers at 0 and 100 % are whole."""


def draw_scores(groups: Sequence[RunGroup], names: Mapping[str, str], metric: str, rule: Rule, path: Path) -> None:
    """Draw the delivered models' mean scores over rounds, seen and unseen, above bars of all models per test set.

    ``names``: test set -> its title; ``rule``: rule of the bars. Bands and error bars are standard deviations over
    seeds.

    Raises:
        DataError: if the image file cannot be written.
    """
    columns = series.bars(groups, list(names), metric, rule)
    titles = {"seen": "mean over clients' data sets", "unseen": "mean over unseen data sets"}
    means = {
        title: lines
        for name, title in titles.items()
        if name in names and (lines := series.curves(groups, name, metric))
    }
    width = min(20.0, max(_WIDTH, 0.07 * len(columns) * len(names)))
    with new_figure(width, 4.8 if means else 2.8) as figure:
        pictures = figure.subplot_mosaic(
            [list(means), ["bars"] * len(means)] if means else [["bars"]],
            height_ratios=(4, 5) if means else None,
        )
        for title, lines in means.items():
            _draw_lines(pictures[title], lines)
            _name_axes(pictures[title], title, "round", metric)
        _draw_bars(pictures["bars"], columns, list(names.values()))
        title = "per data set" + ("" if rule.name == "last" else f", rule {rule.name}")
        _name_axes(pictures["bars"], title, "", metric)
        _add_legend(figure, [curve for lines in means.values() for curve in lines], columns)
        save_figure(figure, path, "--figure")


def draw_curves(groups: Sequence[RunGroup], names: Mapping[str, str], metric: str, path: Path) -> None:
    """Draw a picture per test set: a model's score over rounds, means and bands over seeds, see :func:`series.curves`.

    ``names``: test set -> its title.

    Raises:
        DataError: if no run has logged the score, or the image file cannot be written.
    """
    pictures = {title: series.curves(groups, name, metric) for name, title in names.items()}
    if not any(pictures.values()):
        raise DataError(
            f"{groups[0].runs[0].folder}: the run has no {metric} over rounds; wait for its first evaluation"
        )
    _draw_pictures(pictures, "round", metric, path, "--curves")


def draw_cmc(groups: Sequence[RunGroup], names: Mapping[str, str], path: Path) -> None:
    """Draw CMC curves of the last evaluation: a picture per test set, a line per group, see :func:`series.cmc`.

    Raises:
        DataError: if no run has such scores, or the image file cannot be written.
    """
    pictures = {title: series.cmc(groups, name) for name, title in names.items() if name not in MEANS}
    if not any(pictures.values()):
        raise DataError(f"{groups[0].runs[0].folder}: the run has no ranks to draw; classification has none")
    _draw_pictures(pictures, "rank", "queries with a match", path, "--cmc")


def draw_tradeoff(groups: Sequence[RunGroup], names: Mapping[str, str], metric: str, path: Path) -> None:
    """Draw scores over bytes, images trained on, and simulated seconds until then, if the runs have them.

    If a run does not wait for all clients, a caption has the fewest answers of a client: the price of shorter rounds.

    Raises:
        DataError: if no log contains a cost, or the image file cannot be written.
    """
    means = [name for name in MEANS if name in names] or list(names)
    lines_by_axes = {
        (names[name], unit): lines for name in means for unit, lines in series.tradeoffs(groups, name, metric).items()
    }
    if not lines_by_axes:
        raise DataError(
            f"{groups[0].runs[0].folder}: its log has no costs; --tradeoff needs comm/*_bytes or train/images"
        )
    columns = min(2, len(lines_by_axes))
    rows = -(-len(lines_by_axes) // columns)
    with new_figure(_WIDTH, 2.6 * rows) as figure:
        pictures = axes_of(figure, rows, columns, len(lines_by_axes))
        for picture, ((title, unit), lines) in zip(pictures, lines_by_axes.items(), strict=True):
            _draw_lines(picture, lines, whole=False)
            _name_axes(picture, title, unit, metric)
        _add_legend(figure, [curve for lines in lines_by_axes.values() for curve in lines])
        _add_caption(figure, "\n".join(answers_line(groups)))
        save_figure(figure, path, "--tradeoff")


def plot_curves(axes: Axes, groups: Sequence[RunGroup], name: str, metric: str) -> None:
    """Draw one picture of :func:`draw_curves` into your own axes: the score on the test set ``name``, over rounds.

    Raises:
        DataError: if no run has logged the score.
    """
    lines = series.curves(groups, name, metric)
    if not lines:
        raise DataError(f"{groups[0].runs[0].folder}: the run has no {metric} of {name} over rounds")
    _draw_lines(axes, lines)
    _name_axes(axes, name, "round", metric)
    if len(lines) > 1:
        axes.legend(frameon=False)


def _draw_pictures(lines_by_title: Mapping[str, list[Series]], unit: str, metric: str, path: Path, option: str) -> None:
    """Draw a picture per test set that has any line."""
    shown = {title: lines for title, lines in lines_by_title.items() if lines}
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    with new_figure(_WIDTH if columns > 1 else _WIDTH / 2, 2.1 * rows + 0.3) as figure:
        pictures = axes_of(figure, rows, columns, len(shown))
        for position, (axes, (title, lines)) in enumerate(zip(pictures, shown.items(), strict=True)):
            _draw_lines(axes, lines)
            _name_axes(axes, title, unit, metric)
            if unit == "rank":
                axes.set(xlim=(0.5, _RANKS + 0.5), xticks=[1, 5, 10, 15, 20])
                axes.set(ylim=(-_BEYOND, 100 + _BEYOND), yticks=range(0, 101, 20))
            if position % columns:  # the leftmost picture has the name
                axes.set_ylabel("")
        _add_legend(figure, [curve for lines in shown.values() for curve in lines])
        save_figure(figure, path, option)


def _draw_lines(axes: Axes, lines: Sequence[Series], whole: bool = True) -> None:
    """Draw lines with markers, with a band of one standard deviation over seeds; ``whole``: ticks of x are integers."""
    from matplotlib.ticker import MaxNLocator

    for curve in lines:
        style = style_of(curve.number)
        axes.plot(
            curve.x, curve.mean, linestyle=style.line, marker=style.marker, color=style.colour, markersize=3.5,
            markevery=max(1, len(curve.x) // _MANY), linewidth=1.1, label=curve.label,
        )  # fmt: skip
        if curve.has_spread and len(curve.x) > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=style.colour, alpha=0.18, linewidth=0)
        elif curve.has_spread:
            axes.errorbar(curve.x, curve.mean, yerr=curve.spread, color=style.colour, capsize=2, linewidth=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
    if all(len(curve.x) == 1 for curve in lines):  # else the ticks of a single point are thousandths
        middle = sorted({float(curve.x[0]) for curve in lines})
        margin = 1.0 if whole else 0.1 * middle[-1]
        axes.set_xlim(middle[0] - margin, middle[-1] + margin)


def _draw_bars(axes: Axes, columns: Sequence[Series], names: Sequence[str]) -> None:
    """Draw bars with error bars over seeds; a missing bar is marked n/a, so that it does not look like 0."""
    step = 0.84 / max(1, len(columns))
    for position, column in enumerate(columns):
        style = style_of(column.number)
        left = column.x + (position + 0.5) * step - 0.42
        has_score = np.isfinite(column.mean)
        axes.bar(
            left[has_score], column.mean[has_score], 0.94 * step, color=style.colour, hatch=style.hatch,
            edgecolor="white" if style.hatch else style.colour, linewidth=0.4, label=column.label,
        )  # fmt: skip
        several = has_score & np.isfinite(column.spread)
        axes.errorbar(
            left[several], column.mean[several], yerr=column.spread[several], fmt="none", ecolor="#333333",
            elinewidth=0.8, capsize=min(2.5, 15 * step),
        )  # fmt: skip
        for x in left[~has_score]:
            axes.annotate("n/a", (x, 0), (0, 2), textcoords="offset points", rotation=90, ha="center", va="bottom",
                          fontsize=6 if step > 0.1 else 4, color="#555555")  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    if len(names) > 5:
        for label in axes.get_xticklabels():
            label.set(rotation=30, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(bottom=0)


def _name_axes(axes: Axes, title: str, unit: str, metric: str) -> None:
    axes.set(title=title, xlabel=unit, ylabel=f"{re.sub('rank(?=[0-9])', 'rank-', metric)} (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)


def _add_legend(figure: Figure, lines: Sequence[Series], bars: Sequence[Series] = ()) -> None:
    """Put one legend below all pictures, where it hides nothing; a series with a line and a bar has one entry."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {curve.number for curve in lines}
    handles: dict[int, tuple[str, Any]] = {}
    for entry in (*bars, *lines):
        style = style_of(entry.number)
        line_handle = Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.line, markersize=4)
        patch = Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white")
        parts = ([patch] if bars else []) + ([line_handle] if entry.number in drawn else [])
        handles.setdefault(entry.number, (entry.label, tuple(parts)))
    labels, width = [label for label, _ in handles.values()], figure.get_figwidth()
    entry_width = _LETTER * max(map(len, labels)) + (0.9 if bars else 0.6)
    columns = max(1, min(len(labels), int(width / entry_width)))
    figure.set_figheight(figure.get_figheight() + _LINE * -(-len(labels) // columns))
    figure.legend(
        [parts for _, parts in handles.values()], labels, loc="outside lower center", frameon=False,
        ncols=columns, handler_map={tuple: HandlerTuple(ndivide=None)},
    )  # fmt: skip


def _add_caption(figure: Figure, caption: str) -> None:
    """Put lines of text above all pictures; an empty text takes no room."""
    if caption:
        lines = textwrap.wrap(caption, int(figure.get_figwidth() / _LETTER))
        figure.set_figheight(figure.get_figheight() + _LINE * len(lines))
        figure.suptitle("\n".join(lines), fontsize=7.5)


def draw_participation(groups: Sequence[RunGroup], path: Path) -> None:
    """Draw a row of pictures per run into a file: participation, and the rungs if backbones follow rewards.

    Raises:
        DataError: if a log does not name the clients that trained, or the file cannot be written.
        ConfigError: if there are too many runs for a picture.
    """
    runs = runs_of(groups)
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
