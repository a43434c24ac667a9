"""Tables that fit the terminal, and their cells; image files of figures, and the styles of what they show."""

from __future__ import annotations

import csv
import io
import re
import shutil
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import metric_parts, printable
from fedsim.core.paths import suffix_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

_GAP = 2
_SPREAD = "\x1f"  # stands for +- in cells with numbers: a control character is in no name
_LEAST = 16  # letters of a header in one line
Format = Literal["table", "markdown", "latex", "csv"]


@dataclass(frozen=True)
class Block:
    """A table, before it has a format."""

    headers: Sequence[str]
    """may have several lines"""
    lines: Sequence[Sequence[str]]
    """a text per column"""
    notes: Sequence[str] = ()
    """lines below the table"""
    num_left: int = 1
    """number of columns of words, at the left"""
    is_cut: bool = False
    """whether a table wider than the terminal is cut into several, each with the first column"""
    tidy: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    """headers and lines for CSV, one number per line; None: the same as above"""

    def text(self, format_: Format) -> str:
        """Return the table as text; the format of the terminal includes the notes."""
        if format_ == "csv":
            headers, lines = self.tidy or (self.headers, self.lines)
            file = io.StringIO()
            csv.writer(file, lineterminator="\n").writerows([[h.replace("\n", ", ") for h in headers], *lines])
            return file.getvalue().rstrip("\n")
        if format_ == "table":
            parts = [self._in_parts(), "\n".join(note for note in self.notes if note)]
            return "\n\n".join(part for part in parts if part)
        if not self.lines:
            return ""
        headers = [header.replace("\n", ", ") for header in self.headers]
        style, sign = ("pipe", " ± ") if format_ == "markdown" else ("latex_booktabs", r" $\pm$ ")
        words, numbers = slice(self.num_left), slice(self.num_left, None)
        lines = [[*row[words], *(with_sign(cell, _SPREAD) for cell in row[numbers])] for row in self.lines]
        if format_ == "markdown":
            headers, lines = list(map(_plain, headers)), [list(map(_plain, row)) for row in lines]
        table = tabulate(lines, headers, style, disable_numparse=True, colalign=self._sides())
        return table.replace(_SPREAD, sign)

    def _in_parts(self) -> str:
        if not self.lines:
            return ""
        if not self.is_cut:
            return tabulate(self.lines, self.headers, disable_numparse=True, colalign=self._sides())
        names, *columns = zip(*self.lines, strict=True)
        return table_in_parts(names, list(zip(self.headers[1:], columns, strict=True)), corner=self.headers[0])

    def _sides(self) -> list[str]:
        return ["left"] * self.num_left + ["right"] * (len(self.headers) - self.num_left)


def _plain(cell: str) -> str:
    r"""Return a text that Markdown shows as it is: a name may have signs of tables, of HTML and of emphasis.

    >>> _plain("a|b <i> *c*")
    'a\\|b \\<i> \\*c\\*'
    """
    return re.sub(r"[\\|<*`\[]", r"\\\g<0>", cell)


def with_sign(cell: str, sign: str) -> str:
    """Return a cell of :func:`mean_and_spread` with another sign between its numbers; names stay as they are.

    >>> with_sign("41.0+-1.4 / 30.2+-2.0", " ± "), with_sign("a+-b", " ± ")
    ('41.0 ± 1.4 / 30.2 ± 2.0', 'a+-b')
    """
    return re.sub(r"(?<=[0-9n])\+-(?=[0-9n])", sign, cell)


def mean_and_spread(values: NDArray[np.float64], digits: int = 1) -> str:
    """Write the mean over seeds, with the standard deviation if there are several.

    >>> mean_and_spread(np.array([40.0, 42.0]))
    '41.0+-1.4'
    """
    mean = f"{round(float(values.mean()), digits) + 0.0:.{digits}f}"  # no -0.0
    return mean if len(values) == 1 else f"{mean}+-{values.std(ddof=1):.{digits}f}"


