"""Runs whose files contradict each other are shown with a line, and not certified."""

import json
import shutil

import pytest
import yaml

from fedsim.report.runs import read_run
from fedsim.report.table import report
from run_dirs import edit, row_run, scores_of, short_run, training, verdict, write_log, write_run

LONGER = {"after_round": 10, "setting": "trainer.max_epochs", "from": 200, "to": 300, "counts": False}


def shown(*folders, **options):
    return report([str(folder) for folder in folders], **options)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_without_a_record_of_its_first_config_cannot_be_certified(tmp_path):
    folder = edit(row_run(tmp_path / "a"), changes=[LONGER])
    assert "has all settings" in verdict(folder)[0]
    identity = summary_of(folder)["identity"]
    for left in ({}, {name: value for name, value in identity.items() if name in ("files", "code")}):
        line, below = verdict(edit(folder, identity=left))
        assert "cannot be certified" in line
        assert "has no record of the config.yaml that it began with" in below


def test_an_honest_run_is_shown_without_a_doubt(tmp_path):
    assert "IN DOUBT" not in shown(short_run(tmp_path / "a"), short_run(tmp_path / "b", 1, 0.6))


EDITS = {
    "has the seed 7 in summary.json and 0 in config.yaml": {"seed": 7},
    "has 2 rounds in summary.json and 1 in metrics.csv": {"rounds": 2},
    "has other final scores in summary.json than in metrics.csv": {
        "final": {"round": 1, "metrics": scores_of({"a": 0.9})}
    },
    "has another config.yaml than the one that it began with": {"identity": {"config": "0"}},
}


@pytest.mark.parametrize("doubt", EDITS)
def test_a_plain_report_says_what_files_contradict_each_other(doubt, tmp_path):
    folder, other = edit(short_run(tmp_path / "a"), **EDITS[doubt]), short_run(tmp_path / "b", 1, 0.6)
    for options in ({}, {"significance": True}, {"format": "table", "rule": "last"}):
        [line] = [line for line in shown(folder, other, **options).splitlines() if line.startswith("IN DOUBT: ")]
        assert line.startswith(f"IN DOUBT: {folder} ")
        assert doubt in line


def test_copies_with_other_seeds_are_said(tmp_path):
    folder = short_run(tmp_path / "a")
    by_hand = edit(shutil.copytree(folder, tmp_path / "b"), seed=1)
    line = f"IN DOUBT: {by_hand}, seed 1, has all scores of {folder}, seed 0; is it a copy?"
    assert line in shown(folder, by_hand).splitlines()
    whole = short_run(tmp_path / "c", 2, float("nan"))
    again = short_run(tmp_path / "d", 3, float("nan"))
    assert f"{again}, seed 3, has all scores of {whole}, seed 2" in shown(folder, whole, again)


def test_a_repetition_with_other_scores_says_so(tmp_path):
    folder, same, other = (
        short_run(tmp_path / name, rank1=rank1) for name, rank1 in (("a", 0.5), ("b", 0.5), ("c", 0.7))
    )
    lines = shown(folder, same, other).splitlines()
    assert f"left out: {same} has the settings and the seed 0 of {folder}; both count as one run" in lines
    with_other = (
        f"left out: {other} has the settings and the seed 0 of {folder}, but OTHER SCORES; both count as one run"
    )
    assert with_other in lines


def contradicting(folder, **parts):
    """Edit parts of the data or of the identity in a summary."""
    summary = summary_of(folder)
    return edit(folder, **{name: {**summary[name], **part} for name, part in parts.items()})


INSIDE = {
    "has generated images in summary.json and none in config.yaml": {"data": {"generated": {"images": 500}}},
    "has the code of mine in summary.json, which config.yaml does not name": {"identity": {"code": {"mine": "0" * 12}}},
    "has the content of model.backbone.weights in summary.json, which names no file in config.yaml": {
        "identity": {"files": {"model.backbone.weights": "0" * 12}}
    },
    "has the content of data.manifest in summary.json": {"identity": {"files": {"data.manifest": "0" * 12}}},
}


@pytest.mark.parametrize("doubt", INSIDE)
def test_a_summary_that_contradicts_its_config_is_not_certified(doubt, tmp_path):
    folder = contradicting(row_run(tmp_path / "a"), **INSIDE[doubt])
    line, below = verdict(folder)
    assert "cannot be certified" in line
    assert doubt in below
    assert doubt in shown(folder)


def test_code_and_files_that_the_config_names_are_no_doubt(tmp_path):
    folder = short_run(tmp_path / "a")
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"data": {"manifest": "lists/a.csv"}}
    config["trainer"]["callbacks"] = [{"class_path": "mine.of.Halve"}]
    write_run(folder, {1: scores_of({"a": 0.5})}, config=config)
    contradicting(folder, identity={"code": {"mine.of": "1"}, "files": {"data.manifest": "2"}})
    assert "IN DOUBT" not in shown(folder)


