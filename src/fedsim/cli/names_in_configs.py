"""Names in configs that need help: modules of earlier versions, and loggers without their arguments."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

from fedsim.core.paths import OUTPUT_FOLDER

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
    """Make modules importable by their names in older configs; the parser finds short names of loaded classes."""
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
