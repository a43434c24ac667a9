"""Checks of a run before anything is written, and before other ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning import Trainer

from fedsim.core.errors import ConfigError
from fedsim.core.metrics import METRICS_OF
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.assembly import assemble
from fedsim.federation.checkpoint import check_checkpoint
from fedsim.federation.checks.compatibility import check_trainer, warn_of_idle_ranks, warn_of_slow_precision
from fedsim.federation.events import strategy_of
from fedsim.federation.federation import Federation, listeners_of
from fedsim.federation.memory import check_memory, warn_of_states
from fedsim.models.weights import is_file
from fedsim.parsing.values import check_values


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value of a parsed config that is not allowed."""
    check_values(config, {"trainer": Trainer, "model": Federation, "data": FederatedDataModule})


def check_weights(settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse a backbone without ``weights`` in place of one that a config lets start from a file.

    The parser drops arguments that a new class does not have, and random weights would be scored in the file's place.

    Args:
        settings: those of the command line and its config files, also of replaced classes.
        config: as parsed.

    Raises:
        ConfigError: with the file and the backbone.
    """
    backbone, weights = config["model"]["backbone"], settings.get("model.backbone.weights")
    starts_from_file = isinstance(weights, str) and is_file(weights)
    if backbone and starts_from_file and "weights" not in (backbone.get("init_args") or {}):
        name = str(backbone["class_path"]).rpartition(".")[2]
        raise ConfigError(
            f"model.backbone: {name} has no weights, but a config starts from {weights}; keep its network, or take a "
            "small one with weights of its own, such as --model.backbone.depth 18"
        )


def check_run(trainer: Trainer, model: Federation, data: FederatedDataModule, describes: bool = False) -> None:
    """Check options and folders of a command; raise ConfigError or DataError for a fault.

    A command that only ``describes`` a run needs none of its devices.
    """
    check_trainer(trainer, data.val != "none", METRICS_OF[model.settings.evaluation.task])
    if not describes:
        strategy_of(trainer).check_device()
    _ = data.federated  # lists its files


def check_fit(
    trainer: Trainer, model: Federation, data: FederatedDataModule, checkpoint: Mapping[str, Any] | None = None
) -> None:
    """Assemble a federation without its clients' states, on the CPU of the first rank, and discard it.

    It is compared with the ``checkpoint`` from which the fit continues. Otherwise processes would start, and a round
    would train, with settings that do not fit the data.

    Raises:
        ConfigError: as the fit would.
    """
    warn_of_slow_precision(trainer)
    if trainer.global_rank == 0:
        clients = len(data.federated.clients)
        settings = replace(model.settings, client_store="host")
        parts = assemble(settings, data, clients, clients + 1, torch.device("cpu"))  # as a rank without clients
        warn_of_idle_ranks(trainer.world_size, trainer.world_size // trainer.num_nodes, parts.micro_batches)
        listeners = listeners_of(settings, parts)
        if checkpoint is not None:
            check_checkpoint(checkpoint, parts, listeners)
        check_memory(trainer, settings, parts, data)
        warn_of_states(trainer, model.settings, parts, data)
