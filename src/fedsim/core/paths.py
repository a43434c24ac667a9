"""Paths that users give: each kind of path has one check, for all commands, options and functions."""

from __future__ import annotations

import os
import re
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import problem_of_folder
from fedsim.core.names import check_filled, check_name, check_text, one_line
from fedsim.core.readable import Holds, problem_of_kind, problem_of_reading
from fedsim.core.replaced_run import bring_back_at, run_with


def expanded(value: object, setting: str) -> str:
    """Return a path with ``~`` and ``$VARIABLES`` replaced: libraries replace some of them, each others.

    Raises:
        ConfigError: if it is empty or no path, or names a user or a variable that is not there; the message names the
            ``setting``.

    >>> expanded("runs/a", "run_dir")
    'runs/a'
    """
    if not isinstance(value, str | os.PathLike) or "\0" in (raw_path := os.fsdecode(value)):
        raise ConfigError(f"{setting}: {one_line(repr(value), 80)} is no path; name a file or folder")
    for names in re.findall(r"\$(?:(\w+)|\{([^}]*)\})", raw_path):
        if (name := "".join(names)) not in os.environ:
            raise ConfigError(
                f"{setting}: {raw_path} names the variable {name}, which is not set; set it, or write the path"
            )
    path = os.path.expanduser(os.path.expandvars(raw_path))
    check_filled(path, setting, "name a file or folder, or leave it out")
    if path.startswith("~") and not os.path.lexists(path):
        raise ConfigError(
            f"{setting}: {path} is in the home of a user who is not known here; write the path, or ./{path}"
        )
    return path


def given_path(value: object, setting: str) -> Path:
    """Return the path that a setting means, absolute: a config may be used in another folder than it was made for.

    Errors are those of :func:`expanded`.

    >>> given_path("~/data", "data.source.root").is_absolute(), given_path("data", "data.source.root").is_absolute()
    (True, True)
    """
    return Path(expanded(value, setting)).absolute()


def run_folder(value: object, setting: str) -> Path:
    """Return the folder of a new run or search; raise ConfigError if no config can hold it, and as `expanded`."""
    path = expanded(value, setting)
    check_text(path, setting)
    _check_new_name(path, setting)
    return Path(path)


def _check_new_name(path: str, setting: str) -> None:
    """Refuse a name for results with signs that no terminal shows. Of other bytes than UTF-8, a config is the limit."""
    name = os.path.basename(os.path.abspath(path)) or "root"
    check_name(re.sub("[\ud800-\udfff]", "_", name), setting, "choose another name")


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix by which a file's kind is chosen: MODEL.ONNX is of the kind of model.onnx.

    >>> suffix_of("MODEL.ONNX")
    '.onnx'
    """
    return os.path.splitext(path)[1].lower()


@dataclass(frozen=True)
class PathKind:
    """A kind of path, with its checks; it annotates arguments of :func:`fedsim.core.checked.checked`."""

    holds: Holds
    is_written: bool = False
    suffixes: tuple[str, ...] = ()
    """those that the writer has; empty: any"""
    is_new: bool = False
    """whether the file must not be there yet"""
    is_read_later: bool = False
    """whether a reader with better advice checks it"""
    arrays: tuple[str, ...] = ()
    """those of the npz file that is written"""

    def check(self, value: Any, name: str, remedy: str = "name another") -> Any:
        """Return a path as text, or all of a list, with ``~`` replaced; ``name``: of the option, for messages.

        Raises:
            ConfigError: see :func:`expanded`.
            DataError: if there is no such file or folder, or it cannot be read, or written.
        """
        if isinstance(value, list):
            return [self.check(part, name, remedy) for part in value]
        if self.is_read_later:
            return value
        path = expanded(value, name)
        if self.is_written:
            _check_new_name(path, name)
        if self.holds == RUN.holds:
            bring_back_at(Path(path))
        if problem := self._problem_of(Path(path)):
            raise DataError(f"{name}: {os.path.abspath(path)} {problem}; {remedy}")
        return path

    def _problem_of(self, path: Path) -> str:
        return self._problem_written(path) if self.is_written else problem_of_reading(path, self.holds)

    def _problem_replaced(self, path: Path) -> str:
        """Return why a file that is there cannot be replaced; empty if it can."""
        if self.is_new:
            return "exists already, and this command replaces no file"
        if (run := run_with(path)) is not None:
            return f"is a file of {run}, which no other command replaces"
        if held := self._other_arrays(path):
            return f"holds other results ({one_line(', '.join(held), 60)}), not {', '.join(self.arrays)}"
        return "" if os.access(path, os.W_OK) else "cannot be written (Permission denied)"

    def _other_arrays(self, path: Path) -> list[str]:
        """Return the arrays of an npz file if they are not those to write."""
        names = list[str]()
        if self.arrays and zipfile.is_zipfile(path):
            with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as file:  # a damaged one can be replaced
                names = [name.removesuffix(".npy") for name in file.namelist()]
        return names if set(names) != set(self.arrays) else []

    def _problem_written(self, path: Path) -> str:
        """Return why a path cannot be written; empty if it can."""
        if self.holds == "folder":
            return problem_of_folder(path)
        try:
            if problem := problem_of_kind(os.stat(path).st_mode, self.holds):
                return problem
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            return f"cannot be written ({error.strerror})"
        else:
            if problem := self._problem_replaced(path):
                return problem
        if self.suffixes and suffix_of(path) not in self.suffixes:
            return f"ends with {path.suffix or 'no suffix'}, not with one of {', '.join(self.suffixes)}"
        problem = problem_of_folder(path.parent)
        return problem and f"cannot be written ({path.parent} {problem})"


_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".pdf")
_FIGURES = (".eps", ".jpeg", ".jpg", ".pdf", ".pgf", ".png", ".ps", ".svg", ".svgz", ".tif", ".tiff", ".webp")

FILE, FOLDER, RUN = PathKind("file"), PathKind("folder"), PathKind("checkpoint or run directory")
OUTPUT_FOLDER = PathKind("folder", is_written=True)
PAGE = PathKind("file", is_written=True, suffixes=(".html", ".htm"))
IMAGE_FEATURES = PathKind("file", is_written=True, suffixes=(".npz",), arrays=("features", "files"))
MODEL = PathKind("file", is_written=True, suffixes=(".safetensors", ".onnx"))

Config = Annotated[str | list[str], PathKind("file", is_read_later=True)]
InputFile = Annotated[str, PathKind("file")]
InputFolder = Annotated[str, PathKind("folder")]
Saved = Annotated[str | os.PathLike[str], PathKind("checkpoint or run directory")]
"""a run directory, or a checkpoint"""
SavedRun = Annotated[str, PathKind("checkpoint or run directory")]
OutputFolder = Annotated[str, OUTPUT_FOLDER]
Picture = Annotated[str, PathKind("file", is_written=True, suffixes=_IMAGES)]
NewPicture = Annotated[str, PathKind("file", is_written=True, is_new=True, suffixes=_IMAGES)]
Figure = Annotated[str, PathKind("file", is_written=True, suffixes=_FIGURES)]
Page = Annotated[str, PAGE]
ImageFeatures = Annotated[str, IMAGE_FEATURES]
RankedLists = Annotated[
    str, PathKind("file", is_written=True, suffixes=(".npz",), arrays=("index", "similarity", "is_match"))
]
Table = Annotated[str, PathKind("file", is_written=True, suffixes=(".csv",))]
Settings = Annotated[str, PathKind("file", is_written=True, is_new=True, suffixes=(".yaml", ".yml", ".json"))]
Model = Annotated[str, MODEL]
