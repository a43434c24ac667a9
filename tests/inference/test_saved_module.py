"""Finished runs of a user's LightningModule: they embed, predict and export as runs of fedsim's own model."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import fedsim
from fedsim import load_model
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.functional.normalise import normalise_images
from fedsim.inference.networks import OfScript, saved_network
from fedsim.inference.tensors import chosen_tensors
from fedsim.methods import FedAvg, FedPav
from fedsim.parsing.config_files import read_config
from fedsim.strategy.checkpoint_files import find_version, read_checkpoint
from fedsim.strategy.run_checkpoints import checkpoint_at
from lightning_modules import Frozen, Small
from small import make_data, make_model, refuse

SIZE = (32, 16)
CONFIG = """
seed_everything: 0
trainer: {max_epochs: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedAvg
  module: {class_path: lightning_modules.Small, init_args: {lr: 0.02}}
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.1}}
  size: [32, 16]
  val: none
  augmentation: {pad: 0, flip: 0.0}
"""


class Switch(Small):
    """Its features depend on their own values in a way that no exporter can follow."""

    def embed(self, images):
        features = super().embed(images)
        return features if float(features.detach().sum()) > 0 else 2 * features


class Counts(Small):
    """An export of it serves one number of images alone."""

    def embed(self, images):
        return super().embed(images) * (len(images) / 2)


class Prototypes(Small):
    """Its features need the classifier, which belongs to each client."""

    @torch.no_grad()
    def embed(self, images):
        return super().embed(images) + self.classifier.weight.mean()


class Wider(Small):
    """Another network than that of the run."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.neck = torch.nn.Linear(6 * 15 * 7, 9)
        self.classifier = torch.nn.Linear(9, num_classes)


