"""``fedsim report --queries``, ``--confusion`` and ``--projection``: pictures and tables from a run's features."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from fedsim.cli.app import set_up_messages
from fedsim.core.errors import DataError
from fedsim.core.names import file_names, printable
from fedsim.core.replaced_run import CHECKPOINTS, FEATURES, OF_IMAGES, PROJECTIONS, QUERIES
from fedsim.evaluation.pictures import write_picture
from fedsim.inference.projection import IMAGES, project_features
from fedsim.inference.queries import choose_queries, count_first_images
from fedsim.inference.run_features import RunFeatures, read_run_features
from fedsim.report.features import (
    CONFUSION,
    Chosen,
    Projector,
    confusion_block,
    confusion_matrices,
    draw_confusion,
    draw_projection,
    projection_block,
    query_block,
    write_rows,
)
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.runs import Run
from fedsim.strategy.checkpoint_files import find_version
from fedsim.strategy.run_checkpoints import checkpoint_at

log = logging.getLogger(__name__)
_NUM, _TOP = 8, 10


def feature_blocks(
    groups: Sequence[RunGroup], queries: Chosen | None, confusion: bool, projection: Projector | None
) -> list[Block]:
    """Draw the chosen queries, the domain confusion and the points of each group's first run; return their tables.

    Pictures and rows are written to ``queries`` and ``projections`` in the run directory. Features are those of
    ``fedsim predict``, which is called if there are none, or only older ones than the checkpoint.

    Raises:
        DataError: if a run has neither features nor a checkpoint, or its images are gone.
        ConfigError: if no test set has a named query, or a run classifies.
    """
    blocks = []
    for group in groups:
        run, label = group.runs[0], group.label if len(groups) > 1 else ""
        _predict(run)
        features = read_run_features(run)
        if queries is not None:
            blocks += _write_queries(run.folder / QUERIES, features, queries, label)
        if confusion:
            blocks += _write_confusion(run.folder / QUERIES, features, label)
        if queries is not None or confusion:
            log.info("wrote %s", run.folder / QUERIES)
        if projection is not None:
            blocks += _write_projections(run.folder / PROJECTIONS, features, projection, label)
            log.info("wrote %s", run.folder / PROJECTIONS)
    return blocks


def _write_queries(folder: Path, features: RunFeatures, queries: Chosen, label: str) -> list[Block]:
    blocks = []
    for model in features.models:  # of an earlier choice
        for suffix in ("csv", "png"):
            (folder / f"{model.name}.{suffix}").unlink(missing_ok=True)
    for lists in choose_queries(features, queries, _NUM, _TOP):
        rows = lists.rows()
        write_picture(folder / f"{lists.model.name}.png", lists.picture())
        write_rows(folder / f"{lists.model.name}.csv", rows)
        blocks.append(query_block(rows, label))
    return blocks


def _write_confusion(folder: Path, features: RunFeatures, label: str) -> list[Block]:
    rows = count_first_images(features)
    confusions = confusion_matrices(rows)
    draw_confusion(confusions, folder / f"{CONFUSION}.png")
    write_rows(folder / f"{CONFUSION}.csv", rows)
    return [confusion_block(confusion, label) for confusion in confusions]


def _write_projections(folder: Path, features: RunFeatures, projector: Projector, label: str) -> list[Block]:
    """Write a figure and rows per model, beside those of the other projector."""
    projections = project_features(features, projector, IMAGES)
    owners = file_names(dict.fromkeys(p.file_owner for p in projections if p.file_owner))
    for projection in projections:
        name = "@".join(filter(None, [f"{projector}-{projection.model}", owners.get(projection.file_owner)]))
        draw_projection(projection, folder / f"{name}.png")
        write_rows(folder / f"{name}.csv", projection.rows())
    return [projection_block(projection, label) for projection in projections]


def _predict(run: Run) -> None:
    """Write a run's features, on one rank, unless it has those of its checkpoint."""
    files = [path for path in (run.folder / FEATURES).glob("*.npz") if not path.name.startswith(OF_IMAGES)]
    if not (run.folder / CHECKPOINTS).is_dir():
        if not files:
            raise DataError(
                f"{run.folder}: has no features, and no checkpoint to compute them; fit it with checkpoints"
            )
        return
    written = find_version(checkpoint_at(run.folder)).stat().st_mtime
    if files and min(file.stat().st_mtime for file in files) >= written:
        return
    log.info("%s: writing features of the test sets first, as fedsim predict does", printable(str(run.folder)))
    from fedsim.cli.fit import run as call  # imports the commands that train

    set_up_messages()  # again: Lightning's import has set up its own
    # on this rank alone: another one would repeat the words of this command
    places = ("devices", "num_nodes", "strategy.ranks_per_device")
    words = ["--ckpt_path", str(run.folder), *(f"--trainer.{place}=1" for place in places)]
    with redirect_stdout(sys.stderr):  # standard output is the table's
        call("predict", words)
