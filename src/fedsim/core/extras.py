"""Libraries that not everybody has: they come with an extra of fedsim, and are imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedsim.core.errors import ConfigError


def load_extra(module: str, who: str, extra: str) -> Any:
    """Import a module of an optional library, and return it.

    ``who`` is the setting that needs it, and ``extra`` the name by which pip installs it. Raises ConfigError, with the
    command to install it, if it is missing.

    >>> load_extra("json", "model.backbone: Example", "models").dumps([1])
    '[1]'
    >>> load_extra("no_such_library.part", "model.backbone: Example", "models")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.backbone: Example needs no_such_library; pip install 'fedsim[models]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = (error.name or module).partition(".")[0]
        raise ConfigError(f"{who} needs {library}; pip install 'fedsim[{extra}]'") from error
