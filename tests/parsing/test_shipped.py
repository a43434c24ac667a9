"""Configs come with fedsim: they are named without their folder, wherever a command is called."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

import fedsim
from fedsim.__main__ import _HELP, main
from fedsim.parsing.config_files import shipped_configs, with_shipped
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


@pytest.mark.apart
def test_a_wheel_holds_every_config(tmp_path):
    """As pip builds it: the configs lie beside the sources, which have a link to them."""
    found = {part.metadata["Name"]: part.version for part in distributions()}  # to import setuptools changes Python
    if "pip" not in found or int(found.get("setuptools", "0").partition(".")[0]) < 77:
        pytest.skip("pip and setuptools from 77 on, which build wheels, are not installed")
    copy = tmp_path / "fedsim"
    for name in ("src", "configs"):  # a build writes beside its sources
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    build = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("fedsim_reid-*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if name.endswith((".yaml", ".json"))}
    beside = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    rooms = [ROOT / "src" / "fedsim" / name for name in ("papers", "settings", "sweep")]
    own = {path.relative_to(ROOT / "src") for room in rooms for path in room.rglob("*.[yj][as]*[ln]")}
    assert packed == {f"fedsim/{path}" for path in beside} | {str(path) for path in own}


def test_the_first_steps_of_help_work_outside_the_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    steps = re.findall(r"^  fedsim (fit .*)$", _HELP.partition("first steps:")[2], re.MULTILINE)
    assert len(steps) == 2
    for step in steps:
        words = step.split()[1:]
        assert main(["describe", *words, "--trainer.accelerator=cpu"]) == 0, capsys.readouterr().err
        assert "Shared tensors" in capsys.readouterr().out
    assert main(["data", "preview", "--config", "quickstart", "--output", "people.png"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "people.png"]


def test_a_file_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("trainer: {max_epochs: 1}")
    assert with_shipped(["--config=quickstart"]) == ["--config=quickstart"]
    assert with_shipped(["--config=configs/quickstart.yaml"]) != ["--config=configs/quickstart.yaml"]


def test_a_folder_of_the_working_directory_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "omniglot").mkdir()  # the data, beside the config of this name
    assert with_shipped(["--config=omniglot"]) == [f"--config={shipped_configs()['omniglot']}"]
    (tmp_path / "mine").mkdir()
    assert with_shipped(["--config=mine"]) == ["--config=mine"]


def test_a_slip_in_a_config_s_name_is_answered(capsys):
    assert "did you mean quickstart, which comes with fedsim?" in refuse(capsys, "fit", "--config", "quikstart")


def test_configs_are_listed_with_their_first_line(capsys):
    assert main(["list", "configs"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {re.escape(name)} +\S.{{10}}", text, re.MULTILINE) for name in shipped_configs())
