"""Settings that differ between a checkpoint and a resume, against plain loops over nested ones."""

import copy
import random

import pytest

from fedsim.settings.changes import Change, changes_between, fingerprint_after, read_changes
from fedsim.settings.configuration import fingerprint_of

BASE = {
    "seed_everything": 0,
    "run_dir": "runs/b",
    "trainer": {"max_epochs": 8, "devices": 1, "precision": "32-true", "limit_train_batches": 1.0},
    "model": {
        "method": {"class_path": "fedsim.methods.FedPav", "init_args": {"weighting": "cdw", "every": 1}},
        "client": {"batch_size": 8, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}},
        "clients": {"town0": {"local_epochs": 2}},
        "attack": None,
        "threads": 1,
    },
    "data": {"size": [32, 16], "cache": "device", "source": {"class_path": "a.Folders", "init_args": {"root": "x"}}},
}


def leaves(value, name=()):
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*name, key))]
    return [(name, value)]


def with_value(config, path, value):
    if not path:
        return value
    return {**config, path[0]: with_value(config[path[0]], path[1:], value)}


NULLS = {("trainer", "precision"): "32-true", ("trainer", "limit_train_batches"): 1.0}
"""what null stands for"""


def option_of(path):
    return ".".join(part for part in path if part != "init_args").replace("data.source.", "data.source.a.Folders.")


def test_changes_drawn_at_random_are_all_found_and_no_others():
    for number in range(300):
        rng = random.Random(number)
        new, expected = BASE, {}
        for path, old in rng.sample(leaves(BASE), rng.randint(0, 5)):
            if path[-1] == "class_path":
                continue
            value = rng.choice([7, "other", None, [1, 2], 0.25])
            new = with_value(new, path, value)
            value = NULLS.get(path) if value is None else value
            if path != ("run_dir",) and value != old:
                expected[option_of(path)] = (old, value)
        found = changes_between(BASE, new, 8)
        assert {change.setting: (change.old, change.new) for change in found} == expected
        assert all(change.after == 8 for change in found)
        assert read_changes([change.as_json() for change in found]) == found


@pytest.mark.parametrize(
    ("path", "value", "line", "counts"),
    [
        (("model", "client", "optimizer", "init_args", "lr"), 0.001, "model.client.optimizer.lr 0.05 -> 0.001", True),
        (("data", "size"), [16, 8], "data.size [32, 16] -> [16, 8]", True),
        (("seed_everything",), 5, "seed_everything 0 -> 5", True),
        (("trainer", "precision"), "bf16-mixed", "trainer.precision 32-true -> bf16-mixed", True),
        (("trainer", "max_epochs"), 11, "trainer.max_epochs 8 -> 11", False),
        (("trainer", "devices"), 2, "trainer.devices 1 -> 2", False),
        (("model", "threads"), 2, "model.threads 1 -> 2", False),
        (("data", "source", "init_args", "root"), "/y", "data.source.a.Folders.root x -> y", True),
        (("model", "clients", "town0"), {"local_epochs": 2, "head_lr": 1},
         "model.clients.town0.head_lr none -> 1", True),
        (("model", "clients"), None, "model.clients.town0.local_epochs 2 -> none", True),
        (("model", "attack"), {"class_path": "a.SignFlip", "init_args": {"share": 0.2}},
         "model.attack none -> a.SignFlip", True),
    ],
)  # fmt: skip
def test_a_change_is_one_line_and_counts_if_numbers_depend_on_it(path, value, line, counts):
    [change] = changes_between(BASE, with_value(BASE, path, value), 8)
    assert str(change) == f"changed since round 8: {line}"
    assert change.counts is counts


def test_other_spellings_and_options_of_other_versions_are_no_changes():
    moved = {"class_path": "fedsim.methods.fedpav.FedPav", "init_args": {"weighting": "cdw", "every": 1}}
    new = with_value(with_value(BASE, ("model", "method"), moved), ("data", "size"), (32, 16))
    new = with_value(new, ("model", "client"), {**BASE["model"]["client"], "positives": "any"})
    assert changes_between(BASE, new, 8) == []
    assert changes_between(new, BASE, 8) == []


OWN = {"class_path": "mine.Loss", "init_args": {"options": {"a": 1}}, "dict_kwargs": {"b": 2}}
LINKS = {"down_mbit": 8, "up_mbit": 8, "images_per_second": 9}


@pytest.mark.parametrize(
    ("section", "less", "more", "option"),
    [
        ("objective", {"metric": OWN}, {"metric": OWN | {"init_args": {"options": {"a": 1, "c": 3}}}},
         "objective.metric.options.c"),
        ("objective", {"metric": OWN}, {"metric": OWN | {"dict_kwargs": {"b": 2, "c": 3}}}, "objective.metric.c"),
        ("adaptive_backbones", {"caps": {"town0": 1}}, {"caps": {"town0": 1, "town1": 3}},
         "adaptive_backbones.caps.town1"),
        ("hardware", LINKS, LINKS | {"clients": {"town0": {"up_mbit": 3}}}, "hardware.clients.town0.up_mbit"),
        ("client", {"batch_size": 8}, {"batch_size": 8, "positives": "other_cameras"}, "client.positives"),
    ],
)  # fmt: skip
def test_what_only_one_config_has_is_a_change(section, less, more, option):
    old, new = ({"model": {"method": "fedsim.methods.FedPav", section: content}} for content in (less, more))
    for before, after in ((old, new), (new, old)):
        assert [change.setting for change in changes_between(before, after, 8)] == [f"model.{option}"]
        assert fingerprint_of(before) != fingerprint_of(after)


def test_data_sets_of_a_list_are_compared_one_by_one():
    one, two = ({"class_path": "fedsim.data.datasets.GRID", "init_args": {"root": root}} for root in ("x", "y"))
    old, new = ({"data": {"source": sources}} for sources in ([one, one], [one, two]))
    [change] = changes_between(old, new, 3)
    assert str(change) == "changed since round 3: data.source.GRID-2.root x -> y"
    assert not change.counts
    [change] = changes_between(old, {"data": {"source": [one]}}, 3)
    assert str(change) == "changed since round 3: data.source [GRID, GRID-2] -> [GRID]"
    assert change.counts


def test_only_changes_that_count_make_another_kind_of_run():
    first, other = fingerprint_of(BASE), copy.deepcopy(BASE)
    other["seed_everything"], other["model"]["threads"], other["data"]["cache"] = 5, 2, "host"
    assert fingerprint_of(other) == first
    other["model"]["client"]["batch_size"] = 9
    assert fingerprint_of(other) != first
    harmless, rate = Change(8, "trainer.devices", 1, 2, False), Change(8, "model.client.optimizer.lr", 0.05, 0.1)
    assert fingerprint_after(first, [harmless]) == first
    assert len({first, fingerprint_after(first, [rate]), fingerprint_after(first, [rate._replace(after=4)])}) == 3


def test_changes_of_an_earlier_version_count_by_the_facts():
    lines = {"trainer.devices": False, "trainer.max_epochs": False, "model.client.batch_size": True, "new.x": True}
    content = [{"after_round": 8, "setting": name, "from": 1, "to": 2} for name in lines]
    assert {change.setting: change.counts for change in read_changes(content)} == lines


@pytest.mark.parametrize("content", [None, 3, "x", {}, [1], [{}], [{"after_round": "8", "setting": "a"}], [None]])
def test_what_is_no_list_of_changes_is_refused(content):
    with pytest.raises(ValueError, match="no changes of settings"):
        read_changes(content)
