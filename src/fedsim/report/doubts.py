"""Doubts about a run: what its files do not say, and what they say against each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isclose, isnan
from typing import Any

from fedsim.report.run_files import end_of
from fedsim.settings.changes import Change, fingerprint_after
from fedsim.settings.configuration import compare, fingerprint_from, flat, missing_settings, names_file
from fedsim.settings.effects import Flat
from fedsim.settings.identity import digest_of_config
from fedsim.settings.table import digest_of_table

_UNEQUAL = "has the {} {} in summary.json and {} in config.yaml"
_OF_ROUNDING = 0.01
"""largest difference between two scores of one model by other sizes of batches, or another number of threads"""


def doubts_about(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change], has_log: bool
) -> Iterator[str]:
    """Yield the reasons beside contradictions for which nothing can be certified of a run.

    Each continues a sentence about the run.
    """
    if not config:
        yield "has no config.yaml"
        return
    if gone := missing_settings(settings):
        yield f"has a config.yaml without {', '.join(gone[:5])}" + (f" and {len(gone) - 5} more" if gone[5:] else "")
    if "config" not in summary.get("identity", {}):  # nor had early versions
        yield "has no record of the config.yaml that it began with"
    fingerprint = fingerprint_after(fingerprint_from(settings), changes)  # of a script, it may be of the folder
    is_of_these_facts = summary.get("identity", {}).get("table") == digest_of_table()
    if is_of_these_facts and summary["fingerprint"] != fingerprint:
        yield _UNEQUAL.format("fingerprint", summary["fingerprint"], fingerprint)
    if changes:
        yield f"was continued with other settings ({'; '.join(map(str, changes))})"
    if not has_log:
        yield "has no metrics.csv"
    if not summary["finished"]:
        yield f"is not finished, it has {summary['rounds']} rounds"
    elif end := end_of(summary, settings):
        yield f"ended {end}"


def contradictions_of(summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield the differences between the summary of a run and its config; each continues a sentence about it."""
    present = digest_of_config(config)
    if summary.get("identity", {}).get("config", present) != present:
        yield "has another config.yaml than the one that it began with"
        return
    yield from _doubts_about_settings(summary, settings)
    yield from _doubts_about_identity(summary, config, settings)
    yield from _doubts_about_data(summary, settings)


def _doubts_about_settings(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the settings of a run and those that its results show."""
    pairs, planned = [], settings["trainer.max_epochs"].value
    for name, option in (("method", "model.method"), ("seed", "seed_everything")):
        if option in settings and settings[option].is_given:
            value = settings[option].value
            pairs.append((name, summary[name], value.rpartition(".")[2] if isinstance(value, str) else value))
    if isinstance(planned, int) and 0 <= planned < summary["rounds"]:
        pairs.append(("rounds", summary["rounds"], planned))
    yield from (_UNEQUAL.format(name, old, new) for name, old, new in pairs if old != new)


def _doubts_about_identity(summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield the files and the code in the identity of a run that its config does not name."""
    identity, named = summary.get("identity", {}), json.dumps(config, default=str)
    for option in identity.get("files", {}):
        if option not in settings or not names_file(settings[option]):
            yield f"has the content of {option} in summary.json, which names no file in config.yaml"
    for module in identity.get("code", {}):
        if f'"{module}.' not in named:
            yield f"has the code of {module} in summary.json, which config.yaml does not name"


def _doubts_about_data(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the clients and test sets that settings and data give, and those of the results."""
    if (summary.get("data") or {}).get("generated") and settings["data.generated"].value is None:
        yield "has generated images in summary.json and none in config.yaml"
    sets, public = (summary.get("data") or {}).get("sets"), str(settings["data.public"].value)
    unseen, parts = settings["data.unseen"].value, settings["data.parts"].value
    is_known = isinstance(unseen, list) and isinstance(parts, int) and settings["data.manifest"].value is None
    if sets is None or not is_known or "num_clients" in summary:
        return
    seen = {
        name: counts["train"] for name, counts in sets.items() if counts.get("train") and name not in (*unseen, public)
    }
    by_camera = settings["data.partition"].value == "by_camera"
    clients = [client.rstrip("0123456789") if by_camera else client for client in summary["clients"]]
    if sorted(clients) != sorted(_clients(seen, settings)):
        yield f"has other clients in summary.json than its settings and data give: {', '.join(summary['clients'])}"
    if {name for name in sets if name not in seen} - {public} != {*summary["unseen"]} - {public}:
        names = ", ".join(summary["unseen"]) or "none"
        yield f"has other unseen data sets in summary.json than its settings and data give: {names}"


def _clients(seen: Mapping[str, Any], settings: Flat) -> list[str]:
    """Return the names of clients, of cameras without their numbers; ``seen``: data set -> counts of its training."""
    partition = settings["data.partition"].value
    parts = [f"part{number + 1}" for number in range(settings["data.parts"].value)]
    if partition in ("by_dataset", "union", "stratified"):
        return {"by_dataset": [*seen], "union": ["union"], "stratified": parts}[partition]
    if partition == "by_camera":
        return [f"{name}-cam" for name, counts in seen.items() for _ in range(counts["cameras"])]
    return [f"{name}-{part}" for name in seen for part in parts]


def doubts_about_log(summary: Mapping[str, Any], log: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    """Yield differences between the results of a run and its log: round -> scores."""
    if max(log, default=0) != summary["rounds"]:
        yield f"has {summary['rounds']} rounds in summary.json and {max(log, default=0)} in metrics.csv"
    scored = {round_: row for round_, row in log.items() if any(key.startswith("test/") for key in row)}
    for name in ("final", "best"):
        evaluation = summary[name] or {"round": 0, "metrics": {}}
        logged, scores = log.get(evaluation["round"], {}), evaluation["metrics"]
        if not all(_is_logged(score, logged.get(key)) for key, score in scores.items()):
            yield f"has other {name} scores in summary.json than in metrics.csv"
    if summary["final"] and scored and summary["final"]["round"] != max(scored):
        yield f"has the scores of round {summary['final']['round']} as its last, and of {max(scored)} in metrics.csv"
    best = (summary["best"] or {"metrics": {}})["metrics"]
    for key in [key for key in ("val/mAP", "val/top1") if key in best]:
        if any(row.get(key, best[key]) > best[key] + 1e-6 for row in log.values()):
            yield f"has better {key} in metrics.csv than that of its best round in summary.json"


def doubts_about_test(summary: Mapping[str, Any], settings: Flat, tested: Mapping[str, Any]) -> Iterator[str]:
    """Yield that ``fedsim test`` has other scores than the fit for the round of its last evaluation, scored alike."""
    final = summary["final"] or {"round": None, "metrics": {}}
    if tested.get("round") != final["round"] or not tested.get("settings"):
        return
    effects = {difference.effect for difference in compare(settings, flat(tested["settings"]))}
    tolerance = _OF_ROUNDING if "rounding" in effects else 1e-6
    shared = [name for name in final["metrics"] if name.startswith("test/") and name in tested["metrics"]]
    for name in shared if "results" not in effects else ():
        pair = final["metrics"][name], tested["metrics"][name]
        if not isclose(*pair, abs_tol=tolerance) and not all(map(isnan, pair)):
            yield f"has {name} {pair[0]:.4f} in round {final['round']}, and {pair[1]:.4f} by fedsim test"
            return


def _is_logged(score: float, logged: float | None) -> bool:
    """Return whether a score is the logged one, which has 32 bits."""
    return logged is not None and (
        isclose(score, logged, rel_tol=1e-6, abs_tol=1e-6) or (isnan(score) and isnan(logged))
    )
