"""The results of a run as rows, against its files; features of a folder of images."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from tiny_run import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    options = ["--run_dir", str(folder / "run"), "--trainer.check_val_every_n_epoch=2"]
    assert main(["fit", "--config", str(folder / "tiny.yaml"), *options]) == 0
    return folder / "run"


def test_rows_are_those_of_the_files(run):
    results = fedsim.load_run(run)
    summary = json.loads((run / "summary.json").read_text())
    with (run / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert [row["round"] for row in results.rounds] == [1, 2, 3]
    for row in results.rounds:
        for line in (line for line in logged if int(line["epoch"]) + 1 == row["round"]):
            assert all(row[name] == float(value) for name, value in line.items() if value and name != "step")
    scores = {(row["split"], row["model"], row["data set"]): row for row in results.scores}
    for name, value in summary["final"]["metrics"].items():
        if name.count("/") == 3:
            split, model, data_set, metric = name.split("/")
            assert scores[split, model, data_set][metric] == value
    assert {row["round"] for row in results.curves} == {2, 3}
    assert {row["data set"] for row in results.best} == {row["data set"] for row in results.scores}
    assert results.config["model"]["backbone"]["init_args"]["width"] == 8
    assert results.changes == []
    assert repr(results).endswith(": FedPav, 3 rounds)")


def test_rows_make_a_table_of_pandas(run):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(fedsim.load_run(str(run)).curves)
    chosen = table[(table["model"] == "global") & (table["data set"] == "town0") & (table["split"] == "test")]
    assert list(chosen["round"]) == [2, 3]
    assert chosen["mAP"].between(0, 1).all()


def test_a_picture_is_of_matplotlib(run):
    results = fedsim.load_run(run)
    axes = results.plot("town0", "rank1")
    [line] = axes.get_lines()
    points = [
        (row["round"], 100 * row["rank1"])
        for row in results.curves
        if (row["split"], row["model"], row["data set"]) == ("test", "global", "town0")
    ]
    assert np.allclose(line.get_xydata(), points)
    assert results.plot(axes=axes) is axes
    assert len(axes.get_lines()) == 2
    with pytest.raises(DataError, match="the run has no mAP of nowhere over rounds"):
        results.plot("nowhere")


def test_a_folder_of_no_run_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"holds no summary\.json"):
        fedsim.load_run(tmp_path)


def test_lightning_s_way_to_load_names_fedsim_s(run):
    path = run / "checkpoints" / "last.ckpt"
    for owner in (fedsim.Federation, fedsim.Federation.__new__(fedsim.Federation)):
        with pytest.raises(ConfigError, match=rf"fedsim\.load_model\('{path}'\).*ckpt_path='{path}'"):
            owner.load_from_checkpoint(path)


# -- fedsim predict --images -------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """Images in two folders, and what is none."""
    folder, rng = tmp_path / "query", np.random.default_rng(0)
    for name in ("b.jpg", "a.png", "sub/c.bmp", "._a.png", "__MACOSX/a.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 20, 3), dtype=np.uint8)).save(folder / name)
    for name in ("notes.txt", "sub/d.jfif"):
        (folder / name).write_text("none")
    return folder


def test_features_of_a_folder_are_those_of_the_model_with_their_files(run, pictures, tmp_path, capsys, caplog):
    names = ["a.png", "b.jpg", "sub/c.bmp"]
    for options, client, path in (
        ([], None, run / "features" / "images-query.npz"),
        (["--client=town1", f"--output={tmp_path / 'own.npz'}", "--batch_size=2"], "town1", tmp_path / "own.npz"),
    ):
        assert main(["predict", "--ckpt_path", str(run), "--images", str(pictures), *options]) == 0
        assert f"wrote {path}: features [3, " in capsys.readouterr().out
        unread = ".tif, .tiff, .webp (query/notes.txt, sub/d.jfif); 2 ignorable"
        assert f"{pictures}: files that are not read: 2 with another suffix than " in caplog.text
        assert unread in caplog.text
        with np.load(path) as content:
            assert content["files"].tolist() == names
            expected = fedsim.load_model(run, client=client).embed([pictures / name for name in names])
            assert torch.allclose(torch.from_numpy(content["features"]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--images", "nowhere"], "nowhere is not there: no such folder"),
        (["--images", "empty"], "--images: empty holds no images"),
        (["--images", "damaged"], "damaged/a.png"),
        (["--client", "nobody"], "client"),
        (["--checkpoint", "first"], "checkpoint: there is no first"),
        (["--images_of", "x"], "images_of"),
        (["--output", "tiny/x.npz"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(run, pictures, change, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/a.png").write_bytes(b"no image")
    Path("tiny").write_text("a file")
    assert main(["predict", "--ckpt_path", str(run), "--images", str(pictures), *change]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedsim: error: ")]
    assert message in line
