"""The experiment that a run is: all in which repetitions with other seeds are equal; and doubts about its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose, isnan
from typing import Any, NamedTuple

from fedsim.settings.changes import Change, fingerprint_after
from fedsim.settings.configuration import Flat, digest, fingerprint_from, missing_settings
from fedsim.settings.identity import digest_of_config
from fedsim.settings.table import digest_of_table


class Experiment(NamedTuple):
    """Runs of one experiment are equal in all fields; a field is empty if nothing is known."""

    settings: str
    """hash of all settings that results depend on"""
    data: str
    """hash of the data's digests, as the run found them"""
    files: str
    """hash of the files that settings name"""
    code: str
    """hash of the user's code"""
    changes: str
    """the settings with which the run went on"""
    end: str
    """the round after which it ended before its time: ``after round 37 of 300``"""

    def differs_in(self, earlier: Experiment) -> list[str]:
        """Return the parts in which two experiments differ, for a sentence."""
        words = {"data": "the data", "files": "the content of a file", "code": "the user's code",
                 "changes": "settings with which a run went on", "end": "the end of a run"}  # fmt: skip
        return [word for part, word in words.items() if getattr(self, part) != getattr(earlier, part)]


def experiment_of(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change]
) -> Experiment:
    """Return the experiment of a run; without a config, its settings are known by their fingerprint alone."""
    identity = summary.get("identity", {})
    return Experiment(
        fingerprint_from(settings) if config else f"of {summary['fingerprint']}, {summary['rounds']} rounds",
        summary["data"]["digest"] if summary.get("data") else "",
        digest(identity["files"]) if identity.get("files") else "",
        digest(identity["code"]) if identity.get("code") else "",
        "; ".join(map(str, changes)),
        end_of(summary, settings),
    )


def end_of(summary: Mapping[str, Any], settings: Flat) -> str:
    """Return where a run ended before its last round; empty if it did not, or its callbacks may end it."""
    planned = settings.get("trainer.max_epochs")
    if planned is None or not planned.is_given or (settings["trainer.callbacks"].value and summary["finished"]):
        return ""
    if not isinstance(planned.value, int) or planned.value < 0:
        return f"after round {summary['rounds']}, without a last one"
    return f"after round {summary['rounds']} of {planned.value}" if summary["rounds"] < planned.value else ""


def doubts_about(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change]
) -> Iterator[str]:
    """Yield the reasons for which nothing can be certified of a run; each continues a sentence about it."""
    if not config:
        yield "has no config.yaml"
        return
    if gone := missing_settings(settings):
        yield f"has a config.yaml without {', '.join(gone[:5])}" + (f" and {len(gone) - 5} more" if gone[5:] else "")
    if (recorded := _recorded_digest(summary)) is not None and recorded != _present_digest(summary, config):
        yield "has another config.yaml than the one that it began with"
    else:
        yield from _doubts_about_settings(summary, settings, changes)
        yield from _doubts_about_data(summary, settings)
    if changes:
        yield f"was continued with other settings ({'; '.join(map(str, changes))})"
    if not summary["finished"]:
        yield f"is not finished, it has {summary['rounds']} rounds"
    elif end := end_of(summary, settings):
        yield f"ended {end}"


def _doubts_about_settings(summary: Mapping[str, Any], settings: Flat, changes: list[Change]) -> Iterator[str]:
    """Yield differences between the settings of a run and those that its results show."""
    method, seed = str(settings["model.method"].value).rpartition(".")[2], settings["seed_everything"].value
    planned = settings["trainer.max_epochs"].value
    pairs = [("method", summary["method"], method), ("seed", summary["seed"], seed)]
    if isinstance(planned, int) and 0 <= planned < summary["rounds"]:
        pairs.append(("rounds", summary["rounds"], planned))
    if summary.get("identity", {}).get("table") == digest_of_table():  # of other facts, it has other settings
        fingerprint = fingerprint_after(fingerprint_from(settings), changes)
        pairs.append(("fingerprint", summary["fingerprint"], fingerprint))
    yield from (
        f"has the {name} {old} in summary.json and {new} in config.yaml" for name, old, new in pairs if old != new
    )


def _doubts_about_data(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the clients and test sets that settings and data give, and those of the results."""
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
    if not log:
        yield "has no metrics.csv"
        return
    if max(log) != summary["rounds"]:
        yield f"has {summary['rounds']} rounds in summary.json and {max(log)} in metrics.csv"
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


def _is_logged(score: float, logged: float | None) -> bool:
    """Return whether a score is the logged one, which has 32 bits."""
    return logged is not None and (
        isclose(score, logged, rel_tol=1e-6, abs_tol=1e-6) or (isnan(score) and isnan(logged))
    )


def _recorded_digest(summary: Mapping[str, Any]) -> str | None:
    """Return the hash of the config with which a run began; None of one that was changed by an earlier version."""
    recorded = summary.get("identity", {}).get("config")
    if recorded is None:
        return None if summary.get("changes") else str(summary["fingerprint"])
    return str(recorded)


def _present_digest(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the hash of a config as the version that wrote the summary made it."""
    if summary.get("identity"):
        return digest_of_config(config)
    names = ("max_epochs", "precision", "limit_train_batches")
    trainer = {name: config.get("trainer", {}).get(name) for name in names}
    model = {name: value for name, value in config.get("model", {}).items() if name != "seed"}
    return digest({"model": model, "data": config.get("data"), "trainer": trainer})
