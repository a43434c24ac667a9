"""The package that a user's module comes from, ``lightning`` or ``pytorch_lightning``: its own Trainer trains it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import lightning.pytorch
from lightning_utilities.core.overrides import is_overridden

from fedsim.core.errors import ConfigError, FedSimError
from fedsim.core.names import one_line


def package_of(thing: object) -> ModuleType | None:
    """Return the package whose LightningModule a thing is; None: it is none.

    A module of ``pytorch_lightning`` comes with an import of it, so fedsim need not import it.
    """
    packages = (lightning.pytorch, sys.modules.get("pytorch_lightning"))
    return next((p for p in packages if p is not None and isinstance(thing, p.LightningModule)), None)


def has_own(module: Any, hook: str) -> bool:
    """Return whether a module, or its class, has a hook of its own in place of Lightning's."""
    package: Any = package_of(module)
    return is_overridden(hook, module, package.LightningModule)


def named(module: object) -> str:
    """Return the beginning of an error line about a module."""
    return f"model.module: {type(module).__name__}"


@contextmanager
def in_one_line(name: str, activity: str) -> Iterator[None]:
    """Report errors of the user's code, and of Lightning about it, as a ConfigError; ``name`` is the module's class."""
    try:
        yield
    except FedSimError:
        raise
    except Exception as error:
        reason = one_line(str(error), 200)
        raise ConfigError(f"model.module: {name} failed in {activity} ({type(error).__name__}: {reason})") from error
