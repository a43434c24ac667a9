"""``fedsim export --folder``: a model that others load without its run; read by the hub's own tools, too."""

import inspect
import json
import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fedsim import load_model
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.functional.normalise import normalise_images
from fedsim.models.onnx_file import size_in
from fedsim.report.run_files import read_queries
from fedsim.report.significance import over_people
from small import refuse
from tiny_run import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of FedPav in which one client has a network of its own, and a data set's name ends a cell of a table."""
    folder = tmp_path_factory.mktemp("handed")
    (folder / "tiny.yaml").write_text(TINY)
    args = ["--config", folder / "tiny.yaml", "--run_dir", folder / "run", "--trainer.max_epochs=1"]
    assert main(["fit", *map(str, args), "--trainer.check_val_every_n_epoch=1", "--model.bn_stats=mean"]) == 0
    return folder / "run"


def exported(run, folder, *options):
    assert main(["export", "--ckpt_path", str(run), "--folder", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return exported(run, tmp_path_factory.mktemp("hub") / "model", "--licence", "cc-by-nc-4.0")


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 50, 3), dtype=np.uint8))


class StandIn:
    """A hub on this disk, with two methods of ``huggingface_hub.HfApi``."""

    def __init__(self, root):
        self.root = root

    def upload_folder(self, *, repo_id, folder_path):
        shutil.copytree(folder_path, self.root / repo_id)

    def snapshot_download(self, repo_id, *, local_dir):
        shutil.copytree(self.root / repo_id, local_dir)
        return str(local_dir)


@pytest.mark.parametrize("name", ["upload_folder", "snapshot_download"])
def test_the_stand_in_is_called_as_the_hub_s_client(name):
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'models' is not installed")
    theirs, ours = (inspect.signature(getattr(owner, name)).parameters for owner in (hub.HfApi, StandIn))
    assert ours.keys() <= theirs.keys()
    assert all(theirs[argument].kind in (ours[argument].kind, theirs[argument].KEYWORD_ONLY) for argument in ours)


@pytest.mark.parametrize("client", [None, "town1"])
def test_a_model_from_the_hub_embeds_as_the_run_does(client, run, tmp_path, picture):
    options = ["--client", client] if client else []
    api = StandIn(tmp_path / "hub")
    api.upload_folder(repo_id="me/people", folder_path=exported(run, tmp_path / "model", *options))
    shutil.rmtree(tmp_path / "model")
    model, of_run = load_model(api.snapshot_download("me/people", local_dir=tmp_path / "here")), load_model(run, client)
    assert torch.equal(model.embed(picture), of_run.embed(picture))
    assert (model.size, model.about) == (of_run.size, of_run.about)


def test_the_folder_names_no_path_and_no_pickle(folder):
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json",
    }  # fmt: skip
    assert "/" not in (folder / "config.json").read_text()
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {(folder / "README.md").stat().st_mode & 0o777}


def test_transformers_prepares_images_as_fedsim_does(folder, picture):
    """``BitImageProcessor`` of transformers 5 reads the file; Pillow's filter is that of its backend "pil"."""
    transformers = pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    prepare = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = prepare(picture, return_tensors="pt")["pixel_values"]
    model = load_model(folder)
    resized = picture.resize((model.size[1], model.size[0]), Image.Resampling.BICUBIC)
    ours = normalise_images(torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1)[None])
    torch.testing.assert_close(pixels, ours, rtol=1e-5, atol=1e-5)
    features = model.features.network(pixels)
    torch.testing.assert_close(getattr(features, model.features.layer), model.embed(picture), rtol=1e-4, atol=1e-4)


def test_the_hub_reads_scores_and_licence_from_the_card(folder, run):
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'models' is not installed")
    card = hub.ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.library_name) == ("cc-by-nc-4.0", "fedsim")
    metrics = json.loads((run / "summary.json").read_text())["final"]["metrics"]
    results = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    sets = {"town0", "town1", "town2", "town3", "new0", "new1"}
    assert results.keys() == {(name, metric) for name in sets for metric in ("mAP", "rank1")}
    for (name, metric), value in results.items():
        assert value == pytest.approx(metrics[f"test/global/{name}/{metric}"], abs=5e-5)


