"""Pictures during a run: those of the report, in each logger, once per round, and no number of the run changes."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger
from PIL import Image

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.federated import GallerySplit, RetrievalSet
from fedsim.data.images import ImageArray, Split
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.callbacks import RunSummary
from fedsim.federation.callbacks.picture_loggers import log_picture
from fedsim.inference.pictures import Pictures, sample_set
from fedsim.methods import FedPav
from fedsim.report.course import add_to_course, course_blocks, read_course, round_folder, rounds_with_pictures
from small import make_data, make_model, refuse, vector
from tiny_run import TINY

ROOT = Path(__file__).parents[2]
FEW = ["--data.limit_client_batches=1", "--trainer.check_val_every_n_epoch=1"]
PLAIN = ["--trainer.callbacks+=Pictures", "--trainer.callbacks.num_queries=2"]
COURSE = "pictures/confusion-over-rounds.csv"


def call(*words):
    assert main([str(word) for word in words]) == 0


def fit(folder, *words, rounds=2, run="run"):
    (folder / "tiny.yaml").write_text(TINY)
    call("fit", "--config", folder / "tiny.yaml", *FEW, "--run_dir", folder / run, f"--trainer.max_epochs={rounds}",
         *words)  # fmt: skip
    return folder / run


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers_of(run):
    """All logged numbers but times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows_of(run / "metrics.csv")]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of three rounds with pictures, and one without."""
    folder = tmp_path_factory.mktemp("pictures")
    return fit(folder, *PLAIN, rounds=3), fit(folder, rounds=3, run="without")


def test_pictures_change_no_number(runs):
    with_pictures, without = runs
    assert numbers_of(with_pictures) == numbers_of(without)
    scores = [json.loads((run / "summary.json").read_text())["final"] for run in runs]
    assert scores[0] == scores[1]
    states = [fedsim.load_model(run, checkpoint="last").state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert not (without / "pictures").exists()


def test_a_round_has_the_pictures_of_the_report(runs, capsys):
    run, _ = runs
    call("predict", "--ckpt_path", run / "checkpoints" / "last.ckpt")
    call("report", run, "--queries", "worst", "--confusion", "--projection", "pca", "--html", run / "page.html")
    shown, drawn = capsys.readouterr().out, run / "pictures" / "round-3"
    assert {path.name for path in drawn.iterdir()} >= {"town0.png", "new1.png", "confusion.png", "pca-global.png"}
    assert rows_of(drawn / "confusion.csv") == rows_of(run / "queries" / "confusion.csv")
    # the report takes eight queries, this run two
    first = rows_of(run / "queries" / "town0.csv")[: len(rows := rows_of(drawn / "town0.csv"))]
    assert [row["image"] for row in rows] == [row["image"] for row in first]
    pairs = zip(rows_of(drawn / "pca-global.csv"), rows_of(run / "projections" / "pca-global.csv"), strict=True)
    assert all(float(a["x"]) == pytest.approx(float(b["x"]), abs=1e-5) for a, b in pairs)
    lines = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in lines if line[2:3] == ["/"] and line[0].isdecimal()][:3] == ["1", "2", "3"]
    page = (run / "page.html").read_text()
    assert page.count('alt="pca-global of FedPav in round ') == 3
    assert "wrong first images of FedPav over rounds" in page


def test_the_course_has_the_rows_of_each_round(runs):
    run, _ = runs
    rows = rows_of(run / COURSE)
    for round_ in (1, 2, 3):
        of_round = [row for row in rows if row["round"] == str(round_)]
        assert of_round == rows_of(round_folder(run, round_) / "confusion.csv")


def test_a_resumed_run_has_each_round_once(runs, tmp_path):
    whole, _ = runs
    run = fit(tmp_path, *PLAIN)
    # as of a round that was drawn, and whose checkpoint was lost
    add_to_course(run, 3, [{**row, "queries": 99} for row in rows_of(round_folder(run, 2) / "confusion.csv")])
    (run / "pictures" / "round-3").mkdir()
    (run / "pictures" / "round-3" / "old.png").touch()
    call("fit", "--ckpt_path", run, "--run_dir", run, "--trainer.max_epochs=3")
    ours, theirs = content(run / "pictures"), content(whole / "pictures")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if name.suffix == ".csv" and ours[name] != theirs[name]] == []


def test_each_nth_scored_round_is_drawn_also_after_a_resume(tmp_path):
    words = [*PLAIN, "--trainer.callbacks.every=2", "--trainer.callbacks.queries=null",
             "--trainer.callbacks.projection=null"]  # fmt: skip
    run = fit(tmp_path, *words, rounds=3)
    assert rounds_with_pictures(run) == [2]
    call("fit", "--ckpt_path", run, "--run_dir", run, "--trainer.max_epochs=4")
    assert rounds_with_pictures(run) == [2, 4]
    assert {path.name for path in round_folder(run, 4).iterdir()} == {"confusion.png", "confusion.csv"}
    fit(tmp_path, "--overwrite=true", rounds=1)
    assert not (run / "pictures").exists()


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_draw_the_same_once(fedsim, runs, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    for words, name in ((PLAIN, "run"), ([], "without")):
        fedsim("fit", "--config", tmp_path / "tiny.yaml", *FEW, *words, "--trainer.max_epochs=3",
               "--trainer.devices=2", "--run_dir", tmp_path / name, launched=True)  # fmt: skip
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "without")
    assert (tmp_path / "run" / COURSE).read_bytes() == (runs[0] / COURSE).read_bytes()


def test_tensorboard_has_pictures_and_embeddings_of_each_round(tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*PLAIN, "--trainer.logger", "TensorBoardLogger"]
    run = fit(tmp_path, *words, rounds=1)
    call("fit", "--ckpt_path", run, "--run_dir", run, "--trainer.max_epochs=2")
    assert "Embedding dir exists" not in capsys.readouterr().out
    folder = run / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    for name in ("town0", "confusion", "confusion-over-rounds", "pca-global"):
        assert [event.step for event in events.Images(f"pictures/{name}")] == [0, 1]
    listed = (folder / "projector_config.pbtxt").read_text()
    assert [listed.count(f'"global:0000{step}"') for step in (0, 1)] == [1, 1]
    header, *rows = [line.split("\t") for line in (folder / "00001/global/metadata.tsv").read_text().splitlines()]
    points = rows_of(run / "pictures/round-2/pca-global.csv")
    assert header == ["data set", "client", "camera", "identity", "part", "image"]
    assert [row[0] for row in rows] == [row["data set"] for row in points]
    assert [row[1] for row in rows] == [row["data set"] * row["data set"].startswith("town") for row in points]
    features = np.loadtxt(folder / "00001/global/tensors.tsv")
    assert len(features) == len(rows)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-5)
    with Image.open(folder / "00001/global/sprite.png") as sprite:
        assert (sprite.width // 32) ** 2 >= len(rows)


def test_weights_and_biases_has_pictures(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="W&B is not installed")
    from wandb_tools import logs

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = fit(tmp_path, *PLAIN, "--config", ROOT / "configs" / "loggers" / "wandb.yaml", rounds=1)
    [log] = logs(run)
    [row] = [row for row in log.history if any(name.startswith("pictures/town0") for name in row)]
    assert row["round"] == 1
    assert len(list((run / "wandb").rglob("files/media/images/pictures/confusion-over-rounds_*.png"))) == 1


class Server(MLFlowLogger):
    """A stand-in, which notes what a run's artifacts are."""

    experiment, run_id = None, "id"

    def __init__(self):
        self.artifacts = []
        type(self).experiment = SimpleNamespace(log_artifact=lambda *artifact: self.artifacts.append(artifact))


