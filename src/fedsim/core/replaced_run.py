"""A run that another fit replaces in its folder: it is kept aside until the new run can stand alone.

Aside, the files keep their names. A killed fit leaves one of two folders: ``replaced-run.tmp``, some files of which are
still, or again, at their places, and ``replaced-run``, which has them all. Of the second, the run is put back unless
the new one has a whole checkpoint or has finished.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder, replacing
from fedsim.core.metrics_rows import METRICS_FILE, metrics_files
from fedsim.core.names import file_names
from fedsim.core.readable import has_file
from fedsim.core.run_lock import RunLock
from fedsim.core.versions import current_version

CHECKPOINTS = "checkpoints"
"""folder of a run's checkpoints"""
TESTS = "tests"
"""folder with the scores of fedsim test: one file per checkpoint"""
QUERIES_FILE = "queries.npz"
"""file with the scores of single queries, of the last evaluation"""
RUN_ID_FILE, MLFLOW_ID_FILE = "wandb_id", "mlflow_id"
"""files with the ids of the runs of W&B and MLflow that a resumed job continues"""
FEATURES, RANKINGS, MAPS, QUERIES, PROJECTIONS = "features", "rankings", "maps", "queries", "projections"
"""folders of features, ranked lists, attention maps, pictures and tables of single queries, and features as points"""
ROWS = "rows"
"""note in a PNG file: pixels above its first row of a query and its list, and height of a row"""
PICTURES = "pictures"
"""folder of the pictures that a fit draws over its rounds"""
OF_IMAGES, CONFUSION = "images-", "confusion"
"""begins of the names of files: those that fedsim predict --images writes into FEATURES, those of domain confusion"""
PROJECTED = ("pca-", "tsne-")
"""begins of the names of files with features as points"""
_WRITTEN = ("config.yaml", QUERIES_FILE, FEATURES, RANKINGS, MAPS, QUERIES, PROJECTIONS, PICTURES, TESTS)
_ROUND_FILE = "round.txt"
_ASIDE, _MOVING, _REMOVED = "replaced-run", "replaced-run.tmp", "replaced-run.removed.tmp"

log = logging.getLogger(__name__)


def write_round(folder: Path, round_: int) -> None:
    """Note the round, from 1, of the model of which a folder has features, ranked lists or maps."""
    with replacing(folder / _ROUND_FILE) as partial:
        partial.write_text(f"{round_}\n")


def read_round(folder: Path) -> int | None:
    """Return the round, from 1, of the model of a folder's files; None if it is not noted."""
    path = folder / _ROUND_FILE
    noted = path.read_text(errors="replace").strip() if has_file(path) else ""
    return int(noted) if noted.isascii() and noted.isdecimal() else None


def forget_round(folder: Path) -> None:
    """Remove the note: files of another model follow."""
    (folder / _ROUND_FILE).unlink(missing_ok=True)


def files_of_sets(names: Iterable[str]) -> dict[str, str]:
    """Return test set -> begin of the names of its files in the folders of a run; no other file there begins so."""
    return file_names(names, (OF_IMAGES, CONFUSION, *PROJECTED))


def files_of_run(folder: Path, with_ids: bool = True) -> Iterator[Path]:
    """Yield the files and folders of a run; the summary, which marks a run, is the last."""
    summary, checkpoints = folder / "summary.json", [*(folder / CHECKPOINTS).glob("*.ckpt*")]
    is_run = _holds_run(folder)
    names = (*((RUN_ID_FILE, MLFLOW_ID_FILE) if with_ids else ()), *(_WRITTEN if is_run else ()))
    metrics = metrics_files(folder) if is_run else folder.glob(METRICS_FILE)
    paths = [*metrics, *(folder / name for name in names), *checkpoints, summary]
    return (path for path in paths if path.is_symlink() or path.exists())


