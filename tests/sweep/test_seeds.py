"""``fedsim fit --seeds``: a run per seed, their means and spread."""

import json

import pytest

from fedsim.__main__ import main
from fedsim.sweep.seeds import runs_of_seeds
from tiny_run import TINY


@pytest.mark.slow
def test_seeds_are_run_reported_and_continued(tmp_path, capfd, quick_python):
    config, runs = tmp_path / "tiny.yaml", tmp_path / "runs"
    config.write_text(TINY)
    command = ["fit", "--config", str(config), f"--run_dir={runs}", "--trainer.max_epochs=1",
               "--trainer.check_val_every_n_epoch=1"]  # fmt: skip
    assert main([*command, "--seeds", "3", "4", "--parallel", "2"]) == 0
    table = capfd.readouterr().out
    assert "2 seeds" in table
    assert "seeds 3, 4" in table
    summaries = [json.loads(path.read_text()) for path in sorted(runs.glob("seed*/summary.json"))]
    assert [summary["seed"] for summary in summaries] == [3, 4]
    assert summaries[0]["final"]["metrics"] != summaries[1]["final"]["metrics"]
    stamps = {path: path.stat().st_mtime_ns for path in runs.glob("seed*/summary.json")}
    assert main([*command, "--seeds=3,4"]) == 0
    assert capfd.readouterr().out == table
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    # a seed's run is that of a fit with this seed
    assert main([*command[:3], *command[4:], "--seed_everything=4", f"--run_dir={tmp_path / 'alone'}"]) == 0
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert alone["final"]["metrics"] == summaries[1]["final"]["metrics"]


def test_a_failing_seed_leaves_the_others(tmp_path, capfd, caplog, quick_python):
    caplog.set_level("INFO", logger="fedsim")
    command = ["fit", "--model.method=Nobody", f"--run_dir={tmp_path / 'runs'}", "--seeds", "0", "1"]
    assert main(command) == 1
    error = capfd.readouterr().err
    assert "fedsim: error: 2 of 2 runs failed; call again to repeat only those" in error
    assert caplog.text.count("failed with exit code 2: model.method") == 2
    assert ".log" in error.splitlines()[-1]


def test_folders_have_the_names_of_seeds_and_options(tmp_path):
    first, second = runs_of_seeds(["--config", "a/mine.yaml", "--model.method=Local"], [0, 1])
    assert str(first.folder.parent) == "runs/mine-seeds"
    assert first.folder.name.startswith("seed0-")
    assert second.folder.name == first.folder.name.replace("seed0", "seed1")
    [other] = runs_of_seeds(["--config", "a/mine.yaml", "--model.method=FedBN"], [0])
    assert other.folder != first.folder
    [named] = runs_of_seeds(["--config", "a/mine.yaml", "--model.method=Local", "--run_dir", str(tmp_path)], [0])
    assert named.folder == tmp_path / first.folder.name
    assert named.command[-2:] == ("--seed_everything=0", f"--run_dir={named.folder}")
    named.folder.mkdir()
    [again] = runs_of_seeds(["--config", "a/mine.yaml", "--model.method=Local", "--run_dir", str(tmp_path)], [0])
    assert again.command[-1] == "--ckpt_path=last"
    [row] = runs_of_seeds(["--paper", "003/table5"], [0])
    assert str(row.folder.parent) == "runs/table5-seeds"


@pytest.mark.parametrize(("words", "line"), [
    (["--seeds"], "--seeds: nothing is not a list of integers >= 0"),
    (["--seeds", "1", "x"], "--seeds: 1 x is not a list of integers"),
    (["--seeds", "1", "--seeds", "2"], "--seeds: is given twice"),
    (["--parallel", "2"], "--seeds: give the seeds, such as --seeds 0 1 2"),
    (["--seeds", "1", "--parallel", "0"], "--parallel: give the number of parallel runs, 1 or more"),
    (["--seeds", "1", "--parallel", "2", "3"], "--parallel: give the number"),
    (["--seeds", "1", "--seed_everything=3"], "--seed_everything: leave it out: --seeds gives the seeds"),
    (["--seeds", "1", "--ckpt_path", "last"], "--ckpt_path: leave it out"),
    (["--seeds", "1", "--overwrite", "true"], "--overwrite: leave it out"),
    (["--seeds", "1", "--trainer.max_epoch", "2"], "did you mean --trainer.max_epochs?"),
    (["--seeds", "1", '--config={"model": {"clinet": {}}}'], "model.clinet: there is no such option; did you mean"),
    (["--left_out", "a", "b", '--config={"model": {"clinet": {}}}'], "model.clinet: there is no such option"),
])  # fmt: skip
def test_wrong_words_are_one_line(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
