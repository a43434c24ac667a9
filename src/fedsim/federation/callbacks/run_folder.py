"""The files of a run in its directory when another fit continues or replaces it: all changes, or none."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics_rows import METRICS_FILE, metrics_files
from fedsim.core.run_lock import WAYS
from fedsim.federation.callbacks.summary import QUERIES_FILE
from fedsim.federation.callbacks.tracking import MLFLOW_ID_FILE, RUN_ID_FILE
from fedsim.strategy.run_checkpoints import CHECKPOINTS, checkpoint_named

TESTS = "tests"
"""Folder with the scores of fedsim test: one file per checkpoint."""
_ASIDE = "replaced-"  # begin of the name of a folder with a run that is about to be removed


@dataclass(frozen=True)
class FolderStart:
    """How a fit begins in a run directory."""

    folder: Path
    overwrite: bool = False
    """replace a run in the folder"""
    ckpt_path: str | None = None
    """the checkpoint from which the fit continues"""
    rounds: int = 0
    """those of the checkpoint"""
    restart: bool = False
    """a run that was to be continued, but has no checkpoint, begins again unless it is finished"""
    ways: str = WAYS
    """the remedy in the message about a folder that is not free"""

    @property
    def continues(self) -> bool:
        """Whether the checkpoint is one of the run in the folder."""
        return self.ckpt_path is not None and self.folder.resolve() in Path(self.ckpt_path).resolve().parents

    def check_free(self) -> None:
        """Raise ConfigError if the folder holds a run that the fit neither continues nor replaces."""
        summary = self.folder / "summary.json"
        if self.overwrite or not os.path.isdir(self.folder) or self.continues:
            return
        if summary.exists():
            if self.restart and not _is_finished(summary):
                return
        elif self.restart or checkpoint_named(self.folder, "last") is None:
            return
        raise ConfigError(f"run_dir: {self.folder} holds a run already; {self.ways}")

    def prepare(self, begin: Callable[[], None] = lambda: None) -> None:
        """Make room for the fit, and let it ``begin``; call it on the first rank only.

        A checkpoint in the folder continues its run, and ``begin`` may change its files of metrics. Otherwise
        ``overwrite`` replaces a run in the folder; files of two runs are never mixed. The older run is moved aside, and
        removed after ``begin``; if that fails, everything is back in its place.

        Raises:
            ConfigError: if the folder holds a run that is neither continued nor replaced.
        """
        self.check_free()
        aside = self.folder / f"{_ASIDE}{secrets.token_hex(4)}.tmp"
        if self.continues:
            with _copied([(path, aside / path.name) for path in metrics_files(self.folder)]):
                begin()
        else:
            # a fit that begins again is still the same run of W&B or MLflow
            ids = () if self.restart and not self.overwrite else (RUN_ID_FILE, MLFLOW_ID_FILE)
            files = enumerate(_files_of_run(self.folder, ids))
            with _moved([(path, aside / f"{i}-{path.name}") for i, path in files]):
                begin()
        for leftover in self.folder.glob(f"{_ASIDE}*.tmp"):  # also of a killed fit
            shutil.rmtree(leftover, ignore_errors=True)


def _is_finished(summary: Path) -> bool:
    try:
        return bool(json.loads(summary.read_bytes())["finished"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary}: cannot be read ({type(error).__name__}); was it edited?") from error


def _files_of_run(folder: Path, ids: Sequence[str]) -> Iterator[Path]:
    """Yield the files and folders of a run, and the files of ``ids``; the summary, which marks a run, is the last."""
    summary, checkpoints = folder / "summary.json", [*(folder / CHECKPOINTS).glob("*.ckpt*")]
    is_run = summary.exists() or bool(checkpoints)  # else folders of these names are the user's
    names = (*ids, *((QUERIES_FILE, "features", "rankings", "maps", TESTS) if is_run else ()))
    metrics = metrics_files(folder) if is_run else folder.glob(METRICS_FILE)
    paths = [*metrics, *(folder / name for name in names), *checkpoints, summary]
    return (path for path in paths if os.path.lexists(path))


@contextmanager
def _copied(copies: Iterable[tuple[Path, Path]]) -> Iterator[None]:
    """Copy files for a block; if it fails, the copies are put back."""
    with ExitStack() as back:
        for source, target in copies:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
            back.callback(_move_back, target, source)
        yield
        back.pop_all()


@contextmanager
def _moved(moves: Iterable[tuple[Path, Path]]) -> Iterator[None]:
    """Move files and folders for a block; move them back if it fails."""
    with ExitStack() as back:
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            back.callback(_move_back, target, source)
        yield
        back.pop_all()


def _move_back(moved: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():  # of the new run
        shutil.rmtree(place, ignore_errors=True)
    moved.replace(place)
    with suppress(OSError):  # other things are in it, too
        moved.parent.rmdir()