def _holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run; in another one, folders of a run's names are the user's."""
    has_checkpoint = any((folder / CHECKPOINTS).glob("*.ckpt*"))
    return has_checkpoint or (folder / "summary.json").exists() or stands_alone(folder / _ASIDE)


def run_with(file: Path) -> Path | None:
    """Return the run or checkpoint that a file is a part of; None of other files, also if these are in its folder."""
    real = Path(os.path.realpath(file))
    if real.parent.name == FEATURES and real.name.startswith(OF_IMAGES):
        return None
    for folder in real.parents:
        is_of_run = _holds_run(folder) and not {real, *real.parents}.isdisjoint(files_of_run(folder))
        if is_of_run or (folder.suffix == ".ckpt" and current_version(folder) is not None):
            return folder
    return None


def stands_alone(folder: Path) -> bool:
    """Return whether the run in a folder has a whole checkpoint, or has finished without one."""
    checkpoints = (folder / CHECKPOINTS).glob("*.ckpt")
    if any(path.is_file() or current_version(path) is not None for path in checkpoints):
        return True
    with suppress(DataError):
        return is_finished(folder)
    return False


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has finished; raise DataError if its summary is damaged."""
    summary = folder / "summary.json"
    if not has_file(summary):
        return False
    try:
        return bool(json.loads(summary.read_bytes())["finished"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary}: cannot be read ({type(error).__name__}); was it edited?") from error


def move_aside(folder: Path, with_ids: bool) -> None:
    """Move a run's files aside; if that fails, all are back in their places. For the owner of the folder's lock."""
    _settle(folder)
    try:
        for path in files_of_run(folder, with_ids):
            _move(path, folder / _MOVING / path.relative_to(folder))
        if (folder / _MOVING).exists():
            (folder / _MOVING).rename(folder / _ASIDE)
    except BaseException:
        put_back(folder)
        raise


def put_back(folder: Path) -> None:
    """Put the run that was moved aside back in its place, and remove the files of the one that was to replace it."""
    if (folder / _ASIDE).exists():
        # a run that begins again without a checkpoint has left its ids in their places
        for path in files_of_run(folder) if stands_alone(folder / _ASIDE) else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (folder / _ASIDE).rename(folder / _MOVING)
    for entry in sorted((folder / _MOVING).glob("*")):
        within = sorted(entry.iterdir()) if entry.name == CHECKPOINTS else [entry]
        for path in within:
            _move(path, folder / path.relative_to(folder / _MOVING))
    shutil.rmtree(folder / _MOVING, ignore_errors=True)


def drop_replaced(folder: Path) -> None:
    """Remove the run that was moved aside; renamed first, as a removal that is killed leaves no half of a run."""
    if (folder / _ASIDE).exists():
        shutil.rmtree(folder / _REMOVED, ignore_errors=True)
        (folder / _ASIDE).rename(folder / _REMOVED)
    shutil.rmtree(folder / _REMOVED, ignore_errors=True)


def bring_back(folder: Path) -> None:
    """Settle the replacement that a fit has left unfinished, unless a fit is at work in the folder.

    A line is logged if the replaced run is back.
    """
    if not any(os.path.isdir(folder / name) for name in (_ASIDE, _MOVING, _REMOVED)):
        return
    lock = RunLock(folder)
    with suppress(ConfigError):  # a fit is at work, or the folder is another user's
        lock.acquire()
        try:
            _settle(folder)
        finally:
            lock.release()


def bring_back_at(path: Path) -> None:
    """Settle an unfinished replacement, see :func:`bring_back`, of a run directory, or in that of a checkpoint."""
    bring_back(run_around(path) or path)


def run_around(path: Path) -> Path | None:
    """Return the run directory that holds a checkpoint; None if it is in none."""
    return next((parent.parent for parent in path.absolute().parents if parent.name == CHECKPOINTS), None)


def _settle(folder: Path) -> None:
    is_aside, is_moving = ((folder / name).exists() for name in (_ASIDE, _MOVING))
    if not is_moving and (not is_aside or stands_alone(folder)):
        drop_replaced(folder)
    else:
        put_back(folder)
        log.warning("%s: a fit that was to replace this run ended before its first checkpoint; the run is back", folder)


def _move(path: Path, target: Path) -> None:
    make_folder(target.parent, "run_dir")
    if target.is_dir() and not target.is_symlink():  # of the new run
        shutil.rmtree(target)
    path.rename(target)
