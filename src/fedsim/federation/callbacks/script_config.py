"""The config of a run of a Python script: what the command line would read to build the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from fedsim.core.written import NotInConfigError, written, written_arguments, written_fields
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.federation import Federation
from fedsim.settings.configuration import fingerprint_of
from fedsim.settings.table import setting_at
from fedsim.strategy.strategy import FederatedStrategy

_OF_A_FOLDER = "default_root_dir"


class Described(NamedTuple):
    """The settings of a run that was built in Python, if all of them can be written."""

    config: dict[str, Any] | None
    """as the command line has it; None: something in it cannot be written"""
    unwritable: str = ""
    """the setting that cannot be written, and why"""
    seed: int | None = None
    """of the run; None: its weights were drawn without a seed"""
    start: int | None = None
    """seed of the weights, if it is another one"""

    @property
    def text(self) -> str | None:
        """The text of config.yaml; None if it cannot be written."""
        return None if self.config is None else yaml.safe_dump(self.config, sort_keys=False)

    @property
    def fingerprint(self) -> str | None:
        """The hash of the settings by which runs of several seeds are one group; None if that is not known."""
        if self.config is None or self.seed is None:
            return None
        start = {} if self.start is None else {"start": self.start}
        return fingerprint_of({**self.config, "model": {**self.config["model"], **start}})


def describe_script(module: Any, data: Any, options: Mapping[str, Any]) -> Described:
    """Return the settings of a federation, its data and its trainer.

    The seed is that of :func:`lightning.seed_everything`, which draws the network's weights, and of
    ``Federation(seed=...)``, if this is given.

    Args:
        module: the federation.
        data: its data.
        options: of the trainer, as they were given, and its defaults.
    """
    of_process = os.environ.get("PL_GLOBAL_SEED", "")
    of_training = module.settings.seed
    seed = of_training or int(of_process) if of_process.isdigit() else None
    for section, value, expected_class in (("model", module, Federation), ("data", data, FederatedDataModule)):
        if type(value) is not expected_class:
            return Described(None, f"{section}: {type(value).__name__} is no {expected_class.__name__}", seed)
    try:
        model = written_fields(module.settings, "model")
        sections = {"model": model, "data": written_arguments(data, "data")}
        trainer = {}
        for name, value in options.items():
            if name != _OF_A_FOLDER and not isinstance(value, FederatedStrategy) and not _only_watches(name, value):
                trainer[name] = written(value, None, f"trainer.{name}")
    except NotInConfigError as error:
        return Described(None, str(error), seed)
    del model["seed"]  # the command line sets it to seed_everything
    start = None if seed is None or int(of_process) == seed else int(of_process)
    first = {"seed_everything": of_training if seed is None else seed}
    return Described({**first, "trainer": trainer, **sections}, "", seed, start)


def _only_watches(name: str, value: Any) -> bool:
    """Return whether an option of the trainer is an object on which no number depends, such as a logger; or several."""
    is_plain = all(isinstance(inner, str | int | float) for inner in (value if isinstance(value, list) else [value]))
    return value is not None and not is_plain and setting_at(f"trainer.{name}").facts.effect == "nothing"
