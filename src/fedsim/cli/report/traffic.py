"""What runs have sent, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.cli.report.groups import Group

__all__ = ["traffic"]

_WAYS = ("down", "up", "extra")


def traffic(groups: Sequence[Group]) -> str:
    """Return a line on what runs have sent so far, in GB (1e9 bytes), and their simulated time where there is one."""
    parts = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        gigabytes = _range([sum(s.get(f"bytes_{way}", 0) for way in _WAYS) / 1e9 for s in summaries])
        seconds = [s["simulated_seconds"] for s in summaries if "simulated_seconds" in s]
        simulated = f" in {_range(seconds)} simulated seconds" if seconds else ""
        parts.append(f"{group.label} {gigabytes} GB{simulated}")
    return f"sent by server and clients: {', '.join(parts)}"


def _range(values: Sequence[float]) -> str:
    """One number, or the smallest and the largest where seeds differ."""
    texts = [f"{v:,.1f}" if v >= 100 else f"{v:.3g}" for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))
