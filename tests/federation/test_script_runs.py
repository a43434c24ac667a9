"""Runs of Python scripts: resumed, replaced, grouped by seed, and read by the commands, as those of fedsim fit."""

import csv
import json
import os
import runpy
import subprocess
import sys

import lightning
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger

import fedsim
from environment import is_of_a_launcher
from fedsim.__main__ import main
from fedsim.core import versions
from fedsim.core.errors import ConfigError
from fedsim.core.metrics_rows import read_rows
from fedsim.core.versions import current_version
from fedsim.data import Augmentation
from fedsim.federation.callbacks import RoundProgress
from fedsim.federation.callbacks.script_config import describe_script
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.events import RoundCallback
from fedsim.methods import FedPav
from fedsim.models import SmallCNN
from fedsim.report.runs import read_run
from small import make_data, make_model

CPU = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    """Leave no seed of one test to the next one."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    yield
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def built(seed=0, lr=0.05, width=8, **options):
    """A federation of classes that a config can name."""
    client = fedsim.LocalTraining(batch_size=8, optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))
    settings = {"neck": fedsim.Neck(kind="bnneck", dropout=0.0), "client": client, "seed": seed}
    return fedsim.Federation(FedPav(), SmallCNN(width=width), **settings | options)


def data_of(**options):
    source = fedsim.SyntheticReID(clients=3, unseen=1, scale=0.2)
    return fedsim.FederatedDataModule(source, size=(32, 16), augmentation=Augmentation(pad=0, flip=0.0), **options)


def fit(run, rounds=1, seed=0, start=None, **changed):
    of_trainer = {name: changed.pop(name) for name in ("resume", "overwrite", "callbacks", "logger") if name in changed}
    lightning.seed_everything(seed if start is None else start)
    trainer = fedsim.Trainer(run_dir=run, max_epochs=rounds, **CPU, **of_trainer)
    trainer.fit(built(seed, **changed), datamodule=data_of())
    return trainer


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def weights_of(run):
    version = current_version(run / "checkpoints" / "last.ckpt")
    state = torch.load(version / "global.ckpt", weights_only=True)["state_dict"]
    return next(iter(state.values()))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    fit(tmp_path / "whole", rounds=3)
    for rounds in (1, 3):
        fit(tmp_path / "parts", rounds=rounds, resume=True)
    assert weights_of(tmp_path / "parts").equal(weights_of(tmp_path / "whole"))
    with (tmp_path / "parts" / "metrics.csv").open() as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file) if row["train/loss"]] == [0, 1, 2]
    parts, whole = (summary_of(tmp_path / name) for name in ("parts", "whole"))
    assert parts["fingerprint"] == whole["fingerprint"]
    assert parts["final"] == whole["final"]
    assert [change["setting"] for change in parts["changes"]] == ["trainer.max_epochs"]
    assert parts["data"] == whole["data"] == data_of().identity(1000)


def test_a_finished_fit_leaves_its_folder_at_rest(tmp_path):
    """A script may copy it at once: no thread is left that removes a version."""
    fit(tmp_path / "run", rounds=2)
    assert versions._removals == []


class Unreachable(DummyLogger):
    """A tracker whose server does not answer."""

    @property
    def experiment(self):
        raise ConnectionError("the tracker does not answer")


def test_a_run_that_cannot_go_on_keeps_its_metrics(tmp_path):
    """Also rows of rounds beyond its checkpoint, which the next fit that begins repeats."""
    fit(tmp_path, rounds=1)
    metrics = tmp_path / "metrics.csv"
    header, row = metrics.read_text().splitlines()[:2]
    of_round_2 = ",".join(
        "1" if name == "epoch" else value for name, value in zip(*csv.reader([header, row]), strict=True)
    )
    metrics.write_text(metrics.read_text() + of_round_2 + "\n")
    before = metrics.read_bytes()
    with pytest.raises(ConnectionError, match="does not answer"):
        fit(tmp_path, rounds=3, resume=True, logger=Unreachable())
    assert metrics.read_bytes() == before


def test_a_cell_that_runs_twice_names_both_ways_on(tmp_path):
    fit(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a run already; give another one, resume=True .* or overwrite=True"):
        fit(tmp_path / "run")
    assert not fit(tmp_path / "run", resume=True).scores, "nothing to train"
    first = weights_of(tmp_path / "run")
    fit(tmp_path / "run", seed=1, overwrite=True)
    assert not weights_of(tmp_path / "run").equal(first)
    assert summary_of(tmp_path / "run")["seed"] == 1
    assert summary_of(tmp_path / "run")["changes"] == []


def test_a_run_that_is_to_be_replaced_stays_until_the_first_round_has_trained(tmp_path):
    class Failing(RoundCallback):
        def on_round_start(self, round_, clients):
            raise RuntimeError("not today")

    fit(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for way in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(RuntimeError, match="not today"):
            fit(tmp_path / "run", rounds=2, callbacks=[Failing()], **way)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"run_dir": "x", "resume": True, "overwrite": True},
            r"overwrite: would replace .* with which resume goes on; give one",
        ),
        ({"resume": True}, "resume: is for a run_dir"),
        ({"overwrite": True}, "overwrite: is for a run_dir"),
    ],
)
def test_ways_that_contradict_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        fedsim.Trainer(**options, **CPU)


def test_a_run_is_not_replaced_by_a_fit_that_goes_on_with_it(tmp_path):
    fit(tmp_path / "run")
    trainer = fedsim.Trainer(run_dir=tmp_path / "run", overwrite=True, max_epochs=2, **CPU)
    with pytest.raises(ConfigError, match=r"overwrite: would replace .* with which ckpt_path goes on; give one"):
        trainer.fit(built(), datamodule=data_of(), ckpt_path=tmp_path / "run")


def test_two_progress_bars_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: TQDMProgressBar, RoundProgress are progress bars"):
        fedsim.Trainer(callbacks=[TQDMProgressBar(), RoundProgress()], **CPU | {"enable_progress_bar": True})


def test_fewer_rounds_than_the_checkpoint_has_are_refused(tmp_path):
    fit(tmp_path / "run", rounds=2)
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs: 1 is less than the 2 rounds"):
        fit(tmp_path / "run", rounds=1, resume=True)


def test_a_changed_resume_is_said_and_kept(tmp_path, caplog):
    fit(tmp_path / "run")
    fit(tmp_path / "run", rounds=2, lr=0.01, resume=True)
    assert "changed since round 1: model.client.optimizer.lr 0.05 -> 0.01" in caplog.messages
    fit(tmp_path / "other", rounds=2, lr=0.01)
    assert summary_of(tmp_path / "run")["fingerprint"] != summary_of(tmp_path / "other")["fingerprint"]


def test_runs_of_several_seeds_are_one_column(tmp_path, capsys):
    for seed in (0, 1):
        fit(tmp_path / f"seed{seed}", seed=seed)
    fit(tmp_path / "wide", width=12)
    capsys.readouterr()
    assert main(["report", *(str(tmp_path / name) for name in ("seed0", "seed1", "wide"))]) == 0
    out = capsys.readouterr().out
    assert "2 seeds" in out
    assert "1 seed\n" in out or "1 seed " in out
    assert "width 12" in out


def test_the_seed_of_the_weights_is_enough_and_none_makes_a_run_of_its_own(tmp_path, monkeypatch):
    for start in (1, 2):
        fit(tmp_path / f"start{start}", seed=None, start=start)
    one, two = (summary_of(tmp_path / f"start{start}") for start in (1, 2))
    assert (one["seed"], two["seed"]) == (1, 2)
    assert one["fingerprint"] == two["fingerprint"]
    for start in (0, 1, 2):
        fit(tmp_path / f"other{start}", seed=0, start=start)
    others = experiments_of(*(tmp_path / f"other{start}" for start in (0, 1, 2)))
    assert others[0] == experiments_of(tmp_path / "start1")[0]
    assert others[1].differs_in(others[0]) == others[2].differs_in(others[1]) == ["the seed of the weights"]
    assert not read_run(tmp_path / "other1").doubts[1:]
    monkeypatch.delenv("PL_GLOBAL_SEED")
    kinds = set()
    for name in ("a", "b"):
        fedsim.Trainer(run_dir=tmp_path / name, max_epochs=1, **CPU).fit(built(), datamodule=data_of())
        kinds.add(summary_of(tmp_path / name)["fingerprint"])
    assert len(kinds) == 2


def test_the_config_repeats_the_run_and_serves_all_commands(tmp_path, capsys):
    run = tmp_path / "run"
    fit(run, rounds=2, seed=None, start=3)
    assert main(["fit", "--config", str(run / "config.yaml"), "--run_dir", str(tmp_path / "again")]) == 0
    assert weights_of(tmp_path / "again").equal(weights_of(run))
    assert not read_run(run).doubts
    assert summary_of(tmp_path / "again")["final"] == summary_of(run)["final"]
    assert str(tmp_path) not in (run / "config.yaml").read_text()
    assert main(["test", "--ckpt_path", str(run)]) == 0
    assert main(["predict", "--ckpt_path", str(run)]) == 0
    model = fedsim.load_model(run)
    assert model.embed(torch.zeros(2, 3, 32, 16, dtype=torch.uint8)).shape[0] == 2
    assert main(["fit", "--ckpt_path", str(run), "--trainer.max_epochs=3"]) == 0
    assert [change["setting"] for change in summary_of(run)["changes"]] == ["trainer.max_epochs"]


class OwnMethod(FedPav):
    """A method of a module: its path is known."""


def test_what_a_config_cannot_name_leaves_none_and_says_what(tmp_path, caplog):
    class Inner(FedPav):
        pass

    caplog.set_level("INFO", "fedsim")
    lightning.seed_everything(0)
    module = fedsim.Federation(Inner(), SmallCNN(width=8), client=fedsim.LocalTraining(batch_size=8))
    fedsim.Trainer(run_dir=tmp_path / "run", max_epochs=1, **CPU).fit(module, datamodule=data_of())
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert any("no config.yaml: model.method: " in m and "is a class of the script" in m for m in caplog.messages)
    own = describe_script(make_model(OwnMethod()), make_data(), {"max_epochs": 1})
    assert own.config["model"]["method"]["class_path"].endswith("test_script_runs.OwnMethod")
    foreign = describe_script(make_model(FedPav(), backbone=torch.nn.Conv2d(3, 8, 3)), make_data(), {})
    assert (foreign.config, foreign.unwritable) == (None, "model.backbone: the arguments of Conv2d are not known")
    for section, module, data in (("model", type("Own", (fedsim.Federation,), {}), None), ("data", None, None)):
        built_module = make_model(FedPav()) if module is None else module(FedPav(), SmallCNN(width=8))
        text = describe_script(built_module, data, {}).unwritable
        assert text.startswith(f"{section}: ")
        assert " is no Federat" in text
    assert foreign.text is None


def change_weights(model, data):
    model.settings.backbone.conv1.weight.data.mul_(2)


def change_layer(model, data):
    model.settings.backbone.bn1.eps = 0.1


def change_fraction(model, data):
    model.settings.selection.fraction = 0.9


def change_method(model, data):
    object.__setattr__(model.settings.method, "session_copies", 3)


def append_layer(model, data):
    model.settings.backbone.append(torch.nn.Tanh())


def add_hook(model, data):
    model.settings.backbone.conv1.register_forward_hook(lambda *_: None)


CHANGES = {
    "model.backbone.append": append_layer,
    "model.backbone.conv1._forward_hooks": add_hook,
    "model.backbone.conv1.weight": change_weights,
    "model.backbone.bn1.eps": change_layer,
    "model.selection.fraction": change_fraction,
    "model.method.session_copies": change_method,
    "data.augmentation": lambda model, data: setattr(data, "augmentation", Augmentation(pad=2)),
    "data.limit_client_batches": lambda model, data: setattr(data, "limit_client_batches", 1),
    "data.source.scale": lambda model, data: setattr(data.sources[0], "scale", 0.3),
}


@pytest.mark.parametrize("option", CHANGES)
def test_what_was_changed_after_it_was_made_leaves_no_config_and_is_named(option):
    model, data = built(selection=RandomFraction(0.5)), data_of()
    assert describe_script(model, data, {}).config is not None
    CHANGES[option](model, data)
    described = describe_script(model, data, {})
    assert described.config is None
    said = described.unwritable.replace("backbone.15.class", "backbone.append")
    assert said.startswith(f"{option}: was changed after "), described.unwritable


def test_a_run_leaves_its_objects_as_they_were_made(tmp_path):
    model, data = built(), data_of()
    fedsim.Trainer(run_dir=tmp_path, max_epochs=1, **CPU).fit(model, datamodule=data)
    assert describe_script(model, data, {}).config is not None


def test_a_second_fit_of_a_trained_federation_is_a_run_of_its_own(tmp_path, caplog):
    model, data = built(), data_of()
    caplog.set_level("INFO", "fedsim")
    for name in ("first", "second"):
        fedsim.Trainer(run_dir=tmp_path / name, max_epochs=1, **CPU).fit(model, datamodule=data)
    assert (tmp_path / "first" / "config.yaml").exists()
    assert not (tmp_path / "second" / "config.yaml").exists()
    assert "no config.yaml: model: has trained before" in caplog.text
    assert summary_of(tmp_path / "first")["fingerprint"] != summary_of(tmp_path / "second")["fingerprint"]


def test_options_of_the_trainer_that_only_watch_do_not_matter():
    described = describe_script(make_model(FedPav()), make_data(), {"max_epochs": 3, "logger": object(), "devices": 1})
    trainer = described.config["trainer"]
    assert (trainer["max_epochs"], trainer["devices"]) == (3, 1)
    assert "logger" not in trainer
    for name in ("plugins", "limit_train_batches"):
        without = describe_script(make_model(FedPav()), make_data(), {name: torch.nn.ReLU()})
        assert without.config is None
        assert without.unwritable.startswith(f"trainer.{name}: ")


def test_progress_is_shown_where_nobody_has_set_up_logging(tmp_path):
    program = (
        "import fedsim; from fedsim.methods import FedPav; from fedsim.models import SmallCNN; "
        "data = fedsim.FederatedDataModule(fedsim.SyntheticReID(clients=2, unseen=0, scale=0.2), size=(32, 16)); "
        "model = fedsim.Federation(FedPav(), SmallCNN(width=8), client=fedsim.LocalTraining(batch_size=8)); "
        "fedsim.Trainer(max_epochs=2, accelerator='cpu', devices=1).fit(model, datamodule=data)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("round ")]
    assert [line.partition(":")[0] for line in lines] == ["round 1/2", "round 2/2"]
    assert "val mAP" in lines[1], "the last round is scored"


def test_the_text_of_a_config_has_no_aliases():
    described = describe_script(make_model(FedPav()), make_data(), {"max_epochs": 3})
    text = described.text
    assert "&" not in text
    assert yaml.safe_load(text)["model"]["backbone"]["init_args"]["width"] == 8


def test_scores_after_a_fit_are_no_round_of_the_run(tmp_path):
    trainer = fit(tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    trainer.test(built(), datamodule=data_of(), ckpt_path=str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    again = fedsim.Trainer(run_dir=tmp_path / "run", resume=True, **CPU)
    again.test(built(), datamodule=data_of(), ckpt_path=str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    assert again.scores == trainer.scores
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


class LogsOften(Callback):
    """Logs past Lightning's connector, as DeviceStatsMonitor does: without an epoch, and at any time."""

    def log_twice(self, trainer, name):
        for number in (1.0, 2.0):
            trainer.loggers[0].log_metrics({name: number}, step=trainer.global_step)

    def on_train_start(self, trainer, pl_module):
        self.log_twice(trainer, "own/start")

    def on_train_batch_end(self, trainer, *_):
        self.log_twice(trainer, "own/batch")

    def on_train_end(self, trainer, pl_module):
        self.log_twice(trainer, "own/end")


