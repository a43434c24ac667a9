"""``fedsim augment``: what is refused, in one line, and that nothing is lost by it."""

import re

import pytest
import torch
import yaml
from safetensors.torch import save_file

from fedsim.cli.augment import fit as augment_fit
from fedsim.cli.augment import images as augment_images
from fedsim.cli.augment import settings as augment_settings
from fedsim.core.errors import DataError
from fedsim.generation import fitting
from fedsim.generation.saved import read_quality
from small import refuse
from small_generators import STEPS, WIDTHS, StoppedError, fit, run, stop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clients", "[nobody]"), "--clients: there is no client nobody; choose from town0, town1, town2"),
        (("--pretrain", "nobody"), "--pretrain: there is no client nobody"),
        (("--pretrain", "town1", "--clients", "[town0]"), "--pretrain: town1 must have a generator before the others"),
        (("--size", "[30, 16]"), "size: [30, 16] is not supported; give multiples of 4"),
        (("--size", "[8, 8]"), "size: [8, 8] is not supported"),
        (("--device", "cuda:99"), "--device: cuda:99 is not here; choose from cpu"),
        (("--device", "abacus"), "--device: there is no device abacus; choose from cpu"),
        (("--processes", "0"), "--processes"),
        (("--threads", "0"), "--threads: 0 is not in [1, 1024]"),
        (("--threads", "99999999"), "--threads: 99999999 is not in [1, 1024]"),
        (("--training.rate", "1e300"), "training.rate: 1e+300 is not in (0, 1e30]"),
        (("--training.steps", "0"), "training.steps: 0 is less than 1"),
        (("--networks.width", "0"), "networks.width: 0 is less than 1"),
        (("--networks.hidden", "1000000000000"), "the generator of town0 does not fit on cpu; lower --networks.width"),
        (("--losses.code", "-1"), "losses.code: -1.0 is not in [0, inf)"),
        (("--nonsense", "1"), "nonsense"),
        (("--settings", "no-such-file.yaml"), "no-such-file.yaml"),
    ],
)
def test_wrong_options_are_one_line(options, message, config, tmp_path, capsys):
    args = ("augment", "fit", "--config", config, "--output", tmp_path / "g", *options)
    assert message in refuse(capsys, *args)


@pytest.mark.parametrize("form", [("--settings", "{}"), ("--settings={}",)])
def test_files_that_are_no_settings_are_named(form, config, tmp_path, capsys):
    empty = tmp_path / "empty.yaml"
    empty.write_text(" \n")
    (slip := tmp_path / "slip.yaml").write_text("sede: 3")
    call = ("augment", "fit", "--config", config, "--output", tmp_path / "g")
    for path, expected in (
        (empty, f"{empty}: is empty"),
        (config, f"--settings: {config} is the config of a run; give it to --config"),
        (tmp_path, f"{tmp_path} is a folder"),
        (slip, "sede: there is no such option; did you mean seed?"),
    ):
        assert expected in refuse(capsys, *call, *(word.format(path) for word in form))
    assert not (tmp_path / "g").exists()


def test_a_launcher_of_several_processes_is_refused(config, tmp_path, capsys, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "g")
    assert "torchrun: every process would train the same generators" in line


