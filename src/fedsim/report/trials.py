"""``fedsim report SEARCH``: the trials of a search on this machine, as a table, a figure and a page.

They are in Optuna's study in the folder of the sweep, one line per change.
"""

from __future__ import annotations

import logging
import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from fedsim._version import __version__
from fedsim.core.checked import checked
from fedsim.core.errors import DataError, first_line
from fedsim.core.metrics import score_text
from fedsim.core.paths import Figure, Page
from fedsim.core.readable import has_file
from fedsim.report.layout import Block, Format, new_figure, save_figure, short_names, style_of
from fedsim.report.run_files import read_json
from fedsim.report.runs import STUDY_FILE, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

log = logging.getLogger(__name__)
STUDY = "sweep"
"""name of the study in the journal"""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a search, for tables and figures."""

    number: int
    """Optuna's, from 0"""
    state: str
    """complete, pruned, failed, running or waiting"""
    score: float | None
    """of a complete trial, at its last evaluation; NaN if the run has diverged"""
    seen: Mapping[int, float]
    """evaluation, from 1 -> score"""
    settings: Mapping[str, Any]
    """option -> value, of the options that differ"""
    folder: Path
    same_as: int | None
    """the earlier trial with these settings, whose result it has"""
    error: str
    """of a failed one"""


@dataclass(frozen=True, kw_only=True)
class SearchTrials:
    """All trials of a search."""

    study: optuna.Study
    metric: str
    maximize: bool
    rows: tuple[TrialRow, ...]
    """by number; without failed trials that a later one repeats"""
    distributions: Mapping[str, BaseDistribution]
    """option -> its range or list"""

    @property
    def options(self) -> list[str]:
        """The options that differ."""
        return list(dict.fromkeys(option for row in self.rows for option in row.settings))

    @property
    def complete(self) -> list[TrialRow]:
        """The trials with a score, by number."""
        return [row for row in self.rows if row.score is not None and not math.isnan(row.score)]

    @property
    def records(self) -> list[TrialRow]:
        """The trials that were better than all before, by number; the last one is the best."""
        records = list[TrialRow]()
        for row in self.complete:
            if not records or self.value(row) > self.value(records[-1]):
                records.append(row)
        return records

    def value(self, row: TrialRow) -> float:
        """Return a number that is higher for a better trial; minus infinity without a score."""
        if row.score is None or math.isnan(row.score):
            return -math.inf
        return row.score if self.maximize else -row.score


@contextmanager
def reading_study(path: Path) -> Iterator[None]:
    """Name the file in an error of the block."""
    try:
        yield
    except Exception as error:  # Optuna meets damage also by assertions and indices
        raise DataError(f"{path}: is not a study of fedsim sweep ({first_line(error)}); was it edited?") from error


def read_trials(folder: Path) -> SearchTrials:
    """Read the trials of a search; raise DataError if the file is damaged."""
    path = folder / STUDY_FILE
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not has_file(path):
        raise DataError(f"{path}: is not there; give the folder of a search")
    with reading_study(path):
        study = optuna.load_study(study_name=STUDY, storage=JournalStorage(JournalFileBackend(str(path))))
        trials, metric = study.get_trials(deepcopy=False), str(study.user_attrs["metric"])
        repeated = {trial.user_attrs.get("repeats") for trial in trials}
        rows = tuple(_row(trial, folder) for trial in trials if trial.number not in repeated)
        return SearchTrials(
            study=study, metric=metric, maximize=study.direction == StudyDirection.MAXIMIZE, rows=rows,
            distributions={name: scale for trial in trials for name, scale in trial.distributions.items()},
        )  # fmt: skip


_STATES = {
    TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
    TrialState.RUNNING: "running", TrialState.WAITING: "waiting",
}  # fmt: skip


