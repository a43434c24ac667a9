"""``fedsim report``: a table over runs, with seeds grouped, and what else is asked of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from fedsim.cli.report.comparison import compare_with
from fedsim.cli.report.convergence import convergence_table, fairness_table
from fedsim.cli.report.figure import draw, draw_curves, draw_participation
from fedsim.cli.report.groups import Group, group_runs, traffic
from fedsim.cli.report.layout import table_in_parts
from fedsim.cli.report.rules import Rule, RuleName
from fedsim.cli.report.runs import METRICS
from fedsim.core.errors import ConfigError, DataError

_MEANING = {
    "global": "global: the server's model",
    "local": "local: a client's own after training, before averaging",
    "personalised": "personalised: the client's private parts with what it shares",
    "ensemble": "ensemble: all personalised models, their features side by side",
}


def report(
    runs: list[str],
    metric: str | None = None,
    rule: RuleName | None = None,
    sets: list[str] | None = None,
    horizon: int = 300,
    target: str | None = None,
    fairness: bool = False,
    compare: str | None = None,
    figure: str | None = None,
    curves: str | None = None,
    participation: str | None = None,
) -> str:
    """Return a table: a row per test set, a column per method and model; each cell ``metric / rank1`` in percent.

    Args:
        runs: run directories.
        metric: the first number of each cell; default: mAP, or top1 if all runs classify.
        rule: last: the last evaluation, the default. best: the round with the best val/mAP or val/top1. best3: paper
            003's, beside the last evaluation: means over the three rounds with the highest mean rank-1 on test sets.
            oracle: of each model and test set the round with its highest rank-1, beside the last evaluation.
        sets: of best3: the test sets that choose; default: those of market1501, dukemtmc, cuhk03np and msmt17 that have
            clients, or else all that have clients.
        horizon: of best3: the last round that may be chosen.
        target: also say in which round a score was reached, and after how many bytes: METRIC=PERCENT is the mean over
            clients' test sets, SET/METRIC=PERCENT one test set.
        fairness: also say how the scores of clients' test sets are spread.
        compare: print the runs beside a paper's published numbers instead: 003, or one table of it: 003/table4.
        figure: also draw curves over rounds and bars over test sets into this image file.
        curves: also draw the score over rounds into this image file, a picture for each test set (paper 003's figures).
        participation: also draw who took part in which rounds, and with which backbone where these follow rewards, into
            this image file.

    Raises:
        ConfigError: if an option is wrong.
        DataError: if a directory holds no run, or runs lack what is asked for.
    """
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"--metric: {metric} is unknown; choose from {', '.join(METRICS)}")
    if horizon < 1:
        raise ConfigError(f"--horizon: {horizon} is no round; rounds are 1, 2, ...")
    groups = group_runs([Path(run) for run in runs])
    if metric is None:
        metric = "top1" if compare is None and all(run.classifies for group in groups for run in group.runs) else "mAP"
    chosen = Rule(name=rule or "last", sets=tuple(sets or ()), horizon=horizon)
    if compare is not None:
        parts = [compare_with(compare, groups, metric, chosen, is_given=rule is not None)]
    else:
        parts = [_main_table(groups, metric, chosen)]
    if target is not None:
        parts.append(convergence_table(groups, target))
    if fairness:
        parts.append(fairness_table(groups, metric, chosen))
    if figure is not None:
        columns = [(group, kind) for group in groups for kind in group.kinds(chosen)]
        draw(columns, {name: _short_name(name) for name in _all_sets(groups)}, metric, chosen, Path(figure))
        parts.append(f"wrote {figure}")
    if curves is not None:
        draw_curves(groups, {name: _short_name(name) for name in _all_sets(groups)}, metric, Path(curves))
        parts.append(f"wrote {curves}")
    if participation is not None:
        draw_participation(groups, Path(participation))
        parts.append(f"wrote {participation}")
    return "\n\n".join(parts)


def _main_table(groups: Sequence[Group], metric: str, rule: Rule) -> str:
    rules = [Rule(), rule] if rule.name in ("best3", "oracle") else [rule]
    columns = [(group, kind, r) for group in groups for kind in group.kinds(rule) for r in rules]
    if not columns:
        folder = groups[0].runs[0].folder
        if rule.name == "best" and _all_sets(groups):
            raise DataError(
                f"{folder}: --rule best needs val/mAP or val/top1, which a run with data.val: none has not; "
                "use --rule last"
            )
        raise DataError(f"{folder}: the run has no scores yet; wait for its first evaluation")
    names = _all_sets(groups)
    unseen = {name for group in groups for run in group.runs for name in run.unseen}
    shown = [metric] if metric in ("rank1", "top1") else [metric, "rank1"]
    cells = [[group.cell(f"test/{kind}/{name}", shown, r) for name in names] for group, kind, r in columns]
    headers = ["\n".join([group.label, kind, *([r.name] if len(rules) > 1 else [])]) for group, kind, r in columns]
    rows = [f"{name} (unseen)" if name in unseen else _short_name(name) for name in names]
    text = table_in_parts(rows, list(zip(headers, cells, strict=True)), corner="data set")
    return f"{text}\n\n{_legend(groups, {kind for _, kind, _ in columns}, shown, rule)}"


def _all_sets(groups: Sequence[Group]) -> list[str]:
    """All test sets in their own order, then the two means."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.test_sets))
    means = [name for name in ("seen", "unseen") if name in names]
    return [name for name in names if name not in means] + means


def _short_name(name: str) -> str:
    return f"mean {name}" if name in ("seen", "unseen") else name


def _legend(groups: Sequence[Group], kinds: Collection[str], metrics: Sequence[str], rule: Rule) -> str:
    monitor = "val/top1" if metrics[0] == "top1" else "val/mAP"
    when = {"last": "last evaluation", "best": f"round with the best {monitor}"}
    shown = when.get(rule.name, f"last evaluation and {rule.name}")
    spread = any(len(group.runs) > 1 for group in groups)
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in metrics)
    lines = [
        f"{numbers} in percent, {shown}" + (", mean +- standard deviation over seeds" if spread else ""),
        "; ".join(text for kind, text in _MEANING.items() if kind in kinds),
        "; ".join(f"{group.label}: {_describe(group)}" for group in groups),
        traffic(groups),
    ]
    if rule.name == "best3":
        lines += ["best3 chooses rounds by their scores on test data: optimistic, fit only to stand beside paper 003's"]
        lines += [f"{run.folder}: {rule.describe(run)}" for group in groups for run in group.runs]
    if rule.name == "oracle":
        lines += ["oracle: each model on each test set in the round that was best there; no choice that could be made"]
    return "\n".join(lines)


def _describe(group: Group) -> str:
    seeds = sorted({int(run.summary["seed"]) for run in group.runs})
    rounds = sorted({int(run.summary["rounds"]) for run in group.runs})
    unfinished = sum(not run.summary["finished"] for run in group.runs)
    text = f"{'/'.join(map(str, rounds))} rounds, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    text += f", {unfinished} not finished" if unfinished else ""
    return text + (", DRY RUN on drawn stand-ins" if any(run.setting("data.dry_run") for run in group.runs) else "")
