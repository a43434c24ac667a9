"""The pictures that a fit has drawn in its rounds, and the course of domain confusion over these rounds."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import DataError
from fedsim.core.readable import has_file, has_folder
from fedsim.core.replaced_run import CONFUSION, PICTURES
from fedsim.report.features import KEYS, Row, confusion_matrices, printable_all, write_rows
from fedsim.report.layout import Block, axes_of, new_figure, save_figure, style_of

COURSE = f"{CONFUSION}-over-rounds"
"""name of the files about the course"""
ROUND = "round-"
"""begin of the name of the folder with a round's pictures; the number counts from 1"""
_MOST_LINES = 14
"""data sets of a figure; the rows have all"""
_NOTE = (
    "of each data set's queries, in percent, in each round: right first images / wrong ones of the same data set / "
    "wrong ones of others"
)


def round_folder(folder: Path, round_: int) -> Path:
    """Return the folder of a run directory with the pictures of a round, from 1."""
    return folder / PICTURES / f"{ROUND}{round_}"


def rounds_with_pictures(folder: Path) -> list[int]:
    """Return the rounds, from 1, that have a folder of pictures in a run directory."""
    paths = (folder / PICTURES).glob(f"{ROUND}*") if has_folder(folder / PICTURES) else ()
    names = (path.name.removeprefix(ROUND) for path in paths)
    return sorted(int(name) for name in names if name.isdecimal())


def read_course(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run directory's domain confusion over rounds; none if the fit has drawn none.

    They are those of ``fedsim.inference.queries.count_first_images``, with the ``round``. Raises DataError if the file
    cannot be read.
    """
    path = folder / PICTURES / f"{COURSE}.csv"
    if not has_file(path):
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            _ = int(row["round"]), *map(row.__getitem__, KEYS)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it") from error
    return rows


def add_to_course(folder: Path, round_: int, rows: Sequence[Row]) -> None:
    """Put the rows of a round, from 1, below those of earlier rounds in the file of :func:`read_course`, and draw them.

    Rows of later rounds go: a resumed run trains them again.
    """
    path = folder / PICTURES / f"{COURSE}.csv"
    kept: list[Mapping[str, Any]] = [row for row in read_course(folder) if int(row["round"]) < round_]
    kept += [{"round": round_} | row | {"round": round_} for row in rows]
    write_rows(path, kept)
    draw_course(kept, path.with_suffix(".png"))


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Return, of one kind of model, data set -> round -> percent of its queries: right, wrong at home, elsewhere."""
    shares: dict[str, dict[int, tuple[float, float, float]]] = {}
    for round_ in sorted({int(row["round"]) for row in rows}):
        [confusion] = confusion_matrices([row for row in rows if int(row["round"]) == round_])
        home = np.diag(confusion.by_set)
        right = 100 * confusion.right / confusion.queries
        for name, *values in zip(confusion.sets, right, home, 100 - right - home, strict=True):
            shares.setdefault(name, {})[round_] = (values[0], values[1], max(values[2], 0.0))
    return shares


def _by_model(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    models: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        models.setdefault(str(row["model"]), []).append(row)
    return models


def course_blocks(folder: Path, label: str = "") -> list[Block]:
    """Return a table per kind of model with a row per round; none if the run has no domain confusion over rounds."""
    rows = read_course(folder)
    blocks = []
    for model, of_model in _by_model(rows).items():
        shares = _shares(of_model)
        rounds = sorted({round_ for of_set in shares.values() for round_ in of_set})
        lines = [[str(round_), *(_cell(of_set, round_) for of_set in shares.values())] for round_ in rounds]
        title = "\n".join(filter(None, [label, model, "round"]))
        tidy = list(of_model[0]), [[str(value) for value in row.values()] for row in of_model]
        blocks.append(Block(printable_all([title, *shares]), lines, [_NOTE], is_cut=True, tidy=tidy))
    return blocks


def _cell(of_set: Mapping[int, tuple[float, float, float]], round_: int) -> str:
    return " / ".join(f"{share:.1f}" for share in of_set[round_]) if round_ in of_set else "-"


def draw_course(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the wrong first images over rounds, of the same data set and of others, a line per data set of the queries.

    There is a row of panels per kind of model. Raises DataError if the image file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator  # slow to import

    models = _by_model(rows)
    with new_figure(6.4, 0.6 + 2.4 * len(models)) as figure:
        panels = axes_of(figure, len(models), 2, 2 * len(models))
        for number, (model, of_model) in enumerate(models.items()):
            shares = dict(list(_shares(of_model).items())[:_MOST_LINES])
            for place, kind in ((1, "the same data set"), (2, "other data sets")):
                axes = panels[2 * number + place - 1]
                for style, of_set in zip(map(style_of, range(len(shares))), shares.values(), strict=True):
                    axes.plot(
                        list(of_set), [values[place] for values in of_set.values()], color=style.colour,
                        linestyle=style.line, marker=style.marker, markersize=4, linewidth=1.2,
                    )  # fmt: skip
                axes.set(title=f"{model}: wrong, of {kind}", xlabel="round")
                axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            left, right = panels[2 * number : 2 * number + 2]
            left.sharey(right)
            left.set(ylabel="percent of the queries", ylim=(0, 1.05 * max(left.get_ylim()[1], right.get_ylim()[1])))
            handles: Sequence[Any] = left.lines
        figure.legend(handles, printable_all(list(shares)), loc="outside lower center", ncols=4, frameon=False)
        save_figure(figure, path, "run directory")
