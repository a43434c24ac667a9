"""The content of the page, from the runs; ``page.html`` contains its layout, style and interaction."""

from __future__ import annotations

import base64
import gzip
import io
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsim._version import __version__
from fedsim.core.errors import DataError
from fedsim.core.extras import load_extra
from fedsim.core.files import replacing
from fedsim.core.names import file_names, metric_name
from fedsim.core.readable import files_in, has_file
from fedsim.core.replaced_run import MAPS, PICTURES, PROJECTIONS, QUERIES, RANKINGS, ROWS, files_of_sets, read_round
from fedsim.report.comparison import tables_with_runs
from fedsim.report.course import COURSE, ROUND, course_blocks, round_folder, rounds_with_pictures
from fedsim.report.features import query_tables, with_round
from fedsim.report.groups import RunGroup, differences, shown_metrics
from fedsim.report.layout import Block, with_sign
from fedsim.report.runs import METRICS, Rule, Run
from fedsim.report.scores import all_sets, differences_table, intervals_table, score_block, titles_of
from fedsim.settings.configuration import without_folders

jinja2, offline, plots = (
    load_extra(module, "--html", "report") for module in ("jinja2", "plotly.offline", "fedsim.report.html.plots")
)

_Rows = list[tuple[str, list[tuple[int, Path]]]]
"""name of a picture, and its rounds with their files"""
_PANELS = 6
"""rounds in a row of pictures"""
_SHEETS = ("data.png", "people.png", "preview.png")
"""Names of contact sheets, in a run directory or its parent."""
_PAGE, _PICTURES = 4_900_000, 1_000_000
"""Bytes: a page that has pictures is not larger, unless all else is: then its pictures take the second number."""
_LARGE = 500_000
"""Bytes: a larger file has images of people, a smaller one points or a heat map."""
_FORMS = ((1400, 75, 0), (900, 30, 0), (900, 30, 4), (900, 30, 2), (900, 30, 1))
"""largest width in pixels, quality, and most queries of a picture (0: all); the first one that fits"""


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
        "dark_colours": plots.DARK,
        "plotly": base64.b64encode(gzip.compress(offline.get_plotlyjs().encode(), mtime=0)).decode(),
    }
    bare = len(rendered("page.html", content | {"uris": {}, "num_queries": 1}).encode(errors="backslashreplace"))
    parts = [content[name] for name in ("sheets", "projections", "pictures", "queries", "over_rounds")]
    files, num_first = _by_importance([*_files_in(parts)], groups)
    uris, num_queries = embedded(files, num_first, max(_PAGE - bare, _PICTURES))
    write(rendered("page.html", content | {"uris": uris, "num_queries": num_queries}), path)


def _by_importance(files: Sequence[Path], groups: Sequence[RunGroup]) -> tuple[list[Path], int]:
    """Return pictures in the order in which they get room, and the number of those for which others are left out.

    The others are large ones of rounds, and of further clients' own models on a set. Seen sets come after unseen ones.
    """
    runs = {group.runs[0].folder: group.runs[0] for group in groups}
    seen = {
        folder: {file for name, file in files_of_sets(run.test_sets).items() if name not in run.unseen}
        for folder, run in runs.items()
    }
    first = dict[tuple[Path, str], Path]()

    def importance(file: Path) -> tuple[bool, bool, int]:
        of_set, size = file.stem.partition("@")[0], file.stat().st_size
        is_further = file.parent.name.startswith(ROUND) or first.setdefault((file.parent, of_set), file) != file
        folder = next((folder for folder in file.parents if folder in seen), None)
        return is_further and size > _LARGE, folder is not None and of_set in seen[folder], size

    keys = {file: importance(file) for file in files}
    return sorted(keys, key=keys.__getitem__), sum(not key[0] for key in keys.values())


def _files_in(part: object) -> Iterator[Path]:
    """Yield the files in lists and tuples of any depth."""
    if isinstance(part, Path):
        yield part
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _files_in(inner)