def test_numbers_that_callbacks_log_without_an_epoch_are_those_of_the_latest_round(tmp_path, capsys):
    for rounds in (2, 3):
        fit(tmp_path / "run", rounds=rounds, resume=True, callbacks=[LogsOften(), LearningRateMonitor()])
        assert main(["report", str(tmp_path / "run")]) == 0
        assert "IN DOUBT" not in "".join(capsys.readouterr())
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    epochs = {
        name: [int(row["epoch"]) for row in rows if row[name] == "2.0"] for name in rows[0] if name.startswith("own/")
    }
    assert epochs == {"own/batch": [0, 1, 2], "own/end": [1, 2], "own/start": [0, 2]}


class Damping(Callback):
    """Changes weights after each round."""

    def __init__(self, factor=0.5):
        self._rate = factor

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(self._rate)


def experiments_of(*runs):
    return [read_run(run).experiment for run in runs]


def test_callbacks_are_parts_of_a_run(tmp_path):
    stop = EarlyStopping("val/mAP", patience=7, mode="max")
    given = {"plain": [], "bars": [LearningRateMonitor()], "stop": [stop], "damped": [Damping()], "more": [Damping()]}
    for name, callbacks in given.items():
        fit(tmp_path / name, callbacks=callbacks)
    plain, bars, *others = experiments_of(*(tmp_path / name for name in given))
    assert plain == bars
    assert len({plain, *others}) == 4
    [entry] = yaml.safe_load((tmp_path / "stop" / "config.yaml").read_text())["trainer"]["callbacks"]
    assert entry["class_path"].endswith(".EarlyStopping")
    assert entry["init_args"] == {"monitor": "val/mAP", "patience": 7, "mode": "max"}
    assert summary_of(tmp_path / "damped")["identity"]["unwritable"] == (
        "trainer.callbacks: the arguments of Damping are not known"
    )
    assert fedsim.load_model(tmp_path / "damped")


