"""What tells runs of a method apart in a report: distinct, as little as possible, and what a reader expects first."""

import random
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.report.groups import choose_settings, differences, name_variants
from fedsim.settings.configuration import flat

ORDER = (
    "method", "selection", "timing", "privacy", "aggregation", "server_optimizer", "objective", "backbone", "client",
    "clients",
)  # fmt: skip
"""Sections of ``model`` in the order in which names rather have them; then data, and rounds"""


def run_of(config, folder="run", method="FedPav"):
    """What a name depends on."""
    summary = {"method": method, "clients": ["a", "b"]}
    return SimpleNamespace(settings=flat(config), method=method, folder=Path(folder), summary=summary)


def part(path, **arguments):
    """A class and its arguments, as configs have them."""
    return {"class_path": f"fedsim.somewhere.{path}", "init_args": arguments}


def buffered(buffer, mix=None):
    return part("Buffered", buffer=buffer, power=0.5, mix=mix, max_staleness=None)


DEADLINE = part("Deadline", seconds=None, first=9, late="drop")


def timed(timing, rounds):
    model = {"method": part("FedPav", weighting="size"), "client": {"batch_size": 16}, "timing": timing}
    return run_of({"trainer": {"max_epochs": rounds}, "model": model, "data": {"val": "none"}}, f"run{rounds}")


def test_four_timings_are_told_by_their_timing():
    """The study of docs/results.md: the number of rounds would tell most of them apart, too."""
    runs = [timed(None, 10), timed(buffered(9), 40), timed(DEADLINE, 41), timed(buffered(1, mix=0.6), 360)]
    assert name_variants(runs) == [
        "FedPav timing Synchronous", "FedPav timing Buffered, buffer 9", "FedPav timing Deadline",
        "FedPav timing Buffered, buffer 1",
    ]  # fmt: skip
    assert name_variants(runs[:2]) == ["FedPav timing Synchronous", "FedPav timing Buffered"]
    assert name_variants(runs[1::2]) == ["FedPav buffer 9", "FedPav buffer 1"]
    synchronous = timed(part("Synchronous"), 16)
    assert name_variants([synchronous, runs[2]]) == ["FedPav timing Synchronous", "FedPav timing Deadline"]


def test_a_part_that_is_off_in_some_runs_is_one_row():
    """In the page's table of differences, too: not one row for nothing, and another for the class."""
    assert differences([timed(None, 10), timed(buffered(9), 40), timed(DEADLINE, 40)]) == {
        "model.timing": ["Synchronous", "Buffered", "Deadline"],
        "trainer.max_epochs": ["10", "40", "40"],
    }


def two_runs(model, **sections):
    """Two runs; each ``None`` in a config is 1 in the first, and 2 in the second."""

    def filled(value, number):
        if isinstance(value, dict):
            return {name: filled(inner, number) for name, inner in value.items()}
        return number if value is None else value

    return [run_of(filled({"model": model, **sections}, number)) for number in (1, 2)]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_of_two_settings_the_one_that_readers_expect_is_in_the_name(first):
    rounds, data = {"max_epochs": None}, {"val": None}
    for second in [*ORDER[first + 1 :], "zeta"]:
        model = {ORDER[first]: {"x": None}, second: {"y": None}}
        model = {name: part("SGD", **of) if name == "server_optimizer" else of for name, of in model.items()}
        for ordered in (model, dict(reversed(model.items()))):
            names = name_variants(two_runs(ordered, data=data, trainer=rounds))
            assert [name.replace("server_optimizer SGD, ", "") for name in names] == ["FedPav x 1", "FedPav x 2"]


def test_the_number_of_rounds_is_told_if_nothing_else_tells_runs_apart():
    rounds, data = {"max_epochs": None}, {"val": None}
    assert name_variants(two_runs({"zeta": None}, data=data, trainer=rounds)) == ["FedPav zeta 1", "FedPav zeta 2"]
    assert name_variants(two_runs({}, data=data, trainer=rounds)) == ["FedPav val 1", "FedPav val 2"]
    assert name_variants(two_runs({"zeta": None}, trainer=rounds)) == ["FedPav zeta 1", "FedPav zeta 2"]
    assert name_variants(two_runs({"zeta": 1}, trainer=rounds)) == ["FedPav max_epochs 1", "FedPav max_epochs 2"]


