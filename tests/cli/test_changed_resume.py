"""A resumed run tells the truth: changed settings are said, kept and shown; its numbers are one file."""

import csv
import json
import shutil

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.core.versions import current_version
from fedsim.report.table import open_runs
from tiny_run import TINY

FEW = ["--trainer.check_val_every_n_epoch=2"]


def call(*args):
    assert main([str(arg) for arg in args]) == 0


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def rows_of(run):
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def changed(caplog):
    return [record.message for record in caplog.records if record.message.startswith("changed since")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of two rounds, which differ in their seeds."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    for seed in (0, 1):
        call("fit", "--config", folder / "tiny.yaml", "--run_dir", folder / f"seed{seed}", *FEW,
             "--trainer.max_epochs=2", f"--seed_everything={seed}")  # fmt: skip
    return folder


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "seed0", tmp_path / "run", symlinks=True)


def test_each_changed_setting_is_a_line_and_stays_with_the_run(run, folder, caplog, capsys):
    call("fit", "--ckpt_path", run, "--trainer.max_epochs=3", "--model.client.optimizer.lr=0.01")
    rounds = "changed since round 2: trainer.max_epochs 2 -> 3"
    rate = "changed since round 2: model.client.optimizer.lr 0.05 -> 0.01"
    assert sorted(changed(caplog)) == [rate, rounds]
    change = {"after_round": 2, "setting": "model.client.optimizer.lr", "from": 0.05, "to": 0.01, "counts": True}
    assert change in summary_of(run)["changes"]
    caplog.clear()
    call("fit", "--ckpt_path", run, "--trainer.max_epochs=4", "--data.size=[16, 16]")
    assert sorted(changed(caplog)) == [
        "changed since round 3: data.size [32, 16] -> [16, 16]", "changed since round 3: trainer.max_epochs 3 -> 4",
    ]  # fmt: skip
    assert [change["after_round"] for change in summary_of(run)["changes"]] == [2, 2, 3, 3]
    capsys.readouterr()
    call("report", folder / "seed1", run)
    table = capsys.readouterr().out
    assert ", changed" in table.replace("\n", " ")
    assert f"{rate}, changed since round 3: data.size [32, 16] -> [16, 16]" in table
    assert "max_epochs 2 -> 3" not in table, "a longer run has the same rounds"


def test_a_resume_from_an_earlier_round_forgets_what_was_changed_later(run, caplog):
    shutil.copytree(run / "checkpoints" / "last.ckpt", run / "checkpoints" / "kept.ckpt", symlinks=True)
    call("fit", "--ckpt_path", run / "checkpoints" / "last.ckpt", "--trainer.max_epochs=3", "--model.threads=2",
         "--model.client.optimizer.lr=0.01")  # fmt: skip
    assert len(summary_of(run)["changes"]) == 3
    caplog.clear()
    call("fit", "--ckpt_path", run / "checkpoints" / "kept.ckpt", "--trainer.max_epochs=3")
    assert changed(caplog) == ["changed since round 2: trainer.max_epochs 2 -> 3"]
    assert [change["setting"] for change in summary_of(run)["changes"]] == ["trainer.max_epochs"]
    assert [int(row["epoch"]) for row in rows_of(run) if row["train/loss"]] == [0, 1, 2]


def test_a_run_that_is_continued_as_it_was_is_still_one_of_its_seeds(run, folder, tmp_path, caplog):
    other = shutil.copytree(folder / "seed1", tmp_path / "other", symlinks=True)
    for resumed in (run, other):
        call("fit", "--ckpt_path", resumed, "--trainer.max_epochs=3", "--trainer.enable_progress_bar=true")
    assert summary_of(run)["fingerprint"] == summary_of(other)["fingerprint"]
    assert summary_of(run)["fingerprint"] != summary_of(folder / "seed0")["fingerprint"]  # of two rounds


