"""What pytest does before and after tests; the fixtures are in ``shared_fixtures.py``."""

import gc
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

import others
from durations import FILE, Measurement, function_of, read_durations, seconds_of_files
from environment import is_of_a_launcher
from seen_by import measure_for
from warm import WarmWorkers

APART, NOT_APART = "device", {"test_simulated.py", "test_group_timeouts.py"}
"""folder of tests on a simulated GPU, and its files that try the simulation itself"""
collect_ignore = ["frozen.py"]  # to import it changes what a process draws and parses
DURATIONS = read_durations()


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help=f"write to {FILE.name} which functions are slow")
    parser.addoption("--share", type=others.share_of, default="1/1", help="of functions: 3/12 takes the third twelfth")


def pytest_configure(config):
    # Lightning would take a scheduler's or launcher's variables for ours
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "WANDB_")) or is_of_a_launcher(name):
            del os.environ[name]
    # no test reaches W&B's server, or writes into its folders at home
    os.environ["WANDB_MODE"] = "offline"
    for folder in ("DATA", "CACHE", "CONFIG"):
        os.environ[f"WANDB_{folder}_DIR"] = os.path.join(tempfile.gettempdir(), "fedsim-tests-wandb")
    if config.getoption("write_durations", False):
        config.pluginmanager.register(Measurement(FILE))
    # a process that lets others run the tests has no use for torch, which takes seconds to import
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(import_module("shared_fixtures"))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # else the threads of one process wait for cores of another
        # coverage does not measure such forks, and what has asked for a GPU cannot be forked
        if "coverage" not in sys.modules and not Path("/dev/nvidiactl").exists():
            config.pluginmanager.register(WarmWorkers())


def pytest_collection_modifyitems(config, items):
    others.mark_beyond_budget(items, DURATIONS)
    chosen = {item: others.is_in_share(item, config.getoption("share")) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]
    for item in items:
        on_device = item.path.parent.name == APART and item.path.name not in NOT_APART
        if on_device or "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.apart)
        if "fedsim" in getattr(item, "fixturenames", ()) or function_of(item.nodeid) in DURATIONS:
            item.add_marker(pytest.mark.slow)
    # files that take long come first, so that no worker is left with one at the end
    slow = {item.path for item in items if item.get_closest_marker("dist") or item.get_closest_marker("slow")}
    seconds = seconds_of_files(DURATIONS)
    items.sort(key=lambda item: (item.path not in slow, -seconds[item.path.name]))


def pytest_collection_finish():
    # what was imported lives until the end: to look for garbage in it, and so often, takes a tenth of the tests' time
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure():
    gc.unfreeze()  # else libraries that count their objects complain


def pytest_runtest_logstart(nodeid):
    measure_for(nodeid)