def _row(trial: FrozenTrial, folder: Path) -> TrialRow:
    """Return a trial; raise an error of Python if a value is none of its kind, as after an edit."""
    attributes = trial.user_attrs
    for option, value in trial.params.items():
        if not isinstance(option, str):
            raise TypeError(f"{option!r} is no name of an option")
        scale = trial.distributions[option]
        scale.to_internal_repr(value)
        if isinstance(scale, FloatDistribution | IntDistribution) and not scale.low <= value <= scale.high:
            raise ValueError(f"trial {trial.number} has {option} {value}, out of its range")
    score = None
    if trial.state == TrialState.COMPLETE:
        if trial.value is None:
            raise ValueError(f"trial {trial.number} is complete and has no score")
        score = trial.value if math.isfinite(trial.value) else math.nan
    return TrialRow(
        number=trial.number, state=_STATES[trial.state], score=score,
        seen={int(step): float(value) for step, value in trial.intermediate_values.items()},
        settings=trial.params, folder=folder / str(attributes.get("folder", "")),
        same_as=attributes.get("same_as"), error=str(attributes.get("error", "")),
    )  # fmt: skip


_LEAST = 10
"""complete trials below which no importance is computed: it would be chance"""
_ORDER = ("complete", "pruned", "failed", "running", "waiting")


def importances(trials: SearchTrials) -> dict[str, float]:
    """Return option -> share of the variance of the score over the space that it explains, the largest first.

    It is fANOVA (Hutter et al., ICML 2014) by Optuna: a random forest of the complete trials. Empty with fewer than ten
    of them, with a single option, or if scores are equal or nearly so.
    """
    scores = {row.score for row in trials.complete}
    num_options = len({option for row in trials.complete for option in row.settings})
    if len(trials.complete) < _LEAST or len(scores) < 2 or num_options < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        shares = optuna.importance.get_param_importances(trials.study, evaluator=evaluator)
    except RuntimeError:  # scores differ by so little that all trees are constant
        return {}
    return {option: float(share) for option, share in shares.items()}


def trial_block(trials: SearchTrials) -> Block:
    """Return a table with a row per trial, the best first; a pruned trial has no score, but its state."""
    options = trials.options
    rows = sorted(trials.rows, key=lambda row: (_ORDER.index(row.state), -trials.value(row), row.number))
    lines = [
        [str(row.number), ", ".join([_state(row), *_marks(row)]),
         *(_cell(row.settings.get(option, "-")) for option in options), str(row.folder), score_text(row.score)]
        for row in rows
    ]  # fmt: skip
    headers = ["trial", "state", *short_names(options), "run directory", trials.metric]
    return Block(headers, lines, [_counts(trials), *_notes(trials)], num_left=len(headers) - 1)


def _state(row: TrialRow) -> str:
    if row.same_as is not None:
        return f"{row.state}, as trial {row.same_as}"
    if row.state == "pruned" and row.seen:
        evaluation = max(row.seen)
        return f"pruned after {evaluation}: {score_text(row.seen[evaluation])}"
    return row.state


def _marks(row: TrialRow) -> list[str]:
    """Return the reasons why the score of a trial is not that of its settings."""
    path = row.folder / "summary.json"
    return Run(row.folder, read_json(path)).marks if row.state == "complete" and path.is_file() else []


def _counts(trials: SearchTrials) -> str:
    """Return the numbers of trials by state, and what pruned means."""
    counts = Counter(row.state for row in trials.rows)
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    pruned = "; a pruned trial ended before its last round: it has no score, and counts in no mean"
    return f"trials: {states or 'none'}{pruned if counts['pruned'] else ''}"


def _notes(trials: SearchTrials) -> list[str]:
    """Return lines about the best trial, the way to it, the importance of options, and failures."""
    notes = []
    if trials.records:
        best = trials.records[-1]
        settings = " ".join(f"{option}={value}" for option, value in best.settings.items())
        notes.append(f"best: trial {best.number}, {trials.metric} {best.score:.4f}: {settings}")
        notes.append(f"best so far: {', '.join(f'{row.score:.4f} (trial {row.number})' for row in trials.records)}")
    if shares := importances(trials):
        listed = ", ".join(f"{option} {share:.2f}" for option, share in shares.items())
        notes.append(f"share of the score's variance (fANOVA, {len(trials.complete)} complete trials): {listed}")
    failed = [row for row in trials.rows if row.state == "failed"]
    return notes + [f"failed: trial {row.number}: {row.error} ({row.folder}.log)" for row in failed]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_WIDTH, _PER_AXIS = 7.2, 1.2  # inches: of two columns of a paper, and of an axis of many
