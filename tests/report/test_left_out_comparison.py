"""Runs beside tables in which each column is a run of its own."""

import copy
import re

import pytest

from fedsim.__main__ import main
from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from run_dirs import data_of_row, scores_of, write_run
from small import refuse

SETS = ("market1501", "msmt17", "cuhk03")
SOURCES = ("market1501", "msmt17", "cuhk02", "cuhk03")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


def row_run(folder, row, left_out, target, method="FedPav", change=None, unseen=None):
    """A run of a row of paper 005; ``target``: (chosen, best) mAP on its left-out set, 0.77 on all others."""
    config = copy.deepcopy(resolved_row(read_paper("005"), f"{row}_{left_out}"))
    if change:
        change(config)
    seen = [name for name in SOURCES if name != left_out]
    kind = "personalised" if method == "Local" else "global"
    evaluations = {}
    for round_, (val, score) in {10: (0.6, target[0]), 20: (0.5, target[1])}.items():
        scores = scores_of(dict.fromkeys(seen, 0.77), kind) | {"val/mAP": val}
        single = {name: score + 0.01 * seen.index(name) for name in seen} if method == "Local" else {}
        for client, value in ({"": score} | single).items():
            below = f"test/{kind}/{left_out}" + (f"/{client}" if client else "")
            scores |= {f"{below}/mAP": value, f"{below}/rank1": value + 0.1}
        evaluations[round_] = scores
    best = {"round": 10, "metrics": evaluations[10]}
    return write_run(folder, evaluations, 41, config, method=method, primary=kind, unseen=unseen or [left_out],
                     clients=seen, best=best, seed=1, data=data_of_row("005", f"{row}_{left_out}"))  # fmt: skip


def compare(capsys, which, *folders, options=()):
    assert main(["report", *map(str, folders), "--compare", which, *options]) == 0
    return capsys.readouterr().out


