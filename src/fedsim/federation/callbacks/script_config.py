"""The config of a run of a Python script: what the command line would read to build the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml
from lightning import Callback, Trainer

from fedsim.core.written import NotInConfigError, class_written, written, written_arguments, written_fields
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.federation import Federation
from fedsim.settings.configuration import fingerprint_of
from fedsim.settings.identity import identity_of
from fedsim.settings.table import only_watches, setting_at
from fedsim.strategy.strategy import FederatedStrategy

_OF_A_FOLDER = "default_root_dir"


class Described(NamedTuple):
    """The settings of a run that was built in Python, if all of them can be written."""

    config: dict[str, Any] | None
    """as the command line has it; None: something in it cannot be written"""
    unwritable: str = ""
    """the setting that cannot be written, and why; of a callback or of weights without a seed, beside a config"""
    start: int | None = None
    """seed of the weights, if it is another one than that of the training"""

    @property
    def text(self) -> str | None:
        """The text of config.yaml; None if it cannot be written."""
        return None if self.config is None else yaml.safe_dump(self.config, sort_keys=False)

    @property
    def fingerprint(self) -> str | None:
        """The hash of the settings by which runs of several seeds are one group; None if that is not known."""
        return None if self.config is None or self.unwritable else fingerprint_of(self.config)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the run as ``summary.json`` has it."""
        identity = {} if self.config is None else identity_of(self.config)
        beside = {"unwritable": self.unwritable or None, "start": self.start}
        return identity | {name: value for name, value in beside.items() if value is not None}


def describe_script(
    module: Any, data: Any, options: Mapping[str, Any], callbacks: Iterable[Callback] = ()
) -> Described:
    """Return the settings of a federation, its data and its trainer.

    Args:
        module: the federation.
        data: its data.
        options: of the trainer, as they were given, and fedsim's defaults.
        callbacks: the user's. Those whose arguments are not known cannot be written; the config leaves them out.
    """
    for section, value, expected_class in (("model", module, Federation), ("data", data, FederatedDataModule)):
        if type(value) is not expected_class:
            return Described(None, f"{section}: {type(value).__name__} is no {expected_class.__name__}")
        if replaced := [name for name in vars(value) if inspect.isfunction(getattr(expected_class, name, None))]:
            return Described(None, f"{section}.{replaced[0]}: was replaced after {expected_class.__name__} was made")
    try:
        model = written_fields(module.settings, "model")
        sections = {"model": model, "data": written_arguments(data, "data")}
        trainer = {
            name: _written_option(name, value)
            for name, value in {**_lightning_defaults(), **options}.items()
            if name != _OF_A_FOLDER and not _only_watches(name, value)
        }
    except NotInConfigError as error:
        return Described(None, str(error))
    written_callbacks, unwritable = _written_callbacks(callbacks)
    if written_callbacks:
        trainer["callbacks"] = written_callbacks
    del model["seed"]  # the command line sets it to seed_everything
    seed, start = module.settings.training_seed, module.seed_of_weights
    if start is None:
        unwritable = "seed_everything: was not called before the network was made, whose weights have no seed"
    config = {"seed_everything": seed, "trainer": trainer, **sections}
    return Described(config, unwritable, None if start == seed else start)


def _written_callbacks(callbacks: Iterable[Callback]) -> tuple[list[Any], str]:
    """Return the callbacks on which numbers may depend as a config has them, and why others cannot be written."""
    content, reasons = [], []
    for callback in callbacks:
        if not only_watches(f"{type(callback).__module__}.{type(callback).__qualname__}"):
            try:
                content.append(written(callback, None, "trainer.callbacks"))
            except NotInConfigError as error:
                reasons.append(str(error))
    return content, "; ".join(reasons)


def _lightning_defaults() -> dict[str, Any]:
    parameters = inspect.signature(Trainer.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def _written_option(name: str, value: Any) -> Any:
    """Return an option of the trainer as a config has it; the arguments of a strategy change no number."""
    of_class = isinstance(value, FederatedStrategy)
    return class_written(type(value), {}, name) if of_class else written(value, None, f"trainer.{name}")


def _only_watches(name: str, value: Any) -> bool:
    """Return whether an option of the trainer is an object on which no number depends, such as a logger; or several."""
    is_plain = all(isinstance(inner, str | int | float) for inner in (value if isinstance(value, list) else [value]))
    return value is not None and not is_plain and setting_at(f"trainer.{name}").facts.effect == "nothing"
