"""Counts of the papers' data sets: those of the tables, and no wrong data set passes as the row's."""

import copy
import random
import re

import pytest

from fedsim.data import datasets
from fedsim.data.datasets import DataSet
from fedsim.data.images import ReIDSource
from fedsim.papers.counts import counts_of
from fedsim.papers.counts import data_differences as differing_and_unknown
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import resolved_row

ROWS = [(key, name) for key in list_papers() for name in read_paper(key).rows]
UNKNOWN = {"005": {"cuhk03"}, "006": {"msmt17"}, "007": {"msmt17"}}  # what nobody has published
TABLES = {  # the papers' own: training people and images, query people and images, gallery; None: not printed
    "000": {  # Table 1
        "market1501": (751, 12936, 750, 3368, 19732), "dukemtmc": (702, 16522, 702, 2228, 17661),
        "cuhk03np": (767, None, 700, 1400, 5328), "msmt17": (1041, 30248, 3060, 11659, 82161),
        "viper": (None, None, 316, 316, 316), "ilids": (None, None, 60, 60, 60), "grid": (None, None, 125, 125, 900),
        "prid2011": (None, None, 100, 100, 649),
    },
    "001": {  # Table 1: of test sets, people, and the sum of queries and gallery
        "dukemtmc": (702, 16522, None, None, None), "market1501": (751, 12936, None, None, None),
        "cuhk03np": (767, 7365, None, None, None), "msmt17": (1041, 30248, None, None, None),
        "viper": (None, None, 316, None, 632), "ilids": (None, None, 60, None, 120),
        "3dpes": (None, None, 96, None, 192),
        "caviar4reid": (None, None, 36, None, 72), "grid": (None, None, 125, None, 1025),
        "cuhksysu": (None, None, 2900, None, 8347),
    },
    "002": {  # Table 3, whose queries are people; not CUHK02 and GRID, whose numbers are of other data
        "market1501": (751, 12936, 750, None, 19732), "cuhk03np": (767, 7365, 700, None, 5332),
        "prid2011": (285, 3744, 100, None, 649), "cuhk01": (485, 1940, 486, None, 972),
        "viper": (316, 632, 316, None, 316), "3dpes": (93, 450, 86, None, 316), "ilids": (59, 248, 60, None, 130),
    },
    "003": {  # Table 1; not Duke's gallery
        "msmt17": (1041, 32621, 3060, 11659, 82161), "dukemtmc": (702, 16522, 702, 2228, None),
        "market1501": (751, 12936, 750, 3368, 19732), "cuhk03np": (767, 7365, 700, 1400, 5332),
        "prid2011": (285, 3744, 100, 100, 649), "cuhk01": (485, 1940, 486, 972, 972),
        "viper": (316, 632, 316, 316, 316), "3dpes": (93, 450, 86, 246, 316), "ilids": (59, 248, 60, 98, 130),
    },
    "004": {  # Table I; not the galleries of 17,611
        "dukemtmc": (702, 16522, None, 2228, None), "market1501": (751, 12936, None, 3368, 19732),
        "ilids": (59, 248, None, 98, 130), "cuhk03np": (767, 7365, None, 1400, None),
        "prid2011": (285, 3744, None, 100, None), "viper": (316, 632, None, 316, None),
        "cuhk01": (485, 1940, None, 972, None), "3dpes": (93, 450, None, 246, None),
    },
}  # fmt: skip


def row_counts(key, name):
    paper = read_paper(key)
    return counts_of(paper, resolved_row(paper, name))


def data_differences(counts, data):
    """The lines about what differs and what is not known."""
    return [line for lines in differing_and_unknown(counts, data) for line in lines]


def run_of(counts):
    """The data of a summary that has a row's numbers; other ones where these are not known."""
    sets = {}
    for name, row in counts.items():
        parts = {"train": None, "query": None, "gallery": None}
        for role in parts.keys() | {"pool"}:
            if role in row:
                people, images = (7, row[role]) if role == "gallery" else row[role]
                parts[role] = {"people": people or 5, "cameras": 2, "images": images or 50}
        sets[name] = {**parts, "digest": "0" * 16}
    return {"digest": "1" * 16, "sets": sets}


@pytest.mark.parametrize(("key", "name"), ROWS)
def test_the_row_s_own_data_are_no_difference(key, name):
    counts = row_counts(key, name)
    lines = data_differences(counts, run_of(counts))
    assert {line.partition(":")[0] for line in lines} == UNKNOWN.get(key, set()) & {*counts}
    assert all(": not known: " in line for line in lines)
    assert all(row.get("by") for row in counts.values()), "each has a source"


@pytest.mark.parametrize("key", TABLES)
def test_counts_are_those_of_the_tables(key):
    counts = read_paper(key).content["counts"]
    for name, printed in TABLES[key].items():
        row = counts[name]
        found = (*row.get("train", (None, None)), *row["query"], row["gallery"])
        if key == "001" and printed[4] is not None:
            found = (*found[:4], row["query"][1] + row["gallery"])
        same = [number in (None, other) for number, other in zip(printed, found, strict=True)]
        assert all(same), f"{key} {name}: {found} instead of {printed}"


