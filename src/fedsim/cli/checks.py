"""Checks of a run before anything is written, and before other ranks start; and names in configs that need help.

These are modules of earlier versions, and loggers without their arguments.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from fedsim.core.errors import ConfigError
from fedsim.core.metrics import METRICS_OF
from fedsim.core.names import metric_name, printable
from fedsim.core.paths import OUTPUT_FOLDER
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.assembly import assemble
from fedsim.federation.checkpoint import check_checkpoint
from fedsim.federation.checks.compatibility import (
    check_trainer,
    limit_of_batches,
    warn_of_idle_ranks,
    warn_of_slow_precision,
)
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
    limit_of_batches(trainer, data)
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
        for names in ([client.name for client in data.federated.clients], [*data.federated.tests]):
            check_logged_names(trainer.loggers, names)
        settings = replace(model.settings, client_store="host")
        parts = assemble(settings, data, clients, clients + 1, torch.device("cpu"))  # as a rank without clients
        warn_of_idle_ranks(trainer.world_size, trainer.world_size // trainer.num_nodes, parts.micro_batches)
        listeners = listeners_of(settings, parts)
        if checkpoint is not None:
            check_checkpoint(checkpoint, parts, listeners)
        check_memory(trainer, settings, parts, data)
        warn_of_states(trainer, model.settings, parts, data)


def check_logged_names(loggers: Iterable[Logger], names: Sequence[str]) -> None:
    """Raise ConfigError for two clients, or test sets, whose numbers MLFlowLogger would take for one's.

    Of more than 50 names none is logged.
    """
    written: dict[str, str] = {}
    if len(names) > MAX_NAMES or not any(isinstance(each, MLFlowLogger) for each in loggers):
        return
    for name in names:
        first = written.setdefault(re.sub("[^a-zA-Z0-9_/. -]+", "", metric_name(name)), name)  # as Lightning does
        if first != name:
            raise ConfigError(
                f"trainer.logger: MLFlowLogger drops signs and letters that MLflow forbids, so {printable(first)} and "
                f"{printable(name)} would have the same numbers; rename one of them, or choose another logger"
            )


_RUN_DIR = "RUN_DIR"  # as a logger's save_dir: stands for the run directory
_ONE_FOLDER = "tensorboard"  # subfolder of the run directory, also of a continued run
_DEFAULTS = {  # of arguments of Lightning's constructors that have no default, or one that fails
    TensorBoardLogger: ("save_dir", _RUN_DIR),
    MLFlowLogger: ("tracking_uri", os.getenv("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"),
}
_MOVED = {  # module in configs of earlier versions -> its present name
    "fedsim.callbacks": "fedsim.federation.callbacks",
    "fedsim.federation.privacy": "fedsim.federation.components.privacy",
    "fedsim.federation.robust": "fedsim.federation.components.robust",
    "fedsim.federation.selection": "fedsim.federation.components.selection",
    "fedsim.method": "fedsim.methods.base",
    "fedsim.privacy": "fedsim.federation.components.privacy",
    "fedsim.selection": "fedsim.federation.components.selection",
    "fedsim.server": "fedsim.training.server_optimizers",
}


def give_old_addresses() -> None:
    """Make modules importable by their names in older configs.

    All of them are loaded by that, and the parser finds short names of loaded classes alone, such as FedAdam.
    """
    for old, new in _MOVED.items():
        sys.modules.setdefault(old, import_module(new))


def let_loggers_stand_alone() -> None:
    """Give the parser defaults for arguments of loggers, so that a logger's name is enough in a config."""
    for logger, (name, default) in _DEFAULTS.items():
        init = vars(logger)["__init__"]
        signature = inspect.signature(init)
        parameters = [p.replace(default=default) if p.name == name else p for p in signature.parameters.values()]
        init.__signature__ = signature.replace(parameters=parameters)


def check_folders(loggers: Iterable[Namespace]) -> None:
    """Replace ``~`` and variables in the folders that parsed loggers name, but for their defaults and addresses.

    Raises:
        ConfigError: if one is no path.
        DataError: if one cannot be written.
    """
    for logger in loggers:
        module, _, name = logger.class_path.rpartition(".")
        parameters = inspect.signature(getattr(import_module(module), name)).parameters
        arguments = logger.get("init_args", {})
        for option in ("save_dir", "dir"):
            value, default = arguments.get(option), getattr(parameters.get(option), "default", None)
            if value not in (None, default) and "://" not in str(value):
                arguments[option] = OUTPUT_FOLDER.check(value, f"trainer.logger.{option}")


def write_into(logger: TensorBoardLogger, folder: Path) -> None:
    """Let a logger without a folder write into the run directory; unset names get fedsim's values."""
    if logger.save_dir != _RUN_DIR:
        return
    logger._root_dir = str(folder)  # there is no public way later
    if logger._name == inspect.signature(TensorBoardLogger).parameters["name"].default and logger._version is None:
        logger._name, logger._version = "", _ONE_FOLDER