def test_mlflow_gets_each_file_as_an_artifact_of_its_round(tmp_path):
    logger = Server()
    for round_ in (1, 2):
        log_picture(SimpleNamespace(loggers=[logger]), tmp_path / "town0.png", round_)
    assert logger.artifacts == [("id", str(tmp_path / "town0.png"), f"pictures/round-{n}") for n in (1, 2)]


def test_mlflow_has_pictures(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, *PLAIN, "--config", ROOT / "configs" / "loggers" / "mlflow.yaml", rounds=1)
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("fedsim").experiment_id])
    names = {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "pictures/round-1")}
    assert names >= {"town0.png", "confusion.png", "confusion-over-rounds.png", "pca-global.png"}


# -- limits ------------------------------------------------------------------------------------------------------------


def trainer_of(folder, *callbacks, **options):
    return fedsim.Trainer(run_dir=folder, max_epochs=1, accelerator="cpu", devices=1, callbacks=[*callbacks],
                          limit_val_batches=1, check_val_every_n_epoch=1, enable_progress_bar=False,
                          **options)  # fmt: skip


def test_a_picture_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("fedsim.inference.pictures.write_confusion", fail)
    model = make_model(FedPav())
    trainer_of(tmp_path / "run", Pictures()).fit(model, datamodule=make_data())
    assert "round 1: not all pictures are drawn (confusion): no space left" in caplog.messages
    drawn = {path.name for path in (tmp_path / "run" / "pictures").rglob("*.png")}
    assert "pca-global.png" in drawn  # the others are there
    assert "confusion.png" not in drawn
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    assert vector(model).isfinite().all()