class Strong(Callback):
    """Has a number and no constructor."""

    strength: float


def test_what_a_script_changes_afterwards_is_recorded(tmp_path):
    def changed(trainer, model):
        trainer.limit_train_batches = 1

    def replaced(trainer, model):
        model.on_train_epoch_end = lambda: None

    def strong(trainer, model):
        trainer.callbacks.append(Strong())
        trainer.callbacks[-1].strength = 0.1

    for number, change in enumerate((lambda *_: None, changed, replaced, strong)):
        lightning.seed_everything(0)
        trainer, model = fedsim.Trainer(run_dir=tmp_path / f"{number}", max_epochs=1, **CPU), built()
        change(trainer, model)
        trainer.fit(model, datamodule=data_of())
    assert len({*experiments_of(*(tmp_path / f"{number}" for number in range(4)))}) == 4
    trainer = yaml.safe_load((tmp_path / "1" / "config.yaml").read_text())["trainer"]
    assert (trainer["limit_train_batches"], trainer["limit_val_batches"]) == (1, None)
    assert not (tmp_path / "2" / "config.yaml").exists()


def test_a_callback_of_a_resume_is_a_change(tmp_path):
    for rounds, callbacks in ((1, []), (2, [Damping()]), (3, [Damping()])):
        fit(tmp_path / "run", rounds=rounds, resume=True, callbacks=callbacks)
    changes = summary_of(tmp_path / "run")["changes"]
    assert [(change["after_round"], change["setting"]) for change in changes if change["counts"]] == [
        (1, "settings outside config.yaml")
    ]