def table_in_parts(
    names: Sequence[str],
    columns: Sequence[tuple[str, Sequence[str]]],
    corner: str,
    always: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Write a table, cut into several below each other if it is wider than the terminal.

    Args:
        names: names of the rows.
        columns: header, which may have several lines, and one cell per row.
        corner: header of the names.
        always: columns at the right of every part.
    """
    columns = [_folded(column) for column in columns]
    widest = shutil.get_terminal_size((100, 24)).columns
    left = _width((corner, names)) + sum(_GAP + _width(column) for column in always)
    parts: list[list[tuple[str, Sequence[str]]]] = [[]]
    for column in columns:
        if parts[-1] and left + sum(_GAP + _width(c) for c in (*parts[-1], column)) > widest:
            parts.append([])
        parts[-1].append(column)
    return "\n\n".join(_table(names, [*part, *always], corner) for part in parts)


def _folded(column: tuple[str, Sequence[str]]) -> tuple[str, Sequence[str]]:
    """Wrap long lines of a header, since names of variants are long."""
    header, cells = column
    room = max(_LEAST, *map(len, cells)) if cells else _LEAST
    return "\n".join("\n".join(textwrap.wrap(line, room)) for line in header.splitlines()), cells


def _width(column: tuple[str, Sequence[str]]) -> int:
    header, cells = column
    return max(len(cell) for cell in (*header.splitlines(), *cells, ""))


def _table(names: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], corner: str) -> str:
    rows = [[name, *cells] for name, *cells in zip(names, *(cells for _, cells in columns), strict=True)]
    tallest = max((header.count("\n") for header, _ in columns), default=0)
    ends = ["\n" * (tallest - header.count("\n")) + header for header, _ in columns]  # on one line
    headers = [corner, *ends]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * len(columns)))


def score_table(scores: Mapping[str, Tensor], metrics: Sequence[str]) -> str:
    """Return a line per data set and kind of model, as fedsim validate and fedsim test print it.

    ``scores``: ``split/kind/domain/metric`` -> fraction of 1, one number each; keys of another form are left out.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for key, value in scores.items():
        if key.count("/") == 3:
            _, model_kind, domain, metric = metric_parts(key)
            rows.setdefault((domain, model_kind), {})[metric] = f"{100 * float(value):.1f}"
    table = [
        [*key, *(cells[m] + (f"+-{cells[f'{m}_std']}" if f"{m}_std" in cells else "") for m in metrics)]
        for key, cells in rows.items()
    ]  # with the spread over random splits, if there are several
    alignment = ("left", "left", *["right"] * len(metrics))
    return tabulate(table, headers=["data set", "model", *metrics], disable_numparse=True, colalign=alignment)


_LONGEST = 28
"""letters of a name in a figure"""


def both_ends(name: str) -> str:
    """Return a name that fits into a figure; of a long one its two ends."""
    shown = printable(name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST // 2]}…{shown[1 - _LONGEST // 2 :]}"


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure; sizes in inches. Within the block, text is small, and the text of PDFs can be searched."""
    import matplotlib as mpl  # slow to import
    from matplotlib.figure import Figure

    small: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7.5, "hatch.linewidth": 0.6}
    plain: dict[Any, Any] = {"text.parse_math": False, "text.usetex": False}  # a $ in a name begins no formula
    with mpl.rc_context({**small, **plain, "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}):
        yield Figure(figsize=(width, height), layout="constrained")


def axes_of(figure: Figure, rows: int, columns: int, count: int) -> list[Axes]:
    """Return the first ``count`` axes of a grid; nothing is drawn at the other places."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for empty in axes[count:]:
        empty.set_axis_off()
    return axes[:count]


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write an image file in the format of its suffix; errors name ``option``, the option that gave the path."""
    image_format = suffix_of(path).removeprefix(".")
    formats = figure.canvas.get_supported_filetypes()
    if image_format not in formats:
        reason = f"{path.suffix or 'no suffix'} is none of {', '.join(sorted(formats))}"
        raise DataError(f"{path}: cannot write the figure ({reason}); choose another {option}")
    try:
        with replacing(path) as partial, warnings.catch_warnings():
            # a name in letters that the font lacks is drawn in boxes; a line per letter would hide other messages
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
            warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)  # of very long names
            figure.savefig(partial, format=image_format, dpi=200)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot write the figure ({error}); choose another {option}") from error


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


def short_names(options: Sequence[str]) -> list[str]:
    """Return the last part of each option's name; the full name if that would be ambiguous."""
    last = Counter(option.rpartition(".")[2] for option in options)
    return [short if last[short := option.rpartition(".")[2]] == 1 else option for option in options]
