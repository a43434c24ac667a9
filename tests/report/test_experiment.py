"""What tells runs apart: each member of a group is compared, a difference splits it in one line, doubts are said."""

import copy
import json

import pytest
import yaml

from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.groups import group_opened, splits
from fedsim.report.runs import read_run
from fedsim.report.table import report
from fedsim.settings import table
from fedsim.settings.changes import fingerprint_after, read_changes
from run_dirs import KEY, ROW, clients_and_unseen, data_of_row, edit, row_run, scores_of, verdict


def edited_identity(folder, **parts):
    identity = json.loads((folder / "summary.json").read_text())["identity"]
    return edit(folder, identity=identity | parts)


def grouped(*folders):
    groups = group_opened([read_run(folder) for folder in folders])
    return [[run.folder.name for run in group.runs] for group in groups], list(splits(groups))


def setting(section, name, value):
    return lambda config: config[section].update({name: value})


RATE = {"after_round": 8, "setting": "model.client.optimizer.lr", "from": 0.005, "to": 0.001, "counts": True}
DRY = {**data_of_row(KEY, ROW), "digest": "dry-1", "dry_run": True}
APART = {
    "model.client.head_lr 0.05 / 0.1": lambda folder: row_run(
        folder, 2, lambda config: config["model"]["client"].update(head_lr=0.1)
    ),
    "trainer.callbacks [] / [mine.Halve]": lambda folder: row_run(
        folder, 2, setting("trainer", "callbacks", [{"class_path": "mine.Halve"}])
    ),
    "trainer.plugins [] / [mine.P]": lambda folder: row_run(folder, 2, setting("trainer", "plugins", ["mine.P"])),
    "data.manifest none / lists/a.csv": lambda folder: row_run(folder, 2, setting("data", "manifest", "lists/a.csv")),
    "the data": lambda folder: edit(row_run(folder, 2), data={**data_of_row(KEY, ROW), "digest": "3"}),
    "the content of a file": lambda folder: edited_identity(row_run(folder, 2), files={"data.manifest": "a"}),
    "the user's code": lambda folder: edited_identity(row_run(folder, 2), code={"mine": "a"}),
    "settings with which a run went on": lambda folder: edit(row_run(folder, 2), changes=[RATE]),
    "the end of a run": lambda folder: row_run(folder, 2, rounds=37),
    "data.dry_run false / true; the data": lambda folder: row_run(
        folder, 2, setting("data", "dry_run", True), data=DRY
    ),
}


@pytest.mark.parametrize("text", APART)
def test_a_difference_in_any_member_splits_a_group_and_is_named_in_a_line(text, tmp_path):
    folders = [row_run(tmp_path / "a", 0), row_run(tmp_path / "b", 1), APART[text](tmp_path / "c")]
    groups, lines = grouped(*folders)
    assert groups == [["a", "b"], ["c"]]
    [line] = lines
    assert line.startswith("NOT ONE GROUP: FedPav")
    assert line.endswith(f" differ in {text}")
    assert line in report([str(folder) for folder in folders])
    assert line in report([str(folder) for folder in folders], compare="003/table4")


def test_a_member_without_its_config_is_apart(tmp_path):
    folders = [row_run(tmp_path / "a", 0), row_run(tmp_path / "b", 1)]
    (folders[1] / "config.yaml").unlink()
    groups, [line] = grouped(*folders)
    assert groups == [["a"], ["b"]]
    assert line.endswith(f"differ in settings, as {folders[1]} has no config.yaml")


def test_runs_without_configs_are_equal_by_their_fingerprints_and_rounds(tmp_path):
    folders = [row_run(tmp_path / str(seed), seed, rounds=300 if seed < 2 else 37) for seed in range(3)]
    for folder in folders:
        (folder / "config.yaml").unlink()
    groups, lines = grouped(*folders)
    assert groups == [["0", "1"], ["2"]]
    assert lines[0].endswith("no run has a config.yaml, so the settings are equal by their fingerprint alone")


def test_an_unfinished_member_is_not_averaged(tmp_path):
    folders = [row_run(tmp_path / "a", 0), row_run(tmp_path / "b", 1, rounds=37, finished=False)]
    text = report([str(folder) for folder in folders], unfinished=True)
    assert "+-" not in text.replace("mean +-", "")
    assert "FedPav b, ended after round 37 of 300 differ in the end of a run" in text


