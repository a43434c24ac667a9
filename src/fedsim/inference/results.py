"""The results of a run as plain rows, which pandas takes as they are: ``pandas.DataFrame(run.rounds)``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from fedsim.core.checked import checked
from fedsim.core.checks import Count
from fedsim.core.paths import Saved
from fedsim.evaluation.summary import score_rows
from fedsim.report.features import Chosen, Row, confusion_matrices, plot_confusion
from fedsim.report.figure import plot_curves
from fedsim.report.groups import group_opened
from fedsim.report.projection import Projection, Projector, plot_projection
from fedsim.report.runs import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedsim.inference.queries import ChosenQueries
    from fedsim.inference.run_features import RunFeatures


class RunResults:
    """Config, numbers and scores of a run directory. Files are read on first use.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = read_run(folder)

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved settings; empty for a run of Python that a config cannot name."""
        return self._run.config

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of summary.json."""
        return self._run.summary

    @property
    def changes(self) -> list[str]:
        """A line for each setting on which numbers depend, and that a resume changed."""
        return [str(change) for change in self._run.changes]

    @property
    def rounds(self) -> list[dict[str, float]]:
        """A row per round, with all numbers of ``metrics.csv``, and of the files that earlier versions kept beside it.

        ``round`` counts from 1; scores are fractions of 1, in the rounds that were evaluated.
        """
        return [{"round": float(round_), **numbers} for round_, numbers in self._run.log.items()]

    @property
    def curves(self) -> list[Row]:
        """The scores of all evaluations: a row per round, split, kind of model and data set."""
        log = self._run.log.items()
        return [{"round": float(round_), **row} for round_, numbers in log for row in score_rows(numbers)]

    @property
    def scores(self) -> list[Row]:
        """The scores of the last evaluation: a row per split, kind of model and data set; empty without any."""
        return self._rows_of("final")

    @property
    def best(self) -> list[Row]:
        """As :attr:`scores`, of the round with the best validation score; empty without validation."""
        return self._rows_of("best")

    def plot(self, data_set: str = "seen", metric: str = "mAP", axes: Axes | None = None) -> Axes:
        """Draw the delivered model's score over rounds into matplotlib's axes, new ones by default; return them.

        Args:
            data_set: a test set, or ``seen`` or ``unseen``, the mean over these.
            metric: such as mAP or rank1.
            axes: where to draw.

        Raises:
            DataError: if the run has no such score.
        """
        axes = _new_axes() if axes is None else axes
        plot_curves(axes, group_opened([self._run]), data_set, metric)
        return axes

    @checked()
    def queries(self, chosen: Chosen = "worst", num: Count = 8, top: Count = 10) -> list[Row]:
        """Return a row per query and gallery image of its list, for each test set and model; what a match is, is 1.

        They are ranked by the features that ``fedsim predict`` has written. ``AP`` is a fraction of 1, NaN without a
        match; ``distance`` is 1 - cosine, or Euclidean; cameras and ranks count from 1. An image without a file is
        named by its position.

        Args:
            chosen: worst, best, or a list of the names of queries' files; see
                ``fedsim.inference.queries.choose_queries``.
            num: largest number of worst or best queries of a test set.
            top: images per list.

        Raises:
            DataError: if the run has no features, or its images are gone.
            ConfigError: if no test set has a query of a name, or the run classifies.
        """
        return [row for lists in self._choose(chosen, num, top) for row in lists.rows()]

    @checked()
    def draw_queries(self, chosen: Chosen = "worst", num: Count = 8, top: Count = 10) -> dict[str, Image]:
        """Return a picture of Pillow of the rows of :meth:`queries`, for each test set and model by its file's name.

        At most ten images of a list are drawn. Errors are those of :meth:`queries`.
        """
        return {lists.model.name: lists.picture() for lists in self._choose(chosen, num, top)}

    def confusion(self) -> list[Row]:
        """Return how often the first image is right, or of which camera it is, where galleries are joined.

        See ``fedsim.inference.queries.count_first_images``.
        """
        from fedsim.inference.queries import count_first_images  # imports the readers of data sets

        return count_first_images(self._features)

    def plot_confusion(self, axes: Axes | None = None) -> Axes:
        """Draw :meth:`confusion` of the first model into matplotlib's axes, new ones by default; return them."""
        axes = _new_axes() if axes is None else axes
        plot_confusion(axes, confusion_matrices(self.confusion())[0])
        return axes

    def projection(self, projector: Projector = "pca", num: Count = 300) -> list[Row]:
        """Return a row per test image of a sample: its point ``x``, ``y`` by each model's features.

        The points are those of principal components, or of t-SNE. ``part`` is query or gallery; cameras count from 1.
        See ``fedsim.inference.projection.project_features``.

        Args:
            projector: pca or tsne.
            num: largest number of images of a test set; people are drawn with all of their images.

        Raises:
            DataError: if the run has no features, they are not finite, its images are gone, or those of no person fit
                into ``num``.
            ConfigError: if there is no such projector, or the run classifies.
        """
        return [row for projection in self._project(projector, num) for row in projection.rows()]

    def plot_projection(self, axes: Axes | None = None, projector: Projector = "pca", num: Count = 300) -> Axes:
        """Draw :meth:`projection` of the first model into matplotlib's axes, new ones by default; return them.

        Points are coloured by data set, or by camera if there is one data set.
        """
        axes = _new_axes() if axes is None else axes
        plot_projection(axes, self._project(projector, num)[0])
        return axes

    @checked()
    def _project(self, projector: Projector, num: Count) -> list[Projection]:
        from fedsim.inference.projection import project_features  # as above

        return project_features(self._features, projector, num)

    def _choose(self, chosen: Chosen, num: int, top: int) -> list[ChosenQueries]:
        from fedsim.inference.queries import choose_queries  # as above

        return choose_queries(self._features, chosen, num, top)

    @cached_property
    def _features(self) -> RunFeatures:
        from fedsim.inference.run_features import read_run_features  # as above

        return read_run_features(self._run)

    def __repr__(self) -> str:
        """Return folder, method and rounds."""
        return f"RunResults({str(self.folder)!r}: {self.summary['method']}, {self.summary['rounds']} rounds)"

    def _rows_of(self, part: str) -> list[Row]:
        return score_rows((self.summary[part] or {}).get("metrics", {}))


def _new_axes() -> Axes:
    from matplotlib.figure import Figure  # slow to import

    return Figure(layout="constrained").subplots()


@checked()
def load_run(run: Saved) -> RunResults:
    """Open the results of a run.

    >>> rows = load_run("runs/mine").rounds  # doctest: +SKIP

    Args:
        run: a run directory, of fedsim fit or of a Python script.

    Raises:
        DataError: if it is none, or its summary is damaged.
    """
    return RunResults(Path(run))
