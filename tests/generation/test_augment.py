"""``fedsim augment``: what its three commands write, resume, processes, and what leaves a client."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsim.__main__ import main
from fedsim.cli.augment import fit as augment_fit
from fedsim.cli.augment import processes as augment_processes
from fedsim.cli.data.configs import data_of
from fedsim.data import FederatedDataModule, Generated, SyntheticReID
from fedsim.generation import fitting
from fedsim.generation.saved import read_backbone
from fedsim.models import ResNet, SmallCNN
from small import refuse
from small_generators import STEPS, WIDTHS, StoppedError, contents, fit, run, stop, trained

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
    monkeypatch.setattr(augment_fit, "GeneratorTraining", None)
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


@pytest.mark.others
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


def test_several_configs_are_one(config, tmp_path):
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(yaml.safe_dump({"data": {"max_identities": 3}, "model": {"method": "Local"}}))
    both = ("--config", fewer, "--clients", "[town0]")
    folder = fit(config, tmp_path / "generators", *both)
    run("preview", config, folder, "--output", tmp_path / "swaps.png", *both)
    content = yaml.safe_load(config.read_text())
    content["data"]["max_identities"] = 3
    config.write_text(yaml.safe_dump(content))
    assert trained(fit(config, tmp_path / "alone", "--clients", "[town0]"), "town0") == trained(folder, "town0")


# -- resume and processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["after", "during"])
def test_an_interrupted_fit_continues_bit_for_bit(moment, config, tmp_path, monkeypatch):
    whole = fit(config, tmp_path / "whole", "--clients", "[town1]")
    save, calls = fitting._SaveTraining.on_train_epoch_end, []

    def interrupt(self, trainer, module):
        calls.append(trainer.current_epoch)
        if moment == "during" and len(calls) == 2:
            monkeypatch.setattr("pathlib.Path.replace", stop)
        save(self, trainer, module)
        if len(calls) == 2:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(fitting._SaveTraining, "on_train_epoch_end", interrupt)
        with pytest.raises(StoppedError):
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


@pytest.mark.parametrize("function", ["write_losses", "write_trained"])
def test_whatever_the_end_is_interrupted_in(function, config, tmp_path, monkeypatch):
    whole = fit(config, tmp_path / "whole", "--clients", "[town1]")
    own = getattr(fitting, function)

    def interrupt(folder, content, *args):
        if function == "write_losses" and len(content) < 3:  # not the last line yet
            return own(folder, content)
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(fitting, function, interrupt)
        with pytest.raises(StoppedError):
            fit(config, tmp_path / "parts", "--clients", "[town1]")
    fit(config, tmp_path / "parts", "--clients", "[town1]")
    assert contents(tmp_path / "parts" / "town1") == contents(whole / "town1")


def test_what_a_call_has_not_removed_the_next_one_does(config, tmp_path):
    """The end of a call is between its last two acts."""
    folder = fit(config, tmp_path / "generators", "--clients", "[town1]")
    (folder / "town1" / "training.ckpt").write_bytes(b"images by heart")
    (folder / "town1" / "quality.json").unlink()
    fit(config, folder, "--clients", "[town1]")
    assert not (folder / "town1" / "training.ckpt").exists()


@pytest.mark.parametrize("place", ["fedsim.generation.fitting.torch.load", "fedsim.models.SmallCNN.forward"])
def test_a_signal_is_no_failure_of_what_it_interrupts(place, config, tmp_path, monkeypatch, capsys):
    """Where files are read and backbones tried out, errors mean that these will not do."""
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "write_trained", stop)
        with pytest.raises(StoppedError):
            fit(config, tmp_path / "g", "--clients", "[town1]")
    with monkeypatch.context() as patch:
        patch.setattr(place, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        fit(config, tmp_path / "g", "--clients", "[town1]", code=128 + signal.SIGTERM)
    assert "fedsim: error: stopped by SIGTERM" in capsys.readouterr().err
    fit(config, tmp_path / "g", "--clients", "[town1]")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_schedulers_end_a_fit_in_order(name, config, tmp_path, monkeypatch, capsys):
    save, asked = fitting._SaveTraining.on_train_epoch_end, []

    def end(self, trainer, module):
        save(self, trainer, module)
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr("fedsim.cli.app.requeue", lambda: asked.append(name))
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
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started[-1]

    monkeypatch.setattr(augment_processes, "_command", lambda *_: wait)
    monkeypatch.setattr(augment_processes.subprocess, "Popen", start)
    fit(config, tmp_path / "g", "--processes", 2, code=128 + signal.SIGTERM)
    assert [process.poll() for process in started] == [-signal.SIGTERM] * 2


@pytest.mark.slow
def test_two_processes_train_the_bits_of_one(config, tmp_path, caplog, quick_python):
    alone = fit(config, tmp_path / "alone")
    together = fit(config, tmp_path / "together", "--processes", 2)
    assert "2 processes: town0, town2; town1" in caplog.text
    for client in ("town0", "town1", "town2"):
        assert trained(together, client) == trained(alone, client)
        assert (together / client / "losses.csv").read_bytes() == (alone / client / "losses.csv").read_bytes()
        qualities = [json.loads((folder / client / "quality.json").read_text()) for folder in (together, alone)]
        for quality in qualities:
            del quality["told_apart"]  # here, its judge learns in fewer steps than in the processes
        assert qualities[0] == qualities[1]


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
        monkeypatch.setattr(torch.distributed, name, stop)
    monkeypatch.setattr(socket.socket, "connect", stop)
    assert trained(fit(config, tmp_path / "generators", "--clients", "[town2]"), "town2")


def test_a_pretrained_encoder_is_all_that_leaves_a_client(config, tmp_path, caplog):
    option = ("--pretrain", "town1")
    folder = fit(config, tmp_path / "a", *option)
    assert caplog.text.count("appearance encoder of town1") == 1
    assert "leaves the client before any round and without noise" in caplog.text
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


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_config_that_trains_with_generated_images_makes_them(config, tmp_path):
    content = yaml.safe_load(config.read_text())
    content["data"]["generated"] = {"root": str(tmp_path / "out")}  # not there yet
    config.write_text(yaml.safe_dump(content))
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    run("write", config, folder, "--output", tmp_path / "out", "--clients", "[town0]")


@pytest.mark.parametrize("given", ["a.yaml", "/b c/a.yaml", ["a.yaml", "/b/c.yaml"]])
def test_processes_get_the_options_of_the_call(given, tmp_path):
    parser = augment_fit.fit_parser()
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
    assert "fedsim augment fit --help all lists all options" in refuse(capsys, "augment", "fit", "--nonsense", 1)


def test_help_says_what_settings_are(capsys):
    with pytest.raises(SystemExit):
        main(["augment", "fit", "--help", "all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--networks.scales SCALES resolutions at which the discriminator scores images (type: int, default: 2)" in shown
    )
    assert "--row" not in shown
    assert "or your own Backbone. (type: <class 'Backbone'>, default: {" in shown  # and not "required"
    assert "[--appearance APPEARANCE]" in shown


@pytest.mark.others
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
