"""A federation as configured: the section ``model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from fedsim.core.checks import at_least, within
from fedsim.core.store import StorePlace
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.adaptive_backbones import AdaptiveBackbones
from fedsim.federation.aggregation.masked import Accounting
from fedsim.federation.components.availability import Availability
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.privacy import Privacy
from fedsim.federation.components.robust import Aggregation
from fedsim.federation.components.selection import AllClients, Selection
from fedsim.methods.base import Method
from fedsim.models.backbones import Backbone
from fedsim.models.reid import Neck
from fedsim.training.objective import Objective
from fedsim.training.settings import ClientOverride, LocalTraining, try_optimizer
from fedsim.training.statistics import StatisticsPolicy

__all__ = [
    "Accounting",
    "AdaptiveBackbones",
    "Aggregation",
    "AllClients",
    "Availability",
    "Backbone",
    "ClientOverride",
    "Evaluation",
    "Hardware",
    "LocalTraining",
    "Method",
    "Neck",
    "Objective",
    "OptimizerCallable",
    "Privacy",
    "Selection",
    "Settings",
    "StatisticsPolicy",
    "StorePlace",
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of :class:`~fedsim.federation.federation.Federation`, which documents them."""

    method: Method
    backbone: Backbone | nn.Module
    neck: Neck
    client: LocalTraining
    clients: Mapping[str, ClientOverride]
    objective: Objective
    selection: Selection
    availability: Availability
    adaptive_backbones: AdaptiveBackbones | None
    privacy: Privacy
    hardware: Hardware | None
    accounting: Accounting
    aggregation: Aggregation | None
    server_optimizer: OptimizerCallable | None
    bn_stats: StatisticsPolicy
    reduction: Literal["exact", "fp32"]
    on_bad_update: Literal["stop", "skip_client"]
    client_store: StorePlace
    evaluation: Evaluation
    threads: int
    seed: int

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        self.client.check("model.client")
        at_least("model", 1, threads=self.threads)
        within("model", "[1, 1024]", threads=self.threads)  # torch's own error is a page
        if self.server_optimizer is not None:
            try_optimizer("model.server_optimizer", self.server_optimizer)
