"""Lightning needs two classes of torchmetrics; with this finder their import does not bring the whole package.

``import lightning`` imports torchmetrics, whose ``__init__`` imports all of its metrics, and with them SciPy,
torchvision and, where it is installed, transformers. That is 1.4 of 2.6 CPU-seconds, and 125 MB in each rank
(benchmarks/results/2026-11-25-peers.md). No setting of these libraries leaves them out, and training needs none of
them. So the first import of torchmetrics in a process that has imported fedsim before brings ``Metric`` and
``MetricCollection`` only. The first use of any other name of the package runs its ``__init__``, with the same classes.
Their ``plot`` imports Matplotlib, a fifth of the rest, when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torchmetrics"
_CLASSES = {"Metric": "metric", "MetricCollection": "collections"}
_PLOT = f"{PACKAGE}.utilities.plot"


class _LightPlot(ModuleType):
    """Stands for torchmetrics's ``plot`` with the names that the two classes import; other uses import the whole."""

    _AX_TYPE = _PLOT_OUT_TYPE = Any

    @staticmethod
    def whole() -> ModuleType:
        """Return torchmetrics's own module, in place of this one."""
        if isinstance(sys.modules.get(_PLOT), _LightPlot):
            del sys.modules[_PLOT]
        return import_module(_PLOT)

    @staticmethod
    def plot_single_or_multi_val(*args: Any, **kwargs: Any) -> Any:
        """Plot by torchmetrics's function."""
        return _LightPlot.whole().plot_single_or_multi_val(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{_PLOT}' has no attribute '{name}'")
        return getattr(self.whole(), name)


def _exec_light(module: ModuleType, whole: Callable[[ModuleType], None]) -> None:
    """Import the two classes in place of the package's ``__init__``; the whole package, if its files are others."""
    names = vars(module)
    before = dict(names)

    def run_whole() -> None:
        if isinstance(sys.modules.get(_PLOT), _LightPlot):  # the package's other metrics plot, too
            del sys.modules[_PLOT]
        for name in ("__getattr__", "__dir__"):
            names.pop(name, None)
        whole(module)

    def attribute(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # the import system and debuggers ask for such names
            raise AttributeError(f"module '{PACKAGE}' has no attribute '{name}'")
        run_whole()
        return getattr(module, name)

    def listed() -> list[str]:
        run_whole()
        return dir(module)

    names.update(__getattr__=attribute, __dir__=listed)
    try:
        names["_logger"] = import_module("logging").getLogger(PACKAGE)
        names["__version__"] = import_module(f"{PACKAGE}.__about__").__version__
        sys.modules[_PLOT] = _LightPlot(_PLOT)
        import_module(f"{PACKAGE}.utilities")  # first: it and metric import each other
        for name, part in _CLASSES.items():
            names[name] = getattr(import_module(f"{PACKAGE}.{part}"), name)
    except Exception:  # another version of torchmetrics
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        names.clear()
        names.update(before)
        whole(module)


class LightFinder:
    """Gives torchmetrics the import above, once."""

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        """Return torchmetrics's spec; None for all other modules."""
        if fullname != PACKAGE:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and (loader := spec.loader) is not None:
            whole = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the loader's own again, also for who reads its source
                _exec_light(module, whole)

            loader.exec_module = exec_module  # type: ignore[method-assign]  # of this object alone
        return spec


def lighten() -> None:
    """Let the first import of torchmetrics be a light one; nothing changes after that import."""
    if PACKAGE not in sys.modules and not any(isinstance(finder, LightFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LightFinder())
