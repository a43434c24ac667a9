"""Optional libraries: they come with an extra of fedsim, and are imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedsim.core.errors import ConfigError, first_line

DISTRIBUTION = "fedsim-reid"
"""name on the Python index, where fedsim is another project; that of the import and of the command is fedsim"""


def to_install(extra: str) -> str:
    """Return the command that installs an extra of fedsim.

    >>> to_install("faiss")
    "pip install 'fedsim-reid[faiss]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def load_extra(module: str, setting: str, extra: str, instead: str = "") -> Any:
    """Import a module of an optional library, and return it.

    ``setting`` is the setting that needs the library, and ``extra`` the extra of fedsim by which pip installs it;
    ``instead`` is a remedy without the library. Raises ConfigError, with the command to install it, if the library is
    missing, or cannot be loaded: FAISS, for one, raises RuntimeError if its CUDA libraries are missing.

    >>> load_extra("json", "model.backbone: Example", "models").dumps([1])
    '[1]'
    >>> load_extra("no_such_library.part", "model.backbone: Example", "models")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.backbone: Example needs no_such_library; pip install 'fedsim-reid[models]'
    """
    remedy = f"{to_install(extra)}{instead and f', or {instead}'}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = (error.name or module).partition(".")[0]
        raise ConfigError(f"{setting} needs {library}; {remedy}") from error
    except Exception as error:  # a library that is there and does not start: OSError, RuntimeError, any other
        library, reason = module.partition(".")[0], first_line(error)
        raise ConfigError(f"{setting}: {library} cannot be loaded ({reason}); {remedy}") from error
