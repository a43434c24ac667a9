"""Drawn faults in every section of a config: each is one line that names the field, and nothing is written."""

import contextlib
import io
import signal

import pytest
import yaml
from faults import BASES, draw

import others
from fedsim.__main__ import main
from fedsim.cli.fit import FedSimCLI
from small import refuse

FAST, SOME, ALL = 20, 100, 500
PATIENCE = 60  # seconds for one config on a busy machine: a fault must not make fedsim count to a huge number
NOISE = ("Namespace(", "<class", "Got value", "class this", "class {", "class [{", "Subtypes", "NestedArg")


class ReachedError(Exception):
    """Training would start."""


def _would_train(*_, **__):
    raise ReachedError


def _late(*_):
    raise TimeoutError(f"no answer within {PATIENCE} s")


@pytest.fixture(autouse=True)
def _no_training(monkeypatch):
    monkeypatch.setattr(FedSimCLI, "fit", _would_train, raising=False)
    previous = signal.signal(signal.SIGALRM, _late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Name -> config with all its fields."""
    found, folder = {}, tmp_path_factory.mktemp("bases")
    for name, text in BASES.items():
        path, out = folder / f"{name}.yaml", io.StringIO()
        path.write_text(text)
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            main(["fit", "--config", str(path), "--print_config"])
        found[name] = yaml.safe_load(out.getvalue())
        for of_one_start in ("run_dir", "ckpt_path"):
            found[name].pop(of_one_start)
    return found


def reaches_training(*args):
    with pytest.raises(ReachedError):
        main(["fit", *map(str, args)])


@pytest.mark.parametrize("name", BASES)
def test_without_a_fault_training_would_start(bases, tmp_path, name):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(bases[name]))
    reaches_training("--config", path, "--run_dir", tmp_path / "run")


def marks(number):
    return [*others.unless(number < SOME), *([] if number < FAST else [pytest.mark.slow])]


@pytest.mark.parametrize("number", [pytest.param(number, marks=marks(number)) for number in range(ALL)])
def test_a_drawn_fault_is_one_line(bases, tmp_path, capsys, number):
    fault = draw(number, bases)
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(fault.text)
    args = ("fit", "--config", config, "--run_dir", run_dir)
    try:
        line = refuse(capsys, *args)
    except ReachedError:
        assert fault.may_be_meant, f"taken: {fault}"
        return
    assert all(field in line for field in fault.fields), f"{fault}: {line}"
    assert not [noise for noise in NOISE if noise in line], f"{fault}: {line}"
    assert not run_dir.exists(), f"{fault}: written"
