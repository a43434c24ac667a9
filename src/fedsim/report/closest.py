"""The printed row, and the paper's run, that runs are closest to, and the verdict whether they are that row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args

from fedsim.papers.counts import DataDifferences, counts_of, data_differences
from fedsim.papers.files import Paper, read_paper
from fedsim.papers.published import Table, TableRow
from fedsim.papers.resolved_rows import find_run, resolved_row
from fedsim.report.runs import Run
from fedsim.settings.configuration import Difference, compare, flat, names_file, text_of
from fedsim.settings.effects import Flat
from fedsim.settings.facts import Group

_LONGEST = 100
"""characters of a value"""


class Match(NamedTuple):
    """A printed row of a method, the paper's run of it, and how the runs of a group differ from it."""

    row: TableRow
    name: str
    """of the paper's run: PAPER/ROW"""
    differences: tuple[Difference, ...]
    """of settings, of any of the runs; old values are the row's"""
    clients: tuple[str, ...]
    """differences of the clients"""
    data: DataDifferences
    """of people and images of the data sets"""
    titles: tuple[str, ...]
    """the printed rows of that run in the table, at least this one"""

    @property
    def counted(self) -> list[Difference]:
        """The differences that change results."""
        return [difference for difference in self.differences if difference.effect == "results"]

    @property
    def distance(self) -> int:
        """The number of differences that change results."""
        return len(self.counted) + len(self.clients) + len(self.data.differing)

    def lines(self, label: str, runs: Sequence[Run]) -> Iterator[str]:
        """Yield the verdict on the runs with this label: is the row, differs from it, or cannot be certified."""
        doubts = [*dict.fromkeys(f"{run.folder} {doubt}" for run in runs for doubt in run.doubts), *self.data.unknown]
        titles = " and ".join(f"'{title}'" for title in self.titles)
        if self.distance:
            yield f"- {label} is closest to {titles} ({self.name}); settings that differ: {self.distance}"
            yield from (f"    {line}" for line in self._by_group())
        elif doubts:
            yield f"- {label} cannot be certified as {titles} ({self.name})"
        else:
            yield f"- {label} has all settings of {titles} ({self.name})"
        yield from (f"    {doubt}" for doubt in doubts)
        harmless = (("seconds", "changes simulated seconds alone"), ("rounding", "changes rounding alone"))
        for effect, title in (*harmless, ("nothing", "cannot change a number here")):
            if texts := [_text(d) for d in self.differences if d.effect == effect]:
                yield f"    {title}: {'; '.join(texts)}"

    def _by_group(self) -> Iterator[str]:
        for group in get_args(Group):
            texts = [_text(difference) for difference in self.counted if difference.group == group]
            if texts := [*texts, *((*self.clients, *self.data.differing) if group == "data" else ())]:
                yield f"{group}: {'; '.join(texts)}"


def closest_row(paper: Paper, table: Table, runs: Sequence[Run]) -> Match | None:
    """Return the printed row with scores that has a run of the same method with the fewest differences.

    In a table of left-out data sets, these are runs that leave out the same one. None: no row of the table is of this
    method, or the runs' settings are not known.

    Args:
        paper: the paper.
        table: one of its tables.
        runs: the runs of one group: the differences of each count.
    """
    first = runs[0]
    matches = [
        _match(row, of_paper, name, runs)
        for row in table.rows
        if row.scores and first.config
        for of_paper, name in (find_run(paper, run) for run in row.runs)
        if method_of(settings := settings_of_row(of_paper.key, name)) == method_of(first.settings)
        if not table.left_out or settings["data.unseen"].value == first.setting("data.unseen")
    ]
    if not matches:
        return None
    closest = min(matches, key=lambda match: match.distance)
    return closest._replace(titles=tuple(match.row.name for match in matches if match.name == closest.name))


