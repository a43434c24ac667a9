"""Reports over runs that were continued with other settings, and over runs with names of the user's."""

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.report import group_runs, report
from fedsim.report.comparison import not_comparable
from fedsim.report.runs import read_run
from fedsim.report.table import named_folder
from run_dirs import scores_of, write_run
from small import refuse

RATE = {"after_round": 8, "setting": "model.client.optimizer.lr", "from": 0.005, "to": 0.001}
LONGER = {"after_round": 8, "setting": "trainer.max_epochs", "from": 8, "to": 10}
LINE = "changed since round 8: model.client.optimizer.lr 0.005 -> 0.001"


def make(folder, **summary):
    return write_run(folder, {10: scores_of({"a": 0.4, "seen": 0.4})}, **summary)


def test_a_changed_run_has_a_mark_in_every_format(tmp_path, capsys):
    plain = make(tmp_path / "plain", fingerprint="one")
    changed = make(tmp_path / "changed", fingerprint="two", changes=[RATE, LONGER])
    for form in ("table", "markdown", "latex", "csv"):
        assert main(["report", str(plain), str(changed), "--format", form]) == 0
        shown = capsys.readouterr()
        assert ", changed" in shown.out.replace("\n", " ")
        assert LINE in shown.out + shown.err or form != "table"
    assert LINE in report([str(changed)])
    assert "max_epochs" not in report([str(changed)])
    [reason] = [text for text in not_comparable(read_run(changed)) if "continued" in text]
    assert reason == f"was continued with other settings ({LINE})"


def test_more_rounds_and_other_devices_are_no_mark(tmp_path):
    devices = {"after_round": 8, "setting": "trainer.devices", "from": 1, "to": 2}
    run = make(tmp_path / "run", changes=[LONGER, devices])
    assert "changed" not in report([str(run)])


@pytest.mark.parametrize("changes", ["none", 3, {}, [1], [{"setting": "a"}], [{"after_round": "x", "setting": "a"}]])
def test_changes_that_were_edited_are_named(tmp_path, capsys, changes):
    run = make(tmp_path / "run", changes=changes)
    assert "changes is not a list of changed settings; was it edited?" in refuse(capsys, "report", run)


def test_names_of_the_user_stand_for_runs_and_their_seeds(tmp_path):
    seeds = [make(tmp_path / f"seed{seed}", seed=seed, fingerprint="one") for seed in (0, 1)]
    other = make(tmp_path / "other", fingerprint="two", changes=[RATE])
    text = report([*(f"Mine={seed}" for seed in seeds), f"Their's $x_1$={other}"])
    assert "Mine" in text
    assert "2 seeds" in text
    assert "Their's $x_1$, changed" in text.replace("\n", " ")
    latex = report([f"Their's $x_1$={other}"], format="latex")
    assert r"Their's \$x\_1\$" in latex
    with pytest.raises(ConfigError, match=r"Mine names runs with different settings .*; give each its own name"):
        report([f"Mine={seeds[0]}", f"Mine={other}"])
    assert len(group_runs([*seeds, other])) == 2


def test_a_folder_with_the_sign_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "lr=0.1")
    make(tmp_path / "runs" / "a=b")
    assert [str(part) for part in named_folder("lr=0.1")] == ["lr=0.1", ""]
    assert [str(part) for part in named_folder("A=lr=0.1")] == ["lr=0.1", "A"]
    assert [str(part) for part in named_folder("runs/a=b")] == ["runs/a=b", ""]
    assert main(["report", "A=lr=0.1"]) == 0
    assert "A: 10 rounds" in capsys.readouterr().out
    for wrong in ("=lr=0.1", "A=", " =x"):
        assert "is no run directory, and no name with one" in refuse(capsys, "report", wrong)


def test_one_round_is_one(tmp_path):
    run = write_run(tmp_path / "run", {1: scores_of({"a": 0.4, "seen": 0.4})})
    assert ": 1 round, seed 0" in report([str(run)])
