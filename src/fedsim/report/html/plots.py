"""Pictures of the page, drawn by plotly: the same numbers as in the figures for papers."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly import graph_objects

from fedsim.core.errors import DataError
from fedsim.core.metrics import LABELS, MEANS
from fedsim.report import series
from fedsim.report.groups import RunGroup
from fedsim.report.layout import faded, style_of
from fedsim.report.runs import Rule, Run
from fedsim.report.series import Series, blocks_of, clients_of, participation_of, rungs_of, runs_of

_PATTERN = {"fillmode": "overlay", "fgcolor": "white", "size": 6}
"""Overlay keeps the colour of a bar below its white hatches."""
_UPRIGHT = 14
"""largest number of data sets with upright bars"""
_CLEAR = "rgba(0,0,0,0)"
_TEXT, _QUIET, _AXIS, _ZERO, _GRID = "#1b1f24", "#555555", "#333333", "#999999", "#e5e5e5"
_SHARES = [[0, "#eef3f9"], [1, "#2171b5"]]
_BAND = 0.16
"""Opacity of bands."""
DARK = {
    _TEXT: "#e4e8ec", _QUIET: "#a7b0b9", _AXIS: "#aab3bc", _ZERO: "#6b7580", _GRID: "#2f373f", "white": "#15191e",
    "#000000": "#f4f6f8", faded("#000000", _BAND): faded("#f4f6f8", _BAND),
}  # fmt: skip
"""Colour on white -> colour in the dark, where it differs."""
_DELIVERED = "Delivered models, or the global model (named in the legend) if only that has scores."


@dataclass(frozen=True)
class Plot:
    """One picture of the page, with a choice between several contents."""

    name: str
    """id of its element"""
    title: str
    text: str
    """a description of the picture"""
    choices: Mapping[str, graph_objects.Figure]
    """choice -> its picture; the first one is shown at first"""

    @property
    def json(self) -> str:
        """Return all contents as JSON, which may stand in a page: no ``<`` in it can end a script."""
        contents = {choice: json.loads(figure.to_json()) for choice, figure in self.choices.items()}
        return json.dumps(contents).replace("<", "\\u003c")


def plots_of(groups: Sequence[RunGroup], names: Mapping[str, str], metric: str, rule: Rule) -> list[Plot]:
    """Return all pictures that the runs have numbers for; ``names``: test set -> its title."""
    means_first = sorted(names, key=lambda name: name not in MEANS)
    shown = LABELS.get(metric, metric)
    plots = [
        Plot(
            "curves", "Scores over rounds", f"{_DELIVERED} Bands are one standard deviation over seeds.",
            _by_set(means_first, names, lambda name: series.curves(groups, name, metric), "round", shown),
        ),
        Plot(
            "bars", "Scores per data set", f"All models, rule {rule.name}; a missing bar is marked n/a.",
            {"": _bars(groups, names, metric, rule)},
        ),
        Plot(
            "tradeoff", "Scores over cost",
            f"{_DELIVERED} Bytes are those of server and clients, summed; a run without any has its last score alone.",
            {
                f"{names[name]}, {unit}": _lines(lines, unit, shown)
                for name in means_first
                for unit, lines in series.tradeoffs(groups, name, metric).items()
            },
        ),
        Plot(
            "cmc", "CMC", f"Queries with a match among the first images, last evaluation. {_DELIVERED}",
            _by_set([name for name in names if name not in MEANS], names, lambda name: series.cmc(groups, name),
                    "rank", "queries with a match"),
        ),
        Plot("participation", "Participation", "Share of rounds in which a client's update counted.", _shares(groups)),
        Plot("rungs", "Backbones", "The rung of the ladder on which a client's backbone stands.", _rungs(groups)),
    ]  # fmt: skip
    return [plot for plot in plots if plot.choices]


def _by_set(chosen: Sequence[str], names: Mapping[str, str], draw: Any, unit: str, metric: str) -> dict[str, Any]:
    return {names[name]: _lines(lines, unit, metric) for name in chosen if (lines := draw(name))}


def _lines(lines: Sequence[Series], unit: str, metric: str) -> graph_objects.Figure:
    figure = graph_objects.Figure(layout=_layout(unit, metric))
    for curve in lines:
        style, x = style_of(curve.number), curve.x.tolist()
        if curve.has_spread and len(x) > 1:
            figure.add_scatter(
                x=[*x, *x[::-1]], y=[*curve.high.tolist(), *curve.low.tolist()[::-1]], fill="toself", mode="lines",
                fillcolor=faded(style.colour, _BAND), line={"width": 0}, hoverinfo="skip", showlegend=False,
                legendgroup=curve.label, name=_literal(f"{curve.label}, band"),
            )  # fmt: skip
        errors = {"type": "data", "array": np.nan_to_num(curve.spread).tolist(), "visible": True, "thickness": 1}
        figure.add_scatter(
            x=x, y=curve.mean.tolist(), mode="lines+markers", name=_literal(curve.label), legendgroup=curve.label,
            line={"color": style.colour, "dash": style.plotly_line, "width": 2},
            marker={"symbol": style.plotly_marker, "size": 8, "color": style.colour},
            error_y=errors if curve.has_spread and len(x) == 1 else None, customdata=curve.seeds.tolist(),
            hovertemplate="%{y:.2f} % at %{x}, seeds: %{customdata}<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    if unit in ("round", "rank"):
        figure.update_xaxes(tickformat="d", **({"range": [0.5, 20.5]} if unit == "rank" else {}))
        if all(max(curve.x) - min(curve.x) < 5 for curve in lines):
            figure.update_xaxes(dtick=1)
    return figure


def _bars(groups: Sequence[RunGroup], names: Mapping[str, str], metric: str, rule: Rule) -> graph_objects.Figure:
    """Draw a bar per run and data set; of many data sets lying ones, whose names stand below each other."""
    is_lying, shown = len(names) > _UPRIGHT, LABELS.get(metric, metric)
    place, size = "yx" if is_lying else "xy"
    figure = graph_objects.Figure(layout=_layout(f"{shown} (%)", "") if is_lying else _layout("", shown))
    for column in series.bars(groups, list(names), metric, rule):
        style = style_of(column.number)
        has_score = np.isfinite(column.mean)
        errors = {"type": "data", "array": np.nan_to_num(column.spread).tolist(), "thickness": 1, "width": 2}
        group = {"offsetgroup": column.label, "legendgroup": column.label, "orientation": "h" if is_lying else "v"}
        figure.add_bar(
            **{place: list(map(_literal, names.values())), size: _numbers(column.mean)}, name=_literal(column.label),
            marker={"color": style.colour, "pattern": {**_PATTERN, "shape": style.plotly_hatch}},
            customdata=column.seeds.tolist(), **{f"error_{size}": errors if column.has_spread else None}, **group,
            hovertemplate=f"%{{{size}:.2f}} %, seeds: %{{customdata}}<extra>%{{{place}}}, %{{fullData.name}}</extra>",
        )  # fmt: skip
        missing = [_literal(title) for title, scored in zip(names.values(), has_score, strict=True) if not scored]
        if missing:  # a missing bar cannot have a text, but a bar of height 0 can
            figure.add_bar(
                **{place: missing, size: [0] * len(missing)}, text=["n/a"] * len(missing), textposition="outside",
                textangle=0 if is_lying else -90, textfont={"size": 10, "color": _QUIET}, constraintext="none",
                marker={"color": _CLEAR}, showlegend=False, hoverinfo="skip",
                name=_literal(f"{column.label}, missing"), **group,
            )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.18)
    if is_lying:
        figure.update_layout(xaxis_showgrid=True, meta={"rows": len(names)})
        figure.update_yaxes(type="category", autorange="reversed", showgrid=False, title=None, ticksuffix=" ")
    else:
        figure.update_xaxes(tickangle=-35, type="category")
    return figure


def _shares(groups: Sequence[RunGroup]) -> dict[str, graph_objects.Figure]:
    figures = {}
    for label, run in runs_of(groups):
        try:
            shares = participation_of(run)
        except DataError:  # runs with very many clients do not log it
            continue
        figures[label] = _heat_map(run, shares.tolist(), {"zmin": 0, "zmax": 1, "colorscale": _SHARES})
    return figures


def _rungs(groups: Sequence[RunGroup]) -> dict[str, graph_objects.Figure]:
    return {
        label: _heat_map(run, [_numbers(row) for row in rungs], {"zmin": 1, "colorscale": "Viridis"})
        for label, run in runs_of(groups)
        if (rungs := rungs_of(run)) is not None
    }


def _heat_map(run: Run, values: list[list[Any]], options: Mapping[str, Any]) -> graph_objects.Figure:
    """Draw a row per client and a column per block of rounds, at the block's first round."""
    rounds = sorted(run.log)
    figure = graph_objects.Figure(layout=_layout("round", ""))
    figure.add_heatmap(
        z=values, y=list(map(_literal, clients_of(run))), x=[rounds[block[0]] for block in blocks_of(len(rounds))],
        xgap=1, ygap=1, colorbar={"thickness": 12}, **options,
    )  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed", title=None, ticksuffix=" ")
    figure.update_xaxes(tickformat="d", tick0=rounds[0], dtick=max(1, len(rounds) // 8))
    figure.update_layout(meta={"rows": len(values)})
    return figure


def _layout(unit: str, metric: str) -> dict[str, Any]:
    """Return the common layout of all pictures; the page adds sizes, which depend on its width."""
    grid = {"gridcolor": _GRID, "zerolinecolor": _ZERO, "automargin": True}
    return {
        "template": "none",
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"size": 13, "family": "system-ui, sans-serif", "color": _TEXT},
        "xaxis": {"title": {"text": unit}, "showgrid": False, "linecolor": _AXIS, "ticks": "outside", **grid},
        "yaxis": {"title": {"text": f"{metric} (%)" if metric else ""}, "rangemode": "nonnegative", **grid},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
    }


def _literal(text: str) -> str:
    """Return a text that plotly shows as it is: it reads tags and entities, and takes 2021 for a date."""
    return html.escape(text, quote=False)


def _numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
