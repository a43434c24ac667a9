"""``fedsim report --left_out``: leave-one-data-set-out, with all rotations in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.names import name_variants, settings_of
from fedsim.report.rules import Rule
from fedsim.report.runs import KINDS
from fedsim.report.scores import MEANING, describe, shown_metrics

_SETTING = "data.unseen"


def left_out_block(groups: Sequence[RunGroup], metric: str, rule: Rule) -> Block:
    """Return a row per method and kind of model, with a column per left-out data set and the mean over these.

    Cells are scores on the data set that no client trained on, ``metric / rank-1`` in percent; ``-`` if a rotation is
    missing. Without one of the rotations, there is no mean.

    Raises:
        ConfigError: unless each run leaves out exactly one data set by ``data.unseen``.
    """
    methods = _rotations(groups)
    names = sorted({name for rotations in methods for name in rotations})
    firsts = [next(rotations[name] for name in names if name in rotations).runs[0] for rotations in methods]
    shown, lines, kinds = shown_metrics(metric), [], []
    for label, rotations in zip(name_variants(firsts), methods, strict=True):
        for kind in KINDS:
            cells = [_cell(rotations.get(name), kind, name, shown, rule) for name in names]
            if any(cell != "-" for cell in cells):
                lines.append([label, kind, *cells, _mean(rotations, kind, names, shown, rule)])
                kinds.append(kind)
    first = groups[0]
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in shown)
    notes = [
        f"{numbers} in percent on the data set that no client trained on; mean over the data sets",
        *(MEANING[kind] for kind in dict.fromkeys(kinds)),
        f"each cell: {describe(first)}" if len({describe(group) for group in groups}) == 1 else "",
    ]
    return Block(["method", "model", *names, "mean"], lines, notes, num_left=2)


def _rotations(groups: Sequence[RunGroup]) -> list[dict[str, RunGroup]]:
    """Return each method's rotations: name of the left-out data set -> the runs without it."""
    methods: dict[str, dict[str, RunGroup]] = {}
    for group in groups:
        run = group.runs[0]
        unseen = run.setting(_SETTING)
        if not isinstance(unseen, list) or len(unseen) != 1:
            raise ConfigError(
                f"--left_out: {run.folder} does not leave out exactly one data set by {_SETTING}; omit this run"
            )
        shared = {name: value for name, value in settings_of(run).items() if name != _SETTING}
        methods.setdefault(repr(sorted(shared.items())), {})[str(unseen[0])] = group
    return list(methods.values())


def _cell(group: RunGroup | None, kind: str, name: str, shown: Sequence[str], rule: Rule) -> str:
    return "-" if group is None else group.cell(metric_name("test", kind, name), shown, rule)


def _mean(rotations: Mapping[str, RunGroup], kind: str, names: Sequence[str], shown: Sequence[str], rule: Rule) -> str:
    """Return the mean over data sets of the means over seeds."""
    texts = []
    for metric in shown:
        values = [
            rotations[name].values(metric_name("test", kind, name, metric), rule) for name in names if name in rotations
        ]
        if len(values) < len(names) or not all(len(of_seeds) for of_seeds in values):
            return "-"
        texts.append(f"{100 * np.mean([of_seeds.mean() for of_seeds in values]):.1f}")
    return " / ".join(texts)
