"""Whether a run's data sets are those of a paper's row: 200 drawn wrong ones, of which none may slip through."""

import copy
import random
from pathlib import Path

from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.runs import Run
from fedsim.report.same_sets import wrong_sets

ROWS = [(key, name) for key in ("005", "006") for name in read_paper(key).rows]
OTHERS = ("VIPeR", "GRID", "CUHKSYSU", "DukeMTMC", "PRID2011", "MarketFolders", "SyntheticReID")


def row_of(key, name):
    return resolved_row(read_paper(key), name)


def run_of(config, unseen=None, clients=("a",)):
    summary = {"unseen": config["data"]["unseen"] if unseen is None else unseen, "clients": list(clients)}
    run = Run(Path("run"), summary)
    run.__dict__["config"] = config
    return run


def versioned(sources):
    """The data sets that have several versions, with the values of each argument."""
    values = {"CUHK03NP": ("variant", ["detected", "labeled"]), "MSMT17": ("train", ["train", "train+val"]),
              "CUHK03": ("split", [*range(20)]), "CUHK02": ("exclude_p1", [False, True])}  # fmt: skip
    return [(source, *values[last(source)]) for source in sources if last(source) in values]


def last(source):
    return source["class_path"].rpartition(".")[2]


def change(rng, config):
    """Change a set, a version, a target, a part of the data, or how it is scored; return the kind."""
    data, scored, sources = config["data"], config["model"]["evaluation"], config["data"]["source"]
    kind = rng.choice(["version", "query", "gone", "added", "swapped", "twice", "target", "targets", "no target", "none",
                       "partition", "part", "public", "generated", "labels", "drawn", "manifest", "evaluation", "missing"])  # fmt: skip
    if kind == "version":
        source, name, values = rng.choice(versioned(sources))
        source["init_args"][name] = rng.choice([value for value in values if value != source["init_args"][name]])
    elif kind == "query":
        own = [source for source in sources if last(source) == "CUHK03"]
        if own:
            own[0]["init_args"]["query"] = "all"
        else:
            sources.append({"class_path": "fedsim.data.datasets.CUHK03", "init_args": {"root": "data", "split": 0}})
    elif kind == "gone":
        sources.pop(rng.randrange(len(sources)))
    elif kind == "added":
        sources.append({"class_path": f"fedsim.data.datasets.{rng.choice(OTHERS)}", "init_args": {"root": "data"}})
    elif kind == "swapped":
        rng.choice(sources)["class_path"] = f"fedsim.data.datasets.{rng.choice(OTHERS)}"
    elif kind == "twice":
        sources.append(copy.deepcopy(rng.choice(sources)))
    elif kind == "target":
        data["unseen"] = [rng.choice([n for n in ("market1501", "msmt17", "cuhk02", "x") if n not in data["unseen"]])]
    elif kind == "targets":
        data["unseen"] = [*data["unseen"], "cuhk02"]
    elif kind in ("no target", "none"):
        data["unseen"] = [] if kind == "no target" else None
    elif kind == "partition":
        others = ["by_camera", "by_identity", "iid", "dirichlet", "stratified", "by_dataset", "union"]
        data["partition"] = rng.choice([value for value in others if value != data["partition"]])
    elif kind == "part":
        data[rng.choice(["max_images", "max_identities", "limit_client_batches"])] = rng.randint(1, 9)
    elif kind == "public":
        data["public"] = rng.choice(["cuhk02", "viper"])
    elif kind == "generated":
        data["generated"] = {"root": "generated", "share": 0.25}
    elif kind == "labels":
        data["labels"] = "common"
    elif kind == "drawn":
        data["dry_run"] = True
    elif kind == "manifest":
        data["manifest"] = "mine.csv"
    elif kind == "missing":  # as in a config that another version wrote
        source, name, _ = rng.choice([(s, n, v) for s, n, v in versioned(sources) if s["init_args"][n]])
        del source["init_args"][name]
    else:
        name, values = rng.choice([
            ("layer", ["pool"]), ("flip", [True]), ("distance", ["cosine"]), ("camera_aware", [False]),
            ("invalid_as_zero", [True]), ("single_gallery_shot", [True]), ("task", ["classification"]),
            ("junk_pids", [[], [-1, 0]]), ("precision", ["run"]),
        ])  # fmt: skip
        scored[name] = rng.choice(values)
    return kind


def test_no_drawn_change_of_sets_versions_or_scores_slips_through():
    rng, slipped, kinds = random.Random(0), [], set()
    for _ in range(400):
        key, name = rng.choice(ROWS)
        row = row_of(key, name)
        config = copy.deepcopy(row)
        if rng.random() < 0.5:  # other differences hide none
            harmless(rng, config)
        kind = change(rng, config)
        kinds.add(kind)
        unseen = config["data"]["unseen"] or []
        if not list(wrong_sets(row, run_of(config, unseen))):
            slipped.append((key, name, kind))
    assert slipped == []
    assert len(kinds) == 19


def harmless(rng, config):
    """Change what is not the data: it is an ordinary difference, or none."""
    data, model, sources = config["data"], config["model"], config["data"]["source"]
    for kind in rng.sample(range(9), 3):
        if kind == 0:
            for source in sources:
                source["init_args"]["root"] = "elsewhere"
        elif kind == 1:
            rng.shuffle(sources)
        elif kind == 2:
            config["seed_everything"] = model["seed"] = rng.randint(2, 99)
        elif kind == 3:
            model["client"]["batch_size"] = 32
        elif kind == 4:
            data["val"] = "none"
        elif kind == 5:
            model["evaluation"] |= {"batch_size": 8, "backend": "torch", "ensemble": True}
        elif kind == 6:
            data["size"] = [128, 64]
        elif kind == 7:
            config["trainer"]["max_epochs"] = 3
        else:
            data |= {"cache": "host", "workers": 0, "cache_dir": "somewhere"}


def test_what_is_no_other_set_is_not_refused():
    rng = random.Random(1)
    for _ in range(200):
        row = row_of(*rng.choice(ROWS))
        config = copy.deepcopy(row)
        harmless(rng, config)
        assert list(wrong_sets(row, run_of(config))) == []


def test_a_run_whose_summary_tells_of_other_sets_is_refused():
    row = row_of("005", "table1_fedpav_market1501")
    (line,) = wrong_sets(row, run_of(row, ["msmt17"]))
    assert line == "was scored on other unseen sets than the row: msmt17 (row: market1501)"
    (line,) = wrong_sets(row, run_of(row, clients=["msmt17", "market1501"]))
    assert line == "has its target among its sources: a client trained on market1501"
