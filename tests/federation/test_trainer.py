"""A federation that is built in Python: Lightning's Trainer with fedsim's defaults, and without them."""

import json
import shutil
import subprocess
import sys
import warnings

import lightning
import pytest

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.replaced_run import FEATURES, read_round, write_round
from fedsim.core.run_lock import LOCK_FILE
from fedsim.data.market import MarketFolders
from fedsim.federation.callbacks import RoundProgress
from fedsim.federation.events import RoundCallback
from fedsim.methods import FedPav
from fedsim.strategy import FederatedStrategy
from small import make_data, make_model

QUIET = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}


def test_names_are_imported_when_they_are_used():
    program = (
        "import sys, fedsim; assert not {'torch', 'lightning'} & set(sys.modules), 'heavy'; "
        "assert fedsim.Trainer.__name__ == 'Trainer'; assert fedsim.methods.FedPav; "
        "assert all(getattr(fedsim, name) is not None for name in fedsim.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'Federations'"):
        getattr(fedsim, "Federations")  # noqa: B009 - the name is wrong on purpose


def test_a_run_is_trained_tested_and_read_without_a_warning(tmp_path, capsys):
    model, data = make_model(FedPav()), make_data()
    run = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = fedsim.Trainer(run_dir=run, **QUIET)
        trainer.fit(model, datamodule=data)
        trainer.test(model, datamodule=data)
    rows = {(row["model"], row["data set"]): row for row in trainer.scores}
    assert {("global", name) for name in ("town0", "town1", "town2", "new0", "seen", "unseen")} <= set(rows)
    assert all(row["split"] == "test" and 0 <= row["mAP"] <= 1 for row in trainer.scores)
    assert rows["global", "town0"]["rank1"] == pytest.approx(float(trainer.callback_metrics["test/global/town0/rank1"]))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert (run / "metrics.csv").is_file()
    assert main(["export", "--ckpt_path", str(run), "--output", str(tmp_path / "model.safetensors")]) == 0
    assert (tmp_path / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"run_dir: .* holds a run already"):
        fedsim.Trainer(run_dir=run, **QUIET)


def test_a_second_fit_in_a_run_directory_is_refused_while_the_first_one_runs(tmp_path):
    seen = []

    class Second(RoundCallback):
        def on_round_trained(self, trainer, pl_module):
            with pytest.raises(ConfigError, match=r"run_dir: .* is in use: this process writes a run there already"):
                fedsim.Trainer(run_dir=tmp_path / "run", **QUIET).fit(make_model(FedPav()), datamodule=make_data())
            seen.append((tmp_path / "run" / LOCK_FILE).is_file())

    fedsim.Trainer(run_dir=tmp_path / "run", callbacks=[Second()], **QUIET).fit(
        make_model(FedPav()), datamodule=make_data()
    )
    assert seen == [True]
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]


def test_names_of_a_run_directory_mean_one_folder(tmp_path, monkeypatch):
    """Also if the script changes its working directory between the trainer and its fit."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    (tmp_path / "work").mkdir()
    for name, folder in (("~/run", "home/run"), ("$PLACE/run", "place/run"), ("runs/a", "work/runs/a")):
        monkeypatch.chdir(tmp_path / "work")
        trainer = fedsim.Trainer(run_dir=name, **QUIET)
        monkeypatch.chdir(tmp_path)
        trainer.fit(make_model(FedPav()), datamodule=make_data())
        files = {path.name for path in (tmp_path / folder).iterdir()}
        assert files == {"checkpoints", "config.yaml", "metrics.csv", "summary.json"}
    reader = fedsim.Trainer(**QUIET)
    reader.test(make_model(FedPav()), datamodule=make_data(), ckpt_path="~/run/checkpoints/last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "place", "work"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    for name, problem in (("", "is empty"), ("$NO_SUCH_PLACE/run", "which is not set")):
        with pytest.raises(ConfigError, match=f"run_dir: .*{problem}"):
            fedsim.Trainer(run_dir=name, **QUIET)


def test_a_fit_that_is_refused_or_never_begins_leaves_no_folder(tmp_path):
    trainer = fedsim.Trainer(run_dir=tmp_path / "a" / "run", **QUIET)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no such folder"):
        trainer.fit(make_model(FedPav()), datamodule=make_data(MarketFolders(str(tmp_path / "nowhere"))))
    assert list(tmp_path.iterdir()) == []


def test_what_is_removed_beneath_a_fit_is_named(tmp_path):
    class Removing(RoundCallback):
        def on_round_trained(self, trainer, pl_module):
            shutil.rmtree(tmp_path / "run")

    trainer = fedsim.Trainer(run_dir=tmp_path / "run", callbacks=[Removing()], **QUIET | {"max_epochs": 3})
    with pytest.raises(DataError, match=rf"^{tmp_path}/run.*: was removed "):
        trainer.fit(make_model(FedPav()), datamodule=make_data())


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedsim.Trainer(**QUIET).fit(make_model(FedPav()), datamodule=make_data())
    assert list(tmp_path.iterdir()) == []


def test_features_of_another_model_take_the_note_of_the_round_away(tmp_path):
    (tmp_path / FEATURES).mkdir()
    write_round(tmp_path / FEATURES, 9)
    options = QUIET | {"default_root_dir": str(tmp_path)}
    fedsim.Trainer(**options).predict(make_model(FedPav()), datamodule=make_data())
    assert [*(tmp_path / FEATURES).glob("*.npz")]
    assert read_round(tmp_path / FEATURES) is None


def test_lightning_s_own_trainer_names_what_it_needs_and_then_works(tmp_path):
    options = QUIET | {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(ConfigError, match=r"in Python use fedsim\.Trainer, or strategy=FederatedStrategy\(\)"):
        lightning.Trainer(**options).fit(make_model(FedPav()), datamodule=make_data())
    model, data = make_model(FedPav()), make_data(val="identities")
    trainer = lightning.Trainer(**options, strategy=FederatedStrategy())
    seen = []
    model.on_validation_batch_start = lambda *_: seen.append((trainer.sanity_checking, dict(model.scores)))
    trainer.fit(model, datamodule=data)
    assert seen == [(True, {}), (False, {})], "the sanity pass comes first, and scores nothing"
    assert "val/mAP" in model.scores


@pytest.mark.parametrize("rounds", [-1, 2**63 - 1])
def test_a_run_without_an_end_shows_no_time_left(caplog, tiny, capsys, rounds):
    class Ending(RoundCallback):
        def on_round_trained(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 1

    caplog.set_level("INFO", "fedsim")
    bars = [Ending(), RoundProgress(line_interval=0.0)]
    trainer = fedsim.Trainer(callbacks=bars, **QUIET | {"max_epochs": rounds, "limit_val_batches": 0})
    trainer.fit(make_model(FedPav()), datamodule=make_data())
    lines = [line for line in caplog.messages if line.startswith("round ")]
    last = "" if rounds < 0 else f"/{rounds}"
    assert {line.partition(":")[0] for line in lines} == {f"round 1{last}", f"round 2{last}"}
    assert not any("left" in line for line in lines)
    assert main(["describe", "--config", str(tiny), "--trainer.max_epochs=-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("FedPav, no last round (costs are those of the first), 1 rank\n")
    assert "-1" not in out.partition("\n")[0]
