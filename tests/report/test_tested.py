"""The rule ``tested``: what ``fedsim test`` has scored, and how, is part of the experiment."""

import copy
import json
import os

import pytest
import yaml

from fedsim.core.errors import DataError
from fedsim.report.groups import group_runs, splits, unequal_evaluation
from fedsim.report.runs import read_run
from fedsim.report.table import report
from run_dirs import row_run, scores_of, short_run, write_run

DATA = {"digest": "1" * 12}


def score(folder, rank1=0.5, kind="last", data=DATA, written="2026-01-01T10:00:00+0000", round_=1, **evaluation):
    """Write a file of ``fedsim test``; ``evaluation``: settings that replace those of the run."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["model"]["evaluation"] = settings["model"].get("evaluation", {}) | evaluation
    content = {"checkpoint": f"checkpoint {kind}.ckpt", "round": round_, "metrics": scores_of({"a": rank1})}
    (folder / "tests").mkdir(exist_ok=True)
    path = folder / "tests" / f"{kind}.json"
    path.write_text(json.dumps(content | {"settings": settings, "data": data, "written": written}))
    return folder


def test_seeds_that_are_tested_alike_are_one_column(tmp_path):
    folders = [score(short_run(tmp_path / str(seed), seed), 0.5 + seed / 10, flip=True) for seed in range(2)]
    assert len(group_runs(folders, is_tested=True)) == 1
    assert "+-" in report([str(folder) for folder in folders], rule="tested")


APART = {
    "model.evaluation.flip false / true of fedsim test": {"flip": True},
    "the data of fedsim test": {"data": {"digest": "2" * 12}},
    "the checkpoint of fedsim test": {"kind": "best"},
}


@pytest.mark.parametrize("text", APART)
def test_another_test_splits_a_group_and_is_named(text, tmp_path):
    first, second = short_run(tmp_path / "a"), short_run(tmp_path / "b", 1, 0.6)
    score(first, flip=False), score(second, 0.6, **{"flip": False} | APART[text])
    assert len(group_runs([first, second])) == 1, "scores of the fits are alike"
    groups = group_runs([first, second], is_tested=True)
    assert [line.partition(" differ in ")[2] for line in splits(groups)] == [text]
    shown = report([str(first), str(second)], rule="tested")
    assert f"differ in {text}" in shown
    assert "+-" not in shown


def test_a_test_of_an_earlier_version_is_apart(tmp_path):
    first, second = score(short_run(tmp_path / "a")), score(short_run(tmp_path / "b", 1, 0.6), 0.6)
    path = second / "tests" / "last.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "settings"}))
    [line] = splits(groups := group_runs([first, second], is_tested=True))
    assert line.endswith("the settings of fedsim test")
    assert list(unequal_evaluation(groups)) == []


def test_unequal_evaluation_is_that_of_the_tests(tmp_path):
    first, second = short_run(tmp_path / "a"), short_run(tmp_path / "b")
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["model"] |= {"method": "fedsim.methods.FedAvg", "evaluation": {"flip": True}}
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    score(first, flip=True), score(second, flip=True)
    folders = [first, second]
    assert "model.evaluation.flip false / true" in next(unequal_evaluation(group_runs(folders)))
    assert list(unequal_evaluation(group_runs(folders, is_tested=True))) == []
    score(first, distance="cosine"), score(second, distance="euclidean")
    [line] = unequal_evaluation(group_runs(folders, is_tested=True))
    assert "model.evaluation.distance cosine / euclidean" in line


def test_the_newest_test_is_the_one_that_was_written_last(tmp_path):
    """Not that of the newest file: copies and checkouts change the times of files."""
    folder = score(short_run(tmp_path / "a"), kind="last", written="2026-10-25T02:30:00+0200")
    score(folder, kind="best", written="2026-10-25T02:10:00+0100")  # 40 minutes later
    for kind, time in (("last", 2e9), ("best", 1e9)):
        os.utime(folder / "tests" / f"{kind}.json", (time, time))
    assert read_run(folder).tested["kind"] == "best"
    score(folder, kind="last", written="2026-10-25T02:20:00+0100")
    os.utime(folder / "tests" / "last.json", (5e8, 5e8))
    assert read_run(folder).tested["kind"] == "last"
    score(folder, kind="best", written="yesterday")
    with pytest.raises(DataError, match=r"best\.json: is not a round with its metrics; remove it, or test again"):
        _ = read_run(folder).tested


def test_a_test_of_the_last_round_has_the_scores_of_the_fit(tmp_path):
    folder = row_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())

    def judged(added, round_=300, change=None):
        settings = copy.deepcopy(yaml.safe_load((folder / "config.yaml").read_text()))
        if change:
            change(settings)
        content = {"checkpoint": "last", "round": round_, "settings": settings, "data": summary["data"]}
        metrics = {name: score + added for name, score in summary["final"]["metrics"].items()}
        (folder / "tests").mkdir(exist_ok=True)
        (folder / "tests" / "last.json").write_text(json.dumps(content | {"metrics": metrics}))
        return report([str(folder)], rule="tested"), report([str(folder)], compare="003/table4", rule="tested")

    doubt = "has test/global/market1501/mAP 0.0500 in round 300, and 0.3500 by fedsim test"
    plain, compared = judged(0.3)
    assert f"IN DOUBT: {folder} {doubt}" in plain
    assert "cannot be certified" in compared
    assert doubt in compared

    def other_batches(settings):
        settings["model"]["evaluation"]["batch_size"] = 7

    for added, options in ((0.0, {}), (0.001, {"change": other_batches}), (0.3, {"round_": 299})):
        plain, compared = judged(added, **options)
        assert "IN DOUBT" not in plain
        assert ("has all settings" in compared) == (not options or "change" in options)


def test_a_test_of_the_best_round_has_the_scores_of_the_log(tmp_path):
    """Not where the test was scored by other settings, and not of a round without scores."""
    config = yaml.safe_load((short_run(tmp_path / "settings") / "config.yaml").read_text())
    folder = write_run(tmp_path / "a", {r: scores_of({"a": 0.1 * r}) for r in (1, 2, 3)}, config=config)
    for rank1, options, is_doubted in (
        (0.2, {}, False), (0.3, {}, True), (0.3, {"flip": True}, False), (0.2004, {"batch_size": 7}, False),
    ):  # fmt: skip
        score(folder, rank1, "best", round_=2, **options)
        text = report([str(folder)], rule="tested")
        assert ("in round 2, and 0." in text) == is_doubted, (rank1, options)
    score(folder, 0.9, "best", round_=7)
    assert "by fedsim test" not in report([str(folder)], rule="tested")