_LETTERS = 18  # of a value at an axis, and of a line of the metric's name
_GREY = "#9a9a9a"


def _height(scale: Any, value: Any) -> float:
    """Return the height of a value on a vertical axis, from 0 to 1; ``scale``: its distribution."""
    if isinstance(scale, CategoricalDistribution):
        return float(scale.choices.index(value) + 0.5) / len(scale.choices)
    low, high = scale.low, scale.high
    if low == high:
        return 0.5
    if scale.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return float((value - low) / (high - low))


def _ticks(scale: Any) -> list[Any]:
    """Return the values that are written at an axis: all of a list, the ends of a range."""
    return list(scale.choices) if isinstance(scale, CategoricalDistribution) else [scale.low, scale.high]


def draw_trials(trials: SearchTrials, path: Path) -> None:
    """Draw a search into an image file.

    A line of the parallel coordinates is a trial; colours are scores of complete ones, others are grey and broken.

    Raises:
        DataError: if no trial is complete, or the image file cannot be written.
    """
    if not trials.complete:
        raise DataError(f"{path}: cannot draw the trials, as none is complete; wait for the first one")
    options, shares = trials.options, importances(trials)
    with new_figure(min(20.0, max(_WIDTH, _PER_AXIS * len(options))), 4.8) as figure:
        rows = "aa;bc" if shares else "aa;bb"
        pictures = figure.subplot_mosaic(rows, height_ratios=(5, 4), width_ratios=(3, 2))
        _draw_parallel(pictures["a"], trials, options)
        _draw_best(pictures["b"], trials)
        if shares:
            _draw_shares(pictures["c"], shares)
        save_figure(figure, path, "--figure")


def _draw_parallel(axes: Axes, trials: SearchTrials, options: list[str]) -> None:
    import matplotlib as mpl
    from matplotlib.colors import Normalize

    scales = [trials.distributions[option] for option in options]
    scores = [row.score for row in trials.complete if row.score is not None]
    colours = mpl.colormaps["viridis_r" if trials.maximize else "viridis"]  # dark is good, also in grey
    shade = Normalize(min(scores), max(scores))
    for row in sorted(trials.rows, key=trials.value):  # the best lines lie above the others
        if row.settings.keys() >= set(options):
            heights = [_height(scale, row.settings[option]) for scale, option in zip(scales, options, strict=True)]
            axes.plot(range(len(options)), heights, **_line(row, trials, colours, shade))
    for position, scale in enumerate(scales):
        _draw_scale(axes, position, scale)
    axes.set_xticks(range(len(options)), short_names(options))
    axes.set(yticks=[], ylim=(-0.05, 1.05), xlim=(-0.1, len(options) - 0.75), title="settings of the trials")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = axes.figure.colorbar(mpl.cm.ScalarMappable(shade, colours), ax=axes, pad=0.01, aspect=30)
    bar.set_label(textwrap.fill(trials.metric, _LETTERS))


def _draw_scale(axes: Axes, position: int, scale: BaseDistribution) -> None:
    """Draw a vertical axis, with its values on white."""
    axes.axvline(position, color="#333333", linewidth=0.8)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
    for value in _ticks(scale):
        label = f"{value:.3g}" if isinstance(value, float) else _shortened(str(value))
        place = position, _height(scale, value)
        axes.annotate(label, place, (3, 0), textcoords="offset points", fontsize=6.5, va="center", bbox=box)


