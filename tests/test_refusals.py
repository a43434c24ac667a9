"""Mistakes that fedsim does not see itself, but Lightning, the parser or the disk: one line, exit code 2."""

import pytest
import torch
from lightning import Trainer

from fedsim.__main__ import main
from fedsim.compatibility import naming_the_field
from fedsim.core.errors import ConfigError
from small import refuse


@pytest.mark.parametrize("below", ["", "/sub", "/sub/sub"])
def test_a_run_directory_that_cannot_be_is_found_out_before_training(capsys, tiny, below):
    folder = f"{tiny}{below}"  # tiny is a file
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", folder)
    assert f"run_dir: {folder} cannot be a folder" in line
    assert "name another" in line


def test_so_is_one_that_the_system_refuses(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", "/proc/fedsim")
    assert "run_dir: /proc/fedsim cannot be a folder (No such file or directory)" in line


def test_so_is_that_of_a_sweep(capsys, tiny, write_sweep):
    line = refuse(capsys, "sweep", write_sweep(), "--local", "--run_dir", tiny)
    assert f"--run_dir: {tiny} cannot be a folder" in line


# what only Lightning knows: its words, with the field before them
OF_THE_TRAINER = [
    ("devices=-2", "trainer.devices: -2", "a number of ranks from 1, or auto"),
    ("devices=two", "trainer.devices: two", "a number of ranks from 1, or auto"),
    ("devices=0", "trainer.devices: 0", "a number of ranks from 1, or auto"),
    ("accelerator=cuuda", "trainer.accelerator: cuuda", "set trainer.accelerator to cpu or auto"),
    ("strategy=ddpp", "trainer.strategy: ddpp", "FederatedStrategy"),
    ("num_nodes=0", "trainer.num_nodes: 0", "leave it out"),
    ("max_epochs=-3", "trainer.max_epochs: -3", "non-negative integer"),
    ("max_time=soon", "trainer.max_time: soon", "00:12:00:00"),
    ("limit_val_batches=-1", "trainer.limit_val_batches: -1", "has to be in [0.0, 1.0]"),
    ("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch: 0", "give one from 1"),
    ("check_val_every_n_epoch=-2", "trainer.check_val_every_n_epoch: -2", "give one from 1"),
    ("check_val_every_n_epoch=null", "trainer.check_val_every_n_epoch: None", "give one from 1"),
]


@pytest.mark.parametrize(("option", "field", "remedy"), OF_THE_TRAINER, ids=[case[0] for case in OF_THE_TRAINER])
def test_what_lightning_refuses_names_the_field(capsys, tiny, tmp_path, option, field, remedy):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--trainer.{option}")
    assert field in line
    assert remedy in line
    assert not (tmp_path / "run").exists()


def test_describe_refuses_devices_too(capsys, tiny):
    assert "trainer.devices: -2 cannot be used" in refuse(capsys, "describe", "--config", tiny, "--trainer.devices=-2")


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda", "mps"])
def test_an_accelerator_that_is_not_there(capsys, tiny, tmp_path, name):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--trainer.accelerator={name}")
    assert f"trainer.accelerator: {name} cannot be used" in line
    assert "set trainer.accelerator to cpu or auto" in line


def test_only_what_lightning_raises_is_a_wrong_setting():
    given = {"devices": "auto", "accelerator": "cpu"}
    with pytest.raises(ConfigError, match=r"^trainer\.accelerator: cpu cannot"), naming_the_field(given):
        Trainer(accelerator="cuuda")
    with pytest.raises(TypeError, match="devices of a defect"), naming_the_field(given):
        raise TypeError("devices of a defect")


# -- config files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [("trainer: 5", "trainer: is a section, with fields below it, and not 5"),
     ("data: 5", "data: is a section, with fields below it, and not 5"),
     ("model: 5", "model: is a section, with fields below it, and not 5"),
     ("model: {client: [1]}", "model.client: is a section, with fields below it, and not [1]"),
     ("model: {client: {schedule: 3}}", "model.client.schedule: is a section, with fields below it, and not 3"),
     ("data: {augmentation: [1]}", "data.augmentation: is a section, with fields below it, and not [1]"),
     ("trainer:", "trainer: this section is empty; write its fields below it, or remove it"),
     ("model: {client: }", "model.client: this section is empty; write its fields below it, or remove it")],
)  # fmt: skip
def test_a_section_of_a_later_file_that_is_none_names_file_and_field(capsys, tiny, tmp_path, content, words):
    later = tmp_path / "later.yaml"
    later.write_text(content)
    for last in (["--config", later], [f"--config={later}"]):
        assert f"{later}: {words}" in refuse(capsys, "fit", "--config", tiny, *last, "--run_dir", tmp_path / "run")


def test_commands_about_data_see_it_too(capsys, tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text("data: 5")
    line = refuse(capsys, "data", "preview", "--config", config, "--output", tmp_path / "sheet.png")
    assert f"{config}: data: is a section" in line


def test_a_section_may_be_a_file_of_its_own(capsys, tiny, tmp_path):
    section, config = tmp_path / "trainer.yaml", tmp_path / "later.yaml"
    section.write_text("{max_epochs: 7, accelerator: cpu, devices: 1}")
    config.write_text(f"trainer: {section}")
    assert main(["describe", "--config", str(tiny), "--config", str(config)]) == 0
    assert "bytes of 7 rounds" in capsys.readouterr().out