def verdict_lines(label: str, runs: Sequence[Run], match: Match | None, is_tested: bool) -> Iterator[str]:
    """Yield the verdict on a group's runs beside a table; ``is_tested``: its scores are those of ``fedsim test``."""
    if not runs[0].config:
        yield f"- {label.rstrip(',')}: no row can be closest to it, because its settings are not known"
    elif match is None:
        yield f"- {label.rstrip(',')}: no row of this table is of this method"
    else:
        yield from (as_tested(match, runs) if is_tested else match).lines(label, runs)


def _match(row: TableRow, paper: Paper, name: str, runs: Sequence[Run]) -> Match:
    settings = settings_of_row(paper.key, name)
    clients = tuple(dict.fromkeys(difference for run in runs for difference in _clients(row, run, settings)))
    data = DataDifferences([], []) if clients else _data_differences(paper, name, runs)
    files = [option for option, entry in settings.items() if names_file(entry)]
    data.unknown.extend(f"{option}: the content of the row's file is not known" for option in files)
    return Match(row, f"{paper.key}/{name}", differences_from(settings, runs), clients, data, (row.name,))


def _data_differences(paper: Paper, name: str, runs: Sequence[Run]) -> DataDifferences:
    """Return the differences between the data sets of a row and those of any of some runs, each once."""
    counts = counts_of(paper, resolved_row(paper, name))
    differences = [data_differences(counts, run.summary.get("data")) for run in runs]
    differing, unknown = (
        [*dict.fromkeys(difference for of_run in differences for difference in of_run[part])] for part in (0, 1)
    )
    return DataDifferences(differing, unknown)


def as_tested(match: Match, runs: Sequence[Run]) -> Match:
    """Return a match that is judged by the settings and the data of ``fedsim test``, which gave the scores, too."""
    paper, _, name = match.name.partition("/")
    row, differences, data = settings_of_row(paper, name), {d.option: d for d in match.differences}, match.data
    for run in runs:
        tested = run.tested or {}
        if not tested.get("settings") or not tested.get("data"):
            data = data._replace(unknown=[*data.unknown, f"{run.folder}: settings of fedsim test are not known"])
            continue
        if tested.get("round") not in (run.summary["rounds"], (run.summary["best"] or {}).get("round")):
            doubt = f"{run.folder}: fedsim test scored round {tested.get('round')}, neither the last nor the best one"
            data = data._replace(unknown=[*data.unknown, doubt])
        for d in differences_of(row, flat(tested["settings"])):
            if _decides_on_scores(d) and (d.option not in differences or differences[d.option].effect != "results"):
                differences[d.option] = d._replace(option=f"{d.option} of fedsim test")
        data = data._replace(unknown=[*data.unknown, *_doubts_about_model(run, tested["settings"])])
        if tested["data"]["digest"] != (run.summary.get("data") or tested["data"])["digest"]:
            data = data._replace(differing=[*data.differing, f"{run.folder}: fedsim test had other data"])
    return match._replace(differences=tuple(differences.values()), data=data)


