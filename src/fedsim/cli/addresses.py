"""Where classes have moved that configs of older runs name."""

import sys
from importlib import import_module

__all__ = ["know_old_addresses"]

_MOVED = {
    "fedsim.selection": "fedsim.federation.selection",
    "fedsim.privacy": "fedsim.federation.privacy",
    "fedsim.server": "fedsim.training.server_optimizers",
    "fedsim.callbacks": "fedsim.federation.callbacks",
    "fedsim.method": "fedsim.methods.base",
}


def know_old_addresses() -> None:
    """Let the parser find classes where configs written before version 0.2 say they are."""
    for old, new in _MOVED.items():
        sys.modules.setdefault(old, import_module(new))