def test_generators_of_other_settings_are_not_mixed(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    common = ("augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS)
    assert "--seed: " in refuse(capsys, *common, "--seed", 1)
    assert "--appearance.width: " in refuse(capsys, *common, "--appearance.width", 8)
    assert "--training.steps: " in refuse(capsys, *common, "--training.steps", 11)
    assert "--appearance.class_path: " in refuse(capsys, *common, "--appearance", "MobileNetV2", "--networks.parts", 1)
    settings = (folder / "settings.yaml").read_text()
    (folder / "settings.yaml").unlink()
    assert "settings.yaml: is missing, but there are generators in its folder" in refuse(capsys, *common)
    (folder / "settings.yaml").write_text("appearance: SmallCNN")
    assert "settings.yaml: is no settings file of fedsim augment fit" in refuse(capsys, *common)
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
    assert "--clients: the list is empty" in line
    (tmp_path / "file").touch()
    content["data"]["max_identities"] = 3
    config.write_text(yaml.safe_dump(content))
    line = refuse(capsys, "augment", "fit", "--config", config, "--output", tmp_path / "file")
    assert "/file cannot be a folder (File exists); name another" in line


@pytest.mark.parametrize("command", ["preview", "write"])
def test_what_is_no_trained_generator(command, config, tmp_path, capsys):
    folder = tmp_path / "generators"
    args = ("augment", command, "--config", config, "--generators", folder, "--output", tmp_path / "out.png")
    assert ("generators is not there: no such folder") in refuse(capsys, *args)
    fit(config, folder, "--clients", "[town0]")
    assert "town1/generator.safetensors: there is no trained generator" in refuse(capsys, *args)
    one = (*args, "--clients", "[town0]")
    path = folder / "town0" / "generator.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert f"{path}: cannot be read" in refuse(capsys, *one)
    save_file({"x": torch.zeros(1)}, path)
    assert f"{path}: is not a generator of fedsim augment fit" in refuse(capsys, *one)
    save_file({"x": torch.full((1,), torch.nan)}, path)
    assert f"{path}: x holds numbers that are not finite; remove it and fit again" in refuse(capsys, *one)
    path.write_bytes(content)
    save_file({"x": torch.zeros(1)}, path, {"fedsim": '{"format": 1}'})
    assert f"{path}: is not a generator of fedsim augment fit" in refuse(capsys, *one)
    path.write_bytes(content)
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings | {"size": [64, 32]}))
    assert f"{path}: makes images of [32, 16] pixels, not [64, 32]" in refuse(capsys, *one)
    for change, expected in (
        ({"width": 8}, f"{path}: has other networks"),
        ({"width": "wide"}, f"{folder}/settings.yaml: networks.width: expected int, got wide"),
        ({"width": 0}, f"{folder}/settings.yaml: networks.width: 0 is less than 1"),
    ):
        changed = settings | {"networks": settings["networks"] | change}
        (folder / "settings.yaml").write_text(yaml.safe_dump(changed))
        assert expected in refuse(capsys, *one)
    for section in ("networks", "training"):
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings | {section: None}))
        assert f"{folder}/settings.yaml: is no settings file of fedsim augment fit" in refuse(capsys, *one)


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
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_that_cannot_be_continued(config, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "write_trained", stop)
        with pytest.raises(StoppedError):
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
    monkeypatch.setattr(augment_images, "make_swaps", None)  # it is said before anything is made
    args = ("augment", "write", "--config", config, "--generators", folder, *options)
    assert "out/town1: holds generated images; remove it, write to another" in refuse(capsys, *args, "[town0,town1]")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["town1"]
    for bad in (("--ratio", "0"), ("--least", "2"), ("--labels", "wishes"), ("--threads", "0")):
        assert bad[0].strip("-") in refuse(capsys, "augment", "write", "--config", config, *bad)


@pytest.mark.parametrize("name", ["file", "file/folder", "/proc/folder"])
def test_a_folder_that_cannot_be_is_found_out_before_the_work(name, config, tmp_path, capsys, monkeypatch):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    (tmp_path / "file").touch()
    monkeypatch.setattr(augment_images, "make_swaps", None)
    monkeypatch.setattr(augment_fit, "fit_generator", None)
    args = ("--config", config, "--clients", "[town0]", "--output", tmp_path / name)
    for command in (("fit", *STEPS, *WIDTHS), ("write", "--generators", folder)):
        assert f"--output: {tmp_path / name} cannot be a folder" in refuse(capsys, "augment", *command, *args)
    monkeypatch.setattr(augment_images, "swap_grid", None)
    args = ("--config", config, "--generators", folder, "--output", tmp_path / "sheet.xyz")
    assert "--output: " + str(tmp_path / "sheet.xyz") + " ends with .xyz" in refuse(capsys, "augment", "preview", *args)


def test_an_encoder_of_people_who_are_now_held_out_goes_to_nobody(config, tmp_path, capsys):
    folder = fit(config, tmp_path / "generators", "--pretrain", "town1", "--clients", "[town1]")
    content = yaml.safe_load(config.read_text())
    content["data"]["val"] = "identities"
    config.write_text(yaml.safe_dump(content))
    args = ("fit", "--output", folder, *STEPS, *WIDTHS, "--pretrain", "town1", "--clients", "[town0]")
    line = refuse(capsys, "augment", *args, "--config", config)
    assert "was trained on other images than client town1 has now" in line
    assert not (folder / "town0").exists()


def test_an_interrupted_write_leaves_no_part_of_a_client(config, tmp_path, monkeypatch):
    folder = fit(config, tmp_path / "generators", "--clients", "[town0]")
    options = ("--output", tmp_path / "out", "--clients", "[town0]")
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.data.generated.csv.writer", stop)  # all images are there, but not who is on them
        with pytest.raises(StoppedError):
            run("write", config, folder, *options)
    assert list((tmp_path / "out").iterdir()) == []
    run("write", config, folder, *options)


@pytest.mark.parametrize(("option", "value"), [("ratio", "1e300"), ("ratio", "1e12"), ("threads", "99999999")])
def test_numbers_that_no_machine_can_serve(option, value, config, tmp_path, capsys):
    args = ("--config", config, "--generators", tmp_path, "--output", tmp_path / "out", f"--{option}", value)
    assert re.search(rf"--{option}: .* is not in [\[(]", refuse(capsys, "augment", "write", *args))


@pytest.mark.parametrize(
    "content", ['{"reconstruction": "good"}', '{"reconstruction": null}', '{"edges": [1]}', "[1]", "null"]
)
def test_a_quality_that_is_no_numbers(content, tmp_path):
    (tmp_path / "quality.json").write_text(content)
    with pytest.raises(DataError, match=r"quality\.json: cannot be read .*; remove it"):
        read_quality(tmp_path)
