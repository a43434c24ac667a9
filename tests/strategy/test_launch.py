"""What a launcher has decided: taken over, completed, or refused in one line."""

import os
import signal
import socket
import sys
import time

import pytest

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.federation.callbacks import Preemption
from fedsim.federation.trainer import Trainer
from fedsim.strategy.launch import await_rank_0, awaiting_ranks, check_address, follow_launcher
from small import refuse

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NAME": "mine",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH = {name: value for name, value in STEP.items() if "_STEP_" not in name}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}
BY_HAND = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "NODE_RANK": "1"}


@pytest.mark.parametrize("devices", ["auto", -1, "-1", 2, "2"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_slurm_says_how_many_ranks_there_are(devices, num_nodes):
    environ = dict(STEP)
    assert follow_launcher(devices, num_nodes, environ) == (2 if devices in ("auto", -1, "-1") else devices, 2)
    assert environ["SLURM_NTASKS_PER_NODE"] == "2"  # without which Lightning refuses --ntasks
    assert environ["MASTER_ADDR"] == "n1"


def test_torchrun_says_how_many_ranks_there_are():
    assert follow_launcher("auto", 1, TORCHRUN | {"SLURM_NTASKS": "1"}) == (3, 2)
    assert follow_launcher([0, 1, 2], 2, dict(TORCHRUN)) == ([0, 1, 2], 2)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2"},  # an allocation without tasks
        BATCH | {"SLURM_JOB_NAME": "interactive"},  # salloc's shell
        STEP | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_without_a_launcher_settings_stay(environ):
    assert follow_launcher("auto", 1, environ) == ("auto", 1)


def test_a_step_may_be_smaller_than_its_job():
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}
    environ = STEP | step | {"SLURM_STEP_NODELIST": "n2", "SLURM_NTASKS_PER_NODE": "2"}
    assert follow_launcher("auto", 1, environ) == (3, 1)
    assert (environ["SLURM_NTASKS_PER_NODE"], environ["SLURM_NNODES"]) == ("3", "1")
    assert environ["MASTER_ADDR"] == "n2"


def test_the_name_of_a_job_does_not_tear_its_ranks_apart():
    environ = STEP | {"SLURM_JOB_NAME": "bash"}
    assert follow_launcher("auto", 1, environ) == (2, 2)
    assert environ["SLURM_JOB_NAME"] not in ("bash", "interactive")


def test_steps_and_jobs_meet_at_ports_of_their_own():
    ports = set()
    for job in range(9990, 10010):
        for step in range(3):
            environ = STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            follow_launcher("auto", 1, environ)
            ports.add(int(environ["MASTER_PORT"]))
    assert len(ports) == 60
    assert all(15000 <= port < 32768 for port in ports)
    environ = STEP | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    follow_launcher("auto", 1, environ)
    assert environ["MASTER_PORT"] == "15091"
    environ = STEP | {"MASTER_PORT": "4711", "MASTER_ADDR": "me"}
    follow_launcher("auto", 1, environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("me", "4711")


@pytest.mark.parametrize(
    ("devices", "num_nodes", "environ", "words"),
    [
        (3, 1, STEP, "trainer.devices: 3, but Slurm starts 2 per node; leave it out"),
        ([0], 2, STEP, "trainer.devices: 1, but Slurm starts 2 per node"),
        ("auto", 3, STEP, "trainer.num_nodes: 3, but Slurm uses 2"),
        ("auto", 1, BATCH, "only one of them runs; put srun before fedsim"),
        ("auto", 1, STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, "--ntasks-per-node"),
        ("auto", 1, STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "4 tasks cannot be spread evenly over 2 nodes"),
        ("two", 1, STEP, "trainer.devices: two is not a number of ranks"),
        (-2, 1, TORCHRUN, "trainer.devices: -2 is not a number of ranks"),
        (2, 1, TORCHRUN, "trainer.devices: 2, but torchrun starts 3 per node"),
        ("auto", 4, TORCHRUN, "trainer.num_nodes: 4, but torchrun uses 2"),
        ("auto", 2, {}, "trainer.num_nodes: 2, but there is no launcher to start them; use torchrun or Slurm"),
        (1, 3, BATCH | {"SLURM_JOB_NAME": "bash"}, "trainer.num_nodes: 3, but there is no launcher"),
        (1, 2, {name: BY_HAND[name] for name in ("MASTER_ADDR", "MASTER_PORT")}, "NODE_RANK set"),
        (1, 2, {name: BY_HAND[name] for name in ("MASTER_ADDR", "NODE_RANK")}, "MASTER_PORT and"),
        (1, 2, {name: BY_HAND[name] for name in ("MASTER_PORT", "NODE_RANK")}, "MASTER_ADDR, "),
        (1, 2, BY_HAND | {"NODE_RANK": "2"}, "NODE_RANK: 2 is not one of 0 to 1; trainer.num_nodes is 2"),
        (1, 2, BY_HAND | {"NODE_RANK": "first"}, "NODE_RANK: first is not one of 0 to 1"),
        ("auto", 1, TORCHRUN | {"WORLD_SIZE": "5"}, "the same --nproc-per-node"),
        ("auto", 1, TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "2"}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_contradictions_are_refused(devices, num_nodes, environ, words):
    with pytest.raises(ConfigError) as error:
        follow_launcher(devices, num_nodes, dict(environ))
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK"])
def test_nodes_that_are_started_one_by_one_say_whom_they_wait_for(caplog, name):
    environ = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", name: "1"}
    with caplog.at_level("INFO", logger="fedsim"):
        assert follow_launcher(4, 2, environ) == (4, 2)
    assert caplog.messages == [
        "NODE_RANK 1 of 2 nodes: waits at first:29500 for the others, for at most trainer.strategy.timeout"
    ]


def test_several_nodes_without_a_launcher_are_one_line_at_once(capsys, tiny, tmp_path, in_environment):
    in_environment({})
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", "--trainer.num_nodes", 2)
    assert line.startswith("fedsim: error: trainer.num_nodes: 2, but there is no launcher")
    assert not (tmp_path / "run").exists()


def test_restarts_over_several_nodes_are_possible_with_a_store_for_each():
    environ = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert follow_launcher("auto", 1, environ) == (3, 2)


@pytest.fixture
def in_environment(monkeypatch):
    """Set variables for this test; also those that a command adds are gone afterwards."""

    def enter(variables):
        monkeypatch.setattr(os, "environ", os.environ)
        for name in {*variables, "SLURM_NTASKS_PER_NODE", "MASTER_ADDR", "MASTER_PORT"}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return enter


@pytest.mark.parametrize("environ", [STEP | {"SLURM_PROCID": "0"}, TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}])
def test_a_contradiction_is_one_line(capsys, tiny, tmp_path, in_environment, environ):
    in_environment(environ)
    assert main(["fit", "--config", str(tiny), "--run_dir", str(tmp_path / "run"), "--trainer.devices=7"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fedsim: error: trainer.devices: 7, but ")


def test_describe_needs_no_ranks(capsys, tiny, in_environment):
    in_environment(BATCH | {"SLURM_PROCID": "0"})
    assert main(["describe", "--config", str(tiny), "--trainer.devices=1"]) == 0, capsys.readouterr().err


# -- where ranks meet --------------------------------------------------------------------------------------------------


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_answers_is_right(host, port):
    check_address(host, port, listens=True, patience=5)
    check_address(host, port, listens=False, patience=5)  # refused: rank 0 is not there yet
    with socket.create_server(("", port)):
        check_address(host, port, listens=False, patience=5)


def refuse_address(host, port, listens):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR: ") as error:
        check_address(host, port, listens, patience=1)
    assert time.monotonic() - start < 5
    assert "export MASTER_ADDR" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("listens", [True, False])
def test_a_name_that_is_unknown_is_named_in_time(port, listens):
    assert "no-such-host.invalid does not resolve on " in refuse_address("no-such-host.invalid", port, listens)


def test_an_address_that_does_not_answer_is_named_in_time(port, monkeypatch):
    def connect(address, timeout):
        time.sleep(timeout)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert f"127.0.0.1, port {port}, gives no answer within 1 s" in refuse_address("127.0.0.1", port, listens=False)


def test_an_address_of_another_machine_is_named_in_time(port, monkeypatch):
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(socket, "create_connection", lambda _, timeout: connect(other.getsockname(), timeout))
        message = refuse_address("127.0.0.1", port, listens=True)
    assert f"127.0.0.1, port {port}, does not lead to rank 0 on " in message


def test_the_name_of_a_node_is_said_to_be_one(monkeypatch, port):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "no-such-[3-4]")
    with pytest.raises(ConfigError, match=r"no-such-3 \(the name of Slurm's first node\) does not resolve"):
        check_address("no-such-3", port, listens=False, patience=0.5)


def test_a_port_in_use_is_named(port):
    with socket.create_server(("", port)), pytest.raises(ConfigError, match=f"^MASTER_PORT: .* {port} .*in use"):
        check_address("127.0.0.1", port, listens=True, patience=1)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [STEP, TORCHRUN])
def test_rank_0_speaks_first_where_the_launcher_ends_all_at_the_first_exit(monkeypatch, environ):
    before = signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setattr("fedsim.strategy.launch._LINGER", 0.2)
        start = time.monotonic()
        assert await_rank_0(2, environ)
        assert time.monotonic() - start >= 0.2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not await_rank_0(2, {})


# -- other launchers ---------------------------------------------------------------------------------------------------


def test_a_job_is_started_again_unless_told_otherwise():
    assert Preemption().requeue


def test_a_notebook_has_one_rank(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as in IPython
    alone = Trainer(devices=1, accelerator="cpu", enable_progress_bar=False)
    assert alone.strategy.launcher.is_interactive_compatible
    with pytest.raises(ConfigError, match=r"trainer\.devices: a notebook cannot start 2 ranks"):
        Trainer(devices=2, accelerator="cpu", enable_progress_bar=False)


def test_a_wait_for_ranks_that_never_come_is_one_line_and_a_long_one_is_announced(monkeypatch, caplog):
    caplog.set_level("INFO", logger="fedsim")
    monkeypatch.setattr("fedsim.strategy.launch._QUIET", 0.01)

    def wait(text):
        with awaiting_ranks(0, 2, 600.0):
            time.sleep(0.5)
            raise RuntimeError(text)

    with pytest.raises(ConfigError, match=r"^trainer.strategy.timeout: rank 0 waited 600 s at .* not all of 2 ranks"):
        wait("Timed out after 601 seconds waiting for clients. 1/2 clients joined.")
    assert "for all 2 ranks" in caplog.text
    with pytest.raises(RuntimeError, match="another"):
        wait("another")
