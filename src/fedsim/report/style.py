"""Styles that distinguish series: colours, markers, lines and hatches, by the number of the series."""

from __future__ import annotations

from typing import Literal, NamedTuple

LineStyle = Literal["-", "--", ":", "-."]

# Okabe and Ito, "Color universal design", 2008; without yellow, which is too light for lines on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = (("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"),
            ("P", "cross"), ("X", "x"), ("*", "star"))  # fmt: skip
_LINES: tuple[tuple[LineStyle, str], ...] = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
_HATCHES = (("", ""), ("////", "/"), ("....", "."), ("xxxx", "x"))


class Style(NamedTuple):
    """The style of one series in matplotlib's names, and in plotly's where they differ."""

    colour: str
    marker: str
    line: LineStyle
    hatch: str
    plotly_marker: str
    plotly_line: str
    plotly_hatch: str


def style_of(number: int) -> Style:
    """Return the style of series 0, 1, ...: no two of the first 28 share both colour and line.

    There are seven colours and eight markers: neighbours differ in both. From the eighth series on, the line differs.
    """
    marker, dash = _MARKERS[number % len(_MARKERS)], _LINES[number // len(_COLOURS) % len(_LINES)]
    hatch = _HATCHES[number // len(_COLOURS) % len(_HATCHES)]
    return Style(_COLOURS[number % len(_COLOURS)], marker[0], dash[0], hatch[0], marker[1], dash[1], hatch[1])


def faded(colour: str, opacity: float) -> str:
    """Return a colour ``#rrggbb`` as a CSS colour with an opacity.

    >>> faded("#0072B2", 0.2)
    'rgba(0,114,178,0.2)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
