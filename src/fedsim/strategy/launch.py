"""Slurm and torchrun: number of ranks, the address where ranks meet, and the restart of a job.

These launchers start the processes and describe them in environment variables, which settings must not contradict.
For users, see docs/cluster.md.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from fedsim.core.errors import ConfigError

log = logging.getLogger(__name__)

Environment = MutableMapping[str, str]
Devices = list[int] | str | int

_INTERACTIVE = ("bash", "interactive")  # Lightning treats jobs of these names as a shell without other ranks
_FIRST_PORT, _PORTS = 15000, 17000  # below the range of Linux's ports for outgoing connections
_PAUSE = 0.5  # seconds between two attempts to reach an address
_QUIET = 20.0  # seconds of a wait for other ranks without a message
_LINGER = 5.0  # seconds by which rank 0 may be later than the others
_ARRIVAL = 3.0  # seconds that a message of this process to its own address may take


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes that a launcher has started for one run."""

    launcher: str
    """its name, for messages"""
    nodes: int
    per_node: int
    remedy: str
    """option that sets the number of processes per node"""


# -- how many ranks ----------------------------------------------------------------------------------------------------


def follow_launcher(
    devices: Devices, num_nodes: int, environ: Environment = os.environ, *, ranks_per_device: int = 1
) -> tuple[Devices, int]:
    """Return ``trainer.devices`` and ``trainer.num_nodes`` of the launcher, or the configured ones without a launcher.

    If ``devices`` is ``auto`` or -1, or ``num_nodes`` is its default, 1, the launcher's number is used. A list of GPUs
    is for ``ranks_per_device`` times as many ranks. The variables that Lightning and torch read are set in ``environ``.

    Raises:
        ConfigError: if the config or the launch contradicts the launcher.
    """
    launch = find_launch(environ)
    if launch is None:
        if num_nodes > 1:
            _check_by_hand(num_nodes, environ)
        return devices, num_nodes
    count = _count(devices)
    if count is not None and not str(devices).strip().isdigit():
        count *= ranks_per_device
    if count is None and str(devices).strip() not in ("auto", "-1"):
        raise ConfigError(f"trainer.devices: {devices} is not a number of ranks; leave it out (auto)")
    if count is not None and count != launch.per_node:
        raise ConfigError(
            f"trainer.devices: {count}, but {launch.launcher} starts {launch.per_node} per node; "
            f"leave it out (auto), or {launch.remedy}={count}"
        )
    if num_nodes not in (1, launch.nodes):
        raise ConfigError(f"trainer.num_nodes: {num_nodes}, but {launch.launcher} uses {launch.nodes}; leave it out")
    if launch.launcher == "Slurm":
        _complete_slurm(environ, launch)
    return (launch.per_node if count is None else devices), launch.nodes


def check_place(environ: Environment = os.environ) -> None:
    """Check that the launcher has given this process a place; Lightning reads the variables without a message.

    Raises:
        ConfigError: if a variable is missing, or there is no such place; this process prints it, whatever its rank is.
    """
    launch = find_launch(environ)
    if launch is None:
        return
    is_slurm = launch.launcher == "Slurm"
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID") if is_slurm else ("LOCAL_RANK", "GROUP_RANK", "RANK")
    for name, number in zip(names, (launch.per_node, launch.nodes, launch.per_node * launch.nodes), strict=True):
        value_text = environ.get(name, "0" if name == "GROUP_RANK" else "").strip()  # Lightning's default
        if value_text and int(value_text) < number:
            continue
        setattr(rank_zero_only, "rank", 0)  # noqa: B010 - an attribute of a function
        problem = f"is {value_text}, but the run has {number}, counted from 0" if value_text else "is missing"
        raise ConfigError(
            f"{name}: {problem}; {launch.launcher} sets it for each process: start fedsim by it, or unset "
            f"{'SLURM_NTASKS' if is_slurm else 'TORCHELASTIC_RUN_ID'} to run alone"
        )


def _check_by_hand(num_nodes: int, environ: Environment) -> None:
    """Check Lightning's variables by which nodes find each other if a user starts them one by one."""
    if LSFEnvironment.detect() or MPIEnvironment.detect():  # Lightning supports these launchers itself
        return
    number = environ.get("NODE_RANK", environ.get("GROUP_RANK"))
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if None in (number, host, port):
        raise ConfigError(
            f"trainer.num_nodes: {num_nodes}, but there is no launcher to start them; use torchrun or Slurm "
            "(docs/cluster.md), or start fedsim on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK set"
        )
    if number not in {*map(str, range(num_nodes))}:
        raise ConfigError(f"NODE_RANK: {number} is not one of 0 to {num_nodes - 1}; trainer.num_nodes is {num_nodes}")
    log.info(
        "NODE_RANK %s of %d nodes: waits at %s:%s for the others, for at most trainer.strategy.timeout",
        number, num_nodes, host, port,
    )  # fmt: skip


