"""Run directories as fedsim fit leaves them, with chosen scores."""

import copy
import csv
import json

import yaml

from fedsim.papers.counts import counts_of
from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.table import report
from fedsim.settings.configuration import fingerprint_of
from fedsim.settings.identity import identity_of

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


def data_of_row(key, name):
    """The data of a summary that has the numbers of a paper's row; other ones where these are not known."""
    paper, sets = read_paper(key), {}
    for data_set, row in counts_of(paper, resolved_row(paper, name)).items():
        parts = {"train": None, "query": (5, 50), "gallery": 50} | {role: row[role] for role in row if role != "by"}
        pairs = {role: (7, part) if isinstance(part, int) else part or (7, 50) for role, part in parts.items()}
        numbers = {
            role: {"people": pair[0] or 5, "cameras": 2, "images": pair[1] or 50} for role, pair in pairs.items()
        }
        trains = "train" in row
        sets[data_set] = {**numbers, "train": numbers["train"] if trains else None, "digest": "0" * 16}
    return {"digest": "1" * 16, "sets": sets}


def clients_and_unseen(config, data):
    """The clients, and the unseen data sets, of a run."""
    hidden, partition = config["data"]["unseen"] or [], config["data"]["partition"]
    seen = [name for name, parts in data["sets"].items() if parts["train"] and name not in hidden]
    parts = [f"part{number}" for number in range(1, config["data"]["parts"] + 1)]
    divided = [f"{name}-{part}" for name in seen for part in (("cam1", "cam2") if partition == "by_camera" else parts)]
    clients = {"by_dataset": seen, "union": ["union"], "stratified": parts}.get(partition, divided)
    return {"clients": clients, "unseen": [name for name in data["sets"] if name not in seen]}


def whole(key, name, config=None):
    """What the summary of a whole run of a row has: its clients and data; ``config``: of the run, if it is another."""
    config, data = config or resolved_row(read_paper(key), name), data_of_row(key, name)
    method = config["model"]["method"]["class_path"].rpartition(".")[2]
    return clients_and_unseen(config, data) | {"data": data, "method": method, "seed": config["seed_everything"]}


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
        content |= {"identity": identity_of(config), "fingerprint": fingerprint_of(config)}
    (folder / "summary.json").write_text(json.dumps(content | summary))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


KEY, ROW = "003", "table4_batch_32"
SETS = ("market1501", "dukemtmc", "cuhk03np", "msmt17")


def row_run(folder, seed=0, change=None, rounds=300, **summary):
    """A run of a row on its data; ``change`` edits the config before it."""
    config, data = copy.deepcopy(resolved_row(read_paper(KEY), ROW)), data_of_row(KEY, ROW)
    config["seed_everything"] = seed
    if change:
        change(config)
    known = clients_and_unseen(config, data) | {"data": data, "seed": seed}
    known |= {"fingerprint": fingerprint_of(config)} | summary
    return write_run(folder, {rounds: scores_of(dict.fromkeys(SETS, 0.5 + 0.1 * seed))}, config=config, **known)


def short_run(folder, seed=0, rank1=0.5, **summary):
    """A run of one round, with a small config."""
    config = {"seed_everything": seed, "model": {"method": "fedsim.methods.FedPav"}, "trainer": {"max_epochs": 1}}
    return write_run(folder, {1: scores_of({"a": rank1})}, config=config, **{"seed": seed, **summary})


def edit(folder, **fields):
    """Edit summary.json."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def verdict(*folders):
    """The line of a report beside the row's table that judges runs, and all below it."""
    text = report([str(folder) for folder in folders], compare="003/table4", rule="last", unfinished=True)
    lines = text.splitlines()
    place = next(n for n, line in enumerate(lines) if "(003/table4_batch_32)" in line)
    return lines[place], "\n".join(lines[place + 1 :])
