"""Finished runs count again only for the settings that they have: a command that asks for others is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.names import one_line
from fedsim.parsing.config_files import read_config
from fedsim.settings.configuration import compare, flat, text_of
from fedsim.settings.identity import changed_content, identity_of
from fedsim.sweep.local import SweepRun

_REMEDY = "give another --run_dir, or remove this folder"


def refuse_changed(runs: Sequence[SweepRun]) -> None:
    """Raise ConfigError for the first finished run whose settings are not those that its command has now.

    A command of another program than ``fedsim fit`` is known by its words alone.
    """
    finished = [run for run in runs if run.summary().get("finished") and _options(run) is not None]
    if not finished:
        return
    for run, config in zip(finished, _resolved([_options(run) or [] for run in finished]), strict=True):
        if isinstance(config, str):
            raise ConfigError(config.removeprefix("fedsim: error: "))
        if difference := _difference(run.folder, run.summary(), config):
            raise ConfigError(f"{run.folder}: is finished with {difference}; {_REMEDY}")


def _options(run: SweepRun) -> list[str] | None:
    """Return the words of a run's command after ``fedsim fit``; None for another command."""
    words = list(run.command)
    place = words.index("fit") if "fit" in words else 0
    return words[place + 1 :] if place and Path(words[place - 1]).name == "fedsim" else None


def _resolved(commands: Sequence[Sequence[str]]) -> list[Any]:
    """Return the settings of fits; another process parses them, as that needs torch."""
    process = subprocess.run(
        [sys.executable, "-m", "fedsim.cli.resolve"], input=json.dumps(commands), capture_output=True, text=True
    )
    if process.returncode:
        raise ConfigError(f"the settings of finished runs cannot be resolved: {one_line(process.stderr)}")
    return list(json.loads(process.stdout))


def _difference(folder: Path, summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the first difference between a finished run and a config, for a sentence; empty without any."""
    path = folder / "config.yaml"
    if not path.is_file():
        return "settings that are not known, as it has no config.yaml"
    for d in compare(flat(read_config(str(path))), flat(config)):
        if d.effect != "nothing" and not d.setting.facts.is_file:
            return f"{d.option} {text_of(d.old)}, and the command has {text_of(d.new)}"
    for name in changed_content(summary.get("identity", {}), identity_of(config)):
        return f"another content of {name}"
    return ""
