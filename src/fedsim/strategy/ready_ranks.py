"""The start of a machine's other ranks, in processes that have imported PyTorch meanwhile where there are some."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from fedsim.core import spares


class ReadyRanks(_SubprocessScriptLauncher):
    """Lightning's launcher; spares become the ranks if there are as many as it needs."""

    def _call_children_scripts(self) -> None:
        if spares.count() != self.num_processes - 1:
            spares.dismiss()  # the command line asked for another number than the config that came of it
            super()._call_children_scripts()
            return
        self._check_can_spawn_children()
        own = self.cluster_environment
        os.environ |= {  # as Lightning does
            "MASTER_ADDR": own.main_address,
            "MASTER_PORT": str(own.main_port),
            "NODE_RANK": str(own.node_rank()),
            "LOCAL_RANK": str(own.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        self.procs = spares.take()
        for local_rank, spare in enumerate(self.procs, start=1):
            spares.begin(spare, sys.argv[1:], {**os.environ, "LOCAL_RANK": str(local_rank)})
