"""How often each client has answered: the price of rounds that do not wait for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.runs import Run


def answers_of(run: Run) -> dict[str, int]:
    """Return client -> rounds in which its update counted; empty if there is no log, or it does not name clients."""
    if not run.has_log:
        return {}
    keys = {name: metric_name("train", name, "loss") for name in run.summary["clients"]}
    counts = {name: sum(key in row for row in run.log.values()) for name, key in keys.items()}
    return counts if any(counts.values()) else {}


def is_timed(run: Run) -> bool:
    """Return whether rounds do not wait for all clients (``model.timing``)."""
    return run.has_log and any("time/clock" in row for row in run.log.values())


def fewest_answers(run: Run) -> str:
    """Return the number of answers of the client with the fewest, and of all; ``-`` if the log does not name clients.

    With its name: ``4 of 90 (town0)``.
    """
    counts = answers_of(run)
    if not counts:
        return "-"
    fewest = min(counts, key=counts.__getitem__)
    return f"{counts[fewest]} of {sum(counts.values())} ({fewest})"


def answers_line(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line with the fewest answers of a client, and the most, if any run does not wait for all clients."""
    if not any(is_timed(run) for group in groups for run in group.runs):
        return
    parts = []
    for group in groups:
        counted = [counts for run in group.runs if (counts := answers_of(run))]
        if counted:
            mean = {name: sum(counts[name] for counts in counted) / len(counted) for name in counted[0]}
            fewest, most = min(mean, key=mean.__getitem__), max(mean, key=mean.__getitem__)
            span = f"{fewest} {mean[fewest]:g} to {most} {mean[most]:g}"
            parts.append(f"{group.label} {span if mean[fewest] < mean[most] else f'{mean[most]:g} each'}")
    if parts:
        yield f"answers of a client, fewest and most: {', '.join(parts)}"