def test_runs_without_a_last_round_are_one_group_only_if_they_end_together(tmp_path):
    endless = setting("trainer", "max_epochs", -1)
    folders = [row_run(tmp_path / str(n), n, endless, rounds) for n, rounds in enumerate((30, 30, 31))]
    assert grouped(*folders)[0] == [["0", "1"], ["2"]]
    stops = [{"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/mAP"}}]

    def stopping(config):
        config["trainer"]["callbacks"] = stops

    folders = [row_run(tmp_path / f"stopped{n}", n, stopping, rounds) for n, rounds in enumerate((30, 31))]
    assert grouped(*folders)[0] == [["stopped0", "stopped1"]]


def with_callback(config):
    config["trainer"]["callbacks"] = [{"class_path": "mine.Watch"}]


def limited(config):
    with_callback(config)
    config["trainer"]["max_steps"] = 37


def timed(config):
    with_callback(config)
    config["trainer"]["max_time"] = "00:01:00:00"


ENDS = [
    (limited, {"ended_by": "max_steps"}, False),
    (limited, {}, False),
    (timed, {"ended_by": "max_time"}, False),
    (timed, {}, False),
    (timed, {"ended_by": "callback"}, True),
    (with_callback, {"ended_by": "signal", "finished": False}, False),
    (with_callback, {}, True),
]


@pytest.mark.parametrize(("change", "recorded", "is_one"), ENDS)
def test_an_early_end_hides_behind_no_callback_that_did_not_end_the_run(change, recorded, is_one, tmp_path):
    whole, short = row_run(tmp_path / "a", 0, with_callback), row_run(tmp_path / "b", 1, change, 37, **recorded)
    groups, lines = grouped(whole, short)
    assert groups == ([["a", "b"]] if is_one else [["a"], ["b"]])
    assert is_one or lines[0].endswith("differ in the end of a run")


def machine(config):
    """Another machine, and a later version with an option at its default."""
    config["data"] |= {"workers": 9, "cache": "host", "cache_dir": "/x", "unseen": []}
    for source in config["data"]["source"]:
        source["init_args"]["root"] = "/elsewhere"
    config["trainer"] |= {"devices": 4, "precision": "32-true", "max_time": "09:00:00:00", "callbacks": []}
    config["model"] |= {"threads": 8}
    config["model"]["evaluation"]["batch_size"] = 8
    config["model"]["client"]["channels_last"] = True
    config["model"]["method"]["class_path"] = "fedsim.methods.fedpav.FedPav"
    del config["model"]["adaptive_backbones"]


def test_seeds_of_two_machines_are_one_column(tmp_path):
    folders = [row_run(tmp_path / "a", 0), row_run(tmp_path / "b", 1, machine)]
    assert grouped(*folders) == ([["a", "b"]], [])


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_whole_run_is_the_row_and_two_seeds_are(tmp_path):
    folders = [row_run(tmp_path / "a", 0), row_run(tmp_path / "b", 1)]
    assert verdict(*folders)[0] == "- FedPav has all settings of 'FedPav, B = 32' (003/table4_batch_32)"


CLIENTS = clients_and_unseen(resolved_row(read_paper(KEY), ROW), data_of_row(KEY, ROW))["clients"]
DOUBTS = {
    "has the method FedProx in summary.json and FedPav in config.yaml": {"method": "FedProx"},
    "has other clients in summary.json": {"clients": CLIENTS[:2]},
    "has other clients in": {"clients": [*CLIENTS[:-1], "mine"]},
    "has other unseen data sets": {"unseen": ["viper"]},
    "ended after round 3 of 300": {"rounds": 3},
    "has the rounds 301 in summary.json and 300 in config.yaml": {"rounds": 301},
    "has 299 rounds in summary.json and 300 in metrics.csv": {"rounds": 299},
    "is not finished, it has 300 rounds": {"finished": False},
    "has the seed 7 in summary.json and 0 in config.yaml": {"seed": 7},
    "has the fingerprint 0 in summary.json": {"fingerprint": "0"},
    "has another config.yaml": {"identity": {"config": "0"}},
    "has no record of the config.yaml that it began with": {"identity": {}},
    "was continued with other settings (changed since round 8: model.client.optimizer.lr": {"changes": [RATE]},
    "has other final scores in": {"final": {"round": 300, "metrics": scores_of({"market1501": 0.9})}},
    "has other best scores": {"best": {"round": 9, "metrics": scores_of({"market1501": 0.9})}},
    "data: not known; the run is of an earlier version": {"data": None},
}  # fmt: skip


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_run_whose_files_disagree_cannot_be_certified(doubt, tmp_path):
    line, below = verdict(edit(row_run(tmp_path / "a", 0), **DOUBTS[doubt]))
    assert "cannot be certified as 'FedPav, B = 32' (003/table4_batch_32)" in line
    assert doubt in below
    # nor a group with such a member
    line, below = verdict(row_run(tmp_path / "b", 1), tmp_path / "a")
    assert doubt in below


