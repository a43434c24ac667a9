"""Results from the features of a run: single queries, and domain confusion; ``projection.py`` has points of the plane.

Each has rows as CSV, a table and pictures. Domain confusion shows from which data set and camera wrong first images
come.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import printable
from fedsim.core.readable import files_in
from fedsim.core.replaced_run import CONFUSION, QUERIES
from fedsim.report.layout import Block, both_ends, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, str | float]
Chosen = Literal["worst", "best"] | Sequence[str]
"""the queries with the lowest or the highest average precision, or the names of their files"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([printable(str(value)) for value in row.values()] for row in rows)


def with_round(subject: str, round_: int | str | None) -> str:
    """Return a subject with the round of the model; without one, it is unknown."""
    return f"{subject}, round {round_}" if round_ else subject


def about_choice(round_: int | str | None, chosen: str) -> str:
    """Return the choice of queries, with the round of the model, as a text; ``chosen`` may be empty: unknown."""
    return ", ".join(filter(None, [f"{chosen} queries" if chosen else "", f"round {round_}" if round_ else ""]))


def query_block(rows: Sequence[Mapping[str, Any]], label: str = "") -> Block:
    """Return a line per query of a test set, with the first image of its list."""
    first = rows[0]
    of_model = f"{first['data set']}, {first['model']} {first['owner']}".strip()
    about = about_choice(first.get("round"), first.get("chosen", ""))
    title = "\n".join(filter(None, [label, of_model, about, "query"]))
    of_image = ["first image", "identity,\ncamera", "distance", "right"]
    headers = [title, "identity,\ncamera", "AP\n(%)", "first\nmatch", *of_image]
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
    for path in files_in(folder / QUERIES, "*.csv"):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if path.stem == CONFUSION:
                yield path.stem, [confusion_block(confusion) for confusion in confusion_matrices(rows)]
            else:
                yield path.stem, [query_block(rows)]
        except (OSError, ValueError, KeyError, IndexError, TypeError, csv.Error) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); remove it, or repeat fedsim report --queries"
            ) from error


_LETTER = 0.085
"""inches: width of a letter of a label"""
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
    round_: int | str | None
    """of the model, from 1; empty or None: unknown"""

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
    return Confusion(model, sets, cameras, right, wrong, is_joined, rows[0].get("round"))


def confusion_block(confusion: Confusion, label: str = "") -> Block:
    """Return a row per data set of the queries: right first images, and wrong ones per data set, in percent."""
    names = [printable(name) for name in confusion.sets]
    lines = []
    for name, number, right, shares in zip(names, confusion.queries, confusion.right, confusion.by_set, strict=True):
        cells = ["-" if np.isnan(share) else f"{share:.1f}" for share in shares]
        lines.append([name, f"{number:,}", f"{100 * right / number:.1f}", *cells])
    title = "\n".join(filter(None, [label, with_round(confusion.model, confusion.round_), "queries of"]))
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
    names = list(map(both_ends, confusion.sets))
    shares, columns = 100 * confusion.wrong / confusion.queries[:, None], confusion.cameras
    titles, owners = [f"{both_ends(name)} c{camera}" for name, camera in columns], [name for name, _ in columns]
    if not 0 < len(columns) <= _MOST_COLUMNS:
        shares, titles, owners = confusion.by_set, names, confusion.sets
    image = axes.pcolormesh(np.ma.masked_invalid(shares), cmap="Blues", vmin=0)
    axes.set_xticks(np.arange(len(titles)) + 0.5, titles, rotation=90)
    axes.set_yticks(np.arange(len(confusion.sets)) + 0.5, names)
    axes.invert_yaxis()
    for place in range(1, len(owners)):
        if owners[place] != owners[place - 1]:
            axes.axvline(place, color="0.6", linewidth=0.8)
    axes.set(
        ylabel="queries of", xlabel="data set and camera of a wrong first image",
        title=f"{with_round(confusion.model, confusion.round_)}: percent of the queries",
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def draw_confusion(confusions: Sequence[Confusion], path: Path) -> None:
    """Draw a heat map per kind of model, below each other; raise DataError if the image file cannot be written."""
    columns = max(min(len(confusion.cameras), _MOST_COLUMNS) for confusion in confusions)
    letters = max(len(both_ends(name)) for confusion in confusions for name in confusion.sets)  # of a label
    height = sum(1.2 + _LETTER * letters + 0.2 * len(confusion.sets) for confusion in confusions)
    with new_figure(min(20.0, max(4.5, 2.2 + _LETTER * letters + 0.17 * columns)), height) as figure:
        pictures = figure.subplots(len(confusions), 1, squeeze=False)[:, 0]
        for axes, confusion in zip(pictures, confusions, strict=True):
            plot_confusion(axes, confusion)
        save_figure(figure, path, "run directory")
