"""``fedsim report``: a table over runs with their seeds grouped, and further tables and figures on request.

Also the choice of the runs in it: repeated, damaged and unfinished ones are left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from fedsim.core.checked import checked
from fedsim.core.checks import Count
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics_rows import METRICS_FILE
from fedsim.core.paths import RUN, Figure, Page
from fedsim.report.comparison import compare_with
from fedsim.report.costs import convergence_table, left_out_work
from fedsim.report.figure import draw_cmc, draw_curves, draw_participation, draw_scores, draw_tradeoff
from fedsim.report.groups import RunGroup, group_opened, shown_metrics
from fedsim.report.layout import Block, Format
from fedsim.report.leave_one_out import UNSEEN, honest_rule, left_out_blocks, left_out_differences, named_methods
from fedsim.report.runs import METRICS, Rule, RuleName, Run, read_run
from fedsim.report.scores import all_sets, differences_table, fairness_table, intervals_table, score_block, titles_of

log = logging.getLogger(__name__)


@checked("--", positional="runs")
def report(
    runs: list[str],
    metric: str | None = None,
    rule: RuleName | None = None,
    by: Literal["rank1", "mAP"] | None = None,
    sets: list[str] | str | None = None,
    horizon: Count = Rule.horizon,
    target: str | None = None,
    fairness: bool = False,
    significance: bool = False,
    left_out: bool = False,
    unfinished: bool = False,
    compare: str | None = None,
    format: Format = "table",
    figure: Figure | None = None,
    curves: Figure | None = None,
    cmc: Figure | None = None,
    tradeoff: Figure | None = None,
    participation: Figure | None = None,
    html: Page | None = None,
    further: Callable[[Sequence[RunGroup]], list[Block]] | None = None,
) -> str:
    """Return a table with a row per test set and a column per method and model; cells ``metric / rank1`` in percent.

    Args:
        runs: run directories; NAME=DIRECTORY gives a run, or all seeds of it, a name of your own.
        metric: the first number of each cell; default: mAP, or top1 if all runs classify.
        rule: last: the last evaluation, the default. best: the round with the best val/mAP or val/top1. best3: the rule
            of paper 003, next to the last evaluation: means over the three rounds with the highest mean rank-1 on test
            sets. oracle: for each model and test set the round with its highest score, next to the last evaluation.
            tested: the newest scores of fedsim test in the run directory. With left_out the default is best if all
            runs have held-out data.
        by: for oracle: the score by which a round is best, rank1 or mAP.
        sets: for best3: the test sets that choose the rounds; default: those of market1501, dukemtmc, cuhk03np and
            msmt17 that have clients, or else all test sets that have clients.
        horizon: for best3: the last round that may be chosen.
        target: also print the first round that reaches a score, and the bytes sent until then: METRIC=PERCENT is the
            mean over clients' test sets, SET/METRIC=PERCENT one test set.
        fairness: also print the spread of scores over clients' test sets.
        significance: also test whether methods differ, over seeds and over people, with 95 % confidence intervals. With
            left_out: each method against the first one, over seeds, with its drop.
        left_out: instead, print runs that each leave out another data set by data.unseen: a table with a column per
            left-out data set and the mean over these, one of the rounds that were chosen, the best ones on the
            left-out set, and the gap between both, and one of the methods' images and steps. With compare: all columns
            of the paper's table.
        unfinished: also show unfinished runs if other runs are finished.
        compare: instead, print the runs next to a paper's published numbers: 003, or one table of it: 003/table4.
        format: table for a terminal, markdown, latex (booktabs), or csv (a number per line); with the last three, notes
            go to stderr.
        figure: also draw curves over rounds and bars over test sets into this image file (png, pdf, svg).
        curves: also draw the score over rounds into this image file, a picture per test set (paper 003's figures).
        cmc: also draw CMC curves into this image file.
        tradeoff: also draw the score over sent bytes, images trained on and simulated seconds into this image file.
        participation: also draw into this image file the rounds in which each client took part, and its backbone if
            backbones follow rewards.
        html: also write a page with all of this into this file; the page needs no network.
        further: makes further tables of the runs, before the page is written.

    Raises:
        ConfigError: if an option is wrong.
        DataError: if a directory is not a run directory, or runs lack what an option needs.
    """
    _check_options(metric, compare, format, {"target": target, "fairness": fairness, "significance": significance})
    _check_refinements(rule, {"by": by}, "oracle")
    is_papers = rule is None and (compare is not None or html is not None)  # which may be best3
    refinements = {"sets": sets, "horizon": None if horizon == Rule.horizon else horizon}
    _check_refinements("best3" if is_papers else rule, refinements, "best3")
    sets = [sets] if isinstance(sets, str) else sets
    if html is not None:
        from fedsim.report.html.page import write_page
    folders = [named_folder(run) for run in runs]
    names = [name for _, name in folders]
    opened, omitted = open_runs([folder for folder, _ in folders], unfinished, names, rule == "tested")
    groups = group_opened(opened, UNSEEN if left_out else "")
    if metric is None:
        metric = "top1" if compare is None and all(run.classifies for run in opened) else "mAP"
    chosen = Rule(name=rule or "last", sets=tuple(sets or ()), horizon=horizon, by=by or "rank1")
    tables: list[tuple[str, Block]] = []
    if compare is not None:
        is_given = rule is not None
        compared = compare_with(compare, groups, metric, chosen, is_given=is_given, left_out=left_out)
        parts = [compared, *_texts([] if further is None else further(groups), format, omitted)]
    else:
        if left_out:
            chosen = chosen if rule is not None else honest_rule(opened)
            tables = _tables_of_left_out(groups, metric, chosen, significance)
            blocks = [block for _, block in tables]
        else:
            blocks = [score_block(groups, metric, chosen)]
        blocks += _further_blocks(groups, metric, chosen, target, fairness, significance and not left_out)
        blocks += [] if further is None else further(groups)
        parts = _texts(blocks, format, omitted)
    written = _draw(groups, metric, chosen, [figure, curves, cmc, tradeoff, participation])
    if html is not None:
        write_page(Path(html), groups, metric, chosen, compare, omitted, tables)
        written.append(f"wrote {html}")
    if format == "table":
        return "\n\n".join([*parts, *written])
    for message in written:
        log.info(message)
    return "\n\n".join(parts)


def _check_options(metric: str | None, compare: str | None, format_: Format, tables: Mapping[str, object]) -> None:
    """Refuse options that contradict each other; ``tables``: options of further tables, and their values."""
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"--metric: {metric} is unknown; choose from {', '.join(METRICS)}")
    if compare is not None and format_ != "table":
        raise ConfigError(f"--format: {format_} does not support --compare; use table, or leave --compare out")
    if compare is not None and (unused := next((name for name, value in tables.items() if value), None)):
        raise ConfigError(f"--{unused}: has no effect with --compare; leave one of them out")


def _check_refinements(rule: RuleName | None, values: Mapping[str, object], needed: RuleName) -> None:
    """Refuse options, None if not given, that only have an effect with the ``needed`` rule."""
    for name, value in values.items():
        if value is not None and rule != needed:
            raise ConfigError(f"--{name}: is for --rule {needed}; leave it out, or give --rule {needed}")


def _tables_of_left_out(
    groups: Sequence[RunGroup], metric: str, rule: Rule, significance: bool
) -> list[tuple[str, Block]]:
    """Return the tables of runs that leave data sets out, with their titles."""
    methods = named_methods(groups, "--left_out")
    scores, choices = left_out_blocks(groups, metric, rule)
    tables = [("Left-out data sets", scores), ("The choice beside the oracle", choices)]
    if significance:
        tables.append(("Differences to the first method", left_out_differences(methods, metric, rule)))
    return tables + ([("Work", left_out_work(methods))] if len(methods) > 1 else [])


def _further_blocks(
    groups: Sequence[RunGroup], metric: str, rule: Rule, target: str | None, fairness: bool, significance: bool
) -> list[Block]:
    blocks = [convergence_table(groups, target)] if target is not None else []
    if fairness:
        blocks.append(fairness_table(groups, metric, rule))
    if significance:
        names, metrics = all_sets(groups), shown_metrics(metric)
        blocks += [intervals_table(groups, names, metrics), differences_table(groups, names, metrics)]
    return blocks


def _texts(blocks: Sequence[Block], format_: Format, left_out: Sequence[str]) -> list[str]:
    """Return the tables; their notes are logged to stderr if the format is for another program."""
    if format_ == "table":
        return [*(block.text(format_) for block in blocks), *(["\n".join(left_out)] if left_out else [])]
    for note in (*(note for block in blocks for note in block.notes if note), *left_out):
        log.info(note)
    return [block.text(format_) for block in blocks]


def _draw(groups: Sequence[RunGroup], metric: str, rule: Rule, files: Sequence[str | None]) -> list[str]:
    """Draw the requested figures; return a line per file."""
    names = titles_of(all_sets(groups))
    drawings: list[Callable[[Path], None]] = [
        lambda path: draw_scores(groups, names, metric, rule, path),
        lambda path: draw_curves(groups, names, metric, path),
        lambda path: draw_cmc(groups, names, path),
        lambda path: draw_tradeoff(groups, names, metric, path),
        lambda path: draw_participation(groups, path),
    ]
    written = []
    for file, drawing in zip(files, drawings, strict=True):
        if file is not None:
            drawing(Path(file))
            written.append(f"wrote {file}")
    return written


def named_folder(argument: str) -> tuple[Path, str]:
    """Return the folder that an argument of a report names, and the name that it gives the run: ``Mine=runs/b``.

    A folder whose own name has the sign is meant as it is.

    Raises:
        ConfigError: if name or folder is empty.
    """
    name, sign, folder = argument.partition("=")
    if not sign or Path(argument).exists() or "/" in name:
        return Path(RUN.check(argument, "runs")), ""
    if not name.strip() or not folder:
        raise ConfigError(f"runs: {argument} is no run directory, and no name with one, such as Mine=runs/b")
    return Path(RUN.check(folder, "runs")), name.strip()


def open_runs(
    folders: Sequence[Path], unfinished: bool = False, names: Sequence[str] = (), is_tested: bool = False
) -> tuple[list[Run], list[str]]:
    """Open run directories; return the runs, and a line for each folder that is left out, or in doubt.

    ``names`` are those of the runs in a report, one per folder, empty for none; ``is_tested``: it shows their scores of
    ``fedsim test``.

    Left out are runs without scores, unfinished runs if other runs are finished (``unfinished`` keeps them), and
    repeated runs with the same settings and seed: a repetition is the same run, not another sample.

    Raises:
        ConfigError: if no folder is given.
        DataError: if a folder is not a run directory, or no run is left.
    """
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    runs, lines, seen, damaged = list[Run](), list[str](), set[str](), list[DataError]()
    for folder, name in zip(folders, names or [""] * len(folders), strict=True):
        if os.path.realpath(folder) in seen:
            lines.append(f"left out: {folder} is given twice; it counts once")
        elif is_begun(folder):
            lines.append(f"left out: {folder} has not finished its first round")
        else:
            runs += _whole(folder, name, is_tested, lines, damaged)
        seen.add(os.path.realpath(folder))
    lines += [f"left out: {run.folder} has no scores yet" for run in runs if not run.test_sets]
    scored = [run for run in runs if run.test_sets]
    done = [run for run in scored if run.summary["finished"]]
    if done and not unfinished:
        for run in (run for run in scored if not run.summary["finished"]):
            so_far = f"is not finished, it has {run.summary['rounds']} rounds so far"
            lines.append(f"left out: {run.folder} {so_far}; --unfinished includes it")
        scored = done
    kept = _once(scored, lines)
    if not kept and damaged:
        raise damaged[0]
    if not kept:
        message = f"{folders[0]}: the run has no scores yet; wait for its first evaluation"
        raise DataError(message if len(folders) == 1 else f"{message}; the other runs have none either")
    return kept, [*lines, *_in_doubt(kept)]


def _whole(folder: Path, name: str, is_tested: bool, lines: list[str], damaged: list[DataError]) -> list[Run]:
    """Return the run in a folder; nothing and a line for a damaged run or a file. A folder of no run is an error."""
    if folder.is_file():
        damaged.append(DataError(f"{folder}: is a file; give the run directories of fedsim fit"))
        lines.append(f"left out: {folder} is a file, not a run directory")
        return []
    if os.access(folder, os.X_OK) and not os.path.lexists(folder / "summary.json"):
        return [read_run(folder, name)]
    try:
        run = read_run(folder, name, is_tested)
        run.check()
    except DataError as error:
        damaged.append(error)
        lines.append(f"left out: {folder} is damaged ({error})")
        return []
    return [run]


def is_begun(folder: Path) -> bool:
    """Whether a folder belongs to a run that has no results yet, or ended before its first ones."""
    has_begun = any((folder / name).exists() for name in ("config.yaml", METRICS_FILE))
    return has_begun and not os.path.lexists(folder / "summary.json")


def _once(runs: Sequence[Run], lines: list[str]) -> list[Run]:
    """Return one run of each configuration and seed, a finished and long one; add a line about each repetition."""
    kept: dict[tuple[object, int], Run] = {}
    for run in sorted(runs, key=lambda run: (not run.summary["finished"], -run.summary["rounds"])):
        first = kept.setdefault((run.experiment._replace(end=""), run.summary["seed"]), run)
        if first is not run:
            seed, is_longer = run.summary["seed"], run.summary["rounds"] != first.summary["rounds"]
            difference = "" if is_longer or _numbers(run) == _numbers(first) else ", but OTHER SCORES"
            repeats = f"has the settings and the seed {seed} of {first.folder}{difference}"
            lines.append(f"left out: {run.folder} {repeats}; both count as one run")
    return [run for run in runs if run in kept.values()]


def _numbers(run: Run) -> str:
    """Return all scores of a run as text, by which NaN is NaN."""
    return str(sorted(run.scores.items()))


def _in_doubt(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line about each run whose files contradict each other, and about seeds with the same scores."""
    first: dict[object, Run] = {}
    for run in runs:
        if run.contradictions:
            yield f"IN DOUBT: {run.folder} {'; '.join(run.contradictions)}; its scores are shown all the same"
        of_seed = first.setdefault((run.experiment, _numbers(run)), run)
        if of_seed is not run and run.scores:
            seeds = f"seed {run.summary['seed']}", f"seed {of_seed.summary['seed']}"
            yield f"IN DOUBT: {run.folder}, {seeds[0]}, has all scores of {of_seed.folder}, {seeds[1]}; is it a copy?"
