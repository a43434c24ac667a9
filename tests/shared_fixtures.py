"""Fixtures for all tests."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import once
from environment import is_of_a_launcher
from failing import PATIENCE, run_forked
from quick_start import QuickPython
from tiny_run import TINY

ROOT = Path(__file__).parents[1]


def forget_launchers():
    """Remove what launchers of runs in this process have left in its environment."""
    for name in list(os.environ):
        if is_of_a_launcher(name):
            del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def _no_launcher_of_earlier_files():
    """Also for fixtures of a file: processes that they start would end as launchers of earlier runs have ended."""
    forget_launchers()


@pytest.fixture(autouse=True)
def _nothing_left_by_earlier_tests():
    """Forget launchers of earlier runs in this process, and their mode."""
    forget_launchers()
    torch.use_deterministic_algorithms(False)
    path = [*sys.path]
    yield
    sys.path[:] = path  # a command adds the folder that it works in, and Python looks for each module in all of them


@pytest.fixture(autouse=True, scope="module")
def _people_are_drawn_once(request):
    """Take the pictures of earlier tests, but in tests of the drawing."""
    with nullcontext() if request.path.name == "test_synthetic.py" else once.people():
        yield


@pytest.fixture(autouse=True)
def _standins_are_written_once(request):
    """Take the stand-ins of earlier tests, but in tests of their files."""
    with nullcontext() if request.node.name == "test_a_dry_run_leaves_nothing_behind" else once.standins():
        yield


@pytest.fixture(scope="session")
def root():
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def fedsim():
    """Run the command line in processes of its own: ``fedsim("fit", "--config", path)``.

    They are forks of a fork server, which has imported fedsim: as many as ``--trainer.devices`` says. ``launched=True``
    starts a command as people do, so that it starts its other ranks itself.
    """

    def run(*args, check=True, timeout=PATIENCE, cwd=ROOT, launched=False):
        args = list(map(str, args))
        # a fit in this process leaves its own address behind
        env = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
        if launched:
            command = [sys.executable, "-m", "fedsim", *args]
            result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)
        else:
            devices = [int(arg.partition("=")[2]) for arg in args if arg.startswith("--trainer.devices=")]
            result = run_forked(args, cwd, env, timeout, *devices)
        assert not check or result.returncode == 0, f"{' '.join(args)}\n{result.stdout}\n{result.stderr}"
        return result

    return run


@pytest.fixture
def quick_python(tmp_path, monkeypatch):
    """Let commands start others without importing fedsim anew; a claim about such a start does without it."""
    folder = tmp_path / "quick"
    folder.mkdir()
    server = QuickPython(folder)
    monkeypatch.setattr(sys, "executable", str(server.python))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser():
    """A Chromium that shows no window."""
    library = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    installed = os.environ.get("FEDSIM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with library.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox", "--disable-gpu"])
        except library.Error:
            pytest.skip("there is no Chromium: install your system's package, or name one in FEDSIM_CHROMIUM")
        yield started
        started.close()


@pytest.fixture
def hangup_ends():
    """Let SIGHUP end processes as in a terminal: those that nohup has started, and their children, ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def tiny(tmp_path):
    """Options of a run that takes seconds: four clients, two unseen domains, a narrow network."""
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    return config


@pytest.fixture(scope="session")
def market_tree(tmp_path_factory):
    """Two small data sets with training images and one without, in Market-1501 layout, of random pixels."""
    root = tmp_path_factory.mktemp("market")
    rng = np.random.default_rng(0)
    for name, first in (("north", 1), ("south", 1), ("west", 0)):
        folders = {"query": (range(10, 13), 1), "bounding_box_test": (range(10, 13), 2)}
        if first:
            folders["bounding_box_train"] = (range(1, 7), 2)
        for folder, (pids, shots) in folders.items():
            (root / name / folder).mkdir(parents=True)
            for pid in pids:
                for cam in (1, 2):
                    for shot in range(shots):
                        pixels = rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)
                        Image.fromarray(pixels).save(root / name / folder / f"{pid:04d}_c{cam}s1_{shot:06d}_00.png")
    return root


@pytest.fixture
def write_sweep(tmp_path):
    """Write a sweep file: the base with some fields replaced; None leaves one out."""

    def write(**fields):
        content = {key: value for key, value in {**SWEEP, **fields}.items() if value is not None}
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


SWEEP = {
    "program": "fedsim",
    "method": "grid",
    "metric": {"name": "val/mAP", "goal": "maximize"},
    "parameters": {"seed_everything": {"values": [1, 2]}},
    "command": ["${program}", "fit", "${args}"],
}
