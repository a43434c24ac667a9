"""Finished runs count again only for the settings that they have: a command that asks for others is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.names import one_line
from fedsim.parsing.config_files import read_config
from fedsim.report.run_files import end_of, limits_of
from fedsim.settings.changes import read_changes
from fedsim.settings.configuration import compare, flat, names_file, text_of
from fedsim.settings.identity import identity_of
from fedsim.sweep.local import SweepRun

REMEDY = "give another --run_dir, or remove this folder"


def refuse_changed(runs: Sequence[SweepRun]) -> set[Path]:
    """Raise ConfigError for the first finished run whose settings are not those that its command has now.

    A command of another program than ``fedsim fit`` is known by its words alone. Return the folders of runs that are to
    go on: a limit has ended them before their last round, and their commands have another one.
    """
    finished = [run for run in runs if run.summary().get("finished") and _options(run) is not None]
    going_on = set[Path]()
    if not finished:
        return going_on
    for run, answer in zip(finished, _resolved([_options(run) or [] for run in finished]), strict=True):
        if "error" in answer:
            raise ConfigError(answer["error"].removeprefix("fedsim: error: "))
        summary = run.summary()
        if difference := _difference(run.folder, summary, answer["settings"], answer["data"]):
            raise ConfigError(f"{run.folder}: is finished with {difference}; {REMEDY}")
        before, now = flat(read_config(str(run.folder / "config.yaml"))), flat(answer["settings"])
        if end_of(summary, before) and limits_of(before) != limits_of(now):
            going_on.add(run.folder)
    return going_on


def _options(run: SweepRun) -> list[str] | None:
    """Return the words of a run's command after ``fedsim fit``; None for another command."""
    words = list(run.command)
    position = words.index("fit") if "fit" in words else 0
    return words[position + 1 :] if position and Path(words[position - 1]).name == "fedsim" else None


def _resolved(commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the settings and the data of fits; another process finds them, as that needs torch."""
    with TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        process = subprocess.run(
            [sys.executable, "-m", "fedsim.cli.resolve", str(answer)],
            input=json.dumps(commands), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if process.returncode:
            raise ConfigError(f"the settings of finished runs cannot be resolved: {one_line(process.stderr)}")
        return list(json.loads(answer.read_bytes()))


def _difference(folder: Path, summary: Mapping[str, Any], config: Mapping[str, Any], data: str | None) -> str:
    """Return the first difference between a finished run and a command, for a sentence; empty without any.

    ``data``: digest of the command's data; None if they are not there. What an earlier version of fedsim did not record
    is not compared, but for the user's files and code: they are often changed.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return "settings that are not known, as it has no config.yaml"
    if changes := [change for change in read_changes(summary.get("changes", [])) if change.counts]:
        return f"settings that {changes[0]}"
    steps = config["trainer"].get("max_steps")
    if isinstance(steps, int) and 0 <= steps < summary["rounds"]:
        return f"{summary['rounds']} rounds, and the command has trainer.max_steps {steps}"
    for d in compare(flat(read_config(str(path))), flat(config)):
        if d.effect != "nothing" and not names_file(d):
            return f"{d.option} {text_of(d.old)}, and the command has {text_of(d.new)}"
    recorded, present = summary.get("identity", {}), identity_of(config)
    for content_kind in ("files", "code"):
        before, now = recorded.get(content_kind, {}), present[content_kind]
        for name in (name for name in {**before, **now} if before.get(name) != now.get(name)):
            return f"another content of {'code of ' if content_kind == 'code' else ''}{name}"
    is_other = data is not None and summary.get("data") is not None and summary["data"]["digest"] != data
    return "other data than are there now" if is_other else ""
