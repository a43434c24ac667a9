"""Results from the features of a run: single queries, domain confusion, and points of the plane.

Each has rows as CSV, a table and pictures. Domain confusion shows from which data set and camera wrong first images
come. Points are coloured by data set and by camera.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import printable
from fedsim.core.replaced_run import QUERIES
from fedsim.report.layout import Block, axes_of, new_figure, save_figure, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, str | float]
Chosen = Literal["worst", "best"] | Sequence[str]
"""the queries with the lowest or the highest average precision, or the names of their files"""
CONFUSION = "confusion"
"""name of the files about domain confusion"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([printable(str(value)) for value in row.values()] for row in rows)


def query_block(rows: Sequence[Mapping[str, Any]], label: str = "") -> Block:
    """Return a line per query of a test set, with the first image of its list."""
    first = rows[0]
    title = "\n".join(filter(None, [label, f"{first['data set']}, {first['model']} {first['owner']}".strip(), "query"]))
    headers = [title, "identity", "AP", "first\nmatch", "first image", "identity", "distance", "right"]
    lines = [
        [
            f"{row['query']}",
            f"{row['identity']} c{row['camera']}",
            "-" if math.isnan(precision := float(row["AP"])) else f"{100 * precision:.1f}",
            str(row["first match"]) if int(row["first match"]) else "-",
            f"{row['image']}",
            f"{row['identity of image']} c{row['camera of image']}",
            f"{float(row['distance']):.3f}",
            "yes" if int(row["is match"]) else "no",
        ]
        for row in rows
        if int(row["rank"]) == 1
    ]
    tidy = list(first), [[printable(str(value)) for value in row.values()] for row in rows]
    return Block(printable_all(headers), [printable_all(line) for line in lines], tidy=tidy)


def printable_all(texts: Sequence[str]) -> list[str]:
    """Return texts of which each line can be printed."""
    return ["\n".join(map(printable, text.split("\n"))) for text in texts]


def query_tables(folder: Path) -> Iterator[tuple[str, list[Block]]]:
    """Yield the name of each file of a run directory about single queries, and its tables.

    Raises:
        DataError: if a file cannot be read.
    """
    for path in sorted((folder / QUERIES).glob("*.csv")):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if path.stem == CONFUSION and set(rows[0]) == set(KEYS):
                yield path.stem, [confusion_block(confusion) for confusion in confusion_matrices(rows)]
            else:
                yield path.stem, [query_block(rows)]
        except (OSError, ValueError, KeyError, IndexError, TypeError, csv.Error) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); remove it, or repeat fedsim report --queries"
            ) from error


_MOST_COLUMNS = 60
"""of a figure; with more cameras, its columns are data sets"""
_NAMED = 3
"""cameras in a line"""
KEYS = ("model", "owner", "data set", "first image's data set", "first image's camera", "is match", "queries")
"""of the rows of ``fedsim.inference.queries.count_first_images``"""


@dataclass(frozen=True, eq=False)
class Confusion:
    """The first images of the queries of S data sets by one kind of model; personalised models are summed."""

    model: str
    sets: list[str]
    """S data sets with queries, whose galleries are joined"""
    cameras: list[tuple[str, int]]
    """C data sets and cameras, from 1, in the order of ``sets``, from which some wrong first image comes"""
    right: NDArray[np.int64]
    """[S] queries whose first image is a match"""
    wrong: NDArray[np.int64]
    """[S, C] queries whose first image is a wrong one of this camera"""
    is_joined: NDArray[np.bool_]
    """[S, S] whether some model has both galleries"""

    @property
    def queries(self) -> NDArray[np.int64]:
        """[S] queries with a match, counted for each model."""
        return np.asarray(self.right + self.wrong.sum(axis=1))

    @property
    def by_set(self) -> NDArray[np.float64]:
        """[S, S] percent of the queries whose first image is a wrong one of this data set; NaN if it is not joined."""
        of_camera = np.array([data_set for data_set, _ in self.cameras], dtype=object)
        counts = np.stack([self.wrong[:, of_camera == name].sum(axis=1) for name in self.sets], axis=1)
        return np.where(self.is_joined, 100 * counts / self.queries[:, None], np.nan)