def test_the_card_has_the_data_and_an_interval_over_people(folder, run):
    card = (folder / "README.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    counts = summary["data"]["sets"]["town0"]["train"]
    assert f"{counts['people']} / {counts['cameras']} / {counts['images']}" in card
    assert "| new0       | unseen | -  " in card
    queries = read_queries(run / "queries.npz").results["global/new0"]
    estimate = over_people(queries.scores["mAP"], queries.pids)
    assert f"| {100 * estimate.value:.1f}      | {100 * estimate.low:.1f} to {100 * estimate.high:.1f}" in card
    assert "## Limits" in card


def test_a_model_that_the_run_has_not_scored_has_no_scores(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    for part in ("final", "best"):
        summary[part]["round"] = 7
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    card = (exported(tmp_path / "run", tmp_path / "late") / "README.md").read_text()
    (tmp_path / "run" / "summary.json").unlink()
    without_summary = (exported(tmp_path / "run", tmp_path / "bare") / "README.md").read_text()
    for text in (card, without_summary):
        assert "There are no test scores of this model." in text
        assert "model-index" not in text
        assert "license: unknown" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--output: name a file to write, or, in its place, --folder"),
        (
            ["--folder", "new", "--output", "a.safetensors"],
            "--output: name a file to write, or, in its place, --folder",
        ),
        (["--output", "a.safetensors", "--licence", "mit"], "--licence: stands in the card of --folder"),
        (["--folder", "new", "--sparse", "true"], "--sparse: is for .safetensors files"),
        (["--folder", "new", "--licence", ""], "--licence: is empty"),
        (["--folder", "new", "--licence", "My own\nterms"], "is no word of the hub, such as mit or cc-by-4.0"),
        (["--folder", "full"], "--folder: full is not empty"),
        (["--folder", "new", "--client", "nobody"], "--client: there is no client nobody"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, message, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    assert message in refuse(capsys, "export", "--ckpt_path", run, *options)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine.txt"]


def test_a_backbone_that_others_lack_is_not_handed_on(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for config in (tmp_path / "run").rglob("config.yaml"):
        config.write_text(config.read_text().replace("fedsim.models.SmallCNN", "mine.SmallCNN"))
    message = refuse(capsys, "export", "--ckpt_path", tmp_path / "run", "--folder", tmp_path / "model")
    assert "--folder: the backbone mine.SmallCNN is not fedsim's" in message
    assert not (tmp_path / "model").exists()


def test_a_folder_from_elsewhere_runs_no_foreign_class(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    content["model"]["backbone"] = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"names the backbone torch\.nn\.Linear, which is not fedsim's"):
        load_model(tmp_path / "model")


def spoilt(content, draw):
    """The content of a JSON file with one value removed or replaced."""
    places, rest = [], [content]
    while rest:
        part = rest.pop()
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                rest.append(part[key])
    part, key = draw.choice(places)
    if draw.random() < 0.3:
        del part[key]
    else:
        part[key] = draw.choice([None, -1, 0, "text", [], {}, 3.5, True, "fedsim.methods.FedPav", [1, 2, 3], 10**400])
    return content


def test_no_edited_folder_ends_in_another_error(folder, tmp_path):
    """Of 120 drawn edits, each is refused in one line, or leaves a model."""
    draw, messages = random.Random(0), []
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    for _ in range(120):
        config.write_text(json.dumps(spoilt(json.loads((folder / "config.json").read_text()), draw)))
        try:
            load_model(tmp_path / "model")
        except (ConfigError, DataError) as error:
            messages.append(str(error))
    assert len(messages) > 40
    assert [message for message in messages if "\n" in message] == []


@pytest.mark.parametrize("size", [[0, 0], [10**9, 10**9], [16], "16x8"])
def test_a_size_that_no_image_has_is_refused(size, folder, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    config = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"data\.size: .* is not a height and a width in pixels"):
        size_in(content | {"data": {"size": size}}, config)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_weights_that_are_no_floats_are_refused(dtype, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(DataError, match="no floating-point numbers; fetch it again"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name].clone().fill_(value)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(DataError, match=f"{name} holds numbers that are not finite"):
        load_model(tmp_path / "model")


def test_a_damaged_file_of_weights_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError, match="cannot be read"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("options", [{"client": "town1"}, {"checkpoint": "last"}, {"arch": "a"}, {"size": (4, 4)}])
def test_a_folder_holds_one_model(options, folder):
    with pytest.raises(ConfigError, match="holds one model, and no run"):
        load_model(folder, **options)


def test_images_are_embedded_by_a_folder(folder, picture, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    picture.save(tmp_path / "images" / "a.png")
    args = ["--ckpt_path", folder, "--images", tmp_path / "images", "--output", tmp_path / "features.npz"]
    assert main(["predict", *map(str, args)]) == 0
    with np.load(tmp_path / "features.npz") as file:
        np.testing.assert_array_equal(file["features"], load_model(folder).embed(picture).numpy())


FILES = {"model.safetensors", "config.json", "preprocessor_config.json", "README.md"}


@pytest.mark.parametrize("given", [".", "new/..", "../link", "../clone"])
def test_a_folder_that_is_there_is_filled(given, run, tmp_path, monkeypatch):
    for name in ("model", "clone/.git"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "clone/.gitattributes").touch()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path / "model")
    exported(run, given)
    folder = tmp_path / ("clone" if "clone" in given else "model")
    written = {path.name for path in folder.iterdir()}
    assert written - {".git", ".gitattributes"} == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"model", "clone", "link"}
    assert load_model(folder).about["method"] == "FedPav"


@pytest.mark.parametrize(
    ("given", "message"),
    [("/", "--folder: / is not empty"), (".", "--folder: . is not empty"), ("a" * 300, "too long")],
)
def test_a_folder_that_cannot_be_filled_is_one_line(given, message, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    line = refuse(capsys, "export", "--ckpt_path", run, "--folder", given)
    assert message in line
    assert "run_dir" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