# -- runs of earlier versions, without a seal and without a record of their log ---------------------------------------


def long_run(folder, **summary):
    """Six rounds, every second of which is scored; the fourth is the best one."""
    of = {r: scores_of({"a": 0.1 * r, "seen": 0.1 * r}) | {"val/mAP": 0.5 - abs(r - 4) / 10} for r in (2, 4, 6)}
    best = {"best": {"round": 4, "metrics": of[4]}, "ended_by": "max_epochs"}
    config = {"seed_everything": 0, "model": {"method": "fedsim.methods.FedPav"}, "trainer": {"max_epochs": 6}}
    return write_run(folder, of, config=config, **best | summary)


def log_of(folder, change):
    """Change the rows of a log, pairs of round and numbers."""
    summary = summary_of(folder)
    scores = {part["round"]: part["metrics"] for part in (summary["final"], summary["best"]) if part}
    rows = [(r, numbers) for r in range(1, 7) for numbers in (training(), scores.get(r)) if numbers]
    write_log(folder / "metrics.csv", change(rows))
    return folder


EDITED_LOGS = {
    "lacks round 3 in metrics.csv": lambda rows: [row for row in rows if row[0] != 3],
    "has round 1 twice in metrics.csv": lambda rows: [*rows, rows[0]],
    "has round 4 twice in metrics.csv": lambda rows: [*rows[:5], (4, {"val/mAP": 0.1}), *rows[5:]],
    "has other best scores in summary.json than in metrics.csv": lambda rows: [row for row in rows if row != rows[4]],
    "has better val/mAP in metrics.csv than that of its best round": lambda rows: [(1, {"val/mAP": 0.9}), *rows[1:]],
}


@pytest.mark.parametrize("doubt", EDITED_LOGS)
def test_a_log_that_contradicts_itself_is_doubted(doubt, tmp_path):
    assert "IN DOUBT" not in shown(log_of(long_run(tmp_path / "a"), list))
    assert doubt in shown(log_of(long_run(tmp_path / "b"), EDITED_LOGS[doubt]))


EMPTIED = {
    "has better val/mAP in metrics.csv than that of its best round in summary.json": {"best": None},
    "has the scores of no round as its last, and of 6 in metrics.csv": {"final": None},
}


@pytest.mark.parametrize("doubt", EMPTIED)
def test_null_in_the_place_of_logged_scores_is_doubted(doubt, tmp_path):
    assert doubt in read_run(edit(long_run(tmp_path / "a"), **EMPTIED[doubt])).contradictions


def test_the_primary_model_has_the_main_scores(tmp_path):
    scores = scores_of({"a": 0.5}) | {"val/mAP": 0.4, "val/global/seen/mAP": 0.4, "val/local/seen/mAP": 0.3}
    folder = write_run(tmp_path / "a", {1: scores}, best={"round": 1, "metrics": scores})
    assert "IN DOUBT" not in shown(folder)
    assert "has other val/mAP in summary.json than its local models" in shown(edit(folder, primary="local"))


def test_scores_that_the_log_has_and_the_summary_lacks_are_doubted(tmp_path):
    folder = long_run(tmp_path / "a")
    fewer = {name: score for name, score in summary_of(folder)["final"]["metrics"].items() if "mINP" not in name}
    assert "has other final scores" in shown(edit(folder, final={"round": 6, "metrics": fewer}))


def test_a_number_of_clients_beside_a_list_of_them_hides_none(tmp_path):
    folder = row_run(tmp_path / "a")
    clients = summary_of(folder)["clients"]
    doubt = "has other clients in summary.json than its settings and data give"
    assert doubt in shown(edit(folder, clients=clients[:1], num_clients=len(clients)))
    assert doubt in shown(edit(folder, clients=[], num_clients=len(clients) + 1))
    assert "IN DOUBT" not in shown(edit(folder, clients=[], num_clients=len(clients)))


def test_honest_logs_are_not_doubted(tmp_path):
    """A run that a kill has ended between a row and its summary, one that went on elsewhere, and one of many sets."""
    killed = edit(long_run(tmp_path / "killed"), finished=False, rounds=5)
    final = {"round": 4, "metrics": summary_of(killed)["best"]["metrics"]}
    moved = log_of(long_run(tmp_path / "moved"), lambda rows: [row for row in rows if row[0] > 4])
    timed = edit(log_of(long_run(tmp_path / "timed"), lambda rows: rows[:5]), rounds=4, final=final)
    many = long_run(tmp_path / "many")
    write_log(many / "metrics.csv", [(r, scores_of({"seen": 0.6}) if r == 6 else training()) for r in range(1, 7)])
    edit(many, final={"round": 6, "metrics": scores_of({"a": 0.6, "seen": 0.6})}, best=None)
    for folder in (edit(killed, final=final), moved, edit(timed, ended_by="max_time"), many):
        assert "IN DOUBT" not in shown(folder, unfinished=True), folder
