"""Run directories of papers' rows as an honest ``fedsim fit`` leaves them, and what can be drawn for a setting."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedsim.papers.counts import counts_of
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import find_run, resolved_row
from fedsim.settings.configuration import fingerprint_of
from fedsim.settings.identity import identity_of

Config = dict[str, Any]
ROLES = ("train", "query", "gallery", "pool")


@dataclass
class Made:
    """A run directory before it is written."""

    key: str
    """the paper"""
    name: str
    """the row that it pretends to be"""
    table: str
    """with this row"""
    printed_in: str
    """the paper with this table"""
    config: Config
    """with which the run was done"""
    summary: Config = field(default_factory=dict)
    kept: Config | None = None
    """content of config.yaml, if it was edited after the run; {}: it was removed"""
    tested: Config | None = None
    """content of a file of ``fedsim test``"""
    logged: Config | None = None
    """scores in metrics.csv, if they are not those of the summary"""
    later: Config | None = None
    """scores of the last round in metrics.csv, if those of the summary are of an earlier one"""
    rounds: int | None = None
    """in metrics.csv, if they are not those of the summary"""


@cache
def printed_rows() -> list[tuple[str, str, str, str]]:
    """Return paper and name of each row with printed numbers, and a table with it: paper and name."""
    rows = {}
    for key in list_papers():
        for table in read_paper(key).tables:
            for row in (row for row in table.rows if row.scores):
                for paper, name in (find_run(read_paper(key), run) for run in row.runs):
                    left_out = resolved_row(paper, name)["data"]["unseen"] if table.left_out else row.scores
                    if {*left_out} <= {*table.test_sets}:
                        rows[paper.key, name] = (paper.key, name, key, table.name)
    return sorted(rows.values())


def honest(row: tuple[str, str, str, str], seed: int = 1) -> Made:
    """Return the whole run of a row."""
    key, name, printed_in, table = row
    config = yaml.safe_load(yaml.safe_dump(resolved_row(read_paper(key), name)))
    config["seed_everything"] = seed
    made = Made(key, name, table, printed_in, config)
    complete(made)
    return made


def complete(made: Made) -> None:
    """Write the summary of a run that was done with the settings as they are now."""
    config, (key, name) = made.config, (made.key, made.name)
    data = data_of(key, name)
    hidden = {*(config["data"]["unseen"] or []), config["data"]["public"]}
    seen = {s: c["train"] for s, c in data["sets"].items() if c["train"] and s not in hidden}
    unseen = [s for s in data["sets"] if s not in seen and s != config["data"]["public"]]
    rounds = config["trainer"]["max_epochs"] or 300
    rounds = rounds if isinstance(rounds, int) and rounds > 0 else 300
    table = next(table for table in read_paper(made.printed_in).tables if table.name == made.table)
    kinds = {row.model for row in table.rows} | {"global"}
    scores = {
        f"test/{kind}/{test_set}/{metric}": 0.25 + 0.01 * place
        for kind in sorted(kinds)
        for place, test_set in enumerate(table.test_sets)
        for metric in ("mAP", "mAP_trapezoid", "rank1", "rank5", "rank10", "top1")
    }
    made.summary = {
        "finished": True, "method": config["model"]["method"]["class_path"].rpartition(".")[2],
        "fingerprint": fingerprint_of(config), "identity": identity_of(config), "seed": config["seed_everything"],
        "rounds": rounds, "changes": [], "clients": clients_of(seen, config["data"]), "unseen": unseen, "data": data,
        "primary": "global", "final": {"round": rounds, "metrics": scores}, "best": None,
    }  # fmt: skip


def clients_of(seen: Config, data: Config) -> list[str]:
    """Return the names of the clients; ``seen``: data set -> counts of its training images."""
    parts = [f"part{number}" for number in range(1, data["parts"] + 1)]
    if data["partition"] == "by_dataset":
        return list(seen)
    if data["partition"] == "by_camera":
        return [f"{name}-cam{c}" for name, counts in seen.items() for c in range(1, counts["cameras"] + 1)]
    whole = {"union": ["union"], "stratified": parts}
    return whole.get(data["partition"], [f"{name}-{part}" for name in seen for part in parts])


@cache
def _data_of(key: str, name: str) -> str:
    counts, sets = counts_of(read_paper(key), resolved_row(read_paper(key), name)), {}
    for data_set, row in counts.items():
        parts: Config = dict.fromkeys(ROLES[:3])
        for role in [role for role in ROLES if role in row]:
            people, images = (7, row[role]) if role == "gallery" else row[role]
            parts[role] = {"people": people or 5, "cameras": 2, "images": images or 50}
        for role in ("query", "gallery"):
            parts[role] = parts[role] or {"people": 5, "cameras": 2, "images": 50}
        sets[data_set] = {**parts, "digest": "0" * 16}
    return json.dumps({"digest": "1" * 16, "sets": sets})


def data_of(key: str, name: str) -> Config:
    """Return data with the numbers of a row; made-up ones where these are not known."""
    return dict(json.loads(_data_of(key, name)))


def write(made: Made, folder: Path) -> Path:
    """Write the run directory; return it."""
    folder.mkdir(parents=True)
    summary = made.summary
    (folder / "summary.json").write_text(json.dumps(summary))
    kept = made.config if made.kept is None else made.kept
    if kept:
        (folder / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
    rounds = made.rounds or summary["rounds"]
    last = summary["final"]["round"]
    scores = made.logged or summary["final"]["metrics"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", "train/images", *scores])
        writer.writeheader()
        writer.writerows({"epoch": epoch, "train/images": 100} for epoch in range(rounds))
        writer.writerow({"epoch": last - 1, **scores})
        if made.later:
            writer.writerow({"epoch": rounds - 1, **made.later})
    if made.tested is not None:
        (folder / "tests").mkdir()
        (folder / "tests" / "last.json").write_text(json.dumps(made.tested))
    return folder


# -- settings ----------------------------------------------------------------------------------------------------------


def leaves(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all plain values of a configuration; those of lists of classes by their numbers."""
    if isinstance(content, dict) and content:
        for name, inner in content.items():
            yield from leaves(inner, (*place, name))
    elif isinstance(content, list) and content and all(isinstance(inner, dict) for inner in content):
        for number, inner in enumerate(content):
            yield from leaves(inner, (*place, number))
    else:
        yield place


