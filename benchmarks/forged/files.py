"""Runs of a row's settings that are not whole, not of its data, or whose files were edited afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from fedsim.papers.counts import counts_of
from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.settings.changes import fingerprint_after, read_changes
from forged import settings as of_settings
from forged.runs import ROLES, Made, leaves, other_value, set_at, value_at


def ended_early(rng: random.Random, made: Made) -> str:
    """End the run before its last round, by a limit or a signal."""
    planned = made.summary["rounds"]
    if planned < 2:
        return ""
    rounds = rng.choice([1, planned - 1, rng.randint(1, planned - 1)])
    made.config["trainer"] |= rng.choice([{"max_time": "00:10:00:00"}, {"max_steps": rounds}, {}])
    of_settings.complete_without(made)
    made.summary |= {"rounds": rounds, "finished": rng.choice([True, False])}
    made.summary["final"]["round"] = rounds
    return f"ended after round {rounds} of {planned}, finished {made.summary['finished']}"


def resumed(rng: random.Random, made: Made) -> str:
    """Go on with other settings, other data, another file or other code, and back again."""
    option = rng.choice(["model.client.optimizer.lr", "trainer.callbacks", "data", "data.manifest", "code of mine",
                         "trainer.plugins", "model.method.weighting", "seed_everything", "data.unseen"])  # fmt: skip
    change = {"after_round": rng.randint(1, 9), "setting": option, "from": 0.1, "to": 0.2}
    change |= rng.choice([{"counts": True}, {}])
    made.summary["changes"] = [change]
    if rng.random() < 0.5:
        changes = read_changes([change])
        made.summary["fingerprint"] = fingerprint_after(made.summary["fingerprint"], changes)
        if rng.random() < 0.5:  # and the note of it was removed
            made.summary["changes"] = []
        return f"went on with another {option}; changes {made.summary['changes']}"
    return f"went on with another {option}"


def dry_run(rng: random.Random, made: Made) -> str:
    """Draw stand-ins in the place of the data."""
    made.summary["data"] |= {"dry_run": True, "digest": "dry-1"}
    if rng.random() < 0.5:
        made.config["data"]["dry_run"] = True
        of_settings.complete_without(made)
    return f"dry run, data.dry_run {made.config['data']['dry_run']}"


def other_data(rng: random.Random, made: Made) -> str:
    """Train and score on a part of the data, another version, swapped parts, or with a set more or less."""
    sets = made.summary["data"]["sets"]
    name = rng.choice([*sets])
    countable = [role for role in ("query", "gallery", "train") if sets[name].get(role) and _is_known(made, name, role)]
    kind = rng.choice([*_OTHER_SETS, "less", "more", "unknown"])
    made.summary["data"]["digest"] = "2" * 16
    if kind == "less":
        del sets[name]
    elif kind == "more":
        sets["mine"] = copy.deepcopy(sets[name])
    elif kind == "unknown":
        made.summary["data"] = None
    elif not countable or not _OTHER_SETS[kind](rng, sets[name], countable):
        return ""
    return f"{name}: {kind}"


def _part(rng: random.Random, data_set: dict[str, Any], countable: list[str]) -> bool:
    share = rng.uniform(0.1, 0.9)
    for role in [role for role in ROLES if data_set.get(role)]:
        data_set[role] = {unit: max(1, int(share * count)) for unit, count in data_set[role].items()}
    return True


def _fewer_or_more(rng: random.Random, data_set: dict[str, Any], countable: list[str]) -> bool:
    data_set[rng.choice(countable)]["images"] += rng.choice([-1, 1])
    return True


def _person_fewer(rng: random.Random, data_set: dict[str, Any], countable: list[str]) -> bool:
    role = rng.choice(countable)
    data_set[role] = {unit: count - 1 for unit, count in data_set[role].items()}
    return True


def _swapped(rng: random.Random, data_set: dict[str, Any], countable: list[str]) -> bool:
    is_seen = {"query", "gallery"} <= {*countable} and data_set["query"]["images"] != data_set["gallery"]["images"]
    data_set["query"], data_set["gallery"] = data_set["gallery"], data_set["query"]
    return is_seen


def _no_part(rng: random.Random, data_set: dict[str, Any], countable: list[str]) -> bool:
    data_set[rng.choice(countable)] = None
    return True


_OTHER_SETS = {
    "a part": _part, "an image fewer or more": _fewer_or_more, "a person fewer": _person_fewer, "swapped": _swapped,
    "no part": _no_part,
}  # fmt: skip


def _is_known(made: Made, name: str, role: str) -> bool:
    """Return whether the row has the number of images."""
    paper = read_paper(made.key)
    row = counts_of(paper, resolved_row(paper, made.name))[name]
    return role in row and (row[role] if role == "gallery" else row[role][1]) is not None


def edited_config(rng: random.Random, made: Made) -> str:
    """Do the run with other settings, and edit config.yaml afterwards; or remove the file."""
    kept = copy.deepcopy(made.config)
    kind = rng.choice(["trainer", "callbacks, plugins", "data", "sources", "model", "own class", "removed"])
    if kind == "removed":
        made.kept = {}
        return "config.yaml removed"
    done = of_settings.OF_SETTINGS[kind](rng, made)
    made.kept = kept
    return done and f"{done}, and config.yaml edited"


def edited_values(rng: random.Random, made: Made) -> str:
    """Edit a value of config.yaml that changes results."""
    made.kept = copy.deepcopy(made.config)
    place = rng.choice([p for p in leaves(made.config) if p[0] in ("model", "data") and p[-1] != "class_path"])
    set_at(made.kept, place, other_value(value_at(made.kept, place), rng))
    return f"{'.'.join(map(str, place))} {value_at(made.kept, place)} in config.yaml"


def edited_summary(rng: random.Random, made: Made) -> str:
    """Edit a field of summary.json."""
    summary, clients, unseen = made.summary, made.summary["clients"], made.summary["unseen"]
    identity, final = summary["identity"], summary["final"]
    edits: dict[str, tuple[Any, ...]] = {
        "method": ("FedProx", "Local", "FedBN", "Mine"),
        "clients": (clients[:-1], [*clients, "mine"], ["mine", *clients[1:]], clients[:1] * 2, [*clients, clients[0]]),
        "unseen": ([*unseen, "mine"], unseen[1:], [], clients[:1], ["viper", "grid"]),
        "rounds": (summary["rounds"] + 1, summary["rounds"] - 1, 1, 0),
        "finished": (False,),
        "fingerprint": ("0" * 12,),
        "identity": ({}, {"config": "0" * 12}, {**identity, "config": "1" * 12}, {"config": None}),
        "seed": (summary["seed"] + rng.randint(1, 5),),
        "final": ({**final, "metrics": {name: score + 0.1 for name, score in final["metrics"].items()}},),
        "data": (None, {"digest": "1"}),
    }
    field = rng.choice([*edits])
    values = [value for value in edits[field] if value != summary[field]]
    if field in ("unseen", "clients"):
        values = [value for value in values if sorted(value) != sorted(summary[field])]
    if not values:
        return ""
    made.logged = copy.deepcopy(final["metrics"]) if field == "final" else None
    made.rounds = summary["rounds"] if field == "rounds" else None
    summary[field] = rng.choice(values)
    return f"{field} edited: {str(summary[field])[:80]}"


def no_record(rng: random.Random, made: Made) -> str:
    """Edit config.yaml, and remove the record of the first one: an earlier version has none of a run that went on."""
    done = edited_config(rng, made)
    made.summary["changes"] = [{"after_round": 1, "setting": "trainer.max_epochs", "from": 2, "to": 3, "counts": False}]
    made.summary["identity"] = rng.choice([{}, {"files": {}, "code": {}}])
    return done and f"{done}, and no record of it"


def seed_by_hand(rng: random.Random, made: Made) -> str:
    """Edit the seed in one file, or in both: a copy as a further seed."""
    seed, files = (
        rng.randint(10, 99),
        rng.choice([("summary.json",), ("config.yaml",), ("summary.json", "config.yaml")]),
    )
    if "summary.json" in files:
        made.summary["seed"] = seed
    if "config.yaml" in files:
        made.kept = made.config | {"seed_everything": seed}
    return f"seed {seed} in {' and '.join(files)}"


def contradiction(rng: random.Random, made: Made) -> str:
    """Edit a part of summary.json so that it has what the config does not have."""
    part, edit = rng.choice([("data", {"generated": {"digest": "1", "images": 500}}),
                             ("identity", {"code": {"mine": "0" * 12}}),
                             ("identity", {"files": {"data.manifest": "0" * 12}})])  # fmt: skip
    made.summary[part] = made.summary[part] | edit
    return f"{part} edited: {edit}"


def chosen_round(rng: random.Random, made: Made) -> str:
    """Put the scores of a better round in the place of the last one's."""
    if made.summary["rounds"] < 2:
        return ""
    round_ = made.summary["final"]["round"] = rng.randint(1, made.summary["rounds"] - 1)
    made.later = {name: score - 0.1 for name, score in made.summary["final"]["metrics"].items()}
    return f"scores of round {round_} as the last ones"


