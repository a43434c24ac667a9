"""Scores at the same simulated seconds: rounds of different lengths cannot be compared by their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedsim.report.answers import is_timed
from fedsim.report.groups import RunGroup
from fedsim.report.series import Series, curves, seconds_of

_PARTS = 3
"""number of times, evenly spread until the shortest run's last evaluation"""


def scores_line(groups: Sequence[RunGroup], names: Sequence[str], metric: str) -> Iterator[str]:
    """Yield a line with scores at common simulated times, if a run does not wait for all clients.

    A score is that of the newest evaluation until then, a mean over seeds; ``names``: all test sets, with ``seen`` and
    ``unseen`` for the means over them, of which the first one there is counts.
    """
    if not any(is_timed(run) for group in groups for run in group.runs):
        return
    name = next((mean for mean in ("seen", "unseen") if mean in names), names[0])
    lines = [curve for curve in curves(groups, name, metric, seconds_of) if curve.x[-1] > 0]
    if not lines:
        return
    times = min(float(curve.x[-1]) for curve in lines) * np.arange(1, _PARTS + 1) / _PARTS
    texts = (f"{curve.label} {', '.join(_score_at(curve, time) for time in times)}" for curve in lines)
    subject = f"mean {name}" if name in ("seen", "unseen") else name
    seconds = ", ".join(f"{time:,.1f}" for time in times)
    yield f"{metric} in percent, {subject}, until {seconds} simulated seconds: {'; '.join(texts)}"


def _score_at(curve: Series, time: float) -> str:
    """Return the score of the newest evaluation until a time; ``-`` if there is none."""
    position = int(np.searchsorted(curve.x, time * (1 + 1e-12), side="right")) - 1  # sums of seconds are rounded
    return f"{curve.mean[position]:.1f}" if position >= 0 else "-"
