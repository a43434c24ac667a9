"""The content of the page, from the runs; ``page.html`` contains its layout, style and interaction."""

from __future__ import annotations

import base64
import io
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsim._version import __version__
from fedsim.core.errors import DataError
from fedsim.core.extras import load_extra
from fedsim.core.files import replacing
from fedsim.core.names import metric_name
from fedsim.core.replaced_run import MAPS, PICTURES, PROJECTIONS, QUERIES, RANKINGS
from fedsim.report.comparison import tables_with_runs
from fedsim.report.course import COURSE, course_blocks, round_folder, rounds_with_pictures
from fedsim.report.features import query_tables
from fedsim.report.groups import RunGroup, differences, shown_metrics
from fedsim.report.layout import Block, with_sign
from fedsim.report.runs import METRICS, Rule
from fedsim.report.scores import all_sets, differences_table, intervals_table, score_block, titles_of
from fedsim.settings.configuration import without_folders

jinja2, offline, plots = (
    load_extra(module, "--html", "report") for module in ("jinja2", "plotly.offline", "fedsim.report.html.plots")
)

_Rows = list[tuple[str, list[tuple[int, str]]]]
"""name of a picture, and its rounds with it"""
_PANELS = 6
"""rounds in a row of pictures"""
_SHEETS = ("data.png", "people.png", "preview.png")
"""Names of contact sheets, in a run directory or its parent."""
_WIDEST = 1400
"""Pixels: largest width of a picture in the page."""
_WIDEST_IN_ROW = 900
"""Pixels: largest width of a picture in a row of several rounds."""


def write_page(
    path: Path,
    groups: Sequence[RunGroup],
    metric: str,
    rule: Rule,
    compare: str | None,
    left_out: Sequence[str],
    tests: Sequence[tuple[str, Block]] = (),
) -> None:
    """Write a page about runs into one file, which needs no network.

    Args:
        path: the file.
        groups: the runs.
        metric: metric of the pictures, and the first number in the table.
        rule: rule of the tables and bars.
        compare: a paper, or one table of it, of published numbers; None: all papers that share test sets with the runs.
        left_out: lines about runs that are not shown.
        tests: tables with their titles in place of those of all pairs of groups.

    Raises:
        DataError: if the file cannot be written, or a run lacks data that the page needs.
    """
    names = all_sets(groups)
    sheets = list(_sheets(groups))
    content = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "groups": [(group.label, group.describe(), [str(run.folder) for run in group.runs]) for group in groups],
        "left_out": left_out,
        "scores": score_block(groups, metric, rule),
        "all_scores": _all_scores(groups, names, rule),
        "plots": plots.plots_of(groups, titles_of(names), metric, rule),
        "tests": tests
        or [
            ("Intervals", intervals_table(groups, names, shown_metrics(metric))),
            ("Differences between methods", differences_table(groups, names, shown_metrics(metric))),
        ],
        "published": tables_with_runs(compare, groups, metric, rule),
        "sheets": sheets,
        "sheet_command": "" if sheets else _sheet_command(groups),
        "pictures": list(_pictures(groups)),
        "queries": list(_queries(groups)),
        "projections": list(_drawn(groups, PROJECTIONS, "projections")),
        "over_rounds": list(_over_rounds(groups)),
        "differences": _differences(groups),
        "settings": [
            (group.label, yaml.safe_dump(without_folders(group.runs[0].config), sort_keys=False)) for group in groups
        ],
        "versions": _versions(groups),
        "plotly": offline.get_plotlyjs(),
    }
    write_template("page.html", content, path)


