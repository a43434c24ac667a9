"""Scores of one evaluation, as fedsim validate and fedsim test print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tabulate import tabulate
from torch import Tensor

__all__ = ["score_table"]


def score_table(scores: Mapping[str, Tensor], metrics: Sequence[str]) -> str:
    """Return a line per data set and kind of model.

    Args:
        scores: ``split/kind/domain/metric`` -> fraction of 1, one number each; others are left out.
        metrics: the columns.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for key, value in scores.items():
        if key.count("/") == 3:
            _, kind, domain, metric = key.split("/")
            rows.setdefault((domain, kind), {})[metric] = 100 * float(value)
    table = [[domain, kind, *(_cell(values, metric) for metric in metrics)] for (domain, kind), values in rows.items()]
    return tabulate(
        table, headers=["data set", "model", *metrics], disable_numparse=True,
        colalign=("left", "left", *["right"] * len(metrics)),
    )  # fmt: skip


def _cell(values: Mapping[str, float], metric: str) -> str:
    """A score in percent, with its spread over random splits where there are several."""
    spread = values.get(f"{metric}_std")
    return f"{values[metric]:.1f}" + ("" if spread is None else f"+-{spread:.1f}")