class Forward(Small):
    """Gives its features by forward alone."""

    embed = None

    def forward(self, images):
        return self.neck(self.backbone(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.classifier(self(images)), labels)


def fitted(folder, *options):
    (folder / "own.yaml").write_text(CONFIG)
    assert main(["fit", "--config", str(folder / "own.yaml"), f"--run_dir={folder}/run", *options]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose clients share all but their classifiers; with the features of a prediction."""
    run = fitted(tmp_path_factory.mktemp("shared"))
    assert main(["predict", "--ckpt_path", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A run whose clients keep a part of what gives the features; it is called by forward."""
    of_class = "--model.module=test_saved_module.Forward"
    return fitted(tmp_path_factory.mktemp("private"), of_class, "--model.private=[neck.*]")


@pytest.fixture(scope="module")
def unseen():
    """Query and gallery of the unseen town, by what they are called in files of features."""
    [town] = [domain for domain in SyntheticReID(clients=3, unseen=1, scale=0.1).domains() if domain.name == "new0"]
    return {"query": town.query, "gallery": town.gallery}


# -- load_model --------------------------------------------------------------------------------------------------------


def test_a_module_embeds_what_a_prediction_writes(run, unseen):
    model, written = load_model(run), np.load(run / "features" / "new0.npz")
    assert (model.about["method"], model.about["model"], model.about["round"]) == ("FedAvg", "global", 1)
    assert (model.training, model.size) == (False, SIZE)
    for name, split in unseen.items():
        embedded = model.embed(split.images.decode(SIZE), batch_size=5)
        torch.testing.assert_close(embedded, torch.from_numpy(written[name]), rtol=1e-5, atol=1e-6)
    assert model.embed([]).shape == (0, 8)


def test_a_clients_model_has_its_private_tensors(private, unseen, tmp_path, capsys):
    """The same by hand: the tensors of an export in a module of one's own."""
    pixels, features = unseen["query"].images.decode(SIZE), {}
    assert "no global model" in refuse(capsys, "export", "--ckpt_path", private, "--output", tmp_path / "x.safetensors")
    for client in ("town0", "town1"):
        output = tmp_path / f"{client}.safetensors"
        assert main(["export", "--ckpt_path", str(private), "--output", str(output), "--client", client]) == 0
        module = Forward(num_classes=1).eval()
        missing, unexpected = module.load_state_dict(
            {name: t for name, t in load_file(output).items() if not name.startswith("classifier.")}, strict=False
        )
        assert unexpected == []
        assert {name for name in missing if "num_batches" not in name} == {"classifier.weight", "classifier.bias"}
        with torch.no_grad():
            expected = module(normalise_images(pixels))
        features[client] = load_model(private, client=client).embed(pixels)
        torch.testing.assert_close(features[client], expected, rtol=1e-5, atol=1e-6)
        with safe_open(output, "pt") as file:
            assert file.metadata()["resize"] == "bicubic, antialiased (Pillow)"
    assert not torch.equal(features["town0"], features["town1"])


def test_a_folder_is_embedded(run, unseen, tmp_path, capsys):
    folder = tmp_path / "people"
    folder.mkdir()
    pixels = unseen["gallery"].images.decode((48, 24))[:4]  # other than the run's size
    for number, image in enumerate(pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    output = tmp_path / "features.npz"
    assert main(["predict", "--ckpt_path", str(run), "--images", str(folder), "--output", str(output)]) == 0
    written = np.load(output)
    assert written["files"].tolist() == ["0.png", "1.png", "2.png", "3.png"]
    torch.testing.assert_close(torch.from_numpy(written["features"]), load_model(run).embed(pixels))


# -- ONNX --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_onnx_file_computes_the_features_of_a_module(run, unseen, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert main(["export", "--ckpt_path", str(run), "--output", str(tmp_path / "own.onnx")]) == 0
    session = runtime.InferenceSession(tmp_path / "own.onnx")
    about = session.get_modelmeta().custom_metadata_map
    assert (about["layer"], about["size"], about["resize"]) == ("module", "32x16", "bicubic, antialiased (Pillow)")
    pixels = unseen["query"].images.decode(SIZE)
    for count in (1, len(pixels)):
        [features] = session.run(["features"], {"images": pixels[:count].numpy()})
        torch.testing.assert_close(
            torch.from_numpy(features), load_model(run).embed(pixels[:count]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Switch", "Counts"])
def test_a_module_that_torch_cannot_export_is_one_line(kind, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    run = fitted(tmp_path, f"--model.module=test_saved_module.{kind}")
    line = refuse(capsys, "export", "--ckpt_path", run, "--output", tmp_path / "own.onnx")
    assert "--output: torch cannot write this network as ONNX" in line
    assert "or write .safetensors" in line
    assert not (tmp_path / "own.onnx").exists()


# -- runs of scripts ---------------------------------------------------------------------------------------------------


def script(run, module, **options):
    """A run as a script makes it; return the features of some images by the trained modules of its memory."""
    trainer = fedsim.Trainer(run_dir=run, max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False)
    model = fedsim.Federation(FedAvg(), module, client=fedsim.LocalTraining(batch_size=8), **options)
    trainer.fit(model, datamodule=make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)))
    [arch] = model.parts.models
    model.parts.models[arch].load_global(model.server.vector(arch), {})
    return model.parts.models[arch].network


@pytest.mark.parametrize("module", [Small, partial(Small, lr=0.02)], ids=["class", "partial"])
def test_a_class_of_a_script_is_named_in_its_config(module, tmp_path, unseen):
    trained = script(tmp_path / "run", module).eval()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    given = {"init_args": {"lr": 0.02}} if isinstance(module, partial) else {}
    assert config["model"]["module"] == {"class_path": "lightning_modules.Small", **given}
    pixels = unseen["query"].images.decode(SIZE)
    with torch.no_grad():
        expected = trained(normalise_images(pixels)).neck
    torch.testing.assert_close(load_model(tmp_path / "run").embed(pixels), expected, rtol=1e-5, atol=1e-6)


def test_a_module_that_a_script_has_built_is_given_again(tmp_path, unseen, capsys):
    """Its weights are the script's own, so no config would repeat the run."""
    run = tmp_path / "run"
    trained = script(run, Frozen(num_classes=4)).eval()
    with pytest.raises(ConfigError, match=r"is missing, so the run's own module is unknown; .* module=MyModule, size="):
        load_model(run)
    assert "fedsim.load_model" in refuse(capsys, "export", "--ckpt_path", run, "--output", tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 32)).save(tmp_path / "images" / "a.png")
    assert "fedsim.load_model" in refuse(capsys, "predict", "--ckpt_path", run, "--images", tmp_path / "images")
    pixels = unseen["query"].images.decode(SIZE)
    with torch.no_grad():
        expected = trained(normalise_images(pixels)).neck
    for module in (Frozen, partial(Frozen), Frozen(num_classes=9)):
        embedded = load_model(run, module=module, size=SIZE).embed(pixels)
        torch.testing.assert_close(embedded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Wider, r"model.module: neck.weight has the shape \[9, 630\] in Wider, and is \[8, 630\] in the checkpoint"),
        (Prototypes, "the features of Prototypes need tensors that this model of the checkpoint lacks, such as cla"),
        (torch.nn.Linear(2, 2), "model.module"),
        (lambda num_classes: 1 / 0, "failed in building .ZeroDivisionError"),
    ],
)
def test_another_module_is_one_line(run, module, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_model(run, module=module)
    assert "\n" not in str(raised.value)


def test_a_module_for_a_run_without_one_is_one_line(tmp_path):
    trainer = fedsim.Trainer(run_dir=tmp_path, max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False)
    trainer.fit(make_model(FedPav()), datamodule=make_data())
    for given in ({"module": Small}, {"size": (64, 32)}):
        with pytest.raises(ConfigError, match="only for runs of your own LightningModule"):
            load_model(tmp_path, **given)


def spoilt(content, draw):
    """A config in which something that the module needs is missing, or another value."""
    content = copy.deepcopy(content)
    places = [(content, "model"), (content, "data"), (content["model"], "module"), (content["data"], "size")]
    places += [(content["model"]["module"], "class_path"), (content["model"]["module"], "init_args")]
    holder, name = draw.choice(places)
    values = ["x", 1.5, [], [1], {"x": 1}, "torch.nn.Linear", "lightning_modules.Nothing", "nowhere.Small", True, None]
    holder[name] = draw.choice([value for value in values if value not in ([], None) or name != "init_args"])
    return content


def test_no_edited_config_slips_through_with_another_error(run, tmp_path, monkeypatch):
    draw, slipped = random.Random(0), []
    path = checkpoint_at(run)
    checkpoint, content = read_checkpoint(path), read_config(str(find_version(path) / "config.yaml"))
    tensors, _ = chosen_tensors(checkpoint, path, None, None, mean=False)
    for _ in range(60):
        edited = spoilt(content, draw)
        monkeypatch.setattr("fedsim.inference.networks.read_config", lambda _, edited=edited: edited)
        try:
            saved_network(path, checkpoint, tensors, None, OfScript())
        except ConfigError as error:
            slipped += [] if "\n" not in str(error) else [error]
        except Exception as error:
            slipped.append((edited, repr(error)))
        else:
            slipped.append(edited)
    assert slipped == []


# -- the federation itself ---------------------------------------------------------------------------------------------


def test_a_federation_that_is_called_names_the_lines_that_embed():
    with pytest.raises(ConfigError, match=r"model = fedsim.load_model\(RUN\) .* model.embed\(images\)") as raised:
        make_model(FedPav())(torch.zeros(1, 3, *SIZE))
    assert "\n" not in str(raised.value)
