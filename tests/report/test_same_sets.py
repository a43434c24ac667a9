"""Whether a run's data sets are those of a paper's row: 200 drawn wrong ones, of which none may slip through."""

import copy
import random
from pathlib import Path

from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.closest import wrong_sets
from fedsim.report.runs import Run
from fedsim.settings.configuration import flat

ROWS = [(key, name) for key in ("005", "006") for name in read_paper(key).rows]
OTHERS = ("VIPeR", "GRID", "CUHKSYSU", "DukeMTMC", "PRID2011", "MarketFolders", "SyntheticReID")


def row_of(key, name):
    return resolved_row(read_paper(key), name)


def wrong(row, run):
    return list(wrong_sets(flat(row), run))


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


def change_version(rng, sources):
    source, name, values = rng.choice(versioned(sources))
    source["init_args"][name] = rng.choice([value for value in values if value != source["init_args"][name]])


def drop_argument(rng, sources):
    """As in a config that another version of fedsim wrote."""
    given = [(source, name) for source, name, _ in versioned(sources) if source["init_args"][name]]
    source, name = rng.choice(given)
    del source["init_args"][name]


def add_set(rng, sources):
    sources.append({"class_path": f"fedsim.data.datasets.{rng.choice(OTHERS)}", "init_args": {"root": "data"}})


def swap_set(rng, sources):
    rng.choice(sources)["class_path"] = f"fedsim.data.datasets.{rng.choice(OTHERS)}"


def change_queries(rng, sources):
    own = [source for source in sources if last(source) == "CUHK03"]
    if own:
        own[0]["init_args"]["query"] = "all"
    else:
        sources.append({"class_path": "fedsim.data.datasets.CUHK03", "init_args": {"root": "data", "split": 0}})


SOURCES = {
    "version": change_version,
    "argument": drop_argument,
    "added": add_set,
    "swapped": swap_set,
    "queries": change_queries,
    "gone": lambda rng, sources: sources.pop(rng.randrange(len(sources))),
    "twice": lambda rng, sources: sources.append(copy.deepcopy(rng.choice(sources))),
}
PARTITIONS = ("by_camera", "by_identity", "iid", "dirichlet", "stratified", "by_dataset", "union")
DATA = {  # setting -> other values, of which the row's own is left out
    "target": ("unseen", [["market1501"], ["msmt17"], ["cuhk02"], ["x"]]),
    "targets": ("unseen", [["market1501", "cuhk02"], ["cuhk03", "msmt17"], ["cuhk03np", "cuhk02"]]),
    "no target": ("unseen", [[], None]),
    "partition": ("partition", PARTITIONS),
    "images": ("max_images", [1, 99]),
    "people": ("max_identities", [2, 50]),
    "batches": ("limit_client_batches", [1, 0.5]),
    "public": ("public", ["cuhk02", "viper"]),
    "generated": ("generated", [{"root": "generated", "share": 0.25}]),
    "labels": ("labels", ["common"]),
    "drawn": ("dry_run", [True]),
    "manifest": ("manifest", ["mine.csv"]),
}
SCORED = {
    "layer": ["pool"], "flip": [True], "distance": ["cosine"], "camera_aware": [False], "invalid_as_zero": [True],
    "single_gallery_shot": [True], "task": ["classification"], "junk_pids": [[], [-1, 0]],
}  # fmt: skip


def change(rng, config):
    """Change a set, a version, a target, a part of the data, or how it is scored; return the kind."""
    kind = rng.choice([*SOURCES, *DATA, *SCORED])
    if kind in SOURCES:
        SOURCES[kind](rng, config["data"]["source"])
        return kind
    (section, name, values) = (
        (config["data"], *DATA[kind]) if kind in DATA else (config["model"]["evaluation"], kind, SCORED[kind])
    )
    others = [value for value in values if value != section.get(name)]
    if not others:  # the row has the only one already
        return change(rng, config)
    section[name] = rng.choice(others)
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
        if not wrong(row, run_of(config, unseen)):
            slipped.append((key, name, kind))
    assert slipped == []
    assert kinds == {*SOURCES, *DATA, *SCORED}


HARMLESS = [
    lambda rng, config: [source["init_args"].update(root="elsewhere") for source in config["data"]["source"]],
    lambda rng, config: rng.shuffle(config["data"]["source"]),
    lambda rng, config: config.update(seed_everything=rng.randint(2, 99)),
    lambda rng, config: config["model"]["client"].update(batch_size=32),
    lambda rng, config: config["data"].update(val="none"),
    lambda rng, config: config["model"]["evaluation"].update(
        batch_size=8, backend="torch", ensemble=True, precision="run"
    ),
    lambda rng, config: config["data"].update(size=[128, 64]),
    lambda rng, config: config["trainer"].update(max_epochs=3),
    lambda rng, config: config["data"].update(cache="host", workers=0, cache_dir="somewhere"),
]


def harmless(rng, config):
    """Change what is not the data: it is an ordinary difference, or none."""
    for alter in rng.sample(HARMLESS, 3):
        alter(rng, config)


def test_what_is_no_other_set_is_not_refused():
    rng = random.Random(1)
    for _ in range(200):
        row = row_of(*rng.choice(ROWS))
        config = copy.deepcopy(row)
        harmless(rng, config)
        assert wrong(row, run_of(config)) == []


def test_a_run_whose_summary_tells_of_other_sets_is_refused():
    row = row_of("005", "table1_fedpav_market1501")
    (line,) = wrong(row, run_of(row, ["msmt17"]))
    assert line == "was scored on other unseen sets than the row: msmt17 (row: market1501)"
    (line,) = wrong(row, run_of(row, clients=["msmt17", "market1501"]))
    assert line == "has its target among its sources: a client trained on market1501"
