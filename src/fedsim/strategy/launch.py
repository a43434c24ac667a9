"""What Slurm or torchrun has decided before fedsim starts: how many ranks there are, where they meet, who starts again.

Both start the processes themselves and describe them in environment variables; fedsim asks for nothing that is written
there, and refuses what contradicts it. docs/cluster.md is for users.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from fedsim.core.errors import ConfigError

__all__ = [
    "Launch",
    "await_rank_0",
    "check_address",
    "find_launch",
    "follow_launcher",
    "leave_launcher",
    "requeue",
]

log = logging.getLogger(__name__)

Environment = MutableMapping[str, str]
Devices = list[int] | str | int

_INTERACTIVE = ("bash", "interactive")  # names of jobs that Lightning takes for a shell, with nothing to join
_FIRST_PORT, _PORTS = 15000, 17000  # below the range from which Linux takes ports for outgoing connections
_PAUSE = 0.5
"""Seconds between two attempts to reach an address."""
_LINGER = 5.0
"""Seconds by which rank 0 may be later than the others."""
_ARRIVAL = 3.0
"""Seconds that a word to itself may take."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes that a launcher has started for one run."""

    launcher: str
    """for messages"""
    nodes: int
    per_node: int
    remedy: str
    """how another number of processes per node is asked for"""


# -- how many ranks ----------------------------------------------------------------------------------------------------


def follow_launcher(devices: Devices, num_nodes: int, environ: Environment = os.environ) -> tuple[Devices, int]:
    """Return ``trainer.devices`` and ``trainer.num_nodes`` as the launcher has settled them.

    Args:
        devices: as configured; ``auto`` or -1 takes what the launcher says.
        num_nodes: as configured; 1, the default, takes what the launcher says.
        environ: completed by what Lightning and torch read there.

    Raises:
        ConfigError: what is configured, or how the run was launched, contradicts the launcher.
    """
    launch = find_launch(environ)
    if launch is None:
        if num_nodes > 1:
            _check_by_hand(num_nodes, environ)
        return devices, num_nodes
    given = _count(devices)
    if given is None and str(devices).strip() not in ("auto", "-1"):
        raise ConfigError(f"trainer.devices: {devices} is no number of ranks; leave it out (auto)")
    if given is not None and given != launch.per_node:
        raise ConfigError(
            f"trainer.devices: {given}, but {launch.launcher} starts {launch.per_node} per node; "
            f"leave it out (auto), or {launch.remedy}={given}"
        )
    if num_nodes not in (1, launch.nodes):
        raise ConfigError(f"trainer.num_nodes: {num_nodes}, but {launch.launcher} uses {launch.nodes}; leave it out")
    if launch.launcher == "Slurm":
        _complete_slurm(environ, launch)
    return (launch.per_node if given is None else devices), launch.nodes


def _check_by_hand(num_nodes: int, environ: Environment) -> None:
    """See whether the variables are set by which nodes find each other that somebody starts one by one; say who waits.

    They are those of Lightning's own environment; NODE_RANK may be called GROUP_RANK.
    """
    if LSFEnvironment.detect() or MPIEnvironment.detect():  # which Lightning follows by itself
        return
    number = environ.get("NODE_RANK", environ.get("GROUP_RANK"))
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if number is None or host is None or port is None:
        raise ConfigError(
            f"trainer.num_nodes: {num_nodes}, but there is no launcher to start them; use torchrun or Slurm "
            "(docs/cluster.md), or start fedsim on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK set"
        )
    if number not in map(str, range(num_nodes)):
        raise ConfigError(f"NODE_RANK: {number} is not one of 0 to {num_nodes - 1}, as trainer.num_nodes says")
    log.info(
        "NODE_RANK %s of %d nodes: waits at %s:%s for the others, as long as trainer.strategy.timeout says",
        number, num_nodes, host, port,
    )  # fmt: skip