@pytest.mark.parametrize(("key", "name"), ROWS)
def test_counts_are_the_owners_unless_the_people_are_chosen_by_a_split(key, name):
    paper = read_paper(key)
    sources = resolved_row(paper, name)["data"]["source"]
    for source, (data_set, row) in zip(sources if isinstance(sources, list) else [sources],
                                       row_counts(key, name).items(), strict=True):  # fmt: skip
        made = getattr(datasets, source["class_path"].rpartition(".")[2])(**source["init_args"])
        assert made.name == data_set
        if made.official is None or "pool" in row or data_set in UNKNOWN.get(key, ()):
            continue
        numbers = (*row.get("train", (None, None)), row["query"][1], row["gallery"])
        assert numbers == tuple(made.official), f"{key} {data_set}"


def test_names_of_all_data_sets_follow_from_their_classes():
    kinds = {name: kind for name, kind in vars(datasets).items()
             if isinstance(kind, type) and issubclass(kind, DataSet) and kind is not DataSet}  # fmt: skip
    paper = read_paper("003")
    for name, kind in kinds.items():
        assert [*counts_of(paper, {"data": {"source": {"class_path": f"fedsim.data.datasets.{name}"}}})] == [kind.name]
    assert len(kinds) > 15
    assert issubclass(DataSet, ReIDSource)


# -- wrong data --------------------------------------------------------------------------------------------------------


def known_role(rng, row):
    """A part of a data set of which the row has the number of images."""
    return rng.choice([role for role in ("train", "query", "gallery", "pool")
                       if role in row and (row[role] if role == "gallery" else row[role][1]) is not None])  # fmt: skip


def subset(rng, row, run):
    share = rng.uniform(0.05, 0.95)
    for role in ("train", "query", "gallery", "pool"):
        if run.get(role):
            run[role] = {unit: max(1, int(share * count)) for unit, count in run[role].items()}


def one_fewer(rng, row, run):
    run[known_role(rng, row)]["images"] -= 1


def one_more(rng, row, run):
    run[known_role(rng, row)]["images"] += 1


def swapped(rng, row, run):
    run["query"], run["gallery"] = run["gallery"], run["query"]


def no_part(rng, row, run):
    run[known_role(rng, row)] = None


def other_version(rng, row, run):
    role = known_role(rng, row)
    run[role]["images"] += rng.choice([-1, 1]) * rng.randint(1, run[role]["images"] - 1)


KINDS = {subset: "a part of it", one_fewer: "a part of it", one_more: "other numbers", no_part: "a part of it",
         swapped: "query and gallery are swapped", other_version: ""}  # fmt: skip


@pytest.mark.parametrize("forge", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_no_wrong_data_set_passes(forge, seed):
    rng = random.Random(seed)
    names = []
    while not names:
        key, name = rng.choice(ROWS)
        counts = row_counts(key, name)
        equal = {n for n, row in counts.items() if row["gallery"] == row["query"][1]}  # whose swap only digests show
        names = [n for n, row in counts.items() if row["gallery"] and not (forge is swapped and n in equal)]
    run, right = run_of(counts), run_of(counts)
    data_set = rng.choice(names)
    forge(rng, counts[data_set], run["sets"][data_set])
    before, lines = data_differences(counts, right), data_differences(counts, run)
    new = [line for line in lines if line not in before]
    assert len(new) == 1, f"{key}/{name}: {lines}"
    assert re.match(rf"{data_set}: {KINDS[forge]}", new[0])
    assert " instead of " in new[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_data_set_too_few_or_too_many_is_named(seed):
    rng = random.Random(seed)
    key, name = rng.choice(ROWS)
    counts = row_counts(key, name)
    run = run_of(counts)
    gone = rng.choice([*run["sets"]])
    run["sets"]["mine"] = run["sets"].pop(gone)
    lines = data_differences(counts, run)
    assert f"{gone}: the run does not have it" in lines
    assert "mine: the row does not have it" in lines


def test_lines_are_short_and_name_the_source():
    counts = row_counts("003", "control_uniform")
    name = "market1501"
    run = run_of(counts)
    run["sets"][name]["train"] |= {"people": 250, "images": 4300}
    [line] = [line for line in data_differences(counts, run) if line.startswith(f"{name}: a part")]
    source = counts[name]["by"]
    expected = "a part of it: 250 training people instead of 751, 4,300 training images instead of 12,936"
    assert line == f"{name}: {expected} ({source})"


# -- what is not known -------------------------------------------------------------------------------------------------


def test_a_run_of_an_earlier_version_is_not_certified():
    counts = row_counts(*ROWS[0])
    assert data_differences(counts, None) == ["data: not known; the run is of an earlier version"]
    many = {"digest": "0", "num_sets": 2000, "images": {"train": 1, "query": 1, "gallery": 1}}
    assert data_differences(counts, many) == ["data: not known; the run has too many data sets to list"]


def test_standins_are_named_even_with_the_right_numbers():
    counts = row_counts("003", "control_uniform")
    lines = data_differences(counts, run_of(counts) | {"dry_run": True})
    assert lines == ["data: drawn stand-ins (data.dry_run)"]


def test_numbers_that_only_one_side_knows_are_not_known():
    counts = row_counts("003", "control_uniform")
    run = run_of(counts)
    run["sets"]["market1501"]["train"]["people"] = None
    assert data_differences(counts, run) == ["market1501: not known: training people (Table 1)"]
    counts = copy.deepcopy(counts) | {"market1501": {}}
    assert data_differences(counts, run) == ["market1501: not known: the numbers of the row"]