def rendered(name: str, content: Mapping[str, Any]) -> str:
    """Return a template of this folder with its content."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedsim", "report/html"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    environment.globals.update(key_of=sort_key, with_sign=with_sign)
    return str(environment.get_template(name).render(content))


def write(page: str, path: Path) -> None:
    """Write a page; raise DataError if the file cannot be written."""
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


def _pictures(groups: Sequence[RunGroup]) -> Iterator[tuple[str, str, list[tuple[str, Path]]]]:
    for group in groups:
        for subfolder, title in ((RANKINGS, "ranked lists"), (MAPS, "maps")):
            yield from _drawn([group], subfolder, title)


def _drawn(groups: Sequence[RunGroup], subfolder: str, title: str) -> Iterator[tuple[str, str, list[tuple[str, Path]]]]:
    """Yield run, kind of pictures, and the pictures by name, of the first seed of each group."""
    for group in groups:
        files = files_in(group.runs[0].folder / subfolder, "*.png")
        if files:
            shown, of_round = _names(group.runs[0]), read_round(group.runs[0].folder / subfolder)
            yield group.label, with_round(title, of_round), [(shown(file.stem), file) for file in files]


def _names(run: Run) -> Callable[[str], str]:
    """Return a function: name of a file -> its data set, with the client or architecture of the model if it has one.

    Of pictures of several data sets it is the name of the file.
    """
    names, clients = (
        {file: name for name, file in files.items()}
        for files in (files_of_sets(run.test_sets), file_names(run.summary["clients"]))
    )

    def shown(stem: str) -> str:
        of_set, sign, owner = stem.partition("@")
        return f"{names.get(of_set, of_set)}{sign}{clients.get(owner, owner)}"

    return shown


def _queries(groups: Sequence[RunGroup]) -> Iterator[tuple[str, list[tuple[str, list[Block], Path | None]]]]:
    """Yield the first seed of each group with its files about single queries: name, tables, and picture."""
    for group in groups:
        run, shown = group.runs[0], _names(group.runs[0])
        files = [
            (shown(name), blocks, _existing(run.folder / QUERIES / f"{name}.png"))
            for name, blocks in query_tables(run.folder)
        ]
        if files:
            yield group.label, files


def _over_rounds(groups: Sequence[RunGroup]) -> Iterator[tuple[str, list[Block], Path | None, _Rows]]:
    """Yield the first seed of each group with pictures of its rounds: confusion, and by name the pictures in a row."""
    for group in groups:
        run, shown = group.runs[0].folder, _names(group.runs[0])
        rounds = rounds_with_pictures(run)
        if len(rounds) > _PANELS:  # evenly spread, with the first and the last
            rounds = [rounds[round(place * (len(rounds) - 1) / (_PANELS - 1))] for place in range(_PANELS)]
        rows: dict[str, list[tuple[int, Path]]] = {}
        for round_ in rounds:
            for file in files_in(round_folder(run, round_), "*.png"):
                rows.setdefault(shown(file.stem), []).append((round_, file))
        if rows:
            course = _existing(run / PICTURES / f"{COURSE}.png")
            yield group.label, course_blocks(run), course, list(rows.items())


def _existing(file: Path) -> Path | None:
    return file if has_file(file) else None


def _sheets(groups: Sequence[RunGroup]) -> Iterator[Path]:
    folders = dict.fromkeys(
        folder for group in groups for run in group.runs for folder in (run.folder, run.folder.parent)
    )
    for folder in folders:
        yield from (folder / name for name in _SHEETS if has_file(folder / name))


def _sheet_command(groups: Sequence[RunGroup]) -> str:
    """Return the command that draws a contact sheet; empty if no run has a config.

    A fit draws no sheet by itself: that would take up to half a second, and copy people's pictures without a request.
    """
    folder = next((run.folder for group in groups for run in group.runs if run.config), None)
    if folder is None:
        return ""
    config, sheet = (shlex.quote(str(folder / name)) for name in ("config.yaml", _SHEETS[0]))
    return f"fedsim data preview --config {config} --output {sheet}"


def embedded(files: Sequence[Path], num_first: int, most: int) -> tuple[dict[Path, str], int]:
    """Return pictures as parts of a page of at most ``most`` bytes in total: of too many only the first that fit.

    They are as large, with as many queries, as lets all in; or else the first ``num_first``. Also returns the number of
    queries to which a picture is cut; 0: none is.
    """
    shown, num_queries = dict[Path, str](), 0
    for form, wanted in zip(_FORMS, (len(files), *[num_first] * (len(_FORMS) - 1)), strict=True):
        uris, left = dict[Path, str](), most
        for file in files:
            uri = as_uri(file, *form)
            if len(uri) > left:
                break
            uris[file] = uri
            left -= len(uri)
        if len(uris) > len(shown):  # pictures of earlier versions cannot be cut
            shown, num_queries = uris, form[2]
        if len(shown) >= wanted:
            break
    return shown, num_queries


def as_uri(file: Path, widest: int = _FORMS[0][0], quality: int = _FORMS[0][1], num_rows: int = _FORMS[0][2]) -> str:
    """Return a picture as a part of a page, as WebP: half the size of JPEG, a twentieth of PNG."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            shown, rows = picture.convert("RGB"), str(picture.info.get(ROWS, ""))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: cannot read this picture ({error}); remove it, or write it again") from error
    if num_rows and re.fullmatch("[0-9]{1,5} [0-9]{1,5}", rows):
        top, height = map(int, rows.split())
        shown = shown.crop((0, 0, shown.width, min(shown.height, top + num_rows * height)))
    if shown.width > widest:
        shown = shown.resize((widest, round(shown.height * widest / shown.width)))
    content = io.BytesIO()
    shown.save(content, "WEBP", quality=quality)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
