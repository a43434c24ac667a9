"""A finished run stands for a command only if that asks for the settings, the files and the code that the run had."""

import json
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fedsim.core.errors import ConfigError
from fedsim.data import MarketFolders
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.summary import MAX_LISTED
from fedsim.settings.identity import identity_of
from fedsim.sweep.finished import _difference, refuse_changed
from fedsim.sweep.local import Result, SweepRun, compare_results, outcome_of, table_of
from fedsim.sweep.running import execute_runs
from run_dirs import scores_of, write_run
from write_rows import parsed_row, printed_config

OPTIONS = ("--config=quickstart", "--trainer.max_epochs=1")


def finished(folder, *options):
    """A finished run of a fit with these options."""
    config = yaml.safe_load(printed_config(*options))
    run = write_run(folder, {1: scores_of({"a": 0.5})}, config=config)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"identity": identity_of(config)}))
    return run


def run_of(folder, *options):
    return SweepRun({}, (sys.executable, "-m", "fedsim", "fit", *options, f"--run_dir={folder}"), folder)


def test_a_command_with_the_same_settings_finds_its_run_and_another_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code = "import atexit\nfrom fedsim.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    Path("sweep_code.py").write_text(f"{code}\nprint('seed_everything: 9')\natexit.register(print, 'the end')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = (*OPTIONS, "--model.method=sweep_code.Mine")
    folder = finished(tmp_path / "run", *own)
    spelled = ("--model.client.optimizer.lr=1e-3", "--data.workers=5", "--trainer.precision=32-true")
    refuse_changed([run_of(folder, *own), run_of(folder, *own, *spelled)])
    for option, text in {
        "--model.client.optimizer.lr=0.5": "model.client.optimizer.lr 0.001, and the command has 0.5",
        "--seed_everything=3": "seed_everything 0, and the command has 3",
        "--model.method=FedPav": "model.method sweep_code.Mine, and the command has FedPav",
    }.items():
        with pytest.raises(ConfigError, match=text):
            refuse_changed([run_of(folder, *own), run_of(folder, *own, option)])
    with pytest.raises(ConfigError, match="there is no such option"):
        refuse_changed([run_of(folder, *own, "--model.clint=3")])
    Path("sweep_code.py").write_text(Path("sweep_code.py").read_text() + "# changed\n")
    with pytest.raises(ConfigError, match="another content of code of sweep_code; give another --run_dir"):
        refuse_changed([run_of(folder, *own)])


def test_drawn_changes_of_settings_with_an_effect_are_found(tmp_path):
    config = parsed_row("003/table4_batch_32")
    run = write_run(tmp_path / "run", {1: scores_of({"a": 0.5})}, config=config)
    summary = json.loads((run / "summary.json").read_text())
    assert _difference(run, summary, config, None) == ""
    rng = random.Random(0)
    options = [
        "model.client.local_epochs", "model.neck.dim", "model.evaluation.flip", "data.val", "data.size",
        "trainer.check_val_every_n_epoch", "seed_everything",
    ]  # fmt: skip
    for option in options:
        changed = json.loads(json.dumps(config))
        section, (*path, last) = changed, option.split(".")
        for name in path:
            section = section[name]
        section[last] = rng.choice([977, 978])
        assert option in _difference(run, summary, changed, None)
    config["model"]["backbone"]["init_args"]["weights"] = None
    assert "model.backbone.weights IMAGENET1K_V1" in _difference(run, summary, config, None)


def test_what_an_earlier_version_did_not_record(tmp_path, monkeypatch):
    """Data that are not known are not compared; the user's code, which often changes, is."""
    monkeypatch.chdir(tmp_path)
    Path("sweep_code.py").write_text("class Mine:\n    pass\n")
    config = parsed_row("003/table4_batch_32")
    config["trainer"]["callbacks"] = [{"class_path": "sweep_code.Mine"}]
    run = write_run(tmp_path / "run", {1: scores_of({"a": 0.5})}, config=config)
    summary = json.loads((run / "summary.json").read_text())
    assert _difference(run, summary | {"data": {"digest": "a"}}, config, "a") == ""
    assert _difference(run, summary | {"data": {"digest": "a"}}, config, "b") == "other data than are there now"
    assert _difference(run, summary, config, "b") == ""
    assert _difference(run, summary | {"identity": {}}, config, "b") == "another content of code of sweep_code"


def test_a_run_on_data_that_have_changed_is_refused(tmp_path, market_tree):
    root = shutil.copytree(market_tree, tmp_path / "data")
    options = (*OPTIONS, "--data.source=MarketFolders", f"--data.source.root={root}")
    folder = finished(tmp_path / "run", *options)
    data = FederatedDataModule(MarketFolders(str(root))).identity(MAX_LISTED)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"data": data}))
    refuse_changed([run_of(folder, *options)])
    next(root.glob("north/bounding_box_train/*")).unlink()
    with pytest.raises(ConfigError, match="is finished with other data than are there now"):
        refuse_changed([run_of(folder, *options)])
    shutil.rmtree(root)
    refuse_changed([run_of(folder, *options)])  # a table can be printed without the data


def test_a_run_without_its_config_and_another_program(tmp_path):
    run = write_run(tmp_path / "run", {1: scores_of({"a": 0.5})})
    assert "settings that are not known" in _difference(run, {}, {}, None)
    refuse_changed([SweepRun({}, ("python", "train.py", "--lr=1"), run)])


