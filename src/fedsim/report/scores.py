"""The main table of a report: all models on all test sets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fedsim.core.errors import DataError
from fedsim.core.names import metric_name
from fedsim.report.groups import MEANING, RunGroup, shown_metrics, splits, traffic, work
from fedsim.report.layout import Block
from fedsim.report.rules import Rule
from fedsim.report.series import answers_line, scores_line


def score_block(groups: Sequence[RunGroup], metric: str, rule: Rule) -> Block:
    """Return a row per test set and a column per group and kind of model; cells ``metric / rank-1`` in percent.

    Below the means is their difference, ``drop``, if a model has a mean over seen and one over unseen test sets.

    Raises:
        DataError: if no run has a score under the rule.
    """
    rules = [Rule(), rule] if rule.name in ("best3", "oracle") else [rule]
    columns = [(group, model_kind, r) for group in groups for model_kind in group.distinct_kinds(rule) for r in rules]
    if not columns:
        folder = groups[0].runs[0].folder
        if rule.name == "best":
            raise DataError(
                f"{folder}: --rule best needs val/mAP or val/top1, which a run with data.val: none does not have; "
                "use --rule last"
            )
        raise DataError(f"{folder}: the run has no scores yet; wait for its first evaluation")
    names, shown = all_sets(groups), shown_metrics(metric)
    titles = titles_of(names, {name for group in groups for run in group.runs for name in run.unseen})
    cells = [
        [group.cell(metric_name("test", model_kind, name), shown, r) for name in names]
        for group, model_kind, r in columns
    ]
    lines = [[titles[name], *(column[row] for column in cells)] for row, name in enumerate(names)]
    drops = [group.drop_cell(model_kind, shown, r) for group, model_kind, r in columns]
    if has_drop := set(drops) != {"-"}:
        lines.append(["drop", *drops])
    has_seeds = any(len(group.runs) > 1 for group in groups)
    headers = []
    for group, model_kind, r in columns:
        seeds = [f"{len(group.runs)} seed{'s' * (len(group.runs) > 1)}"] if has_seeds else []
        headers.append("\n".join([group.label, model_kind, *seeds, *([r.name] if len(rules) > 1 else [])]))
    tidy = list(tidy_lines(groups, names, shown, rules))
    headers_of_tidy = ["run", "model", "rule", "data set", "score", "mean", "standard deviation", "seeds"]
    notes = tuple(_legend(groups, {model_kind for _, model_kind, _ in columns}, shown, rule, has_drop=has_drop))
    return Block(["data set", *headers], lines, notes, is_cut=True, tidy=(headers_of_tidy, tidy))


def tidy_lines(
    groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str], rules: Sequence[Rule]
) -> Iterator[list[str]]:
    """Yield a line per number: group, model, rule, test set and metric; mean and deviation over seeds, in percent."""
    for group, rule in ((group, rule) for group in groups for rule in rules):
        for model_kind in group.kinds(rule):
            numbers = [
                (name, metric, group.values(metric_name("test", model_kind, name, metric), rule))
                for name in names
                for metric in metrics
            ]
            numbers += [("drop", metric, group.drops(model_kind, metric, rule)) for metric in metrics]
            for name, metric, fractions in numbers:
                if len(values := 100 * fractions):
                    spread = f"{values.std(ddof=1):.6g}" if len(values) > 1 else ""
                    key = [group.label, model_kind, rule.name, name, metric]
                    yield [*key, f"{values.mean():.6g}", spread, str(len(values))]


def all_sets(groups: Sequence[RunGroup]) -> list[str]:
    """Return all test sets in the order of the runs, then the two means."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.test_sets))
    means = [name for name in ("seen", "unseen") if name in names]
    return [name for name in names if name not in means] + means


def titles_of(names: Sequence[str], unseen: Collection[str] = ()) -> dict[str, str]:
    """Return test set -> its title in tables; ``unseen`` ones are marked with that word."""
    return {
        name: f"mean {name}" if name in ("seen", "unseen") else f"{name} (unseen)" if name in unseen else name
        for name in names
    }


def _legend(
    groups: Sequence[RunGroup], kinds: Collection[str], metrics: Sequence[str], rule: Rule, *, has_drop: bool
) -> Iterator[str]:
    monitor = "val/top1" if metrics[0] == "top1" else "val/mAP"
    when = {"last": "last evaluation", "best": f"round with the best {monitor}", "tested": "fedsim test"}
    shown = when.get(rule.name, f"last evaluation and {rule.name}")
    spread = any(len(group.runs) > 1 for group in groups)
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in metrics)
    yield f"{numbers} in percent, {shown}" + (", mean +- standard deviation over seeds" if spread else "")
    yield "drop: mean seen - mean unseen, in points" if has_drop else ""
    yield "; ".join(meaning for model_kind, meaning in MEANING.items() if model_kind in kinds)
    alike = [group.label for group in groups if "personalised" in {*group.kinds(rule)} - {*group.distinct_kinds(rule)}]
    if alike:
        yield f"{', '.join(alike)}: personalised models score as the global one, and have no column"
    yield "; ".join(f"{group.label}: {group.describe()}" for group in groups)
    yield traffic(groups)
    yield from scores_line(groups, all_sets(groups), metrics[0])
    yield from answers_line(groups)
    yield from splits(groups)
    yield from work(groups)
    if rule.name == "best3":
        yield "best3 chooses rounds by scores on test data: optimistic, comparable only with the numbers of paper 003"
        yield from (f"{run.folder}: {rule.describe(run)}" for group in groups for run in group.runs)
    if rule.name == "oracle":
        yield "oracle: each model on each test set in its best round there; this choice needs the test labels"
    if rule.name == "tested":
        yield from (str((run.tested or {}).get("checkpoint")) for group in groups for run in group.runs)
