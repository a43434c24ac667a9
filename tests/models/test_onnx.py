"""``fedsim export --output model.onnx``: another program computes the features that fedsim computes."""

import copy
import random
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fedsim.__main__ import main
from fedsim.functional import normalise
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedPav
from fedsim.models import ResNet, SmallCNN, onnx_file
from fedsim.models.onnx_file import PixelsToFeatures, network_of
from fedsim.models.reid import Neck, ReIDModel
from fedsim.parsing.config_files import read_config
from small import fit, make_model, refuse
from tiny_run import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which one client has a network of its own; each has its own normalisation of the neck."""
    folder = tmp_path_factory.mktemp("onnx")
    (folder / "tiny.yaml").write_text(TINY)
    own = "--model.clients.town1={backbone: {class_path: SmallCNN, init_args: {width: 6}}}"
    args = ["--config", folder / "tiny.yaml", "--run_dir", folder / "run", "--trainer.max_epochs=1", own]
    assert main(["fit", *map(str, args), "--model.neck={kind: bnneck, dropout: 0.2}"]) == 0
    return folder / "run"


def export(run, output, *args):
    return main(["export", "--ckpt_path", str(run), "--output", str(output), *args])


@pytest.mark.slow
def test_an_onnx_file_computes_what_the_network_computes(run, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    output, arch = tmp_path / "own.onnx", "town1"
    assert export(run, tmp_path / "own.safetensors", "--client", arch, "--arch", archs(run, capsys)[1]) == 0
    normalise._constants.cache_clear()
    assert export(run, output, "--client", arch, "--arch", archs(run, capsys)[1]) == 0
    assert type(normalise_images(torch.zeros(1, 3, 4, 2))) is torch.Tensor  # the exporter left none of its own behind
    network = ReIDModel(SmallCNN(width=6), Neck(kind="bnneck", dropout=0.2)).eval()
    tensors = load_file(tmp_path / "own.safetensors")
    names = {name if name.startswith("neck.") else f"backbone.{name}": tensor for name, tensor in tensors.items()}
    assert not network.load_state_dict(names, strict=False).unexpected_keys
    session = runtime.InferenceSession(output)
    about = session.get_modelmeta().custom_metadata_map
    assert (about["model"], about["layer"], about["size"]) == ("client town1", "neck", "32x16")
    for count in (1, 5):
        pixels = torch.randint(
            0, 256, (count, 3, 32, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        [features] = session.run(["features"], {"images": pixels.numpy()})
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        with torch.no_grad():
            expected = network((pixels / 255 - mean[:, None, None]) / std[:, None, None]).neck
        assert features.shape == expected.shape
        torch.testing.assert_close(torch.from_numpy(features), expected, rtol=1e-4, atol=1e-5)


def archs(run, capsys):
    """The names of the architectures, as the line says that asks to choose."""
    capsys.readouterr()
    assert export(run, "x.safetensors") == 2
    return capsys.readouterr().err.strip().rpartition("choose from ")[2].split(", ")


def test_the_network_is_found_among_those_of_the_config(run):
    config = run / "config.yaml"
    for width, kind in ((8, "bnneck"), (6, "bnneck"), (6, "none")):
        network = ReIDModel(SmallCNN(width=width), Neck(kind=kind, dropout=0.2))
        tensors = {
            name.removeprefix("backbone."): tensor
            for name, tensor in network.state_dict().items()
            if tensor.is_floating_point()
        }
        found, layer, size = network_of(read_config(str(config)), config, tensors)
        assert layer == ("pool" if kind == "none" else "neck")
        assert size == (32, 16)
        assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in network.state_dict().items())


def test_weights_of_a_file_are_not_looked_for(run, tmp_path):
    """The checkpoint has the weights; the file from which they once came may be gone."""
    config = tmp_path / "config.yaml"
    text = (run / "config.yaml").read_text()
    backbone = "{class_path: fedsim.models.ResNet, init_args: {depth: 18, weights: /nowhere/resnet18.pth}}"
    content = yaml.safe_load(text)
    content["model"] |= {"backbone": yaml.safe_load(backbone), "neck": {"kind": "none", "dropout": 0.0}}
    state = ResNet(depth=18, weights=None).state_dict()
    found, _, _ = network_of(content, config, {name: t for name, t in state.items() if t.is_floating_point()})
    assert torch.equal(found.backbone.conv1.weight, state["conv1.weight"])


def test_normalisation_is_in_the_network():
    network = ReIDModel(SmallCNN(width=4), Neck(kind="none", dropout=0.0))
    model = PixelsToFeatures(network, "pool")
    assert not model.network.training
    black, white = torch.zeros(1, 3, 32, 16, dtype=torch.uint8), torch.full((1, 3, 32, 16), 255, dtype=torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for pixels in (black, white):
        image = (pixels / 255 - mean[:, None, None]) / std[:, None, None]
        torch.testing.assert_close(model(pixels), network(image).pool)


@pytest.mark.parametrize(("args", "line"), [
    (["--sparse", "true"], "--sparse: is for .safetensors files"),
    ([], "--output: an ONNX file needs no_such_library; pip install 'fedsim-reid[onnx]'"),
])  # fmt: skip
def test_what_cannot_be_written_is_one_line(run, tmp_path, capsys, monkeypatch, args, line):
    monkeypatch.setattr(onnx_file, "_NEEDS", ("no_such_library",))
    assert export(run, tmp_path / "model.onnx", *args) == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_network_that_nobody_knows_is_one_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(onnx_file, "_NEEDS", ())
    path = tmp_path / "last.ckpt"
    fit(make_model(FedPav())).trainer.save_checkpoint(path)  # from Python: no config
    capsys.readouterr()
    assert export(path, tmp_path / "model.onnx") == 2
    assert "is missing, so the network is unknown; give a run of fedsim fit" in capsys.readouterr().err
    with pytest.raises(onnx_file.ConfigError, match=r"no backbone of .* has the weights of this model"):
        network_of(read_config(str(run / "config.yaml")), run / "config.yaml", {"conv.weight": torch.zeros(3)})


def spoilt(content, drawn):
    """Remove a value of a config that a network needs, or give it another type."""
    content = copy.deepcopy(content)
    paths = ["model", "data", "model.backbone", "model.backbone.class_path", "model.backbone.init_args", "model.neck",
             "model.neck.kind", "model.neck.dropout", "model.evaluation", "data.size", "model.clients"]  # fmt: skip
    path = drawn.choice(paths).split(".")
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = drawn.choice(["x", 1.5, [], [1], {"x": 1}, "os.system", True, {"y": {"backbone": 3}}])
    return content


def test_no_edited_config_slips_through_with_another_error(run):
    drawn, slipped, refused = random.Random(0), [], 0
    content = read_config(str(run / "config.yaml"))
    network = ReIDModel(SmallCNN(width=8), Neck(kind="bnneck"))
    tensors = {name.removeprefix("backbone."): t for name, t in network.state_dict().items() if t.is_floating_point()}
    for _ in range(200):
        edited = spoilt(content, drawn)
        try:
            network_of(edited, run / "config.yaml", tensors)
        except onnx_file.ConfigError as error:
            refused += 1
            slipped += [] if "\n" not in str(error) and "config.yaml" in str(error) else [error]
        except Exception as error:
            slipped.append((edited["model"], repr(error)))
    assert slipped == []
    assert refused > 100


@pytest.mark.parametrize("text", ["a: &a [*a]", "[" * 100, "- 1", "a: !!bool x", "\udcff", "model: x"])
def test_a_config_that_cannot_be_read_is_one_line(run, tmp_path, capsys, monkeypatch, text):
    monkeypatch.setattr(onnx_file, "_NEEDS", ())
    shutil.copytree(run, tmp_path / "run")
    for config in (tmp_path / "run").rglob("config.yaml"):
        config.write_text(text, errors="surrogateescape")
    arch = archs(run, capsys)[0]
    line = refuse(capsys, "export", "--ckpt_path", tmp_path / "run", "--output", tmp_path / "m.onnx", "--arch", arch)
    assert "config.yaml" in line