def value_at(content: Any, place: tuple[Any, ...]) -> Any:
    """Return what stands at a place."""
    for part in place:
        content = content[part]
    return content


def set_at(content: Any, place: tuple[Any, ...], value: Any) -> None:
    """Set a value, and make sections on the way."""
    for part in place[:-1]:
        if isinstance(content, dict) and content.get(part) is None:
            content[part] = {}
        content = content[part]
    content[place[-1]] = value


def remove_at(content: Any, place: tuple[Any, ...]) -> None:
    """Remove what stands at a place."""
    del value_at(content, place[:-1])[place[-1]]


def option_of(place: tuple[Any, ...]) -> str:
    """Return the option of a place, without numbers."""
    return ".".join(
        str(part) for part in place if part not in ("init_args", "class_path") and not isinstance(part, int)
    )


def other_value(value: Any, rng: random.Random) -> Any:
    """Return another value of a setting."""
    choices: list[Any] = [7, "other", True, 0.5, {"added": 1}, [1]]
    if isinstance(value, bool):
        choices = [not value]
    elif isinstance(value, int | float):
        choices = [value + 1, value * 2 + 1, value / 2 + 0.25, -value - 1, None, f"{value}x"]
    elif isinstance(value, str):
        choices = [f"{value}x", None, f"mine.{value.rpartition('.')[2]}"]
    elif isinstance(value, list):
        choices = [[*value, 1], value[1:] if value else [1], [*value, *value] or ["x"]]
    return rng.choice([choice for choice in choices if choice != value])
