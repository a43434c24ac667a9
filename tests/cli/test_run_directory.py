"""Which checkpoint of a run directory a command takes, and what it says about it."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from jsonargparse import Namespace
from safetensors.torch import load_file

from fedsim.__main__ import main
from fedsim.cli import fit as command_fit
from fedsim.cli.checks import check_folders, let_loggers_stand_alone
from fedsim.cli.run_directory import describe_checkpoint
from fedsim.core.errors import DataError
from fedsim.core.placement import place
from fedsim.core.versions import begin_version, current_version, publish_version
from fedsim.federation.callbacks import RoundProgress
from fedsim.federation.checks.compatibility import warn_of_idle_ranks
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.strategy.run_checkpoints import checkpoint_at, rounds_done
from small import refuse
from tiny_run import TINY

ROOT = Path(__file__).parents[2]


def call(*args):
    assert main([str(arg) for arg in args]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three rounds, of which only the second was evaluated, and so is the best."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.yaml").write_text(TINY)
    call("fit", "--config", folder / "config.yaml", "--run_dir", folder / "run", "--trainer.check_val_every_n_epoch=2")
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy", symlinks=True)


def said(caplog, start):
    return [message for message in caplog.messages if message.startswith(start)]


def test_a_command_says_which_checkpoint_it_takes(run, caplog, capsys):
    best, last = (run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    for given, command, expected in (
        (run, "test", f"checkpoint {best}: round 2, best by val/mAP"),
        (best, "validate", f"checkpoint {best}: round 2, best by val/mAP"),
        (last, "predict", f"checkpoint {last}: round 3, last"),
    ):
        caplog.clear()
        call(command, "--ckpt_path", given)
        assert said(caplog, "checkpoint ") == [expected]


@pytest.mark.parametrize("checkpoint", ["last", "RUN", "RUN/checkpoints/best.ckpt"])
def test_a_fit_does_not_replace_the_run_with_which_it_goes_on(run, capsys, checkpoint):
    checkpoint = checkpoint.replace("RUN", str(run))
    words = ["--run_dir", run, "--ckpt_path", checkpoint, "--overwrite=true", "--trainer.max_epochs=4"]
    line = refuse(capsys, "fit", *words)
    assert f"--overwrite: would replace the run in {run}, with which --ckpt_path goes on; give one of them" in line


def test_two_progress_bars_are_one_line(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(TINY)
    bars = ["--trainer.callbacks+=TQDMProgressBar", "--trainer.callbacks+=RichProgressBar"]
    line = refuse(capsys, "fit", "--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "run", *bars)
    assert "trainer.callbacks: TQDMProgressBar, RichProgressBar are progress bars, and a run shows one" in line


def test_without_a_best_one_the_last_is_taken(copy):
    folder = copy / "checkpoints"
    assert checkpoint_at(copy) == folder / "best.ckpt"
    assert checkpoint_at(copy, fitting=True) == folder / "last.ckpt"
    shutil.rmtree(folder / "best.ckpt")
    assert checkpoint_at(copy) == folder / "last.ckpt"
    (folder / "last.ckpt").rename(folder / "mine.ckpt")  # of a ModelCheckpoint of the user's
    content = read_checkpoint(checkpoint_at(copy))
    assert describe_checkpoint(folder / "mine.ckpt", content) == f"checkpoint {folder / 'mine.ckpt'}: round 3"
    shutil.rmtree(folder / "mine.ckpt")
    with pytest.raises(DataError, match="there is no checkpoint"):
        checkpoint_at(copy)


def test_export_takes_a_run_directory(run, tmp_path, caplog):
    names = {"run": run, "best": run / "checkpoints" / "best.ckpt", "last": run / "checkpoints" / "last.ckpt"}
    for name, given in names.items():
        call("export", "--ckpt_path", given, "--output", tmp_path / f"{name}.safetensors")
    tensors = {name: load_file(tmp_path / f"{name}.safetensors")["conv1.weight"] for name in names}
    assert tensors["run"].equal(tensors["best"])
    assert not tensors["run"].equal(tensors["last"])
    best = f"checkpoint {names['best']}: round 2, best by val/mAP"
    assert said(caplog, "checkpoint ") == [best, best, f"checkpoint {names['last']}: round 3, last"]


def test_a_fit_says_that_there_is_nothing_to_train(copy, caplog, capsys):
    last = copy / "checkpoints" / "last.ckpt"
    config = (copy / "config.yaml").read_text()
    expected = f"trainer.max_epochs: 2 is less than the 3 rounds of {last}"
    assert expected in refuse(capsys, "fit", "--ckpt_path", copy, "--run_dir", copy, "--trainer.max_epochs", 2)
    assert (copy / "config.yaml").read_text() == config
    expected = f"nothing to train: {last} is of round 3, the last; to continue, raise trainer.max_epochs"
    for rounds, messages in ((3, [expected]), (4, [])):
        caplog.clear()
        call("fit", "--ckpt_path", copy, "--run_dir", copy, "--trainer.max_epochs", rounds)
        assert said(caplog, "nothing to train") == messages
        assert rounds_done(read_checkpoint(last)) == rounds


def test_a_fit_goes_on_from_the_version_that_it_has_read_first(copy, tmp_path, monkeypatch):
    """The run that it goes on from is alive, and writes the next one."""
    last, check, seen = copy / "checkpoints" / "last.ckpt", command_fit.check_fit, []

    def meanwhile(*args):
        seen.append(current_version(last))
        check(*args)
        (partial := begin_version(last)).joinpath("global.ckpt").write_text("of a later round")
        publish_version(partial)

    monkeypatch.setattr(command_fit, "check_fit", meanwhile)
    call("fit", "--ckpt_path", copy, "--run_dir", tmp_path / "next", "--trainer.max_epochs", 4)
    assert rounds_done(read_checkpoint(tmp_path / "next" / "checkpoints" / "last.ckpt")) == 4
    assert len([*(tmp_path / "next" / "checkpoints" / "last.ckpt").glob("v*")]) == 1
    assert seen[0].is_dir()
    assert current_version(last) != seen[0]
    publish_version(begin_version(last))  # nobody holds the earlier ones any more
    assert not seen[0].exists()


@pytest.fixture
def looks_late(monkeypatch):
    """A fit that finds a run in its folder after all other checks."""
    monkeypatch.setattr("fedsim.cli.app.refuse_used_folder", lambda words: None)


def test_ranks_that_have_nothing_to_train_are_counted(run, capsys, caplog, looks_late):
    warning = "trainer.devices: 5 ranks, but only 4 clients: the other ranks have nothing to train; 4 are enough"
    args = ("fit", "--config", run.parent / "config.yaml", "--run_dir", run, "--trainer.devices")
    for devices, expected in ((4, []), (5, [warning])):
        caplog.clear()
        assert "holds a run already" in refuse(capsys, *args, devices)  # before other ranks are started
        assert said(caplog, "trainer.devices") == expected


@pytest.mark.parametrize(("precision", "has_bf16"), [("32-true", False), ("bf16-mixed", True), ("bf16-mixed", False)])
def test_a_slow_precision_is_said_at_the_start(run, capsys, caplog, monkeypatch, looks_late, precision, has_bf16):
    monkeypatch.setattr("fedsim.federation.checks.compatibility.cpu_computes_bf16", lambda: has_bf16)
    options = ("--trainer.accelerator=cpu", f"--trainer.precision={precision}")
    refuse(capsys, "fit", "--config", run.parent / "config.yaml", "--run_dir", run, *options)  # there is a run already
    slow = "trainer.precision: this CPU lacks instructions for bf16-mixed; 32-true is several times as fast"
    assert said(caplog, "trainer.precision") == ([slow] if precision == "bf16-mixed" and not has_bf16 else [])


def test_a_rank_without_clients_trains_no_client(caplog):
    caplog.set_level("INFO", logger="fedsim")
    RoundProgress().on_placed(place({"a": 1.0}, 2))
    assert caplog.messages[:2] == ["rank 0 trains a", "rank 1 trains no client"]


@pytest.mark.parametrize("micro_batches", [{"a": 1, "b": 1}, {"a": 2}, {"a": 4}])
def test_ranks_with_a_client_or_with_micro_batches_of_one_are_not_idle(micro_batches, caplog):
    warn_of_idle_ranks(2, 2, micro_batches)
    assert caplog.messages == []


@pytest.mark.parametrize(("per_machine", "micro_batches"), [(2, 1), (1, 4)])
def test_one_client_keeps_one_rank_busy_without_micro_batches_or_other_ranks_beside_it(
    per_machine, micro_batches, caplog
):
    warn_of_idle_ranks(2, per_machine, {"a": micro_batches})
    line = "trainer.devices: 2 ranks, but only 1 client: the other ranks have nothing to train; 1 is enough"
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("logger", "words"),
    [("TensorBoardLogger", "save_dir: RUN_DIR"), ("MLFlowLogger", "tracking_uri: sqlite:///mlflow.db")],
)
def test_a_logger_s_name_is_enough(tmp_path, capsys, logger, words):
    (tmp_path / "tiny.yaml").write_text(TINY)
    with pytest.raises(SystemExit):  # the parser's way to end after it has printed
        main(["fit", "--config", str(tmp_path / "tiny.yaml"), "--trainer.logger", logger, "--print_config"])
    assert f"      {words}\n" in capsys.readouterr().out


def test_the_folder_of_a_logger_is_checked_before_training(tmp_path, capsys, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["fit", "--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "run", "--trainer.logger=CSVLogger"]
    for folder, problem in (
        (tmp_path / "tiny.yaml", f"{tmp_path}/tiny.yaml cannot be a folder (File exists); name another"),
        ("$NOWHERE/x", "$NOWHERE/x names the variable NOWHERE, which is not set"),
        ("", "is an empty text"),
        (" ", "is empty"),
    ):
        line = refuse(capsys, *words, f"--trainer.logger.save_dir={folder}")
        assert f"trainer.logger.save_dir: {problem}" in line
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    call(*words, "--trainer.max_epochs=1", "--data.limit_client_batches=1", "--trainer.logger.save_dir=~/logs")
    assert [*(tmp_path / "logs").rglob("metrics.csv")]


@pytest.mark.parametrize("value", ["s3://bucket/logs", ".", "RUN_DIR"])
def test_other_words_for_the_folder_of_a_logger_stay(value):
    let_loggers_stand_alone()
    name = {".": "WandbLogger", "RUN_DIR": "TensorBoardLogger"}.get(value, "CSVLogger")
    logger = Namespace(class_path=f"lightning.pytorch.loggers.{name}", init_args=Namespace(save_dir=value))
    check_folders([logger, Namespace(class_path="lightning.pytorch.loggers.CSVLogger")])
    assert logger.init_args.save_dir == value


@pytest.mark.parametrize(
    "logger",
    [("--config", ROOT / "configs" / "loggers" / "tensorboard.yaml"), ("--trainer.logger", "TensorBoardLogger")],
    ids=["config", "name"],
)
def test_tensorboard_has_the_numbers_of_metrics_csv_in_the_run_directory(tmp_path, logger):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "tiny.yaml").write_text(TINY)
    few = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=1"]
    call("fit", "--config", tmp_path / "tiny.yaml", *logger, *few, "--run_dir", tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    call("fit", "--ckpt_path", moved, "--run_dir", moved, "--trainer.max_epochs=2")
    assert not (tmp_path / "run").exists()
    events = EventAccumulator(str(moved / "tensorboard")).Reload()
    with (moved / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "test/global/unseen/mAP"):
        logged = [event.value for event in events.Scalars(name)]
        assert logged == pytest.approx([float(row[name]) for row in rows if row[name]], rel=1e-6)
        assert len(logged) >= 2

    plugins = {tag: data.plugin_data.content for tag, data in events.summary_metadata.items()}
    assert "data" in events.Tags()["images"]
    check_hparams(plugins["_hparams_/session_start_info"], plugins["_hparams_/experiment"], events, moved)
    check_cards(events.Tensors("custom_scalars__config__")[0].tensor_proto, events.Tags()["scalars"])


@pytest.mark.parametrize("command", ["describe", "validate", "test", "predict"])
def test_each_command_takes_the_config_that_a_run_has_left(command, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    few = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=1"]
    call("fit", "--config", tmp_path / "tiny.yaml", *few, "--run_dir", tmp_path / "run")
    scored = [] if command == "describe" else ["--ckpt_path", tmp_path / "run"]
    call(command, "--config", tmp_path / "run" / "config.yaml", *scored)


def check_hparams(session, experiment, events, folder):
    """A line of the page HPARAMS: the settings that are not defaults, and scores that are scalars, too."""
    from tensorboard.plugins.hparams import metadata

    values = metadata.parse_session_start_info_plugin_data(session).hparams
    assert values["model.method"].string_value == "FedPav"
    assert values["model.backbone.width"].number_value == 8
    assert "trainer.max_epochs" in values
    assert not any("dir" in name or "threads" in name for name in values), "numbers do not depend on these"
    infos = metadata.parse_experiment_plugin_data(experiment).metric_infos
    shown = {info.name.tag for info in infos}
    assert {"test/global/seen/mAP", "test/global/unseen/mAP", "test/global/unseen/rank1"} <= shown
    final = json.loads((folder / "summary.json").read_text())["final"]["metrics"]
    for tag in shown:
        assert events.Scalars(tag)[-1].value == pytest.approx(final[tag], rel=1e-6)


def check_cards(proto, tags):
    """The page CUSTOM SCALARS has a dozen cards, and each has numbers."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = layout_pb2.Layout.FromString(proto.string_val[0])
    cards = {chart.title: list(chart.multiline.tag) for group in layout.category for chart in group.chart}
    assert len(cards) == 12
    empty = [title for title, patterns in cards.items() if not any(re.match(p, tag) for p in patterns for tag in tags)]
    assert empty == []