def short_log(rng: random.Random, made: Made) -> str:
    """Write more rounds into summary.json than the run had."""
    if made.summary["rounds"] < 2:
        return ""
    made.rounds = rng.randint(1, made.summary["rounds"] - 1)
    made.summary["final"]["round"] = made.rounds
    return f"{made.rounds} rounds in metrics.csv"


def tested(rng: random.Random, made: Made) -> str:
    """Score the right run by ``fedsim test`` with other settings of the evaluation, or on other data."""
    conditions = copy.deepcopy(made.config)
    made.tested = {"checkpoint": "last", **copy.deepcopy(made.summary["final"]), "settings": conditions}
    made.tested["data"] = copy.deepcopy(made.summary["data"])
    evaluation = conditions["model"]["evaluation"]
    kind = rng.choice(["evaluation", "evaluation", "data", "network", "unknown", "limit", "round", "model", "scores"])
    if kind == "evaluation":
        if evaluation["task"] != "retrieval":
            return ""
        name = rng.choice([n for n in evaluation if n not in ("share_from", "backend", "batch_size", "ensemble",
                                                              "test_during_fit", "precision")])  # fmt: skip
        evaluation[name] = other_value(evaluation[name], rng)
        return f"tested with {name} {evaluation[name]}"
    if kind == "network":
        backbone = conditions["model"]["backbone"]
        if not backbone or "last_stride" not in backbone.get("init_args", {}):
            return ""
        backbone["init_args"]["last_stride"] = 3 - backbone["init_args"]["last_stride"]
        return f"tested with last_stride {backbone['init_args']['last_stride']}"
    if kind == "data":
        made.tested["data"] = {**made.tested["data"], "digest": "3" * 16}
        return "tested on other data"
    if kind == "round":
        made.tested["round"] += 1
        return "tested at another round"
    if kind == "model":
        conditions["seed_everything"] += rng.randint(0, 1)
        conditions["model"]["client"]["local_epochs"] += 1
        return "tested with a model of other local epochs"
    if kind == "scores":
        made.tested["metrics"] = {name: score + 0.3 for name, score in made.tested["metrics"].items()}
        return "tested, and scores edited"
    if kind == "limit":
        conditions["trainer"]["limit_test_batches"] = 0.5
        return "tested with limit_test_batches 0.5"
    lacking = rng.choice(["settings", "data"])
    del made.tested[lacking]
    return f"tests/last.json without {lacking}"


OF_FILES: dict[str, Callable[[random.Random, Made], str]] = {
    "ended early": ended_early,
    "resumed": resumed,
    "dry run": dry_run,
    "other data": other_data,
    "edited config": edited_config,
    "edited values": edited_values,
    "no record": no_record,
    "edited summary": edited_summary,
    "seed by hand": seed_by_hand,
    "contradiction": contradiction,
    "short log": short_log,
    "chosen round": chosen_round,
    "tested": tested,
}
