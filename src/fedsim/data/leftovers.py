"""The files of a data set's folders that are not read, each with the reason: no image goes missing without a word."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedsim.core.errors import DataError
from fedsim.core.paths import suffix_of

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"}

IGNORABLE = "ignorable (of the system or another program)"
BY_PROTOCOL = "left out by the data set's rules (junk, or not listed)"
_NESTED, _LINKED = "in sub-folders", "linked sub-folders"
_FOLDER = "folders with a suffix of images"
_UNKNOWN, _NONE = "with another suffix than " + ", ".join(sorted(SUFFIXES)), "without a suffix"
_CLOSED = "folders that cannot be listed"

_RUBBISH = {
    "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "__macosx", "@eadir", "#recycle", "$recycle.bin",
    "system volume information", "lost+found", "icon\r", "__pycache__", "picasa.ini",
}  # fmt: skip
_SHOWN = 3  # names in a message, per reason


class LeftOut(NamedTuple):
    """A file, or a folder as a whole, that is not read."""

    path: Path
    reason: str


def is_rubbish(name: str) -> bool:
    """Whether a name is of a file or folder that systems and other programs leave beside images.

    >>> [is_rubbish(name) for name in ("._0001_c1.jpg", "__MACOSX", "Thumbs.db", ".ipynb_checkpoints", "0001_c1.jpg")]
    [True, True, True, True, False]
    """
    lower = name.lower()
    return name.startswith((".", "~$")) or lower in _RUBBISH or lower.endswith(":zone.identifier")


def has_image_suffix(name: str) -> bool:
    """Whether a name ends like those of images that are read."""
    return suffix_of(name) in SUFFIXES


def image_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are read, sorted by name; raise DataError if it cannot be listed."""
    # a broken link is a file that cannot be read, not one that is not there
    return [folder / name for name, is_folder in _entries(folder) if has_image_suffix(name) and not is_folder]


def sub_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without rubbish; raise DataError if it cannot be listed."""
    return [folder / name for name, is_folder in _entries(folder) if is_folder]


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """Return names and whether they are folders, sorted, without rubbish."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry.name, _is_folder(entry)) for entry in entries if not is_rubbish(entry.name))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); give yourself the right to read it") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one; a link into a folder that may not be entered is none."""
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def left_out_in(folder: Path, read: Container[str], is_deep: bool = False) -> Iterator[LeftOut]:
    """Yield the files of a folder and its sub-folders that are not in ``read``, and folders that are left out.

    ``is_deep``: sub-folders are read, too, whatever their names.
    """
    closed: list[Path] = []
    for parent, folders, names in _walk(folder, closed):
        below = Path(parent)
        kept = []
        for name in sorted(folders):
            if (reason := _reason_of_folder(below / name)) and not (is_deep and reason == _FOLDER):
                yield LeftOut(below / name, reason)
            if not is_rubbish(name):
                kept.append(name)
        folders[:] = kept
        start = str(below / "_")[:-1]  # a path takes long to make
        for name in sorted(names):
            if start + name not in read:
                yield LeftOut(below / name, _reason_of_file(name, is_nested=below != folder and not is_deep))
    yield from (LeftOut(path, _CLOSED) for path in closed)


def _walk(folder: Path, closed: list[Path]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield parent, folders and files as os.walk; folders that may not be listed or entered are added to ``closed``."""
    for parent, folders, names in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename))):
        if os.access(parent, os.X_OK):
            yield parent, folders, names
        else:
            closed.append(Path(parent))
            folders.clear()


def left_out_beside(paths: Sequence[Path]) -> list[LeftOut]:
    """Return the other files in the folders of these files, and folders that are left out."""
    read = set(map(str, paths))
    folders = [Path(folder) for folder in sorted(set(map(os.path.dirname, read))) if os.path.isdir(folder)]
    items = {item for folder in folders for item in left_out_in(folder, read)}  # a folder may be in another one
    return sorted(items)


def images_outside(folder: Path, parts: Container[str]) -> Iterator[Path]:
    """Yield the images in a folder and its sub-folders, but not those in the sub-folders ``parts``."""
    for parent, folders, names in _walk(folder, []):
        is_top = Path(parent) == folder
        folders[:] = sorted(n for n in folders if not is_rubbish(n) and not (is_top and n in parts))
        yield from (Path(parent, n) for n in sorted(names) if has_image_suffix(n) and not is_rubbish(n))


def summary(items: Sequence[LeftOut]) -> str:
    """Return counts, reasons and the first names; empty if there are no items.

    >>> summary([LeftOut(Path("query/a"), "without a suffix"), LeftOut(Path("query/b"), "without a suffix")])
    '2 without a suffix (query/a, query/b)'
    """
    by_reason: dict[str, list[Path]] = {}
    for path, reason in items:
        by_reason.setdefault(reason, []).append(path)
    parts = []
    for reason in sorted(by_reason, key=lambda reason: (reason in (BY_PROTOCOL, IGNORABLE), reason)):
        paths = by_reason[reason]
        names = ", ".join("/".join(path.parts[-2:]) for path in paths[:_SHOWN])
        more = ", ..." if len(paths) > _SHOWN else ""
        parts.append(f"{len(paths):,} {reason} ({names}{more})")
    return "; ".join(parts)


def _reason_of_folder(path: Path) -> str | None:
    """Return why a folder as a whole is named; None if it is enough to name its files."""
    if is_rubbish(path.name):
        return IGNORABLE
    if path.is_symlink():
        return _LINKED  # links are not followed: they may lead in a circle
    return _FOLDER if has_image_suffix(path.name) else None


def _reason_of_file(name: str, is_nested: bool) -> str:
    if is_rubbish(name):
        return IGNORABLE
    if is_nested:
        return _NESTED
    if has_image_suffix(name):
        return BY_PROTOCOL
    return _UNKNOWN if os.path.splitext(name)[1] else _NONE