def write_template(name: str, content: Mapping[str, Any], path: Path) -> None:
    """Write a template of this folder with its content into a file; raise DataError if the file cannot be written."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedsim", "report/html"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    environment.globals.update(key_of=sort_key, with_sign=with_sign)
    page = environment.get_template(name).render(content)
    try:
        with replacing(path) as partial:
            partial.write_text(page, encoding="utf-8", errors="backslashreplace")  # of paths
    except OSError as error:
        raise DataError(f"{path}: cannot write the page ({error}); choose another --html") from error


def sort_key(cell: str) -> str:
    """Return the number by which a cell is sorted: its first one, or an empty text for words.

    >>> sort_key("41.0+-1.4 / 30.2"), sort_key("town0"), sort_key("< 0.001")
    ('41.0', '', '0.001')
    """
    word = cell.replace("<", " ").replace("+-", " ").replace("/", " ").split()
    try:
        return word[0] if word and abs(float(word[0])) >= 0 else ""
    except ValueError:
        return ""


def _all_scores(groups: Sequence[RunGroup], names: Sequence[str], rule: Rule) -> Block:
    scored = {key.rpartition("/")[2] for g in groups for key in rule.scores(g.runs[0]) if key.startswith("test/")}
    metrics = [metric for metric in METRICS if metric in scored]
    titles, lines = titles_of(names), []
    for group in groups:
        for model_kind in group.distinct_kinds(rule):
            for name in names:
                cells = [
                    group.cell(metric_name("test", model_kind, name), [metric], rule, digits=2) for metric in metrics
                ]
                if set(cells) != {"-"}:
                    lines.append([group.label, model_kind, titles[name], *cells, str(len(group.runs))])
            drops = [group.drop_cell(model_kind, [metric], rule, digits=2) for metric in metrics]
            if set(drops) != {"-"}:
                lines.append([group.label, model_kind, "drop", *drops, str(len(group.runs))])
    return Block(["run", "model", "data set", *metrics, "seeds"], lines, num_left=3)


def _differences(groups: Sequence[RunGroup]) -> Block:
    settings = differences([group.runs[0] for group in groups])
    lines = [[name, *values] for name, values in settings.items()]
    return Block(["setting", *(group.label for group in groups)], lines)


def _versions(groups: Sequence[RunGroup]) -> Block:
    runs = [(group.label, run.summary) for group in groups for run in group.runs]
    packages = list(dict.fromkeys(name for _, summary in runs for name in summary.get("versions", {})))
    fields = [name for name in ("device", "ranks", "threads", "seconds", "written") if any(name in s for _, s in runs)]
    lines = []
    for label, summary in runs:
        versions = summary.get("versions", {})
        values = {name: str(summary.get(name, "-")) for name in fields}
        if "seconds" in summary:
            values["seconds"] = f"{summary['seconds']:.0f}"
        cells = [str(versions.get(name, "-")) for name in packages]
        lines.append([label, str(summary["seed"]), *cells, *(values[name] for name in fields)])
    return Block(["run", "seed", *packages, *fields], lines, num_left=1)


def _pictures(groups: Sequence[RunGroup]) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    for group in groups:
        for subfolder, title in ((RANKINGS, "ranked lists"), (MAPS, "maps")):
            yield from _drawn([group], subfolder, title)


def _drawn(groups: Sequence[RunGroup], subfolder: str, title: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield run, kind of pictures, and the pictures by name, of the first seed of each group."""
    for group in groups:
        files = sorted((group.runs[0].folder / subfolder).glob("*.png"))
        if files:
            yield group.label, title, [(file.stem, embedded(file)) for file in files]


def _queries(groups: Sequence[RunGroup]) -> Iterator[tuple[str, list[tuple[str, list[Block], str]]]]:
    """Yield the first seed of each group with its files about single queries: name, tables, and picture."""
    for group in groups:
        folder = group.runs[0].folder
        files = [
            (name, blocks, embedded(picture) if (picture := folder / QUERIES / f"{name}.png").is_file() else "")
            for name, blocks in query_tables(folder)
        ]
        if files:
            yield group.label, files


def _over_rounds(groups: Sequence[RunGroup]) -> Iterator[tuple[str, list[Block], str, _Rows]]:
    """Yield the first seed of each group with pictures of its rounds: confusion, and by name the pictures in a row."""
    for group in groups:
        run = group.runs[0].folder
        rounds = rounds_with_pictures(run)
        if len(rounds) > _PANELS:  # evenly spread, with the first and the last
            rounds = [rounds[round(place * (len(rounds) - 1) / (_PANELS - 1))] for place in range(_PANELS)]
        rows: dict[str, list[tuple[int, str]]] = {}
        for round_ in rounds:
            for file in sorted(round_folder(run, round_).glob("*.png")):
                rows.setdefault(file.stem, []).append((round_, embedded(file, _WIDEST_IN_ROW)))
        if rows:
            course = run / PICTURES / f"{COURSE}.png"
            yield group.label, course_blocks(run), embedded(course) if course.is_file() else "", list(rows.items())


def _sheets(groups: Sequence[RunGroup]) -> Iterator[tuple[str, str]]:
    folders = dict.fromkeys(
        folder for group in groups for run in group.runs for folder in (run.folder, run.folder.parent)
    )
    for folder in folders:
        for file in (folder / name for name in _SHEETS if (folder / name).is_file()):
            yield str(file), embedded(file)


def _sheet_command(groups: Sequence[RunGroup]) -> str:
    """Return the command that draws a contact sheet; empty if no run has a config.

    A fit draws no sheet by itself: that would take up to half a second, and copy people's pictures without a request.
    """
    folder = next((run.folder for group in groups for run in group.runs if run.config), None)
    if folder is None:
        return ""
    config, sheet = (shlex.quote(str(folder / name)) for name in ("config.yaml", _SHEETS[0]))
    return f"fedsim data preview --config {config} --output {sheet}"


def embedded(file: Path, widest: int = _WIDEST) -> str:
    """Return a picture as a part of the page, as WebP: half the size of JPEG, a twentieth of PNG."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            shown = picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: cannot read this picture ({error}); remove it, or write it again") from error
    if shown.width > widest:
        shown = shown.resize((widest, round(shown.height * widest / shown.width)))
    content = io.BytesIO()
    shown.save(content, "WEBP", quality=75)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
