"""The results of a run as plain rows, which pandas takes as they are: ``pandas.DataFrame(run.rounds)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.checked import checked
from fedsim.core.paths import Saved
from fedsim.evaluation.summary import score_rows
from fedsim.report.figure import plot_curves
from fedsim.report.groups import group_opened
from fedsim.report.runs import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, str | float]


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
        if axes is None:
            from matplotlib.figure import Figure  # slow to import

            axes = Figure(layout="constrained").subplots()
        plot_curves(axes, group_opened([self._run]), data_set, metric)
        return axes

    def __repr__(self) -> str:
        """Return folder, method and rounds."""
        return f"RunResults({str(self.folder)!r}: {self.summary['method']}, {self.summary['rounds']} rounds)"

    def _rows_of(self, part: str) -> list[Row]:
        return score_rows((self.summary[part] or {}).get("metrics", {}))


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