@pytest.mark.parametrize("option", ["--seed_everything=5", "--model.client.optimizer.lr=0.01"])
def test_a_changed_run_is_no_repetition_of_runs_of_one_seed(run, folder, tmp_path, option, capsys):
    other = shutil.copytree(folder / "seed1", tmp_path / "other", symlinks=True)
    call("fit", "--ckpt_path", run, "--trainer.max_epochs=3", option)
    call("fit", "--ckpt_path", other, "--trainer.max_epochs=3", *([option] if "lr" not in option else []))
    straight = tmp_path / "straight"
    call("fit", "--config", folder / "tiny.yaml", "--run_dir", straight, *FEW, "--trainer.max_epochs=3", option)
    kinds = {summary_of(path)["fingerprint"] for path in (run, straight)}
    assert len(kinds) == 2
    capsys.readouterr()
    call("report", straight, run, other)
    out = capsys.readouterr().out
    assert "2 seeds" not in out
    assert "left out" not in out


def test_the_numbers_of_a_run_are_one_file_that_is_cut_at_the_checkpoint(run, folder):
    before = rows_of(run)
    for rounds in (3, 5):
        call("fit", "--ckpt_path", run, f"--trainer.max_epochs={rounds}")
    assert [path.name for path in run.glob("metrics*")] == ["metrics.csv"]
    rows = rows_of(run)
    assert [int(row["epoch"]) for row in rows if row["train/loss"]] == [0, 1, 2, 3, 4]
    assert [{name: row[name] for name in row if row[name]} for row in rows[: len(before)]] == [
        {name: row[name] for name in row if row[name]} for row in before
    ]
    call("fit", "--ckpt_path", run / "checkpoints" / "best.ckpt", "--trainer.max_epochs=5")
    assert [int(row["epoch"]) for row in rows_of(run) if row["train/loss"]] == [0, 1, 2, 3, 4]
    scored = [int(row["epoch"]) for row in rows_of(run) if row["val/mAP"]]
    assert scored == sorted(set(scored))


def test_files_of_earlier_versions_are_read_and_become_one(run):
    rows = rows_of(run)
    for number, epoch in ((1, 0), (2, 1)):
        with (run / f"metrics-{number}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["epoch"]) == epoch)
    (run / "metrics.csv").unlink()
    [read], _ = open_runs([run])
    assert set(read.log) == {1, 2}
    call("fit", "--ckpt_path", run, "--trainer.max_epochs=3")
    assert [path.name for path in run.glob("metrics*")] == ["metrics.csv"]
    assert [int(row["epoch"]) for row in rows_of(run) if row["train/loss"]] == [0, 1, 2]


def test_a_log_that_cannot_be_continued_refuses_the_resume_and_nothing_changes(run, capsys):
    (run / "metrics.csv").write_text("a,b\n1,2\n")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["fit", "--ckpt_path", str(run), "--trainer.max_epochs=3"]) == 2
    assert "metrics.csv: is not a log of fedsim fit" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_without_a_logger_the_numbers_so_far_stay(run):
    before = (run / "metrics.csv").read_bytes()
    call("fit", "--ckpt_path", run, "--trainer.max_epochs=3", "--trainer.logger=false")
    assert (run / "metrics.csv").read_bytes() == before


def test_nothing_to_train_says_no_change_and_writes_nothing(run, caplog):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    call("fit", "--ckpt_path", run, "--model.client.optimizer.lr=0.01")
    assert changed(caplog) == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_settings_of_a_checkpoint_that_cannot_be_read_are_one_line(run, capsys):
    config = current_version(run / "checkpoints" / "last.ckpt") / "config.yaml"
    text = config.read_text()
    for damaged in ("a: [", f"x: &a [1]\ny: *a\n{text}"):
        config.write_text(damaged)
        arguments = ["--config", run / "config.yaml", "--run_dir", run, "--ckpt_path", "last"]
        assert main([*map(str, ["fit", *arguments]), "--trainer.max_epochs=3"]) == 2
        assert "config.yaml: cannot be read as a config" in capsys.readouterr().err
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
