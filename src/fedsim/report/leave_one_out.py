"""``fedsim report --left_out``: leave-one-data-set-out, with all rotations in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.report.choice import COLUMNS, UNSEEN, Choice, choice_of, mean_of, refuse_oracle, rotations_of
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.names import name_variants
from fedsim.report.rules import CHOSEN_BY, Rule
from fedsim.report.runs import KINDS
from fedsim.report.scores import MEANING, describe, shown_metrics
from fedsim.settings.configuration import digest, values_of_experiment

Rotations = dict[str, RunGroup]
"""Left-out data set -> the runs without it."""


def left_out_blocks(groups: Sequence[RunGroup], metric: str, rule: Rule) -> list[Block]:
    """Return two tables: scores of the rounds that the rule chooses, and these beside the best rounds on the target.

    The first has a row per method and kind of model, a column per left-out data set, and the mean over these. The
    second has a row per data set, the choice, the oracle and the gap between them. Cells are scores on the data set
    that no client trained on, ``metric / rank-1`` in percent; ``-`` if a rotation is missing. Without one of the
    rotations, there is no mean.

    Raises:
        ConfigError: unless each run leaves out exactly one data set by ``data.unseen``, or if the rule is oracle.
    """
    refuse_oracle(rule, "--left_out")
    methods = named_methods(groups, "--left_out")
    names = sorted({name for _, rotations in methods for name in rotations})
    shown = shown_metrics(metric)
    lines: list[list[str]] = []
    second: list[list[str]] = []
    kinds: list[str] = []
    for label, rotations in methods:
        for model_kind in KINDS:
            choices = {n: choice_of(rotations[n], metric_name("test", model_kind, n), shown, rule) for n in rotations}
            cells = [choices[name].cell("chosen") if name in choices else "-" for name in names]
            if any(cell != "-" for cell in cells):
                ordered = [choices[name] for name in names if name in choices]
                whole = ordered if len(ordered) == len(names) else []
                lines.append([label, model_kind, *cells, mean_of(whole, "chosen")])
                second += _lines_of_choice([label, model_kind], {n: choices[n] for n in names if n in choices}, whole)
                kinds.append(model_kind)
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in shown)
    notes = [
        f"{numbers} in percent on the data set that no client trained on; mean over the data sets",
        f"the round is chosen by {CHOSEN_BY[rule.name]}",
        *(MEANING[model_kind] for model_kind in dict.fromkeys(kinds)),
        f"each cell: {describe(groups[0])}" if len({describe(group) for group in groups}) == 1 else "",
    ]
    headers = ["method", "model", "left out", rule.name, "round", "oracle", "round", "gap", "evaluations"]
    return [
        Block(["method", "model", *names, "mean"], lines, notes, num_left=2),
        Block(headers, second, [CHOSEN_BY["oracle"], *_notes_on_gap(shown[0], rule)], num_left=3),
    ]


def named_methods(groups: Sequence[RunGroup], option: str) -> list[tuple[str, Rotations]]:
    """Return the name of each method, the user's own or that of the variant, and its rotations in alphabetical order.

    ``option`` and errors: see :func:`rotations_of`.
    """
    methods = [dict(sorted(rotations.items())) for rotations in by_method(groups, option)]
    firsts = [next(iter(rotations.values())).runs[0] for rotations in methods]
    return [
        (run.name or variant, each) for run, variant, each in zip(firsts, name_variants(firsts), methods, strict=True)
    ]


def by_method(groups: Sequence[RunGroup], option: str) -> list[Rotations]:
    """Return each method's rotations: name of the left-out data set -> the runs without it.

    Runs are of one method if only the left-out data set differs. ``option`` and errors: see :func:`rotations_of`.

    Raises:
        ConfigError: if runs of one method leave out one data set, and are still no seeds of one experiment.
    """
    methods: dict[str, Rotations] = {}
    for name, group in rotations_of(groups, option):
        run = group.runs[0]
        entries = {option: v for option, v in values_of_experiment(run.settings).items() if option != UNSEEN}
        method = methods.setdefault(run.name or (digest(entries) if entries else str(run.folder)), {})
        if name in method:
            first = method[name].runs[0]
            reasons = " and ".join(run.experiment.differs_in(first.experiment))
            raise ConfigError(f"{option}: {first.folder} and {run.folder} differ in {reasons}; omit one of them")
        method[name] = group
    return list(methods.values())


def _lines_of_choice(words: list[str], choices: dict[str, Choice], whole: Sequence[Choice]) -> Iterator[list[str]]:
    for name, choice in choices.items():
        chosen, oracle, gap = (choice.cell(column) for column in COLUMNS)
        rounds = {column: ", ".join(map(str, choice.rounds[column])) or "-" for column in ("chosen", "oracle")}
        counts = ", ".join(map(str, dict.fromkeys(choice.num_evaluations))) or "-"
        yield [*words, name, chosen, rounds["chosen"], oracle, rounds["oracle"], gap, counts]
    if whole:
        chosen, oracle, gap = (mean_of(whole, column) for column in COLUMNS)
        yield [*words, "mean", chosen, "", oracle, "", gap, ""]


def _notes_on_gap(metric: str, rule: Rule) -> Iterator[str]:
    yield f"gap: oracle - {rule.name}, in points; it grows with the number of evaluations that the oracle chooses from"
    yield f"the oracle's round is the best one by {metric}, so the gap of another metric may be below 0"
