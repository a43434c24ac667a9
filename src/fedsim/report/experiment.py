"""The experiment that a run is: all that tells it from a repetition with another seed; and doubts about its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedsim.settings.changes import Change
from fedsim.settings.configuration import Flat, digest, is_of_experiment, missing_settings
from fedsim.settings.identity import digest_of_config


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

    def differs_in(self, other: Experiment) -> list[str]:
        """Return the parts in which two experiments differ, for a sentence."""
        words = {"data": "the data", "files": "the content of a file", "code": "the user's code",
                 "changes": "settings with which a run went on", "end": "the end of a run"}  # fmt: skip
        return [word for part, word in words.items() if getattr(self, part) != getattr(other, part)]


def experiment_of(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change]
) -> Experiment:
    """Return the experiment of a run; without a config, its settings are known by their fingerprint alone."""
    identity = summary.get("identity", {})
    values = {option: entry.value for option, entry in settings.items() if is_of_experiment(entry)}
    return Experiment(
        digest(values) if config else f"of {summary['fingerprint']}",
        summary["data"]["digest"] if summary.get("data") else "",
        digest(identity["files"]) if identity.get("files") else "",
        digest(identity["code"]) if identity.get("code") else "",
        "; ".join(map(str, changes)),
        end_of(summary, settings),
    )


def end_of(summary: Mapping[str, Any], settings: Flat) -> str:
    """Return where a run ended before its last round; empty if it did not, or its callbacks may end it."""
    rounds, planned = summary["rounds"], _planned_rounds(settings)
    may_end = bool(settings) and settings["trainer.callbacks"].value and summary["finished"]
    return "" if planned is None or planned <= rounds or may_end else f"after round {rounds} of {planned}"


def _planned_rounds(settings: Flat) -> int | None:
    """Return the rounds of the settings; None if they are not known, or without an end."""
    entry = settings.get("trainer.max_epochs")
    return entry.value if entry is not None and entry.is_given and isinstance(entry.value, int) else None


def doubts_about(
    summary: Mapping[str, Any], config: Mapping[str, Any], settings: Flat, changes: list[Change]
) -> Iterator[str]:
    """Yield the reasons for which nothing can be certified of a run; each continues a sentence about it."""
    if not config:
        yield "has no config.yaml"
        return
    if (recorded := _recorded_digest(summary)) is not None and recorded != _present_digest(summary, config):
        yield "has another config.yaml than the one that it began with"
    if gone := missing_settings(settings):
        yield f"has a config.yaml without {', '.join(gone[:5])}" + (f" and {len(gone) - 5} more" if gone[5:] else "")
    method = str(settings["model.method"].value).rpartition(".")[2] if "model.method" in settings else None
    if method is not None and method != summary["method"]:
        yield f"has the method {summary['method']} in summary.json and {method} in config.yaml"
    if changes:
        yield f"was continued with other settings ({'; '.join(map(str, changes))})"
    if not summary["finished"]:
        yield f"is not finished, it has {summary['rounds']} rounds"
    elif end := end_of(summary, settings):
        yield f"ended {end}"
    planned = _planned_rounds(settings)
    if planned is not None and planned < summary["rounds"]:
        yield f"has {summary['rounds']} rounds in summary.json and {planned} in config.yaml"
    yield from _doubts_about_data(summary, settings)


def _doubts_about_data(summary: Mapping[str, Any], settings: Flat) -> Iterator[str]:
    """Yield differences between the data sets of the settings and the clients of the results."""
    unseen = set(settings["data.unseen"].value or ())
    if both := sorted(unseen & set(summary["clients"])):
        yield f"has a client {both[0]}, which data.unseen leaves out"
    is_by_set = settings["data.partition"].value == "by_dataset" and summary["clients"] and summary["final"]
    if is_by_set and (gone := sorted(_trained_sets(summary) - set(summary["clients"]))):
        yield f"has scores of {gone[0]} as of a client, and no such client in summary.json"


def _trained_sets(summary: Mapping[str, Any]) -> set[str]:
    """Return the test sets with scores on which clients trained."""
    keys = (key.split("/") for key in summary["final"]["metrics"])
    names = {parts[2] for parts in keys if len(parts) == 4 and parts[0] == "test"}
    return names - {"seen", "unseen", *summary["unseen"]}


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