def test_two_of_them_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: Pictures is there twice"):
        trainer_of(tmp_path / "run", Pictures(), Pictures(queries="best"))


@pytest.mark.parametrize("options", [{"projection": "umap"}, {"queries": "wrst"}])
def test_unknown_choices_are_refused(options):
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks\.(projection|queries): expected '"):
        Pictures(**options)


def test_an_object_counts_anew_in_its_second_fit(tmp_path):
    pictures = Pictures(every=2, queries=None, projection=None)
    for name in ("a", "b"):
        trainer = trainer_of(tmp_path / name, pictures)
        trainer.fit(make_model(FedPav()), datamodule=make_data())
        assert not (tmp_path / name / "pictures").exists()  # of one round


def test_a_quick_check_draws_nothing(tmp_path):
    trainer_of(tmp_path / "run", Pictures(), fast_dev_run=True).fit(make_model(FedPav()), datamodule=make_data())
    assert not (tmp_path / "run" / "pictures").exists()


@pytest.mark.parametrize("field", ["every", "num_queries", "sample"])
def test_wrong_numbers_are_refused(field):
    with pytest.raises(ConfigError, match=f"trainer.callbacks: Pictures.{field}: 0 is less than 1"):
        Pictures(**{field: 0})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--trainer.callbacks.sample=1"], "Pictures.sample: 1 is less than the images of each person"),
        (["--model.method=Local"], "shows the global model, and this run has none"),
    ],
)
def test_a_run_without_such_pictures_is_refused(tmp_path, capsys, words, problem):
    (tmp_path / "tiny.yaml").write_text(TINY)
    line = refuse(capsys, "fit", "--config", tmp_path / "tiny.yaml", *PLAIN, *words, "--run_dir", tmp_path / "run")
    assert problem in line


def test_classification_is_refused(tmp_path):
    trainer = SimpleNamespace(fast_dev_run=False, callbacks=[RunSummary(str(tmp_path), "")])
    federation = SimpleNamespace(settings=SimpleNamespace(evaluation=Evaluation(task="classification")))
    with pytest.raises(ConfigError, match="the run classifies, and ranks no galleries; leave the callback out"):
        Pictures().on_train_start(trainer, federation)


def test_a_script_without_a_run_directory_is_refused():
    with pytest.raises(ConfigError, match=r"draws into the run directory; give fedsim\.Trainer a run_dir"):
        trainer_of(None, Pictures()).fit(make_model(FedPav()), datamodule=make_data())


def split_of(pids):
    pids = np.array(pids)
    return Split(ImageArray(np.zeros((len(pids), 4, 4, 3), np.uint8)), pids, np.arange(len(pids)) % 2)


def test_a_sample_has_whole_people_and_a_small_set_is_whole():
    images = RetrievalSet(split_of([1, 2, 3]), split_of([1, 1, 2, 2, 3, 3, 0, 0]))
    assert sample_set(Evaluation(), 11, images) is images
    chosen = sample_set(Evaluation(), 7, images)
    assert len(chosen.query) == 2
    assert len(chosen.gallery) == 4
    assert set(chosen.query.pids) == set(chosen.gallery.pids)
    pool = RetrievalSet(split_of([]), split_of([1, 2, 1, 2]), splits=(GallerySplit(np.array([1]), np.array([3, 2])),))
    first = sample_set(Evaluation(), 9, pool)
    assert (first.query.pids.tolist(), first.gallery.pids.tolist(), first.splits) == ([2], [2, 1], ())


def test_the_course_counts_home_and_elsewhere(tmp_path):
    keys = ("model", "owner", "data set", "first image's data set", "first image's camera", "is match", "queries")
    values = [("a", "a", 1, 1, 5), ("a", "a", 2, 0, 3), ("a", "b", 1, 0, 2), ("b", "b", 1, 1, 4)]
    rows = [dict(zip(keys, ("global", "", *row), strict=True)) for row in values]
    add_to_course(tmp_path, 4, rows)
    add_to_course(tmp_path, 2, rows)  # a resume: round 4 is trained again
    [block] = course_blocks(tmp_path, "mine")
    assert block.headers == ["mine\nglobal\nround", "a", "b"]
    assert block.lines == [["2", "50.0 / 30.0 / 20.0", "100.0 / 0.0 / 0.0"]]
    assert course_blocks(tmp_path / "other") == []
    (tmp_path / COURSE).write_text("round\nx\n")
    with pytest.raises(DataError, match=r"confusion-over-rounds\.csv: cannot be read"):
        read_course(tmp_path)