def leave_launcher(environ: Environment = os.environ) -> None:
    """Hide the launcher from Lightning, for a command that trains nothing: this process then runs alone."""
    for name in ("SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        environ.pop(name, None)


def find_launch(environ: Environment = os.environ) -> Launch | None:
    """Return the launch of this process, or None if Lightning starts the ranks of this machine.

    Raises:
        ConfigError: if the launcher was used in a way that cannot work.
    """
    if "TORCHELASTIC_RUN_ID" in environ:  # first, as in Lightning: torchrun may run within Slurm
        return _torchrun(environ)
    if "SLURM_NTASKS" not in environ:
        return None
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
    is_shell = environ.get("SLURM_JOB_NAME") in _INTERACTIVE
    if is_shell and (tasks == 1 or "SLURM_STEP_ID" not in environ):
        return None
    if "SLURM_STEP_ID" not in environ and tasks > 1:
        setattr(rank_zero_only, "rank", 0)  # noqa: B010 - an attribute of a function; no other process prints the error
        raise ConfigError(f"Slurm: the job has {tasks} tasks, but only one of them runs; put srun before fedsim")
    # the step's numbers, not the job's: srun may start fewer
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1) if tasks > 1 else 1
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # 2(x3): two on each of three; 2,1: unequal
    if tasks % nodes or "," in spread:
        raise ConfigError(
            f"Slurm: {tasks} tasks cannot be spread evenly over {nodes} nodes ({spread or 'unequal'}); "
            "use --ntasks-per-node"
        )
    return Launch(launcher="Slurm", nodes=nodes, per_node=tasks // nodes, remedy="sbatch --ntasks-per-node")


def _complete_slurm(environ: Environment, launch: Launch) -> None:
    """Set the job's variables, which Lightning reads, to the step's values, and the address where ranks meet."""
    numbers = {"NTASKS": launch.nodes * launch.per_node, "NTASKS_PER_NODE": launch.per_node, "NNODES": launch.nodes}
    environ.update({f"SLURM_{name}": str(number) for name, number in numbers.items()})
    if environ.get("SLURM_JOB_NAME") in _INTERACTIVE:  # else every task would start a run of its own
        environ["SLURM_JOB_NAME"] = "fedsim"
    if "MASTER_ADDR" not in environ and (nodes := _slurm_nodes(environ)):
        environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(nodes)
    # each step of a job, and of neighbouring jobs, gets another port
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    environ.setdefault("MASTER_PORT", str(_FIRST_PORT + (13 * job + step) % _PORTS))


def _slurm_nodes(environ: Environment) -> str:
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")


def _torchrun(environ: Environment) -> Launch:
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    ranks, per_node, nodes = (int(environ.get(name, "1")) for name in names)
    if ranks != nodes * per_node:
        raise ConfigError(f"torchrun: {ranks} processes on {nodes} nodes; give all nodes the same --nproc-per-node")
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if nodes > 1 and restarts > 0 and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise ConfigError(
            f"torchrun: --max-restarts {restarts} over {nodes} nodes can join ranks of two attempts; set the variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes before torchrun, or --max-restarts 0"
        )
    return Launch(launcher="torchrun", nodes=nodes, per_node=per_node, remedy="torchrun --nproc-per-node")


def _count(devices: Devices) -> int | None:
    """Return the number of devices of a setting; None: all devices.

    >>> [_count(devices) for devices in ("auto", -1, 2, "2", [0, 3], "0,3", "0,")]
    [None, None, 2, 2, 2, 2, 1]
    """
    if isinstance(devices, list):
        return len(devices)
    value_text = str(devices).strip()
    if "," in value_text:
        return len([part for part in value_text.split(",") if part.strip()])
    return int(value_text) if value_text.isdigit() else None


# -- where they meet ---------------------------------------------------------------------------------------------------


def check_address(host: str, port: int, listens: bool, patience: float) -> None:
    """Check that ranks can meet at an address; torch would try for minutes without a message.

    A machine that refuses the connection exists: rank 0 may still be importing, and torch waits for it.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        listens: whether this process will listen there; then the address must lead to this process.
        patience: longest time, seconds.

    Raises:
        ConfigError: if the address does not resolve, does not answer, or leads elsewhere.
    """
    deadline = time.monotonic() + patience
    _resolve(host, deadline, patience)
    with _listening(port) if listens else nullcontext() as server:
        _reach(host, port, deadline, patience, server)


@contextmanager
def awaiting_ranks(rank: int, ranks: int, timeout: float) -> Iterator[None]:
    """Log that this process waits for the other ranks, if the block, in which they connect, takes long.

    Raises:
        ConfigError: if the others have not come within ``timeout`` seconds.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    remark = f"rank {rank} waits at {address} for all {ranks} ranks, for at most {timeout:.0f} s"
    timer = threading.Timer(_QUIET, log.info, [remark])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise ConfigError(
            f"trainer.strategy.timeout: rank {rank} waited {timeout:.0f} s at {address}, and not all of {ranks} ranks "
            "came; start all of them, or unset LOCAL_RANK and WORLD_SIZE if no launcher starts them"
        ) from error
    finally:
        timer.cancel()


def _resolve(host: str, deadline: float, patience: float) -> None:
    """Look a name up until it resolves: the name of a new pod or node may be registered late."""
    resolved, problem = threading.Event(), ["no answer from the name service"]

    def look_up() -> None:  # in a thread, because nothing else limits its time
        while not resolved.is_set() and time.monotonic() < deadline:
            try:
                socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                resolved.set()
            except OSError as error:
                problem[0] = error.strerror or str(error)
                time.sleep(_PAUSE)

    threading.Thread(target=look_up, name="fedsim look-up", daemon=True).start()
    if not resolved.wait(max(deadline - time.monotonic(), 0)):
        raise ConfigError(
            f"MASTER_ADDR: {_named(host)} does not resolve on {socket.gethostname()} within {patience:.0f} s "
            f"({problem[0]}); export MASTER_ADDR with an address of rank 0's machine that all machines reach"
        )


def _listening(port: int) -> socket.socket:
    """Listen at the port, as rank 0 will."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT: rank 0 cannot listen at {port} on {socket.gethostname()} ({error.strerror}); "
            "export MASTER_PORT with a free one"
        ) from error


