"""Run directories as fedsim fit leaves them, with chosen scores."""

import csv
import json

import yaml

from fedsim.settings.identity import digest_of_config

METRICS = ("mAP", "mAP_trapezoid", "mINP", "rank1", "rank5", "rank10")


def scores_of(rank1, kind="global", **others):
    """Names and values of an evaluation: rank-1 by test set; the other metrics are multiples of it."""
    scores = {}
    for name, value in rank1.items():
        for factor, metric in enumerate(METRICS, start=1):
            scores[f"test/{kind}/{name}/{metric}"] = value if metric == "rank1" else value * factor / 10
    return scores | others


def with_mean(rank1):
    return rank1 | {"seen": sum(rank1.values()) / len(rank1)}


def write_log(path, rows):
    """``rows``: (round, numbers); each becomes a line."""
    names = ["epoch", *dict.fromkeys(name for _, row in rows for name in row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({"epoch": round_ - 1, **row} for round_, row in rows)


def training(up=5.0, down=10.0):
    return {"comm/up_bytes": up, "comm/down_bytes": down, "train/loss": 1.0}


def write_run(folder, evaluations, rounds=None, config=None, **summary):
    """Write a run directory.

    evaluations: round -> its scores; rounds: how many there were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounds = rounds or max(evaluations)
    rows = []
    for round_ in range(1, rounds + 1):
        rows.append((round_, training()))
        if round_ in evaluations:
            rows.append((round_, evaluations[round_]))
    write_log(folder / "metrics.csv", rows)
    last = max(evaluations)
    content = {
        "finished": True, "method": "FedPav", "fingerprint": folder.name, "seed": 0, "rounds": rounds,
        "clients": ["a"], "unseen": [], "primary": "global", "best": None,
        "final": {"round": last, "metrics": evaluations[last]},
    }  # fmt: skip
    if config is not None:
        content["identity"] = {"config": digest_of_config(config), "files": {}, "code": {}}
    (folder / "summary.json").write_text(json.dumps(content | summary))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder
