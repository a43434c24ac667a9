"""W&B without a network: what a job leaves in its .wandb file, read back with W&B's own tool."""

import csv
import json
import os
import re
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("wandb", reason="W&B is not installed")

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

import fedsim
from failing import PATIENCE, Run
from fedsim.cli.checks import check_logged_names
from fedsim.cli.run_directory import default_run_dir
from fedsim.core.errors import ConfigError
from fedsim.core.metrics import METRICS
from fedsim.data import SyntheticReID
from fedsim.evaluation import summary
from fedsim.evaluation.ranking import MAX_RANK
from fedsim.evaluation.summary import few_names
from fedsim.federation import round
from fedsim.federation.callbacks import FolderStart, Tracking, tracking
from fedsim.federation.callbacks.tracking import RUN_ID_FILE, code_version, join_run, public_config
from fedsim.federation.components import ledger
from fedsim.methods import FedPav
from small import fit, make_data, make_model
from tiny_run import TINY
from wandb_tools import logs

ROOT = Path(__file__).parents[2]
TOWNS = [f"town{i}" for i in range(4)]
LOGGER = ["--config", ROOT / "configs" / "loggers" / "wandb.yaml"]
EVERY_ROUND = ["--trainer.check_val_every_n_epoch=1"]


@pytest.fixture(scope="module")
def runs(fedsim, tmp_path_factory):
    """One job on one rank and one on two: number of ranks -> (run directory, its logs)."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "tiny.yaml").write_text(TINY)
    found = {}
    for ranks in (1, 2):
        run = folder / f"on{ranks}"
        fedsim("fit", "--config", folder / "tiny.yaml", *LOGGER, *EVERY_ROUND, "--trainer.max_epochs=2",
               "--run_dir", run, f"--trainer.devices={ranks}", launched=ranks > 1)  # fmt: skip
        found[ranks] = run, logs(run)
    return found


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def run(request, runs):
    """A job's run directory and its only log."""
    folder, [log] = runs[request.param]
    return folder, log


def test_a_job_is_one_run_whatever_its_number_of_ranks(run):
    folder, log = run
    assert len(list(folder.rglob("*.wandb"))) == 1
    assert log.id == (folder / RUN_ID_FILE).read_text()
    about = log.of("run")[0]
    assert (about["project"], about["display_name"]) == ("fedsim", folder.name)
    assert log.of("exit")[0].get("exit_code", 0) == 0


def test_the_round_is_the_x_axis_of_everything(run):
    _, log = run
    everything = [record for record in log.of("metric") if record.get("glob_name") == "*"][-1]
    assert everything["step_metric"] == "round"
    assert [row["round"] for row in log.history] == sorted(row["round"] for row in log.history)
    assert {row["round"] for row in log.history} == {0, 1, 2}  # 0: before training


def test_what_is_logged_is_what_metrics_csv_holds(run):
    folder, log = run
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = {(float(row["epoch"]) + 1, key): float(value) for row in rows for key, value in row.items() if value}
    found = {(row["round"], key): value for row in log.history for key, value in row.items()}
    for (round_, key), value in expected.items():
        if key not in ("epoch", "step"):
            assert found[round_, key] == pytest.approx(value, rel=1e-6), key
    final = json.loads((folder / "summary.json").read_text())
    assert log.last("val/mAP") == pytest.approx(final["final"]["metrics"]["val/mAP"])
    up = sum(row["comm/up_bytes"] for row in log.history if "comm/up_bytes" in row)
    assert up == final["bytes_up"] > 0


def test_clients_are_logged_by_name_and_add_up(run):
    _, log = run
    for round_ in (1, 2):
        row = {k: v for item in log.history if item["round"] == round_ for k, v in item.items()}
        images = np.array([row[f"train/{town}/images"] for town in TOWNS])
        for metric in ("loss", "accuracy"):
            values = np.array([row[f"train/{town}/{metric}"] for town in TOWNS])
            assert np.average(values, weights=images) == pytest.approx(row[f"train/{metric}"], rel=1e-6)
        assert all(row[f"train/{town}/seconds"] > 0 for town in TOWNS)


def test_single_data_sets_have_few_charts_but_all_numbers(run):
    _, log = run
    numbers = {name for row in log.history for name, value in row.items() if isinstance(value, float | int)}
    hidden = {record["name"] for record in log.of("metric") if record.get("options", {}).get("hidden")}
    assert {"test/global/town0/rank5", "train/town0/seconds", "comm/town0/up_bytes"} <= numbers & hidden
    assert {"test/global/new0/mAP", "test/global/seen/mINP", "train/town0/loss", "comm/up_bytes"} <= numbers - hidden
    charts = numbers - hidden
    assert len(charts) < 0.6 * len(numbers), f"{len(charts)} of {len(numbers)}"


def test_the_table_holds_every_score(run):
    folder, log = run
    scores = json.loads((folder / "summary.json").read_text())["final"]["metrics"]
    rows = log.table("scores")
    assert {(row["split"], row["data set"], row["model"]) for row in rows} >= {
        ("val", "town0", "local"), ("test", "new1", "global"), ("test", "seen", "personalised"),
    }  # fmt: skip
    found = {f"{r['split']}/{r['model']}/{r['data set']}/{metric}": r[metric] for r in rows for metric in METRICS}
    assert found == pytest.approx({key: value for key, value in scores.items() if key.count("/") == 3})
    assert {row["round"] for row in rows} == {2}


def test_curves_agree_with_the_scores(run):
    folder, log = run
    scores = json.loads((folder / "summary.json").read_text())["final"]["metrics"]
    for kind, domains in (("global", [*TOWNS, "new0", "new1"]), ("local", TOWNS), ("personalised", TOWNS)):
        points = log.table(f"cmc/test/{kind}_table")
        for domain in domains:
            curve = {point["step"]: point["lineVal"] for point in points if point["lineKey"] == domain}
            assert sorted(curve) == list(range(1, MAX_RANK + 1))
            assert [curve[r] for r in range(1, 51)] == sorted(curve.values())
            for rank in (1, 5, 10):
                assert curve[rank] == pytest.approx(scores[f"test/{kind}/{domain}/rank{rank}"])


def test_the_data_are_shown_once(run):
    folder, log = run
    [path] = (folder / "wandb").glob("*run-*/files/media/images/*.png")
    assert [row["round"] for row in log.history if "data.path" in row] == [0]
    with Image.open(path) as sheet:
        assert sheet.size[1] > 6 * 100  # six data sets


def test_config_and_code_version_are_there_and_no_folder_of_this_machine(run):
    folder, log = run
    config = log.config
    assert config["model"]["client"]["batch_size"] == 8
    assert config["data"]["size"] == [32, 16]
    about = config["fedsim"]
    assert (about["version"], about["ranks"]) == (fedsim.__version__, int(folder.name[-1]))
    if "commit" in code_version():
        assert re.fullmatch("[0-9a-f]{40}", about["commit"])
        assert about["changed"] in (True, False)
    assert str(folder.parent) not in json.dumps(config)
    assert "logger" not in config["trainer"]


def test_scores_do_not_depend_on_the_number_of_ranks(runs):
    def numbers(log):
        rows = [{k: v for k, v in row.items() if k.split("/")[0] in ("round", "train", "val", "test", "comm")}
                for row in log.history]  # fmt: skip
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]

    assert numbers(runs[1][1][0]) == numbers(runs[2][1][0])


# -- a run that is cut short, and goes on ------------------------------------------------------------------------------


def await_version(run, number):
    """Wait until the checkpoint of some round is complete."""
    current, deadline = run / "checkpoints" / "last.ckpt" / "current", time.monotonic() + PATIENCE
    while not (current.exists() and int(current.read_text()[1:]) >= number) and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(current.read_text()[1:])


@pytest.mark.slow
def test_a_killed_run_is_readable_and_its_continuation_is_the_same_run(tiny, tmp_path):
    run = tmp_path / "run"
    options = ("--config", tiny, *LOGGER, *EVERY_ROUND, "--trainer.max_epochs=10000", "--run_dir", run)
    process = Run(tmp_path, "fit", *options)
    reached = await_version(run, 3)
    process.kill()
    [killed] = logs(run)
    assert killed.of("exit") == []  # the mark of a crash
    assert max(row["round"] for row in killed.history) >= 2
    process = Run(tmp_path, "fit", "--ckpt_path", run)
    await_version(run, reached + 3)
    process.signal(signal.SIGTERM, 0)
    assert process.wait(timeout=PATIENCE) == [128 + signal.SIGTERM], process.output
    first, second = logs(run)
    assert first.id == second.id == (run / RUN_ID_FILE).read_text()
    assert second.of("exit")[0]["exit_code"] == 128 + signal.SIGTERM
    assert [record["type"] for record in second.records].count("preempting") == 1  # so a server repeats a sweep's draw
    rounds = [{row["round"] for row in log.history if "train/loss" in row} for log in (first, second)]
    assert rounds[0] | rounds[1] == set(range(1, 1 + max(rounds[1])))  # no gap
    assert len(rounds[0] & rounds[1]) <= 2  # those without a checkpoint
    assert not any("data.path" in row for row in second.history)


def test_only_a_fresh_start_is_a_new_run(tmp_path, monkeypatch):
    def joined():
        logger = WandbLogger(project="fedsim")
        join_run(logger, tmp_path)
        return logger._wandb_init

    first = joined()
    assert first["id"] == joined()["id"] == (tmp_path / RUN_ID_FILE).read_text()
    assert (first["dir"], first["name"], first["resume"]) == (str(tmp_path), tmp_path.name, "allow")
    FolderStart(tmp_path, False, str(tmp_path / "checkpoints" / "last.ckpt")).prepare()  # continued
    assert joined()["id"] == first["id"]
    FolderStart(tmp_path, restart=True).prepare()  # killed before its first checkpoint
    assert joined()["id"] == first["id"]
    (tmp_path / "summary.json").write_text("{}")
    FolderStart(tmp_path, True).prepare()
    second = joined()
    assert second["id"] != first["id"]
    FolderStart(tmp_path).prepare()  # what was there is no run
    monkeypatch.setenv("WANDB_RUN_ID", "named-by-an-agent")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert (joined()["id"], joined()["name"]) == ("named-by-an-agent", None)
    assert default_run_dir("fedsim.methods.FedPav", 3) == "runs/sweep-abc/named-by-an-agent"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert default_run_dir("fedsim.methods.FedPav", 3) == "runs/fedpav-seed3"


def test_what_the_user_chose_stays(tmp_path):
    logger = WandbLogger(project="mine", id="abc", name="title", save_dir="elsewhere")
    join_run(logger, tmp_path)
    assert {name: logger._wandb_init[name] for name in ("id", "name", "dir", "project")} == {
        "id": "abc", "name": "title", "dir": "elsewhere", "project": "mine",
    }  # fmt: skip
    assert not (tmp_path / RUN_ID_FILE).exists()


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_key_the_job_says_what_to_do(fedsim, tiny, tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    options = ["--config", tiny, *LOGGER, "--run_dir", tmp_path / "run", f"--trainer.devices={ranks}"]
    result = fedsim("fit", *options, check=False)
    assert result.returncode == 2, result.stderr
    assert "WANDB_MODE=offline" in result.stderr
    assert "Traceback" not in result.stderr


# -- many clients ------------------------------------------------------------------------------------------------------


class Recorder(WandbLogger):
    """Keeps what would be logged."""

    def __init__(self):
        super().__init__()
        self.rows, self.settings = [], {}

    @property
    def experiment(self):
        """Stand for a W&B run."""
        config = SimpleNamespace(update=lambda values, allow_val_change: self.settings.update(values))
        return SimpleNamespace(log=self.rows.append, define_metric=lambda *args, **kwargs: None, config=config)


@pytest.fixture
def few(monkeypatch):
    """Take three for many."""
    for module in (tracking, summary, round, ledger):
        monkeypatch.setattr(module, "MAX_NAMES", 2)


def test_of_many_clients_quantiles_are_logged_and_no_names(few):
    logger = Recorder()
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.25), val="identities", val_fraction=0.3)
    model = fit(make_model(FedPav()), data, logger=logger, limit_val_batches=1.0, check_val_every_n_epoch=1,
                callbacks=[Tracking({"data": {}})])  # fmt: skip
    names = {name for row in logger.rows for name in row}
    assert not [name for name in names if "town" in name or "new0" in name]
    row = {k: v for row in logger.rows for k, v in row.items()}
    losses = [values["loss"] for values in {name: report.numbers for name, report in model.reports.items()}.values()]
    assert len(losses) == 3
    assert [row[f"spread/train/loss/p{q}"] for q in (0, 50, 100)] == pytest.approx(sorted(losses))
    scores = [model.scores[f"val/global/town{i}/mAP"] for i in range(3)]
    assert [row[f"spread/val/global/mAP/p{q}"] for q in (0, 50, 100)] == pytest.approx(sorted(scores))
    assert sum(row["spread/train/loss/histogram"].histogram) == 3
    assert row["val/mAP"] == pytest.approx(np.mean(scores))
    assert {line[2] for line in row["scores"].data} == {"seen"}
    # the rest of the run still knows every score
    assert float(model.trainer.callback_metrics["val/global/town1/mAP"]) == pytest.approx(scores[1])


def test_few_names_keeps_all_of_few_and_the_means_of_many():
    many = {f"test/global/d{i}/mAP": 0.5 for i in range(51)}
    means = {"test/global/seen/mAP": 0.5, "val/mAP": 0.5}
    assert few_names(many | means) == means
    few = dict(list(many.items())[1:]) | means
    assert few_names(few) == few


def test_curves_follow_the_last_evaluation():
    model = fit(make_model(FedPav()), make_data(val="identities", val_fraction=0.3), limit_val_batches=1.0)
    curves, scores = model.evaluator.curves, model.scores
    assert {split for split, _, _ in curves} == {"val"}  # test sets were not scored
    assert len([key for key in curves if key[1] == "local"]) == 3
    for (split, kind, domain), curve in curves.items():
        for rank in (1, 5, 10):
            assert curve[rank - 1] == pytest.approx(scores[f"{split}/{kind}/{domain}/rank{rank}"])


def test_absolute_paths_stay_here(monkeypatch):
    config = {"data": {"source": [{"root": "/home/a/reid"}, {"root": "data/reid"}]}, "run_dir": "x",
              "trainer": {"logger": 1, "max_epochs": 2}}  # fmt: skip
    assert public_config(config) == {
        "data": {"source": [{"root": "reid"}, {"root": "data/reid"}]}, "trainer": {"max_epochs": 2},
    }  # fmt: skip
    assert config["trainer"]["logger"] == 1
    monkeypatch.setattr(tracking, "_git", lambda *args: None)  # an installed copy
    assert set(code_version()) == {"version"}


def test_a_logger_that_is_offline_needs_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracking.reach_wandb(WandbLogger(offline=True))
    tracking.reach_wandb(WandbLogger(mode="disabled"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.reach_wandb(WandbLogger())


def test_a_dead_address_of_wandb_is_told_from_a_missing_key(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"http://127.0.0.1:{server.getsockname()[1]}"  # free again when the block ends
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=SimpleNamespace(base_url=dead)))
    monkeypatch.setattr("wandb.login", lambda: pytest.fail("asked for a key"))
    with pytest.raises(ConfigError, match=rf"{dead} does not answer .*refused.*WANDB_BASE_URL"):
        tracking.reach_wandb(WandbLogger())


@pytest.mark.parametrize("status", [200, 403, 404])
def test_each_answer_of_wandbs_address_leads_to_the_login(monkeypatch, status):
    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    logins = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=SimpleNamespace(base_url=base)))
        monkeypatch.setattr("wandb.login", lambda: logins.append(base))
        tracking.reach_wandb(WandbLogger())
    assert logins == [base]


@pytest.mark.parametrize("own", [None, "9"])
def test_a_server_of_mlflow_is_asked_for_seconds_only(monkeypatch, own):
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(names[0], own)
    before, seen = dict(os.environ), {}
    client = SimpleNamespace(get_experiment_by_name=lambda name: seen.update(os.environ))
    tracking.reach_mlflow(SimpleNamespace(_mlflow_client=client, _experiment_name="fedsim"))
    assert [seen[name] for name in names] == [own or "1", "5"]
    assert dict(os.environ) == before


def test_names_that_mlflow_would_take_for_one_are_refused():
    """Lightning's logger leaves out what MLflow forbids."""
    names, logger = ["site a", "site_a", "site+a", "Köln", "Kln"], object.__new__(MLFlowLogger)
    check_logged_names([], names)
    check_logged_names([logger], names[:4])
    with pytest.raises(
        ConfigError, match=r"trainer.logger: MLFlowLogger drops .*, so Köln and Kln would have the same"
    ):
        check_logged_names([logger], names)
    check_logged_names([logger], [*names, *map(str, range(50))])  # so many are not logged by name


def test_the_home_directory_is_not_needed(tmp_path, monkeypatch):
    """In containers it may be read-only, or missing."""
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    for name in ("a", "b"):
        join_run(WandbLogger(offline=True), tmp_path / name)
        assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / name / "wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", "/own")
    join_run(WandbLogger(offline=True), tmp_path)
    assert os.environ["WANDB_DATA_DIR"] == "/own"
