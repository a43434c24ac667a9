"""``fedsim augment``: what its three commands write, resume, processes, what leaves a client, and what is refused."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsim import augment, augment_processes, augment_settings
from fedsim.__main__ import main
from fedsim.data import FederatedDataModule, Generated, SyntheticReID
from fedsim.data_commands import data_of
from fedsim.generation import fitting
from fedsim.generation.saved import read_backbone
from fedsim.models import ResNet, SmallCNN
from small import refuse

STEPS = ("--training.steps", "10", "--training.save_every", "4", "--training.batch_size", "4")  # 4, 4 and 2
WIDTHS = ("--networks.width", "4", "--networks.decoder_blocks", "1", "--appearance.width", "4")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    source = {"class_path": "SyntheticReID", "init_args": {"clients": 3, "unseen": 1, "scale": 0.2}}
    path.write_text(yaml.safe_dump({"data": {"source": source, "size": [32, 16], "val": "none"}}))
    return path


def fit(config, folder, *options, code=0):
    args = ["augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS, "--device", "cpu", *options]
    assert main([str(arg) for arg in args]) == code
    return folder


def run(command, config, folder, *options):
    args = ["augment", command, "--config", config, "--generators", folder, *options]
    assert main([str(arg) for arg in args]) == 0


def trained(folder, client="town1"):
    return (folder / client / "generator.safetensors").read_bytes()


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_fit_writes_a_folder_per_client_and_a_table(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators")
    assert sorted(path.name for path in folder.iterdir()) == ["settings.yaml", "town0", "town1", "town2"]
    for client in ("town0", "town1", "town2"):
        files = sorted(path.name for path in (folder / client).iterdir())
        assert files == ["generator.safetensors", "losses.csv", "quality.json"]
        lines = (folder / client / "losses.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["step", "4", "8", "10"]
        assert {"self", "same", "identity", "soft", "teacher", "discriminator"} < set(lines[0].split(","))
    printed = capsys.readouterr().out
    assert "reconstruction error" in printed
    for client in ("town0", "town1", "town2"):
        quality = json.loads((folder / client / "quality.json").read_text())
        line = next(line for line in printed.splitlines() if line.startswith(client))
        assert line.split()[1] == f"{quality['reconstruction']:.3f}"


def test_a_second_fit_trains_nothing_and_prints_the_same(config, tmp_path, capsys, monkeypatch):
    folder = fit(config, tmp_path / "generators")
    first = capsys.readouterr().out
    monkeypatch.setattr(augment, "new_training", None)
    fit(config, folder)
    assert capsys.readouterr().out == first


def test_clients_are_chosen_and_added_later(config, tmp_path):
    folder = fit(config, tmp_path / "generators", "--clients", "[town1]")
    assert not (folder / "town0").exists()
    before = trained(folder)
    fit(config, folder)
    assert trained(folder) == before
    assert trained(folder, "town0")


def test_a_contact_sheet_is_drawn(config, tmp_path):
    folder = fit(config, tmp_path / "generators")
    run("preview", config, folder, "--output", tmp_path / "swaps.png", "--people", 2)
    with Image.open(tmp_path / "swaps.png") as sheet:
        assert sheet.height > 3 * 3 * 96  # clients, sources and two structures
    run("preview", config, folder, "--output", tmp_path / "one.png", "--people", 2, "--clients", "[town2]")
    with Image.open(tmp_path / "one.png") as sheet:
        assert 3 * 96 < sheet.height < 4 * 96


def test_people_of_256_x_128_pixels(config, tmp_path):
    options = ("--size", "[256, 128]", "--networks.scales", 3, "--networks.parts", 4, "--losses.soft_after", 0)
    args = ("augment", "fit", "--config", config, "--output", tmp_path / "g", "--clients", "[town2]", *options)
    assert main([str(arg) for arg in (*args, *WIDTHS, "--training.steps", 2, "--training.batch_size", 2)]) == 0
    run("write", config, tmp_path / "g", "--output", tmp_path / "out", "--clients", "[town2]", "--ratio", 0.1)
    with Image.open(next((tmp_path / "out" / "town2").glob("*.png"))) as image:
        assert image.size == (128, 256)


@pytest.mark.parametrize("labels", ["teacher", "appearance"])
def test_what_is_written_joins_local_training(labels, config, tmp_path):
    folder, generated = fit(config, tmp_path / "generators"), tmp_path / "generated"
    run("write", config, folder, "--output", generated, "--labels", labels, "--ratio", 0.5)
    data = FederatedDataModule(**_data(config), generated=None).federated
    content = _data(config) | {"generated": Generated(root=str(generated))}
    for plain, client in zip(data.clients, FederatedDataModule(**content).federated.clients, strict=True):
        assert client.generated is not None
        assert len(client.generated) == round(len(plain.train) / 2)
        mass = client.generated.weights.sum(1)
        assert (mass <= 1 + 1e-6).all()
        assert ((client.generated.weights == 1).any(1).all()) == (labels == "appearance")
        if labels == "appearance":
            assert client.generated.weights.shape[1] == 1
        else:
            assert mass.min() > 0.5


def _data(config):
    content = yaml.safe_load(config.read_text())["data"]
    return {"source": SyntheticReID(**content["source"]["init_args"]), "size": (32, 16), "val": "none"}


def test_the_same_call_writes_the_same_images_and_another_seed_others(config, tmp_path):
    folder = fit(config, tmp_path / "generators", "--clients", "[town1]")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run("write", config, folder, "--output", tmp_path / name, "--clients", "[town1]", "--seed", seed)
    a, b, c = (sorted((tmp_path / name / "town1").iterdir()) for name in "abc")
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]
    assert [path.read_bytes() for path in a] != [path.read_bytes() for path in c]


@pytest.mark.slow
def test_several_configs_are_one(config, tmp_path):
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(yaml.safe_dump({"data": {"max_identities": 3}, "model": {"method": "Local"}}))
    both = ("--config", fewer, "--clients", "[town0]")
    folder = fit(config, tmp_path / "generators", *both, "--processes", 2)
    run("preview", config, folder, "--output", tmp_path / "swaps.png", *both)
    content = yaml.safe_load(config.read_text())
    content["data"]["max_identities"] = 3
    config.write_text(yaml.safe_dump(content))
    assert trained(fit(config, tmp_path / "alone", "--clients", "[town0]"), "town0") == trained(folder, "town0")


# -- resume and processes ----------------------------------------------------------------------------------------------


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("moment", ["after", "during"])
def test_an_interrupted_fit_continues_bit_for_bit(moment, config, tmp_path, monkeypatch):
    whole = fit(config, tmp_path / "whole", "--clients", "[town1]")
    save, calls = fitting._SaveTraining.on_train_epoch_end, []

    def interrupt(self, trainer, module):
        calls.append(trainer.current_epoch)
        if moment == "during" and len(calls) == 2:
            monkeypatch.setattr("pathlib.Path.replace", _stop)
        save(self, trainer, module)
        if len(calls) == 2:
            raise _StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(fitting._SaveTraining, "on_train_epoch_end", interrupt)
        with pytest.raises(_StoppedError):
            fit(config, tmp_path / "parts", "--clients", "[town1]")
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "parts" / "town1").iterdir()) == ["losses.csv", "training.ckpt"]
    steps, step = [], fitting.GeneratorTraining.training_step
    monkeypatch.setattr(
        fitting.GeneratorTraining, "training_step", lambda self, *args: (steps.append(args[1]), step(self, *args))[1]
    )
    fit(config, tmp_path / "parts", "--clients", "[town1]")
    assert len(steps) == {"after": 4, "during": 8}[moment]
    assert trained(tmp_path / "parts") == trained(whole)
    for name in ("losses.csv", "quality.json"):
        assert (tmp_path / "parts" / "town1" / name).read_bytes() == (whole / "town1" / name).read_bytes()


def _stop(*_, **__):
    raise _StoppedError


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_schedulers_end_a_fit_in_order(name, config, tmp_path, monkeypatch, capsys):
    save, asked = fitting._SaveTraining.on_train_epoch_end, []

    def end(self, trainer, module):
        save(self, trainer, module)
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(augment_processes, "requeue", lambda: asked.append(name))
    with monkeypatch.context() as patch:
        patch.setattr(fitting._SaveTraining, "on_train_epoch_end", end)
        fit(config, tmp_path / "g", "--clients", "[town2]", code=128 + getattr(signal, name))
    assert f"fedsim: error: stopped by {name}" in capsys.readouterr().err
    assert asked == (["SIGUSR1"] if name == "SIGUSR1" else [])
    assert (tmp_path / "g" / "town2" / "training.ckpt").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    whole = fit(config, tmp_path / "whole", "--clients", "[town2]")
    assert trained(fit(config, tmp_path / "g", "--clients", "[town2]"), "town2") == trained(whole, "town2")


def test_a_fit_that_is_ended_ends_its_processes(config, tmp_path, monkeypatch):
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = []
    own = subprocess.Popen

    def start(*args, **options):
        started.append(own(*args, **options))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(augment_processes, "_command", lambda *_: wait)
    monkeypatch.setattr(augment_processes.subprocess, "Popen", start)
    fit(config, tmp_path / "g", "--processes", 2, code=128 + signal.SIGTERM)
    assert [process.poll() for process in started] == [-signal.SIGTERM] * 2


@pytest.mark.slow
def test_two_processes_train_the_bits_of_one(config, tmp_path, caplog):
    alone = fit(config, tmp_path / "alone")
    together = fit(config, tmp_path / "together", "--processes", 2)
    assert "2 processes: town0, town2; town1" in caplog.text
    for client in ("town0", "town1", "town2"):
        assert trained(together, client) == trained(alone, client)
        for name in ("losses.csv", "quality.json"):
            assert (together / client / name).read_bytes() == (alone / client / name).read_bytes()


def test_a_killed_process_is_named_and_the_others_end(config, tmp_path, monkeypatch, capsys):
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    touch = [sys.executable, "-c", f"import time; time.sleep(0.3); open({str(tmp_path / 'ended')!r}, 'w')"]
    monkeypatch.setattr(augment_processes, "_command", lambda share, *_: touch if "town1" in share else kill)
    line = refuse(
        capsys, "augment", "fit", "--config", config, "--output", tmp_path / "g", *STEPS, *WIDTHS, "--processes", 2
    )
    assert f"clients town0, town2: their process was ended by signal {signal.SIGKILL:d}" in line
    assert "the same command continues" in line
    assert (tmp_path / "ended").exists()


# -- what leaves a client ----------------------------------------------------------------------------------------------


def test_a_generator_needs_no_images_but_its_clients_own(market_tree, tmp_path):
    config = tmp_path / "tree.yaml"
    root = tmp_path / "tree"
    shutil.copytree(market_tree, root)
    source = {"class_path": "MarketFolders", "init_args": {"root": str(root)}}
    config.write_text(yaml.safe_dump({"data": {"source": source, "size": [16, 8]}}))
    size = ("--size", "[16, 16]")
    together = fit(config, tmp_path / "together", *size)
    held_out = data_of(str(config)).federated.clients[0].val.gallery.images.locations()
    assert held_out
    others = (root.glob("south/*/*.png"), root.glob("*/query/*"), root.glob("*/bounding_box_test/*"))
    for path in (*held_out, *itertools.chain(*others)):
        path.write_bytes(b"gone")  # listed, but nobody can read it
    alone = fit(config, tmp_path / "alone", *size, "--clients", "[north]")
    assert trained(alone, "north") == trained(together, "north")


def test_training_talks_to_nobody(config, tmp_path, monkeypatch):
    for name in ("init_process_group", "all_reduce", "all_gather", "all_gather_object", "broadcast", "send", "recv"):
        monkeypatch.setattr(torch.distributed, name, _stop)
    monkeypatch.setattr(socket.socket, "connect", _stop)
    assert trained(fit(config, tmp_path / "generators", "--clients", "[town2]"), "town2")


def test_a_pretrained_encoder_is_all_that_leaves_a_client(config, tmp_path, caplog):
    option = ("--pretrain", "town1")
    folder = fit(config, tmp_path / "a", *option)
    assert caplog.text.count("appearance encoder of town1") == 1
    assert "leaves the client, before any round and without noise" in caplog.text
    assert trained(folder, "town1") == trained(fit(config, tmp_path / "plain"), "town1")
    assert trained(folder, "town0") != trained(tmp_path / "plain", "town0")
    # whatever else is in the file, the others have the same bits
    other = tmp_path / "b"
    shutil.copytree(folder, other)
    for client in ("town0", "town2"):
        shutil.rmtree(other / client)
    path = other / "town1" / "generator.safetensors"
    tensors, start = load_file(path), "generator.appearance.backbone."
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    changed = {name: t if name.startswith(start) else torch.full_like(t, 7) for name, t in tensors.items()}
    save_file(changed, path, metadata)
    (other / "town1" / "losses.csv").unlink()
    fit(config, other, *option)
    assert trained(other, "town0") == trained(folder, "town0")
    passed = read_backbone(folder / "town1")
    shapes = {name: t.shape for name, t in SmallCNN(4).state_dict().items()}
    assert {name: t.shape for name, t in passed.items()} == shapes


def test_the_encoder_of_another_client_is_where_training_starts(config, tmp_path, monkeypatch):
    folder = fit(config, tmp_path / "a", "--pretrain", "town1", "--clients", "[town1]")
    begun = []

    def look(module, *_):
        if not begun:
            begun.append({n: t.clone() for n, t in module.generator.appearance.backbone.state_dict().items()})

    own = fitting.GeneratorTraining.training_step
    monkeypatch.setattr(
        fitting.GeneratorTraining, "training_step", lambda self, *args: (look(self), own(self, *args))[1]
    )
    fit(config, folder, "--pretrain", "town1", "--clients", "[town0]")
    assert begun
    for name, tensor in read_backbone(folder / "town1").items():
        assert torch.equal(begun[0][name], tensor), name


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clients", "[nobody]"), "--clients: there is no client nobody; choose from town0, town1, town2"),
        (("--pretrain", "nobody"), "--pretrain: there is no client nobody"),
        (("--pretrain", "town1", "--clients", "[town0]"), "--pretrain: the generator of town1 comes first"),
        (("--size", "[30, 16]"), "size: [30, 16] will not do; give multiples of 4"),
        (("--size", "[8, 8]"), "size: [8, 8] will not do"),
        (("--device", "cuda:99"), "--device: cuda:99 is not here"),
        (("--device", "abacus"), "--device: there is no device abacus"),
        (("--processes", "0"), "--processes"),
        (("--threads", "0"), "--threads"),
        (("--training.steps", "0"), "training.steps: 0 is less than 1"),
        (("--networks.width", "0"), "networks.width: 0 is less than 1"),
        (("--losses.code", "-1"), "losses.code: -1.0 is less than 0"),
        (("--nonsense", "1"), "nonsense"),
        (("--settings", "no-such-file.yaml"), "no-such-file.yaml"),
    ],
)
def test_wrong_options_are_one_line(options, message, config, tmp_path, capsys):
    args = ("augment", "fit", "--config", config, "--output", tmp_path / "g", *options)
    assert message in refuse(capsys, *args)


def test_a_launcher_of_several_processes_is_refused(config, tmp_path, capsys, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "g")
    assert "torchrun: all its processes would train the same" in line


def test_generators_of_other_settings_are_not_mixed(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    common = ("augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS)
    assert "--seed: " in refuse(capsys, *common, "--seed", 1)
    assert "--appearance.width: " in refuse(capsys, *common, "--appearance.width", 8)
    assert "--training.steps: " in refuse(capsys, *common, "--training.steps", 11)
    assert "--appearance.class_path: " in refuse(capsys, *common, "--appearance", "MobileNetV2", "--networks.parts", 1)
    settings = (folder / "settings.yaml").read_text()
    (folder / "settings.yaml").unlink()
    assert "settings.yaml: is gone, but there are generators beside it" in refuse(capsys, *common)
    (folder / "settings.yaml").write_text("appearance: SmallCNN")
    assert "settings.yaml: is not what fedsim augment fit has written" in refuse(capsys, *common)
    (folder / "settings.yaml").write_text(settings)
    fit(config, folder)


def test_the_first_of_two_calls_decides(config, tmp_path, capsys, monkeypatch):
    """Both have seen that there are no settings yet."""
    folder = tmp_path / "generators"
    own = augment_settings._write_new

    def late(path, settings):
        assert own(path, settings | {"seed": 7})  # the other call
        return own(path, settings)

    monkeypatch.setattr(augment_settings, "_write_new", late)
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS)
    assert "--seed: the generators of" in line
    assert line.endswith("have 7; give another --output, or remove that folder")


def test_a_size_that_is_not_given_is_kept_as_it_was(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    assert yaml.safe_load((folder / "settings.yaml").read_text())["size"] == [32, 16]
    content = yaml.safe_load(config.read_text())
    content["data"]["size"] = [64, 32]
    config.write_text(yaml.safe_dump(content))
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS)
    assert "--size: the generators of" in line
    run("preview", config, folder, "--output", tmp_path / "swaps.png", "--clients", "[town0]")  # of its own size


def test_people_whom_a_generator_cannot_learn(config, tmp_path, capsys):
    content = yaml.safe_load(config.read_text())
    content["data"]["max_identities"] = 1
    config.write_text(yaml.safe_dump(content))
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "g")
    assert "client town0: a generator needs images of at least 2 identities; leave the client out" in line
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "g", "--clients", "[]")
    assert "--clients: names nobody" in line
    (tmp_path / "file").touch()
    content["data"]["max_identities"] = 3
    config.write_text(yaml.safe_dump(content))
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "file")
    assert "is a file; name a folder" in line


@pytest.mark.parametrize("command", ["preview", "write"])
def test_what_is_no_trained_generator(command, config, tmp_path, capsys):
    folder = tmp_path / "generators"
    args = ("augment", command, "--config", config, "--generators", folder, "--output", tmp_path / "out.png")
    assert "give --generators the folder that fedsim augment fit has written" in refuse(capsys, *args)
    fit(config, folder, "--clients", "[town0]")
    assert "town1/generator.safetensors: there is no trained generator" in refuse(capsys, *args)
    one = (*args, "--clients", "[town0]")
    path = folder / "town0" / "generator.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert f"{path}: cannot be read" in refuse(capsys, *one)
    save_file({"x": torch.zeros(1)}, path)
    assert f"{path}: is no generator that fedsim augment fit has written" in refuse(capsys, *one)
    path.write_bytes(content)
    save_file({"x": torch.zeros(1)}, path, {"fedsim": '{"format": 1}'})
    assert f"{path}: is no generator that fedsim augment fit has written" in refuse(capsys, *one)
    path.write_bytes(content)
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings | {"size": [64, 32]}))
    assert f"{path}: makes images of [32, 16] pixels, not [64, 32]" in refuse(capsys, *one)
    settings["networks"]["width"] = 8
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert f"{path}: is of other networks" in refuse(capsys, *one)


@pytest.mark.parametrize("change", [{"max_identities": 4}, {"val": "identities"}])
def test_other_people_than_those_of_the_training(change, config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    content = yaml.safe_load(config.read_text())
    content["data"] |= change
    config.write_text(yaml.safe_dump(content))
    args = ("--config", config, "--clients", "[town0]")
    for command in (
        ("fit", "--output", folder, *STEPS, *WIDTHS),
        ("preview", "--generators", folder),
        ("write", "--generators", folder, "--output", tmp_path / "out"),
    ):
        line = refuse(capsys, "augment", *command, *args)
        assert "was trained on other images than client town0 has now" in line


def test_other_pictures_of_the_same_people(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    content = yaml.safe_load(config.read_text())
    content["data"]["source"]["init_args"]["seed"] = 1
    config.write_text(yaml.safe_dump(content))
    args = ("--config", config, "--clients", "[town0]", "--generators", folder, "--output", tmp_path / "out")
    assert "was trained on other images than client town0 has now" in refuse(capsys, "augment", "write", *args)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_cannot_be_continued(config, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "write_trained", _stop)
        with pytest.raises(_StoppedError):
            fit(config, tmp_path / "g", "--clients", "[town0]")
    path = tmp_path / "g" / "town0" / "training.ckpt"
    common = ("augment", "fit", "--output", tmp_path / "g", *STEPS, *WIDTHS, "--clients", "[town0]", "--config")
    content = yaml.safe_load(config.read_text())
    other = tmp_path / "other.yaml"
    content["data"]["source"]["init_args"]["seed"] = 1  # the same people by number, but not the same pictures
    other.write_text(yaml.safe_dump(content))
    assert f"{path}: was trained on other images than client town0 has now" in refuse(capsys, *common, other)
    path.write_bytes(b"nothing")
    assert f"{path}: cannot be continued" in refuse(capsys, *common, config)


def test_nothing_is_written_over(config, tmp_path, capsys, monkeypatch):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0,town1]")
    options = ("--output", tmp_path / "out", "--clients")
    run("write", config, folder, *options, "[town1]")
    monkeypatch.setattr(augment, "make_swaps", None)  # it is said before anything is made
    args = ("augment", "write", "--config", config, "--generators", folder, *options)
    assert "out/town1: holds generated images; remove it, write to another" in refuse(capsys, *args, "[town0,town1]")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["town1"]
    for bad in (("--ratio", "0"), ("--least", "2"), ("--labels", "wishes")):
        assert bad[0].strip("-") in refuse(capsys, "augment", "write", "--config", config, *bad)


def test_an_interrupted_write_leaves_no_part_of_a_client(config, tmp_path, monkeypatch):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    options = ("--output", tmp_path / "out", "--clients", "[town0]")
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.data.generated.csv.writer", _stop)  # all images are there, but not who is on them
        with pytest.raises(_StoppedError):
            run("write", config, folder, *options)
    assert list((tmp_path / "out").iterdir()) == []
    run("write", config, folder, *options)


def test_a_config_that_trains_with_generated_images_makes_them(config, tmp_path):
    content = yaml.safe_load(config.read_text())
    content["data"]["generated"] = {"root": str(tmp_path / "out")}  # not there yet
    config.write_text(yaml.safe_dump(content))
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    run("write", config, folder, "--output", tmp_path / "out", "--clients", "[town0]")


@pytest.mark.parametrize("given", ["a.yaml", "/b c/a.yaml", ["a.yaml", "/b/c.yaml"]])
def test_processes_get_the_options_of_the_call(given, tmp_path):
    parser = augment._fit_parser()
    config = json.dumps(given) if isinstance(given, list) else given
    call = parser.parse_args([f"--config={config}", f"--output={tmp_path}", "--threads=2", "--device=cpu"])
    (tmp_path / "settings.yaml").write_text("seed: 3")
    options = {**call.as_dict(), "settings": tmp_path / "settings.yaml"}
    line = augment_processes._command(["001", "no"], 1, options)
    got = parser.parse_args(line[line.index("fit") + 1 :])
    assert got.config == given
    assert (got.output, got.threads, got.device, got.row, got.seed) == (str(tmp_path), 2, "cpu", 1, 3)
    assert got.clients == ["001", "no"]


def test_help_and_wrong_commands(capsys):
    assert main(["augment", "--help"]) == 0
    assert "{fit,preview,write}" in capsys.readouterr().out
    assert "there is no command dream; choose from fit, preview, write" in refuse(capsys, "augment", "dream")
    assert "there is no command (none)" in refuse(capsys, "augment")
    assert "fedsim augment fit --help lists all options" in refuse(capsys, "augment", "fit", "--nonsense", 1)


def test_help_says_what_settings_are(capsys):
    with pytest.raises(SystemExit):
        main(["augment", "fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--networks.scales SCALES resolutions at which the discriminator looks (type: int, default: 2)" in shown
    assert "--row" not in shown


def test_first_weights_need_not_be_there_any_more(config, tmp_path, capsys):
    """What a trained generator was begun with is no part of it."""
    weights = tmp_path / "resnet18.safetensors"
    begun = ResNet(18)
    save_file({name: t.contiguous() for name, t in begun.state_dict().items()}, weights)
    options = (
        "--appearance",
        "ResNet",
        "--appearance.depth",
        18,
        "--appearance.weights",
        weights,
        "--size",
        "[64, 32]",
    )
    args = ("augment", "fit", "--config", config, "--output", tmp_path / "g", "--clients", "[town2]", *options)
    assert main([str(arg) for arg in (*args, "--training.steps", 1, "--networks.width", 4)]) == 0
    weights.unlink()
    run("preview", config, tmp_path / "g", "--output", tmp_path / "swaps.png", "--clients", "[town2]")
