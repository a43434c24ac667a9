"""The trials of a search as a table, with the best so far and the importance of each option."""

from __future__ import annotations

import math
from collections import Counter

import optuna

from fedsim.report.layout import Block
from fedsim.report.study import SearchTrials, TrialRow

_LEAST = 10
"""complete trials below which no importance is computed: it would be chance"""
_ORDER = ("complete", "pruned", "failed", "running", "waiting")


def importances(trials: SearchTrials) -> dict[str, float]:
    """Return option -> share of the variance of the score over the space that it explains, the largest first.

    It is fANOVA (Hutter et al., ICML 2014) by Optuna: a random forest of the complete trials. Empty with fewer than ten
    of them, with a single option, or if scores are equal or nearly so.
    """
    scores = {row.score for row in trials.complete}
    num_options = len({option for row in trials.complete for option in row.settings})
    if len(trials.complete) < _LEAST or len(scores) < 2 or num_options < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        shares = optuna.importance.get_param_importances(trials.study, evaluator=evaluator)
    except RuntimeError:  # scores differ by so little that all trees are constant
        return {}
    return {option: float(share) for option, share in shares.items()}


def trial_block(trials: SearchTrials) -> Block:
    """Return a table with a row per trial, the best first; a pruned trial has no score, but its state."""
    options = list(dict.fromkeys(option for row in trials.rows for option in row.settings))
    rows = sorted(trials.rows, key=lambda row: _place(row, trials))
    lines = [
        [str(row.number), _state(row), *(_cell(row.settings.get(option, "-")) for option in options), str(row.folder),
         "-" if row.score is None else f"{row.score:.4f}"]
        for row in rows
    ]  # fmt: skip
    headers = ["trial", "state", *short_names(options), "run directory", trials.metric]
    return Block(headers, lines, [_counts(trials), *_notes(trials)], num_left=len(headers) - 1)


def short_names(options: list[str]) -> list[str]:
    """Return the last part of each option's name; the full name if that would be ambiguous."""
    last = Counter(option.rpartition(".")[2] for option in options)
    return [short if last[short := option.rpartition(".")[2]] == 1 else option for option in options]


def _place(row: TrialRow, trials: SearchTrials) -> tuple[int, bool, float, int]:
    score = 0.0 if row.score is None or math.isnan(row.score) else row.score
    is_nan = row.score is not None and math.isnan(row.score)
    return _ORDER.index(row.state), is_nan, -score if trials.maximize else score, row.number


def _state(row: TrialRow) -> str:
    if row.same_as is not None:
        return f"{row.state}, as trial {row.same_as}"
    if row.state == "pruned" and row.seen:
        evaluation = max(row.seen)
        return f"pruned after {evaluation}, at {row.seen[evaluation]:.4f}"
    return row.state


def _counts(trials: SearchTrials) -> str:
    """Return the numbers of trials by state, and what pruned means."""
    counts = Counter(row.state for row in trials.rows)
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    pruned = "; a pruned trial ended before its last round: it has no score, and counts in no mean"
    return f"trials: {states or 'none'}{pruned if counts['pruned'] else ''}"


def _notes(trials: SearchTrials) -> list[str]:
    """Return lines about the best trial, the way to it, the importance of options, and failures."""
    notes = []
    if trials.records:
        best = trials.records[-1]
        settings = " ".join(f"{option}={value}" for option, value in best.settings.items())
        notes.append(f"best: trial {best.number}, {trials.metric} {best.score:.4f}: {settings}")
        notes.append(f"best so far: {', '.join(f'{row.score:.4f} (trial {row.number})' for row in trials.records)}")
    if shares := importances(trials):
        listed = ", ".join(f"{option} {share:.2f}" for option, share in shares.items())
        notes.append(f"share of the score's variance (fANOVA, {len(trials.complete)} complete trials): {listed}")
    failed = [row for row in trials.rows if row.state == "failed"]
    return notes + [f"failed: trial {row.number}: {row.error} ({row.folder}.log)" for row in failed]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