def test_mlflow_has_the_numbers_of_metrics_csv_in_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.chdir(tmp_path)  # the file of its config is there
    (tmp_path / "tiny.yaml").write_text(TINY)
    logger = ["--config", ROOT / "configs" / "loggers" / "mlflow.yaml"]
    few = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=1"]
    call("fit", "--config", tmp_path / "tiny.yaml", *logger, *few, "--run_dir", tmp_path / "run")
    call("fit", "--ckpt_path", tmp_path / "run", "--run_dir", tmp_path / "run", "--trainer.max_epochs=2")
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("fedsim")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.info.run_id == (tmp_path / "run" / "mlflow_id").read_text()
    assert run.data.params["model/method/class_path"] == "fedsim.methods.FedPav"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "summary.json"}
    kept = client.download_artifacts(run.info.run_id, "summary.json", str(tmp_path))
    assert Path(kept).read_bytes() == (tmp_path / "run" / "summary.json").read_bytes()
    assert not any(str(tmp_path) in value for value in run.data.params.values())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "test/global/unseen/mAP"):
        logged = [number.value for number in client.get_metric_history(run.info.run_id, name)]
        assert logged == pytest.approx([float(row[name]) for row in rows if row[name]], rel=1e-6)
        assert len(logged) >= 2
    call("fit", "--config", tmp_path / "tiny.yaml", *logger, *few, "--run_dir", tmp_path / "run", "--overwrite=true")
    assert len(client.search_runs([experiment.experiment_id])) == 2


def test_a_run_is_left_as_it_is_where_mlflow_does_not_answer(tmp_path, capsys):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    (tmp_path / "tiny.yaml").write_text(TINY)
    run = tmp_path / "run"
    few = ["--trainer.max_epochs=1", "--data.limit_client_batches=1", "--run_dir", run]
    call("fit", "--config", tmp_path / "tiny.yaml", *few)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    capsys.readouterr()
    server = ["--trainer.logger=MLFlowLogger", "--trainer.logger.tracking_uri=http://127.0.0.1:9"]
    line = refuse(capsys, "fit", "--config", tmp_path / "tiny.yaml", *few, *server, "--overwrite=true")
    assert "trainer.logger: MLflow failed" in line
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_folder_of_features_is_tried_before_they_are_computed(copy, capsys):
    shutil.rmtree(copy / "features", ignore_errors=True)
    (copy / "features").touch()
    line = refuse(capsys, "predict", "--ckpt_path", copy)
    assert f"run_dir: {copy / 'features'} cannot be a folder (File exists)" in line