def confusion_matrices(rows: Sequence[Mapping[str, Any]]) -> list[Confusion]:
    """Return a matrix per kind of model from the rows of ``fedsim.load_run(RUN).confusion()``."""
    models = dict.fromkeys(str(row["model"]) for row in rows)
    return [_matrix(model, [row for row in rows if row["model"] == model]) for model in models]


def _matrix(model: str, rows: Sequence[Mapping[str, Any]]) -> Confusion:
    _, _, data_set, first, camera, is_match, count = KEYS
    sets = list(dict.fromkeys(str(row[data_set]) for row in rows))
    wrong_rows = [row for row in rows if not int(row[is_match])]
    cameras = sorted({(str(r[first]), int(r[camera])) for r in wrong_rows}, key=lambda c: (sets.index(c[0]), c[1]))
    right, wrong = np.zeros(len(sets), np.int64), np.zeros((len(sets), len(cameras)), np.int64)
    for row in rows:
        place = sets.index(str(row[data_set]))
        if int(row[is_match]):
            right[place] += int(row[count])
        else:
            wrong[place, cameras.index((str(row[first]), int(row[camera])))] += int(row[count])
    is_joined = np.zeros((len(sets), len(sets)), bool)
    for owner in {row["owner"] for row in rows}:
        places = [sets.index(name) for name in {str(row[data_set]) for row in rows if row["owner"] == owner}]
        is_joined[np.ix_(places, places)] = True
    return Confusion(model, sets, cameras, right, wrong, is_joined)


def confusion_block(confusion: Confusion, label: str = "") -> Block:
    """Return a row per data set of the queries: right first images, and wrong ones per data set, in percent."""
    names = [printable(name) for name in confusion.sets]
    lines = []
    for name, number, right, shares in zip(names, confusion.queries, confusion.right, confusion.by_set, strict=True):
        cells = ["-" if np.isnan(share) else f"{share:.1f}" for share in shares]
        lines.append([name, f"{number:,}", f"{100 * right / number:.1f}", *cells])
    title = "\n".join(filter(None, [label, confusion.model, "queries of"]))
    notes = [
        "first images in the joined galleries, in percent of the queries with a match: right ones, and wrong ones by "
        "data set",
        *(_line_of_cameras(confusion, row) for row in range(len(names))),
    ]
    return Block([title, "queries", "right", *(f"wrong, of\n{name}" for name in names)], lines, notes, is_cut=True)


def _line_of_cameras(confusion: Confusion, row: int) -> str:
    """Return a line on the cameras from which most wrong first images of a data set's queries come."""
    counts = confusion.wrong[row]
    order = [place for place in np.argsort(-counts, kind="stable")[:_NAMED] if counts[place]]
    cameras = [f"{name} c{camera}" for name, camera in confusion.cameras]
    shares = [f"{cameras[place]} {100 * counts[place] / confusion.queries[row]:.1f} %" for place in order]
    return printable(f"{confusion.sets[row]}: most wrong first images are of {', '.join(shares)}") if shares else ""


