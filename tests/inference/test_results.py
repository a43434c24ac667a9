"""The results of a run as rows, against its files; features of a folder of images."""

import csv
import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.versions import current_version
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.report.run_files import read_queries
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


def default_of(folder):
    return f"images-query-{sha256(bytes(folder)).hexdigest()[:8]}.npz"


def test_features_of_a_folder_are_those_of_the_model_with_their_files(run, pictures, tmp_path, capsys, caplog):
    names = ["a.png", "b.jpg", "sub/c.bmp"]
    for options, client, path in (
        ([], None, run / "features" / default_of(pictures)),
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
        (["--images", "with_pipe"], "with_pipe/a.png is a pipe or a device"),
        (["--ckpt_path", "tiny"], "tiny: is a file; checkpoints of fedsim are directories"),
        (["--client", "nobody"], "--client: there is no client nobody"),
        (["--checkpoint", "first"], "--checkpoint: there is no first"),
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
    Path("with_pipe").mkdir()
    os.mkfifo("with_pipe/a.png")
    assert main(["predict", "--ckpt_path", str(run), "--images", str(pictures), *change]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedsim: error: ")]
    assert message in line
    assert line.startswith("fedsim: error: --") or {"damaged", "tiny"} & set(change)


def test_odd_folders_do_not_refuse_the_images_beside_them(run, pictures, tmp_path, capsys, caplog):
    (pictures / "album.jpg").mkdir()
    shutil.copy(pictures / "a.png", pictures / "album.jpg")
    (pictures / "link.jpg").symlink_to(pictures / "sub")
    output = tmp_path / "own.npz"
    assert main(["predict", f"--ckpt_path={run}", f"--images={pictures}", f"--output={output}"]) == 0
    with np.load(output) as content:
        assert content["files"].tolist() == ["a.png", "album.jpg/a.png", "b.jpg", "sub/c.bmp"]
    assert "1 linked sub-folders (query/link.jpg)" in caplog.text
    assert "album.jpg" not in caplog.text


def test_an_earlier_file_of_this_folder_alone_is_replaced_with_a_word(run, pictures, tmp_path, capsys):
    shutil.copytree(pictures, tmp_path / "other/query")
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    lines = []
    for folder in (pictures, tmp_path / "other/query", pictures):
        assert main(["predict", f"--ckpt_path={tmp_path / 'run'}", f"--images={folder}"]) == 0
        lines.append(capsys.readouterr().out)
    assert ["in the place of an earlier one" in line for line in lines] == [False, False, True]


def test_the_default_file_is_checked_before_anything_is_embedded(run, pictures, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (tmp_path / f"run/features/{default_of(pictures)}").mkdir(parents=True)
    (pictures / "a.png").write_bytes(b"no image")
    assert main(["predict", f"--ckpt_path={tmp_path / 'run'}", f"--images={pictures}"]) == 2
    assert "is a folder, not a file; name a file" in capsys.readouterr().err


def test_the_files_of_a_run_and_other_arrays_are_not_replaced(run, pictures, tmp_path, capsys):
    """By a command's output, wherever its input lies; other files beside them are."""
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    in_checkpoint = next(current_version(run / "checkpoints/best.ckpt").glob("*.safetensors"))
    shutil.copytree(run / "checkpoints/best.ckpt", tmp_path / "copy.ckpt", dirs_exist_ok=True)
    features = tmp_path / "features.npz"
    labels = RetrievalLabels(np.array([1, 2]), np.zeros(2, int), np.array([1, 2]), np.ones(2, int))
    write_features(features, torch.eye(2), torch.eye(2), labels)
    copied = tmp_path / "copy.ckpt" / in_checkpoint.relative_to(run / "checkpoints/best.ckpt")
    for words in (
        ["export", f"--ckpt_path={run}", f"--output={in_checkpoint}"],
        ["export", f"--ckpt_path={tmp_path / 'copy.ckpt'}", f"--output={copied}"],
        ["predict", f"--ckpt_path={run}", f"--images={pictures}", f"--output={run / 'queries.npz'}"],
        ["rank", str(features), f"--save_ranking={run / 'queries.npz'}"],
    ):
        assert main(words) == 2
        assert "is a file of" in capsys.readouterr().err
    shutil.copy(run / "queries.npz", tmp_path / "queries.npz")
    for words in (
        ["predict", f"--ckpt_path={run}", f"--images={pictures}", f"--output={tmp_path / 'queries.npz'}"],
        ["rank", str(features), f"--save_ranking={tmp_path / 'queries.npz'}"],
    ):
        assert main(words) == 2
        assert "queries.npz holds other results (round, " in capsys.readouterr().err
    assert content == {path: path.read_bytes() for path in run.rglob("*") if path in content}
    for words in (
        ["export", f"--ckpt_path={run}", f"--output={run / 'checkpoints/mine.safetensors'}"],
        ["predict", f"--ckpt_path={run}", f"--images={pictures}"],
        ["rank", str(features), f"--save_ranking={tmp_path / 'lists.npz'}"],
    ):
        assert main(words) == main(words) == 0, capsys.readouterr().err


def test_scores_of_queries_without_their_arrays_are_called_so(run, tmp_path):
    np.savez(tmp_path / "queries.npz", features=np.ones(2))
    with pytest.raises(DataError, match="it holds no per-query scores"):
        read_queries(tmp_path / "queries.npz")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--images=imgs", "--save_maps=true"], "--save_maps: is for the run's test sets; leave --images out"),
        (["--images=imgs", "--trainer.devices=1"], "--trainer.devices: is for the run's test sets; leave --images out"),
        (["--ckpt_path=run1", "--output", "a.npz"], "--output: is for --images FOLDER; add that"),
        (["--client=town1"], "--client: is for --images FOLDER; add that"),
        (["--device", "cpu"], "--device: is for --images FOLDER; add that"),
        (["--images=imgs", "--clint=town1"], "--clint: there is no such option; did you mean --client?"),
        (["--clint=town1"], "--clint: there is no such option"),
    ],
)
def test_an_option_of_the_other_form_of_predict_is_called_so(words, line, capsys):
    assert main(["predict", *words]) == 2
    assert f"error: {line}" in capsys.readouterr().err
