"""Configs come with fedsim: they are named without their folder, wherever a command is called."""

import re
import tomllib
from pathlib import Path

import fedsim
from fedsim.__main__ import _HELP, main
from fedsim.cli.config_files import shipped_configs, with_shipped
from small import refuse

ROOT = Path(__file__).parents[2]


def test_every_config_of_the_repository_is_in_the_package():
    there = {
        path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert set(shipped_configs()) == there
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fedsim"]
    package = Path(fedsim.__file__).parent
    packed = {path.resolve() for pattern in patterns for path in package.glob(pattern)}
    assert {path.resolve() for path in shipped_configs().values()} <= packed


def test_the_first_steps_of_help_work_outside_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    steps = re.findall(r"^  fedsim (fit .*)$", _HELP.partition("first steps:")[2], re.MULTILINE)
    assert len(steps) == 2
    for step in steps:
        words = step.split()[1:]
        assert main(["describe", *words, "--trainer.accelerator=cpu"]) == 0, capsys.readouterr().err
        assert "What is shared" in capsys.readouterr().out
    assert main(["data", "preview", "--config", "quickstart", "--output", "people.png"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "people.png"]


def test_a_file_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("trainer: {max_epochs: 1}")
    assert with_shipped(["--config=quickstart"]) == ["--config=quickstart"]
    assert with_shipped(["--config=configs/quickstart.yaml"]) != ["--config=configs/quickstart.yaml"]


def test_a_slip_in_a_config_s_name_is_answered(capsys):
    assert "did you mean quickstart, which comes with fedsim?" in refuse(capsys, "fit", "--config", "quikstart")


def test_configs_are_listed_with_their_first_line(capsys):
    assert main(["list", "configs"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {re.escape(name)} +\S.{{10}}", text, re.MULTILINE) for name in shipped_configs())
