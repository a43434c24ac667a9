"""The bars of fedsim beside other engines, on the runs of ``run.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from launch import Case, Run

Bar = tuple[str, str, str, int, float]
"""another engine, what is compared (a field of Run), model, workers, largest ratio"""


def bars() -> Iterator[Bar]:
    """Yield all bars: ratios of fedsim's medians to another engine's."""
    for workers in (1, 2):
        yield "pfl", "seconds", "cifar", workers, 1.0
        for model in ("cnn", "linear", "cifar"):
            yield "blazefl", "seconds", model, workers, 1.0
            yield "blazefl", "peak", model, workers, 1.0
    yield "pfl", "peak", "cnn", 1, 1.1
    yield "pfl", "startup", "cnn", 1, 1.2
    yield "plain", "seconds", "linear", 1, 1.1


def check_bars(runs: dict[Case, list[Run]]) -> list[str]:
    """Return a line for each bar whose two cases ran: the median of the ratios within a repeat, and the bar."""
    lines = []
    for engine, field, model, workers, largest in bars():
        ours, theirs = runs.get(("fedsim", model, workers)), runs.get((engine, model, workers))
        if ours and theirs:
            pairs = zip(ours, theirs, strict=True)
            ratio = statistics.median(getattr(run, field) / getattr(rival, field) for run, rival in pairs)
            verdict = "met" if ratio <= largest else "missed"
            title = f"fedsim over {engine}, {model}, {workers} worker{'s' * (workers > 1)}, {field}"
            lines.append(f"- {title}: {ratio:.2f}, bar {largest:.2f}, {verdict}")
    return lines