@pytest.mark.parametrize("maximize", [True, False])
def test_a_score_that_is_no_number_comes_after_all_others(maximize):
    def result(number, score):
        summary = {"final": {"metrics": {"val/mAP": score}}}
        return Result(SweepRun({"x": number}, ("fedsim", "fit"), Path(f"run{number}")), 0, summary)

    results = [result(number, score) for number, score in enumerate([0.25, float("nan"), 0.5, 0.125])]
    sweep = SimpleNamespace(metric="val/mAP", maximize=maximize)
    table = table_of(results, sweep)
    order = re.findall(r"run\d", table)
    assert table.split().count("diverged") == 1
    assert "nan" not in table
    assert order == (["run2", "run0", "run3", "run1"] if maximize else ["run3", "run0", "run2", "run1"])


def ended(folder, rounds, limits, **summary):
    """A run of four rounds that has ended after some of them."""
    trainer = {"max_epochs": 4, "max_steps": -1, "max_time": None} | limits
    config = {"seed_everything": 0, "model": {"method": "fedsim.methods.FedPav"}, "trainer": trainer}
    scores = {rounds: scores_of({"a": 0.5}, **{"val/mAP": 0.5})}
    return write_run(folder, scores, config=config, **summary), config


def going_on(monkeypatch, folder, config):
    """The folders of ``refuse_changed`` for the run and a command with this config."""
    monkeypatch.setattr("fedsim.sweep.finished._resolved", lambda _: [{"settings": config, "data": None}])
    return refuse_changed([run_of(folder)])


@pytest.mark.parametrize(
    ("limits", "now"),
    [
        ({"max_steps": 1}, {"max_steps": -1}),
        ({"max_steps": 1}, {"max_steps": 3}),
        ({"max_time": "00:00:00:01"}, {"max_time": None}),
        ({"max_time": "00:00:00:01"}, {"max_time": "00:01:00:00"}),
    ],
)
def test_a_run_that_a_limit_has_ended_goes_on_for_a_command_with_another_one(limits, now, tmp_path, monkeypatch):
    folder, config = ended(tmp_path / "run", 1, limits)
    assert going_on(monkeypatch, folder, config) == set(), "it is what the command asks for"
    assert going_on(monkeypatch, folder, config | {"trainer": config["trainer"] | now}) == {folder}
    whole, config = ended(tmp_path / "whole", 4, limits | {"max_steps": -1})
    assert going_on(monkeypatch, whole, config | {"trainer": config["trainer"] | now | {"max_steps": -1}}) == set()


def test_a_whole_run_is_none_of_a_command_that_ends_earlier(tmp_path, monkeypatch):
    folder, config = ended(tmp_path / "run", 4, {})
    config["trainer"]["max_steps"] = 2
    with pytest.raises(ConfigError, match="is finished with 4 rounds, and the command has trainer"):
        going_on(monkeypatch, folder, config)


CHANGE = {"after_round": 1, "setting": "model.client.optimizer.lr", "from": 0.005, "to": 0.5, "counts": True}


def test_a_run_that_went_on_with_other_settings_is_finished_for_no_command(tmp_path, monkeypatch):
    folder, config = ended(tmp_path / "run", 4, {}, changes=[CHANGE])
    words = "is finished with settings that changed since round 1: model.client.optimizer.lr 0.005 -> 0.5; give another"
    with pytest.raises(ConfigError, match=words):
        going_on(monkeypatch, folder, config)
    longer, config = ended(tmp_path / "longer", 4, {}, changes=[CHANGE | {"counts": False}])
    assert going_on(monkeypatch, longer, config) == set()


def test_a_run_that_is_to_go_on_is_executed(tmp_path, monkeypatch):
    folder, _ = ended(tmp_path / "run", 1, {"max_steps": 1})
    monkeypatch.setattr("fedsim.sweep.running.refuse_changed", lambda _: {folder})
    text = "import pathlib; pathlib.Path('gone_on').touch()"
    monkeypatch.chdir(tmp_path)
    other, _ = ended(tmp_path / "other", 4, {})
    runs = [SweepRun({}, (sys.executable, "-c", text.replace("gone", place.name)), place) for place in (folder, other)]
    execute_runs(runs, "val/mAP")
    assert [path.name for path in tmp_path.glob("*_on")] == ["run_on"]


def test_tables_mark_runs_that_are_not_of_their_settings(tmp_path):
    folders = {
        "": ended(tmp_path / "whole", 4, {})[0],
        ", ended after round 1 of 4": ended(tmp_path / "short", 1, {"max_steps": 1})[0],
        ", changed": ended(tmp_path / "changed", 4, {}, changes=[CHANGE])[0],
    }
    results = [
        Result(run := SweepRun({"x": number}, ("fedsim", "fit"), folder), 0, run.summary())
        for number, folder in enumerate(folders.values())
    ]
    lines = table_of(results, SimpleNamespace(metric="val/mAP", maximize=True)).splitlines()
    for (mark, folder), result in zip(folders.items(), results, strict=True):
        assert any(line.rstrip().endswith(f"{folder}{mark}") for line in lines)
        assert outcome_of(result, "val/mAP") == f"val/mAP 0.5000{mark}"


def test_runs_beside_a_paper_keep_their_marks(tmp_path):
    config = {"model": {"method": "fedsim.methods.FedPav"}, "trainer": {"max_epochs": 4, "max_steps": 1}}
    scores = scores_of({"market1501": 0.5})
    short, whole = (
        write_run(tmp_path / f"{rounds}", {rounds: scores}, config=config, rounds=rounds) for rounds in (1, 4)
    )
    results = [
        Result(run := SweepRun({"x": number}, ("fedsim", "fit"), folder), 0, run.summary())
        for number, folder in enumerate((short, whole))
    ]
    text = compare_results(results, "003/table4")
    assert "- x=0, ended after round 1 of 4" in text
    assert "- x=1 " in text
