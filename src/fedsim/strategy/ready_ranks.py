"""Launchers of ranks: the other ranks of a machine start in spares, if there are any, and end with their launcher."""

from __future__ import annotations

import os
import sys

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from fedsim.core import spares
from fedsim.strategy.channel import end_with_launcher
from fedsim.strategy.notebook import OneRank, check_notebook

LAUNCHER_ID = "FEDSIM_LAUNCHER"
"""in the environment: process id of the rank 0 that starts the other ranks of its machine"""


class ReadyRanks(_SubprocessScriptLauncher):
    """Lightning's launcher; spares become the ranks if their number is the right one."""

    def _call_children_scripts(self) -> None:
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


def new_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> _SubprocessScriptLauncher:
    """Return the launcher that runs the command line again in each process.

    Raises:
        ConfigError: in a notebook that would have to start other ranks.
    """
    check_notebook(num_processes * num_nodes, environment)
    launcher = OneRank if num_processes * num_nodes == 1 else ReadyRanks
    return launcher(environment, num_processes, num_nodes)


def follow_starter(environment: ClusterEnvironment, start_method: str) -> None:
    """Let this process end with the process that started it, or, as the starter, publish its id."""
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False  # it would save in the middle of a round; Preemption does not
        end_with_launcher(os.getppid())
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher(os.getppid())
    elif not environment.creates_processes_externally:  # then this process will start the others
        os.environ[LAUNCHER_ID] = str(os.getpid())
    elif os.environ.get(LAUNCHER_ID, str(os.getpid())) != str(os.getpid()) and start_method == "popen":
        end_with_launcher(int(os.environ[LAUNCHER_ID]))
