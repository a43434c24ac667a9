"""Lightning needs two classes of torchmetrics; with this finder their import does not bring the whole package.

``import lightning`` imports torchmetrics, whose ``__init__`` imports all of its metrics, and with them SciPy,
torchvision and, where it is installed, transformers. That is 1.4 of 2.6 CPU-seconds, and 125 MB in each rank
(benchmarks/results/2026-11-25-peers.md). No setting of these libraries leaves them out, and training needs none of
them. So the first import of torchmetrics in a process that has imported fedsim before brings ``Metric`` and
``MetricCollection`` only. The first use of any other name of the package runs its ``__init__``, with the same classes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # importlib.abc takes 10 ms, which `fedsim --help` would wait for

PACKAGE = "torchmetrics"
_CLASSES = {"Metric": "metric", "MetricCollection": "collections"}


class LightPackage(ModuleType):
    """torchmetrics with two classes, until something else of it is used."""

    def __getattr__(self, name: str) -> Any:
        """Run the package's ``__init__``, then return the attribute."""
        if name.startswith("__") and name != "__all__":  # the import system and debuggers ask for such names
            raise AttributeError(f"module '{PACKAGE}' has no attribute '{name}'")
        _run_whole(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        """Run the package's ``__init__``, then return the names."""
        _run_whole(self)
        return dir(self)


class LightLoader(Loader):
    """Imports the two classes in place of the package's ``__init__``.

    Args:
        whole: the package's own loader.
    """

    def __init__(self, whole: Loader) -> None:
        self.whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the package's own loader."""
        return self.whole.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import the two classes; the whole package, if its files are not as they were."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.whole  # readers of its source ask the loader
        module.__class__ = LightPackage
        before = dict(vars(module))
        try:
            vars(module)["_logger"] = import_module("logging").getLogger(PACKAGE)
            vars(module)["__version__"] = import_module(f"{PACKAGE}.__about__").__version__
            import_module(f"{PACKAGE}.utilities")  # first: it and metric import each other
            for name, part in _CLASSES.items():
                vars(module)[name] = getattr(import_module(f"{PACKAGE}.{part}"), name)
        except Exception:  # another version of torchmetrics
            for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
                del sys.modules[name]
            vars(module).clear()
            vars(module).update(before)
            _run_whole(module)


class LightFinder(MetaPathFinder):
    """Gives torchmetrics the loader above, once."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torchmetrics's spec; None for all other modules."""
        if fullname != PACKAGE:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = LightLoader(spec.loader)
        return spec


def lighten() -> None:
    """Let the first import of torchmetrics be a light one; nothing changes after that import."""
    if PACKAGE not in sys.modules and not any(isinstance(finder, LightFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LightFinder())


def _run_whole(module: ModuleType) -> None:
    module.__class__ = ModuleType
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