def plot_confusion(axes: Axes, confusion: Confusion) -> None:
    """Draw a row per data set of the queries, and a column per camera of wrong first images, into matplotlib's axes.

    With more than 60 cameras, a column is a data set.
    """
    shares, columns = 100 * confusion.wrong / confusion.queries[:, None], confusion.cameras
    titles, owners = [f"{name} c{camera}" for name, camera in columns], [name for name, _ in columns]
    if not 0 < len(columns) <= _MOST_COLUMNS:
        shares, titles, owners = confusion.by_set, confusion.sets, confusion.sets
    image = axes.pcolormesh(np.ma.masked_invalid(shares), cmap="Blues", vmin=0)
    axes.set_xticks(np.arange(len(titles)) + 0.5, titles, rotation=90)
    axes.set_yticks(np.arange(len(confusion.sets)) + 0.5, confusion.sets)
    axes.invert_yaxis()
    for place in range(1, len(owners)):
        if owners[place] != owners[place - 1]:
            axes.axvline(place, color="0.6", linewidth=0.8)
    axes.set(
        ylabel="queries of", xlabel="data set and camera of a wrong first image",
        title=f"{confusion.model}: percent of the queries",
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def draw_confusion(confusions: Sequence[Confusion], path: Path) -> None:
    """Draw a heat map per kind of model, below each other; raise DataError if the image file cannot be written."""
    width = min(20.0, 2.8 + 0.17 * max(min(len(confusion.cameras), _MOST_COLUMNS) for confusion in confusions))
    height = sum(1.9 + 0.2 * len(confusion.sets) for confusion in confusions)
    with new_figure(max(4.5, width), height) as figure:
        pictures = figure.subplots(len(confusions), 1, squeeze=False)[:, 0]
        for axes, confusion in zip(pictures, confusions, strict=True):
            plot_confusion(axes, confusion)
        save_figure(figure, path, "run directory")


Projector = Literal["pca", "tsne"]
"""principal components, or t-SNE (van der Maaten and Hinton, JMLR 2008)"""
_MOST_PANELS = 12
"""of a figure; the cameras of further data sets are in the rows only"""
_COLUMNS = 3
_PANEL = 2.5
"""Inches: width of a panel, and its height without the legend."""
_LETTER, _LINE = 0.066, 0.16
"""Inches: approximate width of a letter, and height of a line, in a legend."""
_HANDLE = 0.32
"""Inches: width of an entry of a legend without its letters."""
_LONGEST = 28
"""letters of a name in a figure"""


@dataclass(frozen=True, eq=False)
class Projection:
    """n test images of S data sets as points of the plane, by one model's features."""

    projector: Projector
    model: str
    """its kind: global, personalised or ensemble"""
    owner: str
    """see ``fedsim.inference.run_features.ModelOnSet``"""
    sets: list[str]
    """S names"""
    of_set: NDArray[np.int64]
    """[n] position in ``sets``"""
    images: list[str]
    """n names of files"""
    is_query: NDArray[np.bool_]
    """[n]; the other images are of the gallery"""
    identities: NDArray[np.int64]
    """[n]; two data sets may number two people alike"""
    cameras: NDArray[np.int64]
    """[n], from 1; each data set has its own"""
    points: NDArray[np.float64]
    """[n, 2]"""
    shares: NDArray[np.float64]
    """[2] share of the variance along each axis; NaN for t-SNE"""

    @property
    def title(self) -> str:
        """The model as a text."""
        return f"{self.model} {self.owner}".strip()

    @property
    def file_owner(self) -> str:
        """The owner in names of files; of a personalised model without a single owner, its data set; else empty."""
        return self.owner or (self.sets[0] if self.model == "personalised" else "")

    def rows(self) -> list[Row]:
        """Return a row per image: see ``fedsim.inference.results.RunResults.projection``."""
        return [
            {
                "projector": self.projector,
                "model": self.model,
                "owner": self.owner,
                "data set": self.sets[self.of_set[number]],
                "part": "query" if self.is_query[number] else "gallery",
                "image": image,
                "identity": int(self.identities[number]),
                "camera": int(self.cameras[number]),
                "x": float(self.points[number, 0]),
                "y": float(self.points[number, 1]),
            }
            for number, image in enumerate(self.images)
        ]

    def axis_titles(self) -> tuple[str, str]:
        """Return the titles of both axes, with the shares of the variance."""
        if self.projector == "tsne":
            return "t-SNE, axis 1", "t-SNE, axis 2"
        first, second = (f"component {axis + 1}, {100 * self.shares[axis]:.1f} % of the variance" for axis in (0, 1))
        return first, second


def projection_block(projection: Projection, label: str = "") -> Block:
    """Return a row per data set: the people, cameras and images that are drawn."""
    lines = []
    for number, name in enumerate(projection.sets):
        is_here = projection.of_set == number
        counts = [len(np.unique(values[is_here])) for values in (projection.identities, projection.cameras)]
        lines.append([name, *(f"{count:,}" for count in (*counts, int(is_here.sum())))])
    title = "\n".join(filter(None, [label, projection.title, projection.projector]))
    shown = "t-SNE: near points are alike; distances between groups, and their sizes, mean little"
    if projection.projector == "pca":
        first, second = (f"{100 * share:.1f}" for share in projection.shares)
        shown = f"the components have {first} and {second} % of the variance of these images' features"
    return Block(
        printable_all([title, "people", "cameras", "images"]), [printable_all(line) for line in lines], [shown]
    )


def plot_projection(axes: Axes, projection: Projection) -> None:
    """Draw all points into matplotlib's axes, coloured by data set, or by camera if there is one data set."""
    if len(projection.sets) == 1:
        _draw_cameras(axes, projection, 0)
        return
    for number in range(len(projection.sets)):
        _scatter(axes, projection.points[projection.of_set == number], number)
    _finish(axes, projection, "data set", projection.sets)


def draw_projection(projection: Projection, path: Path) -> None:
    """Draw a panel coloured by data set, and one per data set coloured by camera, the other ones in grey.

    Raises:
        DataError: if the image file cannot be written.
    """
    panels = _panels(projection)
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    of_cameras = _legend_lines([f"c{camera}" for camera in projection.cameras])
    of_sets = _legend_lines(projection.sets) if len(projection.sets) > 1 else 0
    height = rows * (_PANEL + 0.25) + _LINE * ((rows - 1) * of_cameras + max(of_sets, of_cameras)) + 0.2
    with new_figure(max(1.6, columns) * _PANEL, height) as figure:
        figure.set_layout_engine("compressed", h_pad=0.08)  # panels are squares
        for axes, draw in zip(axes_of(figure, rows, columns, len(panels)), panels, strict=True):
            draw(axes)
        further = f"; cameras of the first {_MOST_PANELS - 1}" if len(projection.sets) >= _MOST_PANELS else ""
        title = f"model {projection.title}: {len(projection.images):,} test images{further}"
        figure.suptitle(printable(title), fontsize=8)
        save_figure(figure, path, "run directory")


def _panels(projection: Projection) -> list[Callable[[Axes], None]]:
    """Return the functions that draw the panels of a figure."""
    numbers = range(min(len(projection.sets), _MOST_PANELS - 1)) if len(projection.sets) > 1 else ()
    by_camera = [lambda axes, number=number: _draw_cameras(axes, projection, number) for number in numbers]
    return [lambda axes: plot_projection(axes, projection), *by_camera]


def _draw_cameras(axes: Axes, projection: Projection, number: int) -> None:
    """Draw the points of a data set by camera; a number of a camera has one colour in all panels."""
    is_here = projection.of_set == number
    x, y = projection.points[~is_here].T
    axes.scatter(x, y, s=5, color="#dddddd", linewidths=0)
    cameras = np.unique(projection.cameras[is_here]).tolist()
    for camera in cameras:
        _scatter(axes, projection.points[is_here & (projection.cameras == camera)], camera - 1)
    _finish(axes, projection, f"cameras of {_shortened(projection.sets[number])}", [f"c{camera}" for camera in cameras])


def _scatter(axes: Axes, points: NDArray[np.float64], number: int) -> None:
    style, (x, y) = style_of(number), points.T
    axes.scatter(x, y, s=11, alpha=0.75, linewidths=0, color=style.colour, marker=style.marker)


def _finish(axes: Axes, projection: Projection, title: str, labels: Sequence[str]) -> None:
    """Give all panels the same square of the plane, and put the legend below the panel, where it hides nothing.

    ``labels`` are those of the points that were drawn last.
    """
    low, high = projection.points.min(axis=0), projection.points.max(axis=0)
    half = 0.54 * float((high - low).max()) or 1.0
    (left, right), (bottom, top) = ((middle - half, middle + half) for middle in (low + high) / 2)
    x_title, y_title = projection.axis_titles()
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", xticks=[], yticks=[], title=title)
    axes.set_xlabel(x_title, fontsize=7)
    axes.set_ylabel(y_title, fontsize=7)
    # the axes' own labels would lack those that begin with _
    drawn: Sequence[Any] = axes.collections[-len(labels) :]
    shown = list(map(_shortened, labels))
    axes.legend(
        drawn, shown, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=_legend_columns(shown), frameon=False,
        fontsize=7, handletextpad=0.1, columnspacing=0.8, borderpad=0,
    )  # fmt: skip


def _shortened(name: str) -> str:
    """Return a name that fits over a panel; of a long one its two ends."""
    shown = printable(name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST // 2]}…{shown[1 - _LONGEST // 2 :]}"


def _legend_columns(labels: Sequence[str]) -> int:
    widest = _HANDLE + _LETTER * max(map(len, labels), default=1)
    return max(1, min(len(labels), int(_PANEL / widest)))


def _legend_lines(labels: Sequence[str]) -> int:
    distinct = list(map(_shortened, dict.fromkeys(labels)))
    return -(-len(distinct) // _legend_columns(distinct))
