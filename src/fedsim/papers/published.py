"""Published numbers, and the settings of a run that can be compared with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["ok", "impossible", "not comparable", "figure only"]
Scores = Mapping[str, Mapping[str, float]]
"""Test set -> metric under the paper's name: mAP, rank1, rank5, rank10 -> percent."""

_METHOD = "model.method.class_path"


class ComparedRun(Protocol):
    """The properties of a run that a row is compared with."""

    @property
    def seen(self) -> list[str]:
        """Test sets of the clients."""

    def setting(self, name: str) -> Any:
        """Return a setting by its dotted name, a class without its module; None if it is not set."""


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A paper's description of a test set."""

    name: str
    """the paper's"""
    status: Status = "ok"
    note: str = ""
    gallery: float = float("inf")
    """number of images"""
    one_match: bool = False
    """whether every query has exactly one match"""
    digits: int | None = None
    """decimals of its numbers; None: as in the rest of the paper"""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One method, or one setting, of a table."""

    name: str
    scores: Scores
    model: str = "global"
    """scored model: global, local, personalised, or ensemble"""
    client: str = ""
    """the client whose model alone is scored; empty: the mean over clients"""
    spread: Mapping[str, float] = field(default_factory=dict)
    """test set -> the spread printed next to its first number"""
    status: Status = "ok"
    note: str = ""
    costs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """test set -> percent of its client's weights that are finally pruned, optionally GiB that it received and sent"""
    settings: Mapping[str, Any]
    """dotted name -> value, from the paper or its authors' code"""
    alternative: Mapping[str, Any] | None = None
    """other settings that also reproduce this row"""
    clients: tuple[frozenset[str], ...]
    """alternative sets of data sets that have clients; empty: any"""

    def distance(self, run: ComparedRun) -> tuple[bool, int]:
        """Return how far a run's settings are from this row's: whether its method differs, and how many settings do."""
        is_other_method, differences = self._nearest(run)
        return is_other_method, len(differences)

    def differences(self, run: ComparedRun) -> list[str]:
        """Return a line for each difference between a run's settings and this row's."""
        return self._nearest(run)[1]

    def _nearest(self, run: ComparedRun) -> tuple[bool, list[str]]:
        """Return whether the method differs, and the differences, for the alternative with the fewest differences."""
        choices = [self.settings] if self.alternative is None else [self.settings, self.alternative]
        methods = (None, run.setting(_METHOD))
        candidates = [(settings.get(_METHOD) not in methods, self._differences(settings, run)) for settings in choices]
        return min(candidates, key=lambda choice: (choice[0], len(choice[1])))

    def _differences(self, settings: Mapping[str, Any], run: ComparedRun) -> list[str]:
        wrong = [name for name, value in settings.items() if run.setting(name) != value]
        differences = [
            f"{name} {_text(run.setting(name))} (published: {_text(settings[name])})"
            for name in wrong
            if f"{name.partition('.init_args.')[0]}.class_path" not in wrong or name.endswith(".class_path")
        ]
        if self.clients and frozenset(run.seen) not in self.clients:
            published = min(self.clients, key=lambda sets: len(sets ^ set(run.seen)))
            missing, extra = sorted(published - set(run.seen)), sorted(set(run.seen) - published)
            differences += [f"no client {', '.join(missing)}"] if missing else []
            differences += [f"additional clients: {', '.join(extra)}"] if extra else []
        return differences


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a paper."""

    name: str
    title: str
    notes: tuple[str, ...]
    rows: tuple[TableRow, ...]
    digits: int
    """decimals, as printed"""

    @property
    def test_sets(self) -> list[str]:
        """The test sets in their order in the table."""
        return list(dict.fromkeys(name for row in self.rows for name in row.scores))

    @property
    def metrics(self) -> set[str]:
        """The metrics of at least one row."""
        return {metric for row in self.rows for scores in row.scores.values() for metric in scores}


def table_of(name: str, content: Mapping[str, Any]) -> Table:
    """Read a table from the content of a paper's file."""
    table = content["tables"][name]
    columns = table.get("columns", content["columns"])
    base: Scores = {}
    if "add" in table:
        added = content["tables"][table["add"]["table"]]
        row = next(row for row in added["rows"] if row["name"] == table["add"]["row"])
        base = _scores(row, added.get("columns", content["columns"]), {})
    common = {**content["settings"], **table.get("settings", {})}
    rows = []
    for row in table["rows"]:
        clients = row.get("clients", table.get("clients", content["clients"]))
        read = {
            "scores": _scores(row, columns, base),
            "settings": {**common, **row.get("settings", {})},
            "alternative": {**common, **row["alternative"]} if "alternative" in row else None,
            "clients": () if clients == "any" else tuple(frozenset(sets) for sets in clients),
        }
        rows.append(TableRow(**row | read))
    digits = table.get("digits", content["digits"])
    return Table(name=name, title=table["title"], notes=tuple(table.get("notes", ())), rows=tuple(rows), digits=digits)


def _scores(row: Mapping[str, Any], columns: list[str], base: Scores) -> Scores:
    return {
        name: {
            m: value + base.get(name, {}).get(m, 0.0)
            for m, value in zip(columns, values, strict=True)
            if value is not None
        }
        for name, values in row.get("scores", {}).items()
    }


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