def cells_of(text, start, scores):
    """The cells of a line of the table that begins with a label and has these scores."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith(start)]
    return next(line[3:] for line in lines if len(line) > 3 and line[2] == scores)


def head_of(text):
    return re.split(r" {2,}", next(line for line in text.splitlines() if line.startswith("method ")).strip())


def test_one_run_stands_in_the_column_of_its_left_out_set_alone(tmp_path, capsys):
    text = compare(capsys, "005/table1", row_run(tmp_path / "a", "table1_fedpav", "msmt17", (0.2, 0.3)))
    assert head_of(text) == ["method", "model", "scores", "msmt17 [1]"]
    assert cells_of(text, "FedPav ", "published") == ["5.2 / 15.5"]
    assert cells_of(text, "FedPav ", "best") == ["20.0 / 30.0"]
    assert cells_of(text, "FedPav ", "oracle") == ["30.0 / 40.0"]
    assert cells_of(text, "FedPav ", "gap") == ["+10.0 / +10.0"]
    assert "77" not in text  # no score on a source stands beside a printed one
    assert (
        "FedPav, msmt17 left out, cannot be certified as 'FedPav' (005/table1_fedpav_msmt17)\n    cuhk03: not" in text
    )
    assert "NOT COMPARABLE" not in text
    assert "table1: Left-out data sets; mAP / rank-1 in percent" in compare(capsys, "005", tmp_path / "a")


def test_left_out_shows_all_columns_and_a_whole_rotation_its_mean(tmp_path, capsys):
    folders = [row_run(tmp_path / name, "table1_fedpav", name, (0.1 * k, 0.15 * k)) for k, name in enumerate(SETS, 1)]
    options = ["--left_out", "true"]
    part = compare(capsys, "005/table1", *folders[:2], options=options)
    assert head_of(part)[3:] == ["market1501", "msmt17 [1]", "cuhk03 [2]", "mean"]
    assert cells_of(part, "FedPav ", "best") == ["10.0 / 20.0", "20.0 / 30.0", "-", "-"]
    assert [cell.partition(" [")[0] for cell in head_of(compare(capsys, "005/table1", *folders[:2]))[3:]] == [
        "market1501", "msmt17", "mean",
    ]  # fmt: skip
    whole = compare(capsys, "005/table1", *folders, options=options)
    assert cells_of(whole, "FedPav ", "best") == ["10.0 / 20.0", "20.0 / 30.0", "30.0 / 40.0", "20.0 / 30.0"]
    assert cells_of(whole, "FedPav ", "gap")[-1] == "+10.0 / +10.0"
    assert cells_of(whole, "FedPav ", "published")[-1] == "17.7 / 29.7"
    assert "! market1501: 005/table1, SNR: 32.7 / 59.4; 005/supp1, SNR, three sources: 30.4 / 56.5" in whole


def test_each_source_alone_is_a_row_of_one_run(tmp_path, capsys):
    folder = row_run(tmp_path / "a", "table1_single", "market1501", (0.2, 0.3), method="Local")
    text = compare(capsys, "005/table1", folder)
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    order = [
        (line[0].partition(" [")[0], line[3]) for line in lines if len(line) > 3 and line[2] in ("published", "best")
    ]
    assert order[:6] == [("Single (1)", "23.3 / 47.5"), ("Local", "20.0 / 30.0"),  # msmt17, cuhk03, cuhk02
                         ("Single (2)", "13.2 / 31.1"), ("Local", "22.0 / 32.0"),
                         ("Single (3)", "18.9 / 41.2"), ("Local", "21.0 / 31.0")]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda config: config["data"]["source"][1]["init_args"].update(train="train"),
            "data.source.MSMT17.train train",
        ),
        (
            lambda config: config["data"]["source"][3]["init_args"].update(split=1),
            "data.source.CUHK03.split 1 (row: 0)",
        ),
        (lambda config: config["data"]["source"].pop(2), "data.source without CUHK02 (row: with CUHK02)"),
        (
            lambda config: config["model"]["evaluation"].update(camera_aware=False),
            "model.evaluation.camera_aware false",
        ),
        (lambda config: config["data"].update(max_identities=9), "data.max_identities 9 (row: none)"),
    ],
    ids=["version", "split", "source", "score", "part"],
)
def test_a_run_with_other_sets_than_the_row_is_marked(change, reason, tmp_path, capsys):
    folder = row_run(tmp_path / "a", "table1_fedpav", "market1501", (0.2, 0.3), change=change)
    text = compare(capsys, "005/table1", folder)
    assert cells_of(text, "FedPav ", "best, NOT COMPARABLE") == ["20.0 / 30.0"]
    assert f"NOT COMPARABLE: {folder} has other sets than the row: {reason}" in text


def test_of_a_method_without_a_row_the_sets_are_compared_all_the_same(tmp_path, capsys):
    def change(config):
        config["model"]["method"] = {"class_path": "fedsim.methods.FedBN", "init_args": {}}
        config["data"]["source"][1]["init_args"]["train"] = "train"

    folder = row_run(tmp_path / "a", "table1_fedpav", "market1501", (0.2, 0.3), method="FedBN", change=change)
    text = compare(capsys, "005/table1", folder)
    assert "FedBN, market1501 left out: no row of this table is of this method" in text
    assert "has other sets than the row: data.source.MSMT17.train train (row: train+val)" in text
    assert text[: text.index("\n\n[")].splitlines()[-1].startswith("FedBN ")  # below all rows


def test_wrong_runs_and_options_are_one_line(tmp_path, capsys):
    folder = row_run(tmp_path / "a", "table1_fedpav", "msmt17", (0.2, 0.3))
    assert "leaves msmt17 out, which is no column of 005/table2" in refuse(
        capsys, "report", folder, "--compare", "005/table2"
    )
    line = refuse(capsys, "report", folder, "--compare", "003/table4", "--left_out", "true")
    assert "--left_out: 003/table4 is no table of left-out data sets" in line
    assert "has no rank5" in refuse(capsys, "report", folder, "--compare", "005/table1", "--metric", "rank5")
    line = refuse(capsys, "report", folder, "--compare", "005/table1", "--rule", "oracle")
    assert "has a column of its own in a table of left-out data sets" in line
    seen = row_run(
        tmp_path / "b", "table1_fedpav", "msmt17", (0.2, 0.3), change=lambda c: c["data"].update(unseen=None)
    )
    line = refuse(capsys, "report", seen, "--compare", "005/table1")
    assert "--compare: " in line
    assert "does not leave out exactly one data set by data.unseen" in line


def test_a_page_has_such_a_table_only_for_runs_that_leave_a_set_out(tmp_path):
    pytest.importorskip("plotly")
    from fedsim.report import Rule, group_runs
    from fedsim.report.comparison import tables_with_runs

    folder = row_run(tmp_path / "a", "table1_fedpav", "msmt17", (0.2, 0.3))
    titles = [title for title, _ in tables_with_runs(None, group_runs([folder]), "mAP", Rule())]
    assert [title for title in titles if "005, table1" in title]
    seen = write_run(
        tmp_path / "b", {1: scores_of({"market1501": 0.5})}, config={"data": {"unseen": None}, "model": {}}
    )
    titles = [title for title, _ in tables_with_runs(None, group_runs([seen]), "mAP", Rule())]
    assert not [title for title in titles if re.match(r"Paper 00[567], (table1|supp|ablation|gains)", title)]
