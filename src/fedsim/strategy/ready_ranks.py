"""Launchers of ranks: the other ranks of a machine start in spares, if there are any, and end with their launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only

from fedsim.core import spares
from fedsim.core.errors import ConfigError
from fedsim.strategy.channel import end_process, end_with_launcher
from fedsim.strategy.notebook import check_notebook

PATIENCE = 10.0
"""seconds for rank 0 to end by itself, with a better message, after another rank of its machine has ended"""
_PERIOD = 0.2  # seconds between two looks at the other ranks

LAUNCHER_ID = "FEDSIM_LAUNCHER"
"""in the environment: process id of the rank 0 that starts the other ranks of its machine"""


class ReadyRanks(_SubprocessScriptLauncher):
    """Lightning's launcher; spares become the ranks if their number is the right one.

    Lightning's observer kills rank 0 without a message when another rank ends. So it gets no processes to observe, and
    :class:`_RankWatch` takes its place.
    """

    _watch: _RankWatch | None = None
    is_interactive_compatible = True  # in notebooks there is one rank: see check_notebook

    def _call_children_scripts(self) -> None:
        self._start_ranks()
        started, self.procs = self.procs, []
        first = self.cluster_environment.node_rank() * self.num_processes + 1
        self._watch = _RankWatch({first + position: process for position, process in enumerate(started)})
        self._watch.start()

    def kill(self, signum: int) -> None:
        """Send a signal to the other ranks."""
        for process in self._watch.processes.values() if self._watch else []:
            with suppress(OSError):
                process.send_signal(signum)

    def dead_ranks(self) -> Sequence[int]:
        """Return the started ranks that have failed, the first one first."""
        return self._watch.look() if self._watch else ()

    def _start_ranks(self) -> None:
        if spares.count() != self.num_processes - 1:
            spares.dismiss()  # the final config has another number of ranks than the command line
            super()._call_children_scripts()
            return
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ |= {  # as Lightning does
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        self.procs = spares.take()
        for local_rank, spare in enumerate(self.procs, start=1):
            spares.begin(spare, sys.argv[1:], {**os.environ, "LOCAL_RANK": str(local_rank)})


class _RankWatch(threading.Thread):
    """Ends rank 0 in one line some seconds after another rank of its machine has failed, if it is still there.

    Usually it is not: the control channel reports it. But before the channel exists, rank 0 would wait for minutes.
    """

    def __init__(self, processes: dict[int, Any]) -> None:
        super().__init__(name="fedsim ranks", daemon=True)
        self.processes = processes
        self._failed: dict[int, int] = {}  # rank -> exit code, in the order of the ends
        self._is_over = False
        self._lock = threading.Lock()

    def look(self) -> list[int]:
        """Return the ranks that have failed, the first one first; of those found at once, the killed ones."""
        with self._lock:
            codes = {rank: process.poll() for rank, process in self.processes.items() if rank not in self._failed}
            killed_first = sorted(codes.items(), key=lambda rank_and_code: (rank_and_code[1] or 0) >= 0)
            self._failed |= {rank: code for rank, code in killed_first if code}
            self._is_over = bool(self._failed) or None not in codes.values()
            return [*self._failed]

    def run(self) -> None:
        """Watch until all ranks have ended well, or one has failed."""
        while not (failed := self.look()) and not self._is_over:
            time.sleep(_PERIOD)
        if not failed:
            return
        time.sleep(PATIENCE)
        for process in self.processes.values():
            with suppress(OSError):
                process.send_signal(signal.SIGKILL)
        end_process(f"rank {failed[0]} {_ending(self._failed[failed[0]])}; its own message, if any, is above")


def _ending(code: int) -> str:
    """Describe an exit code.

    >>> _ending(-9), _ending(1)
    ('was ended by SIGKILL', 'ended with exit code 1')
    """
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def check_variables(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Check the variables by which Lightning finds this process's place, if no launcher that it knows has set them.

    Raises:
        ConfigError: if this process would be a rank that the run does not have, or wait for ranks that nothing starts.
    """
    is_own = os.environ.get(LAUNCHER_ID) is not None  # fedsim has set them
    if not isinstance(environment, LightningEnvironment) or is_own:
        return
    local, node = environment.local_rank(), environment.node_rank()
    rank = int(os.environ.get("RANK", node * num_processes + local))
    problem = (
        f"LOCAL_RANK: {local} in the environment, but this machine has {num_processes} of the run's processes"
        if local >= num_processes
        else f"NODE_RANK: {node} in the environment, but trainer.num_nodes is {num_nodes}"
        if node >= num_nodes
        else f"RANK: {rank} in the environment, but this process is rank {node * num_processes + local} of the run"
        if rank != node * num_processes + local
        else ""
    )
    if problem:
        setattr(rank_zero_only, "rank", 0)  # noqa: B010 - an attribute of a function; no other process prints the error
        name = problem.partition(":")[0]
        raise ConfigError(f"{problem}, and no launcher started it; unset {name}, or use torchrun or Slurm")
    if not environment.creates_processes_externally:
        os.environ.pop("RANK", None)  # the ranks that this process starts would all believe that it is theirs
    if num_processes * num_nodes == 1 or "LOCAL_RANK" not in os.environ:
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        setattr(rank_zero_only, "rank", 0)  # noqa: B010 - as above
        raise ConfigError(
            f"LOCAL_RANK: {environment.local_rank()} in the environment, so this process would wait for "
            f"{num_processes * num_nodes - 1} more of a launcher, but none has set {missing[0]}; unset LOCAL_RANK, "
            "then fedsim starts them, or use torchrun or Slurm (docs/cluster.md)"
        )


def new_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> _SubprocessScriptLauncher:
    """Return the launcher that runs the command line again in each process.

    Raises:
        ConfigError: in a notebook that would have to start other ranks.
    """
    check_notebook(num_processes * num_nodes, environment)
    return ReadyRanks(environment, num_processes, num_nodes)


def follow_starter(environment: ClusterEnvironment) -> None:
    """Let this process end with the process that started it, or, as the starter, publish its id."""
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False  # it would save in the middle of a round; Preemption does not
        end_with_launcher(os.getppid())
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher(os.getppid())
    elif not environment.creates_processes_externally:  # then this process will start the others
        os.environ[LAUNCHER_ID] = str(os.getpid())
    elif os.environ.get(LAUNCHER_ID, str(os.getpid())) != str(os.getpid()):
        end_with_launcher(int(os.environ[LAUNCHER_ID]))
