"""Published numbers, and the runs that can be compared with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Status = Literal["ok", "impossible", "not comparable", "figure only"]
Scores = Mapping[str, Mapping[str, float]]
"""Test set -> metric under the paper's name: mAP, rank1, rank5, rank10 -> percent."""


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A paper's description of a test set."""

    name: str
    """the paper's"""
    status: Status = "ok"
    note: str = ""
    metric: str = "rank1"
    """fedsim's name of the metric that the paper's first column is: top1 for a classifier"""
    gallery: float = float("inf")
    """number of images"""
    one_match: bool = False
    """whether every query has exactly one match"""
    digits: int | None = None
    """decimals of its numbers; None: as in the rest of the paper"""

    @property
    def remark(self) -> str:
        """The text of its footnote; empty without one."""
        return self.note if self.status == "ok" else f"{self.status}: {self.note}"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One method, or one setting, of a table."""

    name: str
    scores: Scores
    runs: tuple[str, ...] = ()
    """the paper's rows, or those of others (PAPER/ROW), that are this experiment; empty: another's method"""
    model: str = "global"
    """scored model: global, local, personalised, or ensemble"""
    client: str = ""
    """the client whose model alone is scored; empty: the mean over clients"""
    spread: Mapping[str, float] = field(default_factory=dict)
    """test set -> the spread printed next to its first number"""
    status: Status = "ok"
    note: str = ""
    copied: Mapping[str, str] | None = None
    """whose the numbers are if the paper copied them (``from``), and what is known of their settings (``known``)"""
    costs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """test set -> percent of its client's weights that are finally pruned, optionally GiB that it received and sent"""
    single: Mapping[str, str] = field(default_factory=dict)
    """of a table with ``left_out``: left-out data set -> the client whose model alone is scored"""
    mean: tuple[float, ...] = ()
    """the mean over the data sets, if it is printed: a number per metric"""
    clients: tuple[frozenset[str], ...]
    """alternative sets of data sets that have clients; empty: any"""

    @property
    def remark(self) -> str:
        """The text of its footnote; empty without one."""
        origin = "copied from {from}; known of its settings: {known}".format_map(self.copied) if self.copied else ""
        footnote = "; ".join(part for part in (origin, self.note) if part)
        return footnote if self.status == "ok" else f"{self.status}: {footnote}"


class Footnotes(dict[str, int]):
    """Text of a footnote -> its number."""

    def mark(self, entry: TableRow | TestSet) -> str:
        """Return the mark of the footnote with an entry's remark; empty without one."""
        return f" [{self.setdefault(entry.remark, len(self) + 1)}]" if entry.remark else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a paper."""

    name: str
    title: str
    notes: tuple[str, ...]
    rows: tuple[TableRow, ...]
    digits: int
    """decimals, as printed"""
    left_out: bool = False
    """whether each column is a run of its own, which leaves that data set out"""

    @property
    def test_sets(self) -> list[str]:
        """The test sets in their order in the table."""
        return list(dict.fromkeys(name for row in self.rows for name in row.scores))

    @property
    def metrics(self) -> set[str]:
        """The metrics of at least one row."""
        return {metric for row in self.rows for scores in row.scores.values() for metric in scores}


def table_of(
    name: str, content: Mapping[str, Any], rotations: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> Table:
    """Read a table from the content of a paper's file; for ``rotations`` see :class:`fedsim.papers.files.Paper`."""
    table = content["tables"][name]
    columns = table.get("columns", content["columns"])
    base: Scores = {}
    if "add" in table:
        added = content["tables"][table["add"]["table"]]
        row = next(row for row in added["rows"] if row["name"] == table["add"]["row"])
        base = _scores(row, added.get("columns", content["columns"]), {})
    metrics = {test_set: entry.get("metric", "rank1") for test_set, entry in content["test_sets"].items()}
    rows = []
    for row in table["rows"]:
        clients = row.get("clients", table.get("clients", content["clients"]))
        runs = row.get("run", [])
        read = {
            "scores": _with_metrics(_scores(row, columns, base), metrics),
            "runs": tuple(_runs([runs] if isinstance(runs, str) else runs, rotations)),
            "mean": tuple(row.get("mean", ())),
            "clients": () if clients == "any" else tuple(frozenset(sets) for sets in clients),
        }
        rows.append(TableRow(**{name: value for name, value in row.items() if name != "run"} | read))
    digits = table.get("digits", content["digits"])
    notes, left_out = tuple(table.get("notes", ())), table.get("left_out", False)
    return Table(name=name, title=table["title"], notes=notes, rows=tuple(rows), digits=digits, left_out=left_out)


def _runs(names: Sequence[str], rotations: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the rows of the paper that are a printed row: of a rotation, one per left-out data set."""
    return [run for name in names for run in rotations.get(name, {"": name}).values()]


def _scores(row: Mapping[str, Any], columns: list[str], base: Scores) -> Scores:
    return {
        name: {
            m: value + base.get(name, {}).get(m, 0.0)
            for m, value in zip(columns, values, strict=True)
            if value is not None
        }
        for name, values in row.get("scores", {}).items()
    }


def _with_metrics(scores: Scores, metrics: Mapping[str, str]) -> Scores:
    """Return scores with the test sets' own names in place of rank1."""
    return {
        name: {metrics[name] if metric == "rank1" else metric: value for metric, value in of_set.items()}
        for name, of_set in scores.items()
    }