def _doubts_about_model(run: Run, tested: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings by which the model that ``fedsim test`` has scored is none of the run."""
    for d in compare(run.settings, flat(tested)):
        if d.effect == "results" and not _decides_on_scores(d):
            yield f"{run.folder}: fedsim test scored a model of {d.option} {text_of(d.new)} (run: {text_of(d.old)})"


def _decides_on_scores(difference: Difference) -> bool:
    return difference.group not in ("training", "loss") or difference.option.startswith("trainer.")


def closest_table(paper: Paper, runs: Sequence[Run]) -> Table:
    """Return the table with the row closest to runs, of those with a test set of the first if there are any."""

    def distance(table: Table) -> tuple[bool, bool, int, int, int]:
        match = closest_row(paper, table, runs)
        shared = len(set(table.test_sets) & set(runs[0].test_sets))
        return not shared, match is None, 0 if match is None else match.distance, -shared, -len(table.metrics)

    return min((table for table in paper.tables if table.test_sets), key=distance)


@cache
def settings_of_row(key: str, name: str) -> Flat:
    """Return all settings of a paper's row."""
    return flat(resolved_row(read_paper(key), name))


def method_of(settings: Flat) -> str:
    """Return the method of an experiment; of one client with all data, ``Centralised``."""
    if settings["data.partition"].value == "union":
        return "Centralised"
    return str(settings["model.method"].value) if "model.method" in settings else ""


def differences_from(row: Flat, runs: Iterable[Run]) -> tuple[Difference, ...]:
    """Return the settings in which any of some runs differs from a row, each once."""
    return tuple({d.option: d for run in runs for d in differences_of(row, run.settings)}.values())


def differences_of(row: Flat, settings: Flat) -> list[Difference]:
    """Return the settings in which an experiment differs from a row."""
    return [
        d
        for d in compare(row, settings)  # but for a seed, the path of a file, an option of a start
        if not (d.setting.facts.is_repeated or names_file(d) or ("." not in d.option and d.effect != "results"))
    ]


def wrong_sets(row: Flat, run: Run) -> Iterator[str]:
    """Yield why the data sets of a run, or how they are scored, are not those of a row that leaves one data set out.

    Each reason continues a sentence about the run.
    """
    for difference in differences_from(row, [run]):
        is_of_sets = difference.group == "data" or difference.option.startswith("model.evaluation.")
        if is_of_sets and difference.effect == "results" and not _is_order(difference):
            yield f"has other sets than the row: {_text(difference)}"
    left_out = row["data.unseen"].value
    if sorted(run.unseen) != sorted(left_out):
        yield f"was scored on other unseen sets than the row: {_names(run.unseen)} (row: {_names(left_out)})"
    if trained := sorted({*left_out} & {*run.summary["clients"]}):
        yield f"has its target among its sources: a client trained on {trained[0]}"


def _clients(row: TableRow, run: Run, settings: Flat) -> Iterator[str]:
    """Yield the data sets that have clients in one of the two experiments only, if their classes do not show it."""
    if set(settings["data.source"].value or ()) & set(run.setting("data.source") or ()):
        return
    if row.clients and frozenset(run.seen) not in row.clients:
        published = min(row.clients, key=lambda sets: len(sets ^ set(run.seen)))
        for name in sorted(published ^ set(run.seen)):
            yield f"data.source {'without' if name in published else 'with'} client {name}"


def _text(difference: Difference) -> str:
    """Return a difference with both values, in full if they are equal when they are cut."""
    new, old = difference.new, difference.old
    texts = [text_of(new), text_of(old)]
    if not _is_order(difference) and (
        isinstance(new, list)
        and isinstance(old, list)
        and difference.setting.form == "classes"
        and any(name in old for name in new)
    ):
        texts = [", ".join(_with_and_without(*pair)) for pair in ((new, old), (old, new))]
    short = [value_text if len(value_text) <= _LONGEST else f"{value_text[: _LONGEST - 4]} ..." for value_text in texts]
    of_run, of_row = short if len(set(short)) == 2 else texts
    return f"{difference.option} {of_run} (row: {of_row})"


def _is_order(difference: Difference) -> bool:
    """Return whether a difference is one of the order of the same classes."""
    old, new = difference.old, difference.new
    is_list = isinstance(new, list) and isinstance(old, list) and difference.setting.form == "classes"
    return is_list and not [*_with_and_without(new, old)]


def _with_and_without(names: Sequence[str], compared: Sequence[str]) -> Iterator[str]:
    """Yield the classes in which one list differs from another."""
    yield from (f"with {name}" for name in names if name not in compared)
    yield from (f"without {name}" for name in compared if name not in names)


def _names(names: object) -> str:
    return ", ".join(sorted(map(str, names))) if isinstance(names, list | set) and names else "none"
