"""Leave-one-data-set-out: all rotations in one table."""

import random

import pytest
import yaml

from fedsim.core.errors import ConfigError
from fedsim.report import report
from run_dirs import scores_of, write_run
from small import refuse

SETS = ("cuhk02", "market1501", "msmt17")


def write_rotation(folder, method, left_out, seed, rank1, kind="global"):
    """A run that leaves a data set out; it also scores those that it trains on."""
    config = {"data": {"unseen": [left_out], "val": "none"}, "model": {"method": {"class_path": method}}}
    scores = scores_of({name: rank1 if name == left_out else 0.99 for name in SETS}, kind)
    path = folder / f"{method}-{left_out}-{seed}"
    return write_run(path, {1: scores}, config=config, method=method, seed=seed, unseen=[left_out],
                     fingerprint=f"{method}-{left_out}")  # fmt: skip


@pytest.fixture
def drawn(tmp_path):
    """Two methods, three rotations, two seeds: rank-1 by method and data set, and the run directories."""
    draw, scores, folders = random.Random(0), {}, []
    for method in ("FedPav", "FedBN"):
        for name in SETS:
            for seed in (0, 1):
                value = draw.randint(1, 80) / 100
                scores.setdefault((method, name), []).append(value)
                kind = "global" if method == "FedPav" else "personalised"
                folders.append(write_rotation(tmp_path, method, name, seed, value, kind))
    return scores, folders


def test_a_row_per_method_and_a_column_per_data_set(drawn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    scores, folders = drawn
    text = report([str(folder) for folder in folders], metric="rank1", left_out=True)
    head, _, *rows = text.splitlines()
    assert head.split() == ["method", "model", *SETS, "mean"]
    for row, (method, kind) in zip(rows, (("FedPav", "global"), ("FedBN", "personalised")), strict=False):
        name, model, *cells = row.split()
        assert (name, model) == (method, kind)
        total = 0.0
        for cell, left_out in zip(cells, SETS, strict=False):
            first, second = (100 * value for value in scores[method, left_out])
            spread = abs(first - second) / 2**0.5
            assert cell == f"{(first + second) / 2:.1f}+-{spread:.1f}"
            total += (first + second) / 2
        assert float(cells[-1]) == pytest.approx(total / len(SETS), abs=0.051)


def test_there_is_no_mean_of_some_rotations(drawn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, folders = drawn
    some = [str(folder) for folder in folders if folder.name != "FedBN-msmt17-0" and folder.name != "FedBN-msmt17-1"]
    rows = report(some, metric="rank1", left_out=True).partition("\n\n")[0].splitlines()
    (row,) = [row.split() for row in rows if row.startswith("FedBN")]
    assert row[2 + SETS.index("msmt17")] == row[-1] == "-"
    (row,) = [row.split() for row in rows if row.startswith("FedPav")]
    assert "-" not in row


def test_other_runs_are_refused(drawn, tmp_path, capsys):
    _, folders = drawn
    other = write_run(tmp_path / "other", {1: scores_of({"viper": 0.5})}, config={"data": {"unseen": None}})
    line = refuse(capsys, "report", folders[0], other, "--left_out", "true")
    assert "other does not leave out exactly one data set by data.unseen" in line
    with pytest.raises(ConfigError, match="leave out exactly one data set"):
        report([str(other)], left_out=True)


def test_a_rotation_that_ended_early_is_named(drawn):
    _, folders = drawn
    config = yaml.safe_load((folders[3] / "config.yaml").read_text())
    (folders[3] / "config.yaml").write_text(yaml.safe_dump(config | {"trainer": {"max_epochs": 9}}))
    lines = report([str(folder) for folder in folders[3:6:2]], left_out=True).splitlines()
    assert f"{folders[3]}: ended after round 1 of 9" in lines
    assert not any(line.startswith(f"{folders[5]}: ") for line in lines)