def drawn(seed):
    """Two to six runs of a method; each section has few values, so that names need one to three settings, or more."""
    rng = random.Random(seed)

    def number():
        return rng.choice([1, 1, 2])

    def timing():
        classes = [None, part("Synchronous"), part("Buffered", buffer=number(), mix=number())]
        return rng.choice([*classes, part("Deadline", first=number())])

    configs = []
    for _ in range(rng.randint(2, 6)):
        optimizer = rng.choice([None, part("SGD", lr=number()), part("Adam", lr=number(), eps=number())])
        model = {
            "client": {"batch_size": number(), "optimizer": part("SGD", lr=number())}, "server_optimizer": optimizer,
            "clients": {"a": {"lr": number()}, "b": {"lr": number()}}, "timing": timing(),
            "method": part("FedPav", weighting=rng.choice(["size", "uniform"])),
            "aggregation": rng.choice([None, part("Median")]),
        }  # fmt: skip
        sections = rng.sample([*model], rng.randint(1, 6))  # as many differ at most
        model = {name: value if name in sections or not configs else configs[0]["model"][name]
                 for name, value in model.items()}  # fmt: skip
        configs.append({"model": model, "data": {"val": number()}, "trainer": {"max_epochs": number() * 10}})
    return [run_of(config, f"run{i}") for i, config in enumerate(configs)]


def place(name):
    words = name.split(".")
    return len(ORDER) + (words[0] == "trainer") if words[0] != "model" else ORDER.index(words[1])


def with_classes(names, differing):
    """Settings, and the classes whose arguments they are, if runs differ in these."""
    return {*names} | {part for name in names for part in differing if name.startswith(f"{part}.")}


def tells_apart(names, differing, number):
    return len({tuple(differing[name][run] for name in sorted(names)) for run in range(number)}) == number


def expected(differing, number):
    """By hand: of all sets of at most three settings, the smallest that tells all apart; of these, the first."""
    for size in range(1, 4):
        found = [
            names for names in combinations(differing, size)
            if tells_apart(with_classes(names, differing), differing, number)
        ]  # fmt: skip
        if found:
            return found
    return []


def by_folders(names, runs):
    """Whether the names end with the folders of the runs."""
    return [name.split()[-1] for name in names] == [str(run.folder) for run in runs]


def test_names_of_drawn_runs_are_distinct_minimal_and_in_order():
    numbers = {0: 0, 1: 0, 2: 0, 3: 0}
    for seed in range(600):
        runs = drawn(seed)
        differing, names = differences(runs), name_variants(runs)
        if len({*zip(*differing.values(), strict=True)}) < len(runs):
            assert by_folders(names, runs), "some have equal settings"
            continue
        assert len({*names}) == len(names), names
        found, chosen = expected(differing, len(runs)), choose_settings(differing)
        numbers[len(found[0]) if found else 0] += 1
        if not found:
            assert by_folders(names, runs)
            continue
        first = min(found, key=lambda of: sorted(map([*differing].index, of)))
        assert {*chosen} == with_classes(first, differing), seed
        assert [*map(place, differing)] == sorted(map(place, differing))
        for name, run in zip(names, range(len(runs)), strict=True):
            values = [value for one in chosen if (value := differing[one][run]) != "-"]
            texts = name.removeprefix("FedPav ").split(", ")  # first those that all runs share
            assert [text.rpartition(" ")[2] for text in texts[len(texts) - len(values) :]] == values
    assert min(numbers.values()) > 10, numbers


def test_names_are_told_by_as_many_words_as_make_them_differ():
    runs = [run_of({"model": {"client": {"a": {"x": i}}, "clients": {"a": {"x": j}}}}) for i in (1, 2) for j in (3, 4)]
    assert name_variants(runs)[0] == "FedPav client.a.x 1, clients.a.x 3"
