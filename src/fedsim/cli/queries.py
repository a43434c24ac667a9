"""``fedsim report --queries``, ``--confusion`` and ``--projection``: pictures and tables from a run's features."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from fedsim.cli.app import set_up_messages
from fedsim.core.errors import DataError
from fedsim.core.files import check_folder
from fedsim.core.names import printable
from fedsim.core.readable import files_in, has_folder
from fedsim.core.replaced_run import CHECKPOINTS, FEATURES, OF_IMAGES, PROJECTIONS, QUERIES
from fedsim.inference.feature_pictures import write_confusion, write_projections, write_queries
from fedsim.inference.run_features import RunFeatures, each_usable, read_run_features
from fedsim.report.course import course_blocks
from fedsim.report.features import Chosen, confusion_block, confusion_matrices, query_block
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.projection import Projector, projection_block
from fedsim.report.runs import Run
from fedsim.strategy.checkpoint_files import find_version
from fedsim.strategy.run_checkpoints import checkpoint_at

log = logging.getLogger(__name__)
_NUM = 8


def feature_blocks(
    groups: Sequence[RunGroup], queries: Chosen | None, confusion: bool, projection: Projector | None
) -> list[Block]:
    """Draw the chosen queries, the domain confusion and the points of each group's first run; return their tables.

    Pictures and rows are written to ``queries`` and ``projections`` in the run directory. Features are those of
    ``fedsim predict``, which is called if there are none, or only older ones than the checkpoint. What lacks its data,
    a test set, one of the three or a run, is left out with a line.

    Raises:
        DataError: if nothing can be drawn: such as for a run with neither features nor a checkpoint.
        ConfigError: if no test set has a named query, or a run classifies.
    """
    is_written = {QUERIES: queries is not None or confusion, PROJECTIONS: projection is not None}
    for folder in (group.runs[0].folder / name for group in groups for name in is_written if is_written[name]):
        check_folder(folder, "run_dir")

    def of_run(group: RunGroup) -> list[Block]:
        run, label = group.runs[0], group.label if len(groups) > 1 else ""
        _predict(run)
        features, sections = read_run_features(run), list[tuple[str, Callable[[Path], list[Block]]]]()
        if queries is not None:
            sections.append((QUERIES, partial(_of_queries, features=features, label=label, chosen=queries)))
        if confusion:
            sections.append((QUERIES, partial(_of_confusion, features=features, label=label)))
        if projection is not None:
            sections.append((PROJECTIONS, partial(_of_points, features=features, label=label, projector=projection)))
        drawn = each_usable(sections, lambda part: (part[0], part[1](run.folder)))
        for name in dict.fromkeys(name for name, _ in drawn):
            log.info("wrote %s", run.folder / name)
        return [block for _, blocks in drawn for block in blocks]

    return [block for blocks in each_usable(groups, of_run) for block in blocks]


def _of_queries(folder: Path, features: RunFeatures, label: str, chosen: Chosen) -> list[Block]:
    return [query_block(rows, label) for rows in write_queries(folder / QUERIES, features, chosen, _NUM)]


def _of_confusion(folder: Path, features: RunFeatures, label: str) -> list[Block]:
    confusions = confusion_matrices(write_confusion(folder / QUERIES, features))
    return [*(confusion_block(confusion, label) for confusion in confusions), *course_blocks(folder, label)]


def _of_points(folder: Path, features: RunFeatures, label: str, projector: Projector) -> list[Block]:
    return [projection_block(points, label) for points in write_projections(folder / PROJECTIONS, features, projector)]


def _predict(run: Run) -> None:
    """Write a run's features, on one rank, unless it has those of its checkpoint."""
    files = [path for path in files_in(run.folder / FEATURES, "*.npz") if not path.name.startswith(OF_IMAGES)]
    if not has_folder(run.folder / CHECKPOINTS):
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