def _reach(host: str, port: int, deadline: float, patience: float, server: socket.socket | None) -> None:
    """Connect to any process, or, if there is a ``server``, to that one."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)) as connection:
                if server is None or _leads_to(server, connection, deadline):
                    return
            problem = "it belongs to another machine"
            break
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and server is None:
                return
            problem = error.strerror or "no answer"
        if time.monotonic() + _PAUSE > deadline or server is not None:
            break
        time.sleep(_PAUSE)
    failure = f"gives no answer within {patience:.0f} s" if server is None else "does not lead to rank 0"
    raise ConfigError(
        f"MASTER_ADDR: {_named(host)}, port {port}, {failure} on {socket.gethostname()} ({problem}); "
        "export MASTER_ADDR with an address of rank 0's machine that all machines reach"
    )


def _leads_to(server: socket.socket, connection: socket.socket, deadline: float) -> bool:
    """Return whether ``connection`` reaches ``server``, to which other ranks may connect, too."""
    token = secrets.token_bytes(16)
    connection.sendall(token)
    # immediate on loopback: the connection exists, so no name or route needs time
    deadline = min(deadline, time.monotonic() + _ARRIVAL)
    while (remaining := deadline - time.monotonic()) > 0:
        server.settimeout(remaining)
        try:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(_PAUSE)
                if peer.recv(len(token)) == token:
                    return True
        except OSError:  # no connection, or one without a message
            continue
    return False


def _named(host: str) -> str:
    nodes = _slurm_nodes(os.environ)
    is_default = nodes and SLURMEnvironment.resolve_root_node_address(nodes) == host
    return f"{host} (the name of Slurm's first node)" if is_default else host


# -- the end -----------------------------------------------------------------------------------------------------------


def await_rank_0(code: int, environ: Environment = os.environ) -> bool:
    """Wait until rank 0 has reported an error that all ranks have: srun and torchrun end all ranks when one fails.

    ``code`` is the exit code if the launcher ends this process meanwhile. Returns whether a launcher was there and did
    not end it: this rank may then be the only one with the error.
    """
    if "TORCHELASTIC_RUN_ID" not in environ and "SLURM_STEP_ID" not in environ:
        return False
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(_LINGER)
    return True