def leave_launcher(environ: Environment = os.environ) -> None:
    """Make this process one of its own, for a command that trains nothing: Lightning then finds no launcher."""
    for name in ("SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        environ.pop(name, None)


def find_launch(environ: Environment = os.environ) -> Launch | None:
    """Return what started this process, or None: then Lightning starts the ranks of this machine.

    Raises:
        ConfigError: the launcher was used in a way that cannot work.
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
        raise ConfigError(f"Slurm: the job has {tasks} tasks, but only one of them runs; put srun before fedsim")
    return _slurm(environ, tasks)


def _slurm(environ: Environment, tasks: int) -> Launch:
    # of the step, not of the job: srun may start fewer
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1) if tasks > 1 else 1
    spread = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # 2(x3): two on each of three; 2,1: unequal
    if tasks % nodes or "," in spread:
        raise ConfigError(
            f"Slurm: {tasks} tasks cannot be spread evenly over {nodes} nodes ({spread or 'unequal'}); "
            "use --ntasks-per-node"
        )
    return Launch(launcher="Slurm", nodes=nodes, per_node=tasks // nodes, remedy="sbatch --ntasks-per-node")


def _complete_slurm(environ: Environment, launch: Launch) -> None:
    """Say of the step what Lightning reads of the job, and where its ranks meet."""
    environ["SLURM_NTASKS"] = str(launch.nodes * launch.per_node)
    environ["SLURM_NTASKS_PER_NODE"] = str(launch.per_node)
    environ["SLURM_NNODES"] = str(launch.nodes)
    if environ.get("SLURM_JOB_NAME") in _INTERACTIVE:  # every task would take itself for a run of its own
        environ["SLURM_JOB_NAME"] = "fedsim"
    if "MASTER_ADDR" not in environ and (nodes := _slurm_nodes(environ)):
        environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(nodes)
    environ.setdefault("MASTER_PORT", str(_slurm_port(environ)))


def _slurm_nodes(environ: Environment) -> str:
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")


def _slurm_port(environ: Environment) -> int:
    """Derive the port at which ranks meet, another one for every step of a job, and for the jobs before and after it.

    >>> _slurm_port({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    15091
    """
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (13 * job + step) % _PORTS


def _torchrun(environ: Environment) -> Launch:
    ranks, per_node, nodes = (
        int(environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
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
    """Return how many devices a setting means; None: as many as there are.

    >>> [_count(devices) for devices in ("auto", -1, 2, "2", [0, 3], "0,3", "0,")]
    [None, None, 2, 2, 2, 2, 1]
    """
    if isinstance(devices, list):
        return len(devices)
    text = str(devices).strip()
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    return int(text) if text.isdigit() else None


# -- where they meet ---------------------------------------------------------------------------------------------------


def check_address(host: str, port: int, listens: bool, patience: float) -> None:
    """See whether ranks can meet at an address; torch would try for minutes, and not say what it tries.

    A machine that refuses the connection is there: rank 0 may still be importing. That is torch's to wait for.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        listens: whether this process will listen there; then the address must lead to itself.
        patience: seconds.

    Raises:
        ConfigError: the address does not resolve, does not answer, or leads elsewhere.
    """
    deadline = time.monotonic() + patience
    _resolve(host, deadline, patience)
    if listens:
        with _listening(port) as server:
            _reach(host, port, deadline, patience, server)
    else:
        _reach(host, port, deadline, patience)


def _resolve(host: str, deadline: float, patience: float) -> None:
    """Look a name up until it is known: of a new pod or node it may become so late."""
    found, problem = threading.Event(), ["no answer from the name service"]

    def look_up() -> None:  # in a thread, because nothing else limits its time
        while not found.is_set() and time.monotonic() < deadline:
            try:
                socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                found.set()
            except OSError as error:
                problem[0] = error.strerror or str(error)
                time.sleep(_PAUSE)

    threading.Thread(target=look_up, name="fedsim look-up", daemon=True).start()
    if not found.wait(max(deadline - time.monotonic(), 0)):
        raise ConfigError(
            f"MASTER_ADDR: {_named(host)} does not resolve on {socket.gethostname()} within {patience:.0f} s "
            f"({problem[0]}); export MASTER_ADDR with an address of rank 0's machine that all machines reach"
        )


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """Listen as rank 0 will."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT: rank 0 cannot listen at {port} on {socket.gethostname()} ({error.strerror}); "
            "export MASTER_PORT with a free one"
        ) from error
    with server:
        yield server


def _reach(host: str, port: int, deadline: float, patience: float, server: socket.socket | None = None) -> None:
    """Connect, if ``server`` is given to that."""
    problem = "no answer"
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)) as connection:
                if server is None or _leads_to(server, connection, deadline):
                    return
            problem = "it is another machine's"
            break
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and server is None:
                return
            problem = error.strerror or "no answer"
        if time.monotonic() + _PAUSE > deadline or server is not None:
            break
        time.sleep(_PAUSE)
    where = f"gives no answer within {patience:.0f} s" if server is None else "does not lead to rank 0"
    raise ConfigError(
        f"MASTER_ADDR: {_named(host)}, port {port}, {where} on {socket.gethostname()} ({problem}); "
        "export MASTER_ADDR with an address of rank 0's machine that all machines reach"
    )


def _leads_to(server: socket.socket, connection: socket.socket, deadline: float) -> bool:
    """See whether ``connection`` came in at ``server``; other ranks may come in between."""
    token = secrets.token_bytes(16)
    connection.sendall(token)
    # on loopback this is immediate; the connection stands, so there is no name or route to wait for
    deadline = min(deadline, time.monotonic() + _ARRIVAL)
    while (rest := deadline - time.monotonic()) > 0:
        server.settimeout(rest)
        try:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(_PAUSE)
                if peer.recv(len(token)) == token:
                    return True
        except OSError:  # nobody, or one that says nothing
            continue
    return False


def _named(host: str) -> str:
    nodes = _slurm_nodes(os.environ)
    is_default = nodes and SLURMEnvironment.resolve_root_node_address(nodes) == host
    return f"{host} (the name of Slurm's first node)" if is_default else host


# -- the end -----------------------------------------------------------------------------------------------------------


def await_rank_0(code: int, environ: Environment = os.environ) -> bool:
    """Give rank 0 time to say what is wrong on all ranks: srun and torchrun end all when the first one fails.

    Args:
        code: exit code of this process, should the launcher end it meanwhile.
        environ: of this process.

    Returns:
        whether this rank is still there, and so may be the only one with this error; False without such a launcher.
    """
    if "TORCHELASTIC_RUN_ID" not in environ and "SLURM_STEP_ID" not in environ:
        return False
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(_LINGER)
    return True


# -- starting again ----------------------------------------------------------------------------------------------------


def requeue(environ: Environment = os.environ) -> None:
    """Ask Slurm to start this job again from the beginning of its script; outside of Slurm do nothing.

    Slurm ends what is left of the job, so this comes last. What goes wrong is one warning.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in environ:  # the task alone, not those beside it
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        problem = "" if result.returncode == 0 else re.sub(r"\s+", " ", result.stderr.strip()) or "it does not say why"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log.warning("job %s does not start again by itself: scontrol requeue failed (%s)", job, problem)
    else:
        log.info("Slurm starts job %s again", job)
