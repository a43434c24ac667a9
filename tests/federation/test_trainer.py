"""A federation that is built in Python: Lightning's Trainer with fedsim's defaults, and without them."""

import json
import subprocess
import sys
import warnings

import lightning
import pytest

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
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


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedsim.Trainer(**QUIET).fit(make_model(FedPav()), datamodule=make_data())
    assert list(tmp_path.iterdir()) == []


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
