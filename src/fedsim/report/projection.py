"""Features of test images as points of the plane: rows, a table, and a figure by data set, client and camera."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.names import printable
from fedsim.report.features import Row, printable_all, with_round
from fedsim.report.layout import Block, axes_of, both_ends, new_figure, save_figure, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Projector = Literal["pca", "tsne"]
"""principal components, or t-SNE (van der Maaten and Hinton, JMLR 2008)"""
_MOST_PANELS = 12
"""of a figure; the cameras of further data sets are in the rows only"""
_MOST_LINES = 5
"""of a legend below its panel; that of more data sets is below all panels"""
_COLUMNS = 3
_PANEL = 2.5
"""Inches: width of a panel, and its height without the legend."""
_LETTER, _LINE = 0.066, 0.16
"""Inches: approximate width of a letter, and height of a line, in a legend."""
_HANDLE = 0.32
"""Inches: width of an entry of a legend without its letters."""


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
    clients: list[str]
    """S: the only client that is tested on the set; empty if there is none, or several"""
    features: NDArray[np.float64]
    """[n, D] of which the points are made, as the distance compares them"""
    round_: int | None = None
    """of the model, from 1; None: unknown"""

    @property
    def title(self) -> str:
        """The model as a text."""
        return f"{self.model} {self.owner}".strip()

    @property
    def file_owner(self) -> str:
        """The owner in names of files; of a personalised model without a single owner, its data set; else empty."""
        return self.owner or (self.sets[0] if self.model == "personalised" else "")

    @property
    def has_clients(self) -> bool:
        """Whether colours by client are others than those by data set: a client is tested on several sets."""
        named = [client for client in self.clients if client]
        return len(set(named)) < len(named) and len(set(self.clients)) > 1

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

    Between them is a panel coloured by client, if a client is tested on several sets.

    Raises:
        DataError: if the image file cannot be written.
    """
    panels = _panels(projection)
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    of_cameras = _legend_lines([f"c{camera}" for camera in projection.cameras])
    of_sets = _legend_lines(projection.sets) if len(projection.sets) > 1 else 0
    below = -(-of_sets // columns) if of_sets > _MOST_LINES else 0
    height = rows * (_PANEL + 0.25) + _LINE * ((rows - 1) * of_cameras + max(of_sets * (not below), of_cameras) + below)
    with new_figure(max(1.6, columns) * _PANEL, height + 0.2) as figure:
        figure.set_layout_engine("compressed", h_pad=0.08)  # panels are squares
        all_axes = axes_of(figure, rows, columns, len(panels))
        for axes, draw in zip(all_axes, panels, strict=True):
            draw(axes)
        legend = all_axes[0].get_legend()
        if below and legend is not None:  # a tall one leaves a gap between the rows
            handles: Sequence[Any] = legend.legend_handles
            names = [text.get_text() for text in legend.get_texts()]
            legend.remove()
            ncols = columns * _legend_columns(names)
            figure.legend(handles, names, loc="outside lower center", ncols=ncols, frameon=False, fontsize=7)
        most = _MOST_PANELS - 1 - projection.has_clients
        further = f"; cameras of the first {most}" if len(projection.sets) > most else ""
        of_model = with_round(f"model {projection.title}", projection.round_)
        title = f"{of_model}: {len(projection.images):,} test images{further}"
        figure.suptitle(printable(title), fontsize=8)
        save_figure(figure, path, "run directory")


def _panels(projection: Projection) -> list[Callable[[Axes], None]]:
    """Return the functions that draw the panels of a figure."""
    most = _MOST_PANELS - 1 - projection.has_clients
    numbers = range(min(len(projection.sets), most)) if len(projection.sets) > 1 else ()
    by_camera = [lambda axes, number=number: _draw_cameras(axes, projection, number) for number in numbers]
    by_client = [lambda axes: _draw_clients(axes, projection)] if projection.has_clients else []
    return [lambda axes: plot_projection(axes, projection), *by_client, *by_camera]


def _draw_clients(axes: Axes, projection: Projection) -> None:
    """Draw all points by client; those of no client, such as unseen sets, in grey."""
    of_image = np.array(projection.clients, dtype=object)[projection.of_set]
    x, y = projection.points[of_image == ""].T
    axes.scatter(x, y, s=5, color="#dddddd", linewidths=0)
    clients = [client for client in dict.fromkeys(projection.clients) if client]
    for number, client in enumerate(clients):
        _scatter(axes, projection.points[of_image == client], number)
    _finish(axes, projection, "client", clients)


def _draw_cameras(axes: Axes, projection: Projection, number: int) -> None:
    """Draw the points of a data set by camera; a number of a camera has one colour in all panels."""
    is_here = projection.of_set == number
    x, y = projection.points[~is_here].T
    axes.scatter(x, y, s=5, color="#dddddd", linewidths=0)
    cameras = np.unique(projection.cameras[is_here]).tolist()
    for camera in cameras:
        _scatter(axes, projection.points[is_here & (projection.cameras == camera)], camera - 1)
    _finish(axes, projection, f"cameras of {both_ends(projection.sets[number])}", [f"c{camera}" for camera in cameras])


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
    shown = list(map(both_ends, labels))
    axes.legend(
        drawn, shown, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=_legend_columns(shown), frameon=False,
        fontsize=7, handletextpad=0.1, columnspacing=0.8, borderpad=0,
    )  # fmt: skip


def _legend_columns(labels: Sequence[str]) -> int:
    widest = _HANDLE + _LETTER * max(map(len, labels), default=1)
    return max(1, min(len(labels), int(_PANEL / widest)))


def _legend_lines(labels: Sequence[str]) -> int:
    distinct = list(map(both_ends, dict.fromkeys(labels)))
    return -(-len(distinct) // _legend_columns(distinct))
