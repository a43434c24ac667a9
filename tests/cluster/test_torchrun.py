"""Ranks that torchrun starts, on one node and on two (two agents on the loopback device)."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from environment import is_of_a_launcher
from failing import (
    CONFIG,
    PATIENCE,
    Run,
    assert_equal,
    await_gate,
    await_true,
    errors,
    finish,
    fit,
    gate_of,
    last,
    open_gate,
    options,
    processes_of,
    read_result,
    variable,
)
from fedsim.strategy.checkpoint_files import read_checkpoint

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TESTS = Path(__file__).parents[1]
# round 2 does not end by itself, and ranks that are not waited for long
HELD = ["--trainer.callbacks+=failing.Gate"]
SHORT = ["--trainer.strategy.silence_timeout=0:00:15"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of the run in one process, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(fit(folder))
    return read_result(last(folder))


class Agents:
    """A fit under one torchrun for each node, all on this machine; ``python`` starts agents and ranks."""

    def __init__(self, folder, *args, nodes=1, per_node=2, flags=(), environment=None, python=sys.executable):
        config = folder.with_suffix(".yaml")
        config.write_text(CONFIG.replace("  devices: 1\n", ""))
        self.folder = folder
        self.logs = [folder.parent / f"agent-{time.monotonic_ns()}-{node}.txt" for node in range(nodes)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [python, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", per_node,
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test", *flags,
                   "-m", "fedsim", "fit", "--config", config, "--run_dir", folder, *args]  # fmt: skip
        own = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
        own |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)} | (environment or {})
        self.processes = []
        for log in self.logs:
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=own, start_new_session=True)
                )

    @property
    def log(self):
        """What all agents and ranks have written so far."""
        return "\n".join(path.read_text() for path in self.logs)

    def wait(self):
        """Return the exit codes of the agents; after that no process of the run is left."""
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                pytest.fail(f"an agent still runs after {PATIENCE} s\n{self.log}")
        await_true(lambda: not processes_of(self.folder), PATIENCE, lambda: self.log)
        return [process.returncode for process in self.processes]

    def finish(self):
        """Wait for a run that must succeed."""
        assert not any(self.wait()), self.log
        return self

    def ranks(self):
        """Return the process ids of the ranks."""
        found = {variable(pid, "RANK"): pid for pid in processes_of(self.folder)}
        return {int(rank): pid for rank, pid in found.items() if rank is not None}

    def rank(self, number):
        """Return the process id of a rank."""
        return self.ranks()[number]

    def errors(self):
        """Return what the ranks call errors."""
        prefix = "fedsim: error: "
        return [line.removeprefix(prefix) for line in self.log.splitlines() if line.startswith(prefix)]

    def kill(self):
        """Kill what is left."""
        for pid in {*(process.pid for process in self.processes), *processes_of(self.folder)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def torchrun(folder, *args, **options):
    """Agents that do not outlive a block."""
    agents = Agents(folder, *args, **options)
    try:
        yield agents
    finally:
        agents.kill()


# -- in every test run -------------------------------------------------------------------------------------------------


def test_a_fit_under_torchrun_has_the_bits_of_one_process(whole, tmp_path, quick_python):
    with torchrun(tmp_path / "run", python=quick_python.python) as run:
        run.finish()
    assert len(read_checkpoint(last(run.folder))["fedsim"]["files"]) == 2
    assert_equal(read_result(last(run.folder)), whole)


def test_a_wrong_address_is_named_in_time(tmp_path):
    run = Run(tmp_path, "fit", *options(tmp_path / "run"), ranks=2, environment={"MASTER_ADDR": "no-such-host.invalid"})
    assert run.wait(timeout=PATIENCE) == [2, 2], run.output  # torch alone would try for ten minutes
    assert len(errors(run.log())) == 1
    assert "MASTER_ADDR: no-such-host.invalid does not resolve on " in run.log()


# -- make test-cluster -------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2)])
def test_a_fit_under_two_agents_has_the_bits_of_one_process(whole, tmp_path, nodes, per_node):
    with torchrun(tmp_path / "run", nodes=nodes, per_node=per_node) as run:
        run.finish()
    assert len(read_checkpoint(last(run.folder))["fedsim"]["files"]) == nodes * per_node
    assert_equal(read_result(last(run.folder)), whole)


@pytest.mark.cluster
def test_an_agent_that_gives_itself_a_wrong_name_is_found_out_in_time(tmp_path):
    separate = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks meet where the agents do
    flags = ["--local-addr", "no-such-host.invalid"]
    with torchrun(tmp_path / "run", nodes=2, per_node=1, flags=flags, environment=separate) as run:
        await_true(lambda: run.errors(), PATIENCE, lambda: run.log)  # torch alone would try for ten minutes
        assert "MASTER_ADDR: no-such-host.invalid does not resolve on " in run.errors()[0]
        assert all(run.wait())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("flags", "args", "words"),
    [
        ([], ["--trainer.devices=3"], "trainer.devices: 3, but torchrun starts 1 per node"),
        ([], ["--trainer.num_nodes=3"], "trainer.num_nodes: 3, but torchrun uses 2"),
        (["--max-restarts", "2"], [], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_a_mismatch_is_one_line(tmp_path, flags, args, words):
    with torchrun(tmp_path / "run", *args, nodes=2, per_node=1, flags=flags) as run:
        assert all(run.wait())
        assert {line for line in run.errors() if words in line} == set(run.errors())
        assert run.errors()


@pytest.mark.cluster
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda number: number.name)
def test_when_a_rank_is_lost_all_end_and_a_restart_has_the_same_bits(whole, tmp_path, number, victim, nodes):
    with torchrun(tmp_path / "run", *HELD, *SHORT, nodes=nodes, per_node=2 // nodes) as run:
        await_gate(run.folder, lambda: run.log)
        lost = run.rank(victim)
        os.kill(lost, number)
        if number == signal.SIGTERM:  # which ends the round of all ranks
            await_true(lambda: not (gate_of(run.folder) / str(victim)).exists(), PATIENCE, lambda: run.log)
            open_gate(run.folder)
        if number == signal.SIGSTOP and nodes == 2:  # nobody but its own agent could end it, and that waits for it
            await_true(lambda: 1 - victim not in run.ranks(), PATIENCE, lambda: run.log)
            survivor = next(process for process in run.processes if process.pid != parent(lost))
            assert survivor.wait(PATIENCE)
            with suppress(ProcessLookupError):  # here the nodes are one machine: the other rank has continued it
                os.kill(lost, signal.SIGKILL)
        assert any(run.wait()), run.log
        text = "\n".join(run.errors())
        if number == signal.SIGTERM:
            assert "stopped by SIGTERM" in text
        else:
            assert f"rank {victim} " in text, run.log
            assert "in round 2, " in text, run.log
    again = fit(run.folder, "--ckpt_path", "last")  # in one process, from the last round
    finish(again)
    assert_equal(read_result(last(run.folder)), whole)


@pytest.mark.cluster
def test_the_others_end_though_a_frozen_rank_stays_and_the_end_of_python_would_wait(tmp_path):
    """As with NCCL, whose end may wait for a lost rank. The frozen rank's agent ends it."""
    with torchrun(tmp_path / "run", *HELD, *SHORT, "--trainer.callbacks+=failing.StuckEnd", per_node=3) as run:
        await_gate(run.folder, lambda: run.log, ranks=3)
        os.kill(run.rank(1), signal.SIGSTOP)
        assert all(run.wait()), run.log
        assert "rank 1 gave no sign of life" in "\n".join(run.errors())


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_end_with_their_agent(whole, tmp_path, victim):
    with torchrun(tmp_path / "run", *HELD, *SHORT, nodes=2, per_node=1) as run:
        await_gate(run.folder, lambda: run.log)
        run.processes[victim].kill()
        assert all(run.wait())
        assert "launcher" in "\n".join(run.errors())
    with torchrun(run.folder, "--ckpt_path", "last", nodes=2, per_node=1) as again:
        again.finish()
    assert_equal(read_result(last(run.folder)), whole)


@pytest.mark.cluster
def test_torchrun_restarts_a_run_where_it_was(whole, tmp_path):
    args = ["--ckpt_path", "last", *SHORT, *HELD]
    separate = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    flags = ["--max-restarts", "3"]
    with torchrun(tmp_path / "run", *args, nodes=2, per_node=1, flags=flags, environment=separate) as run:
        await_gate(run.folder, lambda: run.log)
        os.kill(run.rank(1), signal.SIGKILL)
        open_gate(run.folder)
        run.finish()
    assert_equal(read_result(last(run.folder)), whole)