def _shortened(name: str) -> str:
    """Return the beginning of a long value, without the package of a class: there is room up to the next axis.

    >>> _shortened("fedsim.methods.FedPav"), _shortened("configs/recipes/mine.yaml"), _shortened("0.1")
    ('FedPav', 'configs/recipes/m…', '0.1')
    """
    name = re.sub(r"^(\w+\.)+(?=[A-Z]\w*$)", "", name)
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"


def _line(row: TrialRow, trials: SearchTrials, colours: Colormap, shade: Normalize) -> dict[str, Any]:
    if row not in trials.complete:
        return {"color": _GREY, "linestyle": "--", "linewidth": 0.7, "alpha": 0.7}
    is_best = row is trials.records[-1]
    return {"color": colours(shade(row.score or 0.0)), "linewidth": 2.2 if is_best else 1.0}


def _draw_best(axes: Axes, trials: SearchTrials) -> None:
    """Draw the score of each trial, the best so far, and the last score of pruned trials."""
    from matplotlib.ticker import MaxNLocator

    style, complete = style_of(0), trials.complete
    axes.plot([row.number for row in complete], [row.score or 0.0 for row in complete], style.marker,
              color=style.colour, markersize=3.5, label="complete")  # fmt: skip
    pruned = [row for row in trials.rows if row.state == "pruned" and row.seen]
    if pruned:
        axes.plot([row.number for row in pruned], [row.seen[max(row.seen)] for row in pruned], "x", color=_GREY,
                  markersize=3.5, label="pruned, last score")  # fmt: skip
    records = [*trials.records, trials.records[-1]]
    numbers = [*(row.number for row in trials.records), trials.rows[-1].number]
    axes.step(numbers, [row.score or 0.0 for row in records], where="post", color="#333333", linewidth=1.1,
              label="best so far")  # fmt: skip
    axes.set(title="best so far", xlabel="trial", ylabel=textwrap.fill(trials.metric, _LETTERS))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


def _draw_shares(axes: Axes, shares: dict[str, float]) -> None:
    """Draw a bar per option, the largest above."""
    options = list(reversed(shares))
    bars = axes.barh(short_names(options), [shares[option] for option in options], color=style_of(0).colour)
    axes.bar_label(bars, [f"{shares[option]:.2f}" for option in options], padding=2, fontsize=7)
    axes.set(title="share of the score's variance (fANOVA)", xlim=(0, 1.12), xticks=[0, 0.5, 1])
    axes.spines[["top", "right"]].set_visible(False)


@checked("--")
def trials_report(
    folder: Path, format_: Format = "table", figure: Figure | None = None, html: Page | None = None
) -> str:
    """Return the table of the trials in a sweep's folder; draw them into ``figure``, write a page into ``html``.

    Raises:
        DataError: if the trials cannot be read or drawn, or a file cannot be written, or its name has another suffix.
        ConfigError: if a library that the page needs is missing.
    """
    trials = read_trials(folder)
    block, written = trial_block(trials), list[str]()
    if figure is not None:
        draw_trials(trials, Path(figure))
        written.append(f"wrote {figure}")
    if html is not None:
        _write_page(trials, block, folder, Path(html))
        written.append(f"wrote {html}")
    if format_ == "table":
        return "\n\n".join([block.text(format_), *written])
    for message in (*block.notes, *written):
        log.info(message)
    return block.text(format_)


def _write_page(trials: SearchTrials, block: Block, folder: Path, path: Path) -> None:
    """Write the table, sortable, and the figure into one file that needs no network."""
    from fedsim.report.html.page import as_uri, rendered, write

    picture = ""
    with TemporaryDirectory() as temporary:
        if trials.complete:
            drawn = Path(temporary, "trials.png")
            draw_trials(trials, drawn)
            picture = as_uri(drawn)
    content = {"folder": str(folder), "made": time.strftime("%Y-%m-%d %H:%M"), "version": __version__,
               "trials": block, "picture": picture}  # fmt: skip
    write(rendered("trials.html", content), path)