def test_two_ranks_resume_a_run_of_a_script(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import lightning, fedsim
from fedsim.methods import FedPav
from fedsim.models import SmallCNN

lightning.seed_everything(0)
data = fedsim.FederatedDataModule(fedsim.SyntheticReID(clients=3, unseen=0, scale=0.2), size=(32, 16))
model = fedsim.Federation(FedPav(), SmallCNN(width=8), client=fedsim.LocalTraining(batch_size=8))
rounds, devices = map(int, sys.argv[2:])
trainer = fedsim.Trainer(run_dir=sys.argv[1], resume=True, max_epochs=rounds, accelerator="cpu", devices=devices)
trainer.fit(model, datamodule=data)
"""
    )
    for folder, rounds in (("whole", 3), ("parts", 1)):
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / folder), str(rounds), "1"])
        runpy.run_path(str(script), run_name="__main__")
    words = [sys.executable, script, tmp_path / "parts", 3, 2]
    environ = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}  # of the runs above
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    assert weights_of(tmp_path / "parts").equal(weights_of(tmp_path / "whole"))
    parts, whole = (summary_of(tmp_path / name) for name in ("parts", "whole"))
    assert parts["fingerprint"] == whole["fingerprint"]
    with (tmp_path / "parts" / "metrics.csv").open() as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file) if row["train/loss"]] == [0, 1, 2]


@pytest.mark.others
@pytest.mark.dist
@pytest.mark.slow
def test_a_script_whose_rank_fails_ends_though_the_end_of_python_would_wait(tmp_path):
    """As with NCCL, whose end may wait for a lost rank; the program that catches the error first goes on."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import atexit, sys, time
import fedsim, lightning
from fedsim.methods import FedPav
from fedsim.models import SmallCNN

class Failing(FedPav):
    def upload(self, client):
        raise ValueError("nothing to upload")

class StuckEnd(lightning.Callback):
    def on_fit_start(self, *_):
        atexit.register(time.sleep, 3600)

lightning.seed_everything(0)
data = fedsim.FederatedDataModule(fedsim.SyntheticReID(clients=2, unseen=0, scale=0.2), size=(32, 16))
model = fedsim.Federation(Failing(), SmallCNN(width=8), client=fedsim.LocalTraining(batch_size=8))
trainer = fedsim.Trainer(
    run_dir=sys.argv[1], max_epochs=1, accelerator="cpu", devices=2, callbacks=[StuckEnd()], enable_progress_bar=False
)
try:
    trainer.fit(model, datamodule=data)
finally:
    time.sleep(11)
    print("went on", flush=True)
"""
    )
    environ = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
    words = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 2, done.stderr
    assert "went on" in done.stdout
    assert "ValueError: nothing to upload" in done.stderr
    assert "fedsim: error: the end of Python takes longer than 10 s after a rank has failed" in done.stderr


def test_a_fast_dev_run_changes_no_file_of_a_run(tmp_path):
    folder = tmp_path / "run"
    fit(folder, rounds=1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    quick = fedsim.Trainer(run_dir=folder, overwrite=True, fast_dev_run=True, **CPU)
    quick.fit(built(), datamodule=data_of())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
