"""Files of settings: those of ``--settings``, and ``settings.yaml`` in a folder of generators.

The latter says what they depend on, so that no two kinds are mixed in it.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.generation.saved import is_begun
from fedsim.parsing.config_files import read_config

_FILE = "settings.yaml"
_OPTIONS = ("appearance", "networks", "losses", "training", "size", "pretrain", "seed")
"""which it holds; the other options of a call are about the call"""


def check_settings_files(args: Sequence[str]) -> None:
    """Read the files of ``--settings``: the parser does not say what is wrong with one.

    Raises:
        DataError: if one cannot be read, or is empty.
        ConfigError: if it is a config of a run.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--settings", action="append", default=[])
    for path in parser.parse_known_args(args)[0].settings:
        if Path(path).is_file() and not Path(path).read_bytes().strip():
            raise DataError(f"{path}: is empty; --settings wants options of fedsim augment fit, see configs/generators")
        if {"data", "model", "trainer"} & read_config(path).keys():
            raise ConfigError(
                f"--settings: {path} is the config of a run; give it to --config, and --settings a file of options of "
                "fedsim augment fit, see configs/generators"
            )


def keep_settings(root: Path, options: Mapping[str, Any]) -> Path:
    """Write what the generators of a folder depend on, or see that it is what is written there; return the file.

    Of several calls that begin at the same time one writes, and the others compare. ``options`` are plain values.

    Raises:
        ConfigError: if the folder was begun with other settings.
        DataError: if they are gone, but there are generators.
    """
    path, mine = root / _FILE, {name: options[name] for name in _OPTIONS}
    if not path.is_file():
        if root.is_dir() and any(is_begun(folder) for folder in root.iterdir()):
            raise DataError(f"{path}: is gone, but there are generators beside it; give another --output")
        if _write_new(path, mine):
            return path
    there, wanted = _flat(read_settings(root)), _flat(mine)
    if changed := [name for name in {**wanted, **there} if there.get(name) != wanted.get(name)]:
        raise ConfigError(
            f"--{changed[0]}: the generators of {path} have {there.get(changed[0])}; give another --output, or remove "
            "that folder"
        )
    return path


def read_settings(root: Path) -> dict[str, Any]:
    """Read what the generators of a folder depend on; raise DataError if the file is not there, or not fedsim's."""
    path = root / _FILE
    if not path.is_file():
        raise DataError(f"{path}: is not there; give --generators the folder that fedsim augment fit has written")
    found = read_config(str(path))
    if set(found) != set(_OPTIONS) or not isinstance(found["appearance"], dict):
        raise DataError(f"{path}: is not what fedsim augment fit has written; give another folder")
    return found


def _write_new(path: Path, settings: Mapping[str, Any]) -> bool:
    """Write a file, unless somebody else has just done so."""
    try:
        with replacing(path, new=True) as partial:
            partial.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    except FileExistsError:
        return False
    return True


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options that settings stand for.

    >>> _flat({"appearance": {"class_path": "SmallCNN", "init_args": {"width": 16}}, "seed": 0})
    {'appearance.class_path': 'SmallCNN', 'appearance.width': 16, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        name = "" if name == "init_args" else f".{name}"
        found |= _flat(value, prefix + name) if isinstance(value, Mapping) else {(prefix + name).lstrip("."): value}
    return found
