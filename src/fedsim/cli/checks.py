"""What can be found out about a fit before anything is written, and before other ranks start."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.wiring import axes_of


def check_assembly(model: Federation, data: FederatedDataModule) -> None:
    """Put a federation together without its clients' states, on the CPU, and drop it.

    Else a run directory would be begun, or an older run there replaced, for settings and data that do not go together.

    Raises:
        ConfigError: as the fit would.
    """
    how = replace(model.settings, client_store="host")
    nobody = len(data.federated.clients)  # a rank behind those of all clients
    parts = assemble(how, data, nobody, nobody + 1, torch.device("cpu"))
    axes_of(how, parts)