def test_a_note_of_a_change_that_was_removed_leaves_its_fingerprint(tmp_path):
    folder = row_run(tmp_path / "a")
    fingerprint = json.loads((folder / "summary.json").read_text())["fingerprint"]
    edit(folder, fingerprint=fingerprint_after(fingerprint, read_changes([RATE])))
    assert "has the fingerprint" in verdict(folder)[1]


def test_a_fingerprint_that_other_facts_have_made_is_no_doubt(tmp_path):
    folder = row_run(tmp_path / "a", fingerprint="0" * 12)
    assert "has the fingerprint" in verdict(folder)[1]
    identity = json.loads((folder / "summary.json").read_text())["identity"]
    assert "has all settings" in verdict(edit(folder, identity=identity | {"table": "0" * 12}))[0]


def test_scores_of_another_model_are_not_those_of_the_run(tmp_path):
    folder = row_run(tmp_path / "a")
    summary, config = (
        json.loads((folder / "summary.json").read_text()),
        yaml.safe_load((folder / "config.yaml").read_text()),
    )
    (folder / "tests").mkdir()

    def judged(**changes):
        content = {"checkpoint": "last", **summary["final"], "data": summary["data"]}
        settings = copy.deepcopy(config) | {"seed_everything": changes.get("seed", 0)}
        settings["model"]["client"]["optimizer"]["init_args"]["lr"] = changes.get("lr", 0.005)
        (folder / "tests" / "last.json").write_text(json.dumps(content | {"settings": settings}))
        return report([str(folder)], compare="003/table4", rule="tested")

    assert "has all settings" in judged()
    for changes, setting in (({"seed": 5}, "seed_everything 5"), ({"lr": 0.1}, "model.client.optimizer.lr 0.1")):
        text = judged(**changes)
        assert "cannot be certified" in text
        assert f"fedsim test scored a model of {setting} (run: " in text


def test_a_run_without_a_log_cannot_be_certified(tmp_path):
    folder = row_run(tmp_path / "a")
    (folder / "metrics.csv").unlink()
    assert "has no metrics.csv" in verdict(folder)[1]


def test_a_config_without_fields_cannot_be_certified(tmp_path):
    def without(config):
        del config["model"]["evaluation"], config["model"]["availability"], config["data"]["augmentation"]

    line, below = verdict(row_run(tmp_path / "a", 0, without))
    assert "cannot be certified" in line or "settings that differ" in line
    assert "has a config.yaml without model.availability, model.evaluation, data.augmentation" in below


def test_what_cannot_change_numbers_stands_apart_from_what_differs(tmp_path):
    def change(config):
        machine(config)
        config["model"]["client"]["batch_size"] = 9
        config["model"]["client"]["schedule"]["step"] = 3

    line, below = verdict(row_run(tmp_path / "a", 0, change))
    assert line.endswith("settings that differ: 1")
    first, rounding, nothing = below.splitlines()[0], "changes rounding alone: ", "cannot change a number here: "
    assert first == "    training: model.client.batch_size 9 (row: 32)"
    lines = {name: line for line in below.splitlines() for name in (rounding, nothing) if line.strip().startswith(name)}
    assert "model.threads 8 (row: 1)" in lines[rounding]
    assert "data.workers 9 (row: 2)" in lines[nothing]
    assert "model.client.schedule.step 3 (row: 40)" in lines[nothing]


# -- a new setting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _with_new_setting(monkeypatch):
    """A later version, whose models have a setting of which it says nothing but its default."""
    content = copy.deepcopy(dict(table._content()))
    content["classes"][content["sections"]["model"]]["arguments"]["newest"] = {"default": 3}
    monkeypatch.setattr(table, "_content", lambda: content)
    table.class_at.cache_clear()
    yield
    table.class_at.cache_clear()


@pytest.mark.usefixtures("_with_new_setting")
def test_a_new_setting_that_says_nothing_tells_runs_apart_and_names_them(tmp_path):
    values = {"a": None, "b": 3, "c": 4}
    folders = [
        row_run(tmp_path / name, seed, None if value is None else setting("model", "newest", value))
        for seed, (name, value) in enumerate(values.items())
    ]
    groups, [line] = grouped(*folders)
    assert groups == [["a", "b"], ["c"]]
    assert line == "NOT ONE GROUP: FedPav newest 3 and FedPav newest 4 differ in model.newest 3 / 4"
