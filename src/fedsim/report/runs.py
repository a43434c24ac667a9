"""What ``fedsim fit`` has left in its run directories, and runs that differ in the seed only."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.config_files import read_config
from fedsim.core.errors import ConfigError, DataError
from fedsim.report.rules import Rule
from fedsim.run_directory import metrics_files

__all__ = ["KINDS", "METRICS", "Group", "Run", "group_runs", "read_run"]

METRICS = ("mAP", "mAP_trapezoid", "mINP", "rank1", "rank5", "rank10", "top1")
KINDS = ("global", "local", "personalised", "ensemble")


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory. Files are read on first use."""

    folder: Path
    summary: dict[str, Any]
    """content of summary.json"""

    @cached_property
    def log(self) -> dict[int, dict[str, float]]:
        """Round, from 1 -> what was logged in it: training, bytes, and scores (fractions of 1) where it was evaluated.

        A round that a continued run did again counts once, as it was done last.

        Raises:
            DataError: if there is no log, or it cannot be read.
        """
        paths = metrics_files(self.folder)
        if not paths:
            raise DataError(f"{self.folder}: holds no metrics.csv; was the run started with another logger only?")
        rounds: dict[int, dict[str, float]] = {}
        for path in paths:
            try:
                with path.open(newline="") as file:
                    for row in csv.DictReader(file):
                        numbers = {name: float(value) for name, value in row.items() if value}
                        rounds.setdefault(int(row["epoch"]) + 1, {}).update(numbers)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}: is no log of fedsim fit ({error}); was it edited?") from error
        return dict(sorted(rounds.items()))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved settings; empty for runs that were not started by the command line."""
        path = self.folder / "config.yaml"
        return read_config(str(path)) if path.is_file() else {}

    @property
    def primary(self) -> str:
        """The kind of model that the method delivers."""
        return str(self.summary["primary"])

    @property
    def unseen(self) -> set[str]:
        """Test sets on which nobody trained."""
        return set(self.summary["unseen"])

    @property
    def test_sets(self) -> list[str]:
        """Names of all test sets of the last evaluation, and ``seen`` and ``unseen``, the means over them."""
        keys = (self.summary["final"] or {}).get("metrics", {})
        return list(dict.fromkeys(key.split("/")[2] for key in keys if key.startswith("test/") and key.count("/") == 3))

    @property
    def seen(self) -> list[str]:
        """Test sets of those who trained."""
        return [name for name in self.test_sets if name not in (*self.unseen, "seen", "unseen")]

    @property
    def classifies(self) -> bool:
        """Whether the run was scored by top-1 accuracy, not by retrieval."""
        return any(key.endswith("/top1") for key in (self.summary["final"] or {}).get("metrics", {}))

    def setting(self, name: str) -> Any:
        """Return a setting by its dotted name, classes by their last name; None where it is not set."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found.rpartition(".")[2] if name.endswith("class_path") and isinstance(found, str) else found


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one configuration, one per seed."""

    label: str
    runs: tuple[Run, ...]

    def values(self, key: str, rule: Rule) -> NDArray[np.float64]:
        """Return one score of each run, fractions of 1; runs without it are missing."""
        scores = [rule.scores(run).get(key) for run in self.runs]
        return np.array([score for score in scores if score is not None])

    def kinds(self, rule: Rule) -> list[str]:
        """Return the models; local ones are left out where another has the same scores (Local, Centralised)."""
        metrics = rule.scores(self.runs[0])
        scores = {
            kind: {k.split("/", 2)[2]: v for k, v in metrics.items() if k.startswith(f"test/{kind}/")} for kind in KINDS
        }
        others = [scores["global"].items(), scores["personalised"].items()]
        repeats = any(scores["local"].items() <= other for other in others)
        return [kind for kind in KINDS if scores[kind] and not (kind == "local" and repeats)]


def read_run(folder: Path) -> Run:
    """Open a run directory.

    Raises:
        DataError: if it is none.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(f"{folder}: holds no summary.json; give the run directories of fedsim fit")
    try:
        return Run(folder, json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: is no JSON ({error}); was it edited?") from error


def group_runs(folders: list[Path]) -> list[Group]:
    """Open run directories and put runs together that differ in the seed only."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    by_config: dict[str, list[Run]] = {}
    for folder in folders:
        run = read_run(folder)
        by_config.setdefault(run.summary["fingerprint"], []).append(run)
    groups: list[Group] = []
    for runs in by_config.values():
        first = runs[0]
        method = "Centralised" if first.summary["clients"] == ["union"] else str(first.summary["method"])
        taken = method in {group.label for group in groups}
        groups.append(Group(f"{method} {first.folder.name}" if taken else method, tuple(runs)))
    return groups
