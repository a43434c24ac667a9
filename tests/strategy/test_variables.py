"""Variables of launchers in the environment of a command that no launcher has started."""

import os
import random

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only

from fedsim.core.errors import ConfigError
from fedsim.parsing.early import check_environment, is_alone
from fedsim.parsing.output import rank_of_this_process
from fedsim.strategy.launch import check_place
from fedsim.strategy.ready_ranks import LAUNCHER_ID, check_variables
from small import refuse

NAMES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCHER_ID,
    "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
WRONG = ["x", "-1", "1.0", "0x1", "1e3", "²", "\u0661", "one", "0 1", "nan", "1,2", "--", "+1"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank_zero_only, "rank", 0)


def is_refused(environ, monkeypatch, ranks, nodes):
    """Whether a process with these variables is refused; its environment is as before afterwards."""
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            check_environment()
            check_variables(LightningEnvironment(), ranks, nodes)
        except ConfigError as error:
            return str(error).partition(":")[0] in environ and "unset" in str(error)
        return False


def test_drawn_variables_that_are_no_numbers_are_all_refused(monkeypatch):
    drawn, slipped = random.Random(7), []
    for _ in range(300):
        wrong = drawn.choice(["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "GROUP_RANK"])
        environ = {wrong: drawn.choice(WRONG)}
        if not is_refused(environ, monkeypatch, drawn.randint(1, 3), 1):
            slipped.append(environ)
    assert slipped == []


def test_drawn_places_that_the_run_does_not_have_are_all_refused(monkeypatch):
    drawn, slipped = random.Random(8), []
    for _ in range(300):
        ranks, nodes = drawn.randint(1, 4), drawn.randint(1, 3)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        local, node = drawn.randrange(ranks), drawn.randrange(nodes)
        environ = {"LOCAL_RANK": local, "NODE_RANK": node, "RANK": node * ranks + local, "WORLD_SIZE": ranks * nodes}
        right = {name: str(value) for name, value in environ.items()} | meeting
        assert not is_refused(right, monkeypatch, ranks, nodes)
        name, more = drawn.choice([("LOCAL_RANK", ranks), ("NODE_RANK", nodes), ("RANK", ranks * nodes)])
        wrong = right | {name: str(more + drawn.randrange(3))}
        if not is_refused(wrong, monkeypatch, ranks, nodes):
            slipped.append(wrong)
        if ranks * nodes > 1:  # nothing starts the others
            without = {**right}
            del without[drawn.choice([*meeting])]
            if not is_refused(without, monkeypatch, ranks, nodes):
                slipped.append(without)
    assert slipped == []


@pytest.mark.parametrize("environ", [
    {}, {"RANK": ""}, {"WORLD_SIZE": " "}, {"RANK": "0"}, {"NODE_RANK": "0"}, {"WORLD_SIZE": "1"},
    {"LOCAL_RANK": ""}, {"WORLD_SIZE": "2"},
])  # fmt: skip
def test_variables_that_change_nothing_are_accepted(monkeypatch, environ):
    assert not is_refused(environ, monkeypatch, 1, 1)
    assert not is_refused(environ, monkeypatch, 2, 1)
    assert rank_of_this_process() == 0


def test_ranks_that_this_process_starts_do_not_inherit_its_number(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    check_variables(LightningEnvironment(), 2, 1)
    assert "RANK" not in os.environ


def test_a_command_says_so_in_one_line_also_as_a_later_rank(monkeypatch, capsys):
    for environ, devices in (
        ({"LOCAL_RANK": "0"}, 2),
        ({"LOCAL_RANK": "1"}, 2),
        ({"LOCAL_RANK": "5", "RANK": "5"}, 2),
        ({"RANK": "x"}, 1),
    ):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(rank_zero_only, "rank", int(environ.get("LOCAL_RANK", "0")))
            options = ["--config", "quickstart", f"--trainer.devices={devices}"]
            assert "unset " in refuse(capsys, "fit", *options)


def place_of(drawn, nodes, per_node, is_slurm):
    """The variables of one process of a launcher."""
    node, local = drawn.randrange(nodes), drawn.randrange(per_node)
    place = {"LOCALID": local, "NODEID": node, "PROCID": node * per_node + local}
    if is_slurm:
        sizes = {"SLURM_NTASKS": nodes * per_node, "SLURM_NNODES": nodes, "SLURM_STEP_ID": 0}
        return {f"SLURM_{name}": str(number) for name, number in place.items()} | {k: str(v) for k, v in sizes.items()}
    names = {"LOCALID": "LOCAL_RANK", "NODEID": "GROUP_RANK", "PROCID": "RANK"}
    sizes = {"WORLD_SIZE": nodes * per_node, "LOCAL_WORLD_SIZE": per_node, "GROUP_WORLD_SIZE": nodes}
    environ = {names[name]: str(number) for name, number in place.items()} | {k: str(v) for k, v in sizes.items()}
    return environ | {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize("is_slurm", [True, False])
def test_drawn_places_that_a_launcher_does_not_have_are_all_refused(is_slurm):
    drawn, slipped = random.Random(9), []
    for _ in range(300):
        nodes, per_node = drawn.randint(1, 3), drawn.randint(1, 4)
        right = place_of(drawn, nodes, per_node, is_slurm)
        check_place(right)
        names = {"SLURM_LOCALID": per_node, "SLURM_NODEID": nodes, "SLURM_PROCID": nodes * per_node}
        if not is_slurm:
            names = {"LOCAL_RANK": per_node, "GROUP_RANK": nodes, "RANK": nodes * per_node}
        name = drawn.choice([*names])
        wrong = right | {name: str(names[name] + drawn.randrange(3))}
        if name != "GROUP_RANK" and drawn.random() < 0.3:
            del wrong[name]
        try:
            check_place(wrong)
            slipped.append(wrong)
        except ConfigError as error:
            slipped += [] if str(error).startswith(f"{name}: ") and "unset" in str(error) else [error]
    assert slipped == []


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
     {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "3"}, {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
     {"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "5"},
     {"LOCAL_RANK": "5"}, {"LOCAL_RANK": "1"}, {"GROUP_RANK": "3"}, {"RANK": "1", "WORLD_SIZE": "2"}],
)  # fmt: skip
def test_one_rank_with_the_place_of_another_is_one_line(monkeypatch, capsys, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    rank = next((int(environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in environ), 0)
    monkeypatch.setattr(rank_zero_only, "rank", rank)  # as at Lightning's import
    refuse(capsys, "fit", "--config", "quickstart", "--trainer.devices=1", "--trainer.accelerator=cpu")


@pytest.mark.parametrize("environ", [{"RANK": "3"}, {"LOCAL_RANK": "2"}, {"SLURM_PROCID": "1"}])
def test_a_process_that_is_alone_reports_its_errors_whatever_its_rank(monkeypatch, capsys, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", int(next(iter(environ.values()))))
    assert "--model.nonsense: there is no such option" in refuse(
        capsys, "fit", "--config", "quickstart", "--model.nonsense=1"
    )
    assert not is_alone({"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert not is_alone({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"})
