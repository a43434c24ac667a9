"""People and images of a row's data sets, as its paper or their owners print them, beside those of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedsim.papers.files import Config, Paper

Counts = Mapping[str, Any]
"""``train``, ``query``, ``pool``: [people, images]; ``gallery``: images; None: not known; ``by``: who prints them"""

_NAMES = {"ThreeDPeS": "3dpes"}  # class -> data set, where that is not the class in small letters
_LABELS = {"train": "training", "query": "query", "gallery": "gallery", "pool": "pool"}


def counts_of(paper: Paper, config: Config) -> dict[str, Counts]:
    """Return the counts of the data sets that the ``config`` of one of the paper's rows names; {}: not known."""
    sources = config["data"]["source"] or []
    paths = [str(source["class_path"]) for source in (sources if isinstance(sources, list) else [sources])]
    names = [_NAMES.get(last, last.lower()) for last in (path.rpartition(".")[2] for path in paths)]
    return {name: paper.content["counts"].get(name, {}) for name in names}


class DataDifferences(NamedTuple):
    """The differences between the data sets of a row and of a run, a line each."""

    differing: list[str]
    unknown: list[str]
    """numbers that the row or the run lacks"""


def data_differences(counts: Mapping[str, Counts], data: Mapping[str, Any] | None) -> DataDifferences:
    """Return a line for each data set that a run has not as the row has it, and for numbers that are not known.

    Numbers do not show a swap of query and gallery of equal sizes, nor images in the place of others; digests of two
    runs do.

    Args:
        counts: of the row: data set -> numbers; see :func:`counts_of`.
        data: ``data`` of the run's ``summary.json``, or of a file of ``fedsim test``; None: it has none.
    """
    if data is None or "sets" not in data:
        why = "has too many data sets to list" if data else "is of an earlier version"
        return DataDifferences([], [f"data: not known; the run {why}"])
    differences = DataDifferences(["data: drawn stand-ins (data.dry_run)"] if data.get("dry_run") else [], [])
    for name, row in counts.items():
        run = data["sets"].get(name)
        if run is None:
            differences.differing.append(f"{name}: the run does not have it")
        else:
            _compare_set(name, row, run, differences)
    differences.differing.extend(f"{name}: the row does not have it" for name in data["sets"] if name not in counts)
    return differences


def _compare_set(name: str, row: Counts, run: Mapping[str, Any], differences: DataDifferences) -> None:
    """Add the difference of one data set, and the names of its unknown numbers."""
    expected, present = dict(_of_row(row)), dict(_of_run(run))
    unknown = [label for label in expected if None in (expected[label], present[label])]
    if unknown or not expected:
        listed = ", ".join(unknown) or "the numbers of the row"
        differences.unknown.append(f"{name}: not known: {listed}{_source(row)}")
    differing = [label for label in expected if label not in unknown and expected[label] != present[label]]
    if differing:
        texts = [f"{present[label]:,} {label} instead of {expected[label]:,}" for label in differing]
        difference_kind = _kind(expected, present, differing)
        differences.differing.append(f"{name}: {difference_kind}: {', '.join(texts)}{_source(row)}")


def _kind(expected: Mapping[str, Any], present: Mapping[str, Any], differing: list[str]) -> str:
    query, gallery = (f"{_LABELS[role]} images" for role in ("query", "gallery"))
    if query in differing and (present[query], present[gallery]) == (expected[gallery], expected[query]):
        return "query and gallery are swapped"
    return "a part of it" if all(present[label] < expected[label] for label in differing) else "other numbers"


def _of_row(row: Counts) -> Iterator[tuple[str, int | None]]:
    """Yield the name and the value of each number that a row has, or should have."""
    for role in _LABELS:
        if role == "gallery" and role in row:
            yield f"{_LABELS[role]} images", row[role]
        elif role in row:
            yield from zip((f"{_LABELS[role]} people", f"{_LABELS[role]} images"), row[role], strict=True)


def _of_run(run: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    """Yield the name and the value of each number of a run; without a part, they are 0."""
    for role, label in _LABELS.items():
        counted = run.get(role) or {"people": 0, "images": 0}
        yield from ((f"{label} {unit}", counted[unit]) for unit in ("people", "images"))


def _source(row: Counts) -> str:
    return f" ({row['by']})" if "by" in row else ""
