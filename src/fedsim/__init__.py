"""fedsim: federated person re-identification on PyTorch Lightning and torch.distributed.

Nothing heavy is imported here: ``fedsim --help`` must not wait for torch. What stands in ``__all__`` is imported at its
first use. A script that imports fedsim before Lightning starts faster (:mod:`fedsim.core.light_torchmetrics`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsim._version import __version__
from fedsim.core.false_alarms import ignore_missing_widgets
from fedsim.core.light_torchmetrics import lighten

if TYPE_CHECKING:
    from fedsim.data import Augmentation, FederatedDataModule, MarketFolders, SyntheticReID
    from fedsim.evaluation.settings import Evaluation
    from fedsim.federation import Federation
    from fedsim.federation.trainer import Trainer
    from fedsim.inference import load_model, load_run, rank
    from fedsim.models import Neck
    from fedsim.training.objective import Objective
    from fedsim.training.settings import LocalTraining

_NAMES_IN = {
    "data": ["Augmentation", "FederatedDataModule", "MarketFolders", "SyntheticReID"],
    "evaluation.settings": ["Evaluation"],
    "federation": ["Federation"],
    "federation.trainer": ["Trainer"],
    "inference": ["load_model", "load_run", "rank"],
    "models": ["Neck"],
    "training.objective": ["Objective"],
    "training.settings": ["LocalTraining"],
}
_PLACES = {name: f"fedsim.{module}" for module, names in _NAMES_IN.items() for name in names}
_FACES = ("data", "methods", "models", "report", "testing")  # they need no import of their own: fedsim.methods.FedPav

__all__ = [
    "Augmentation",
    "Evaluation",
    "FederatedDataModule",
    "Federation",
    "LocalTraining",
    "MarketFolders",
    "Neck",
    "Objective",
    "SyntheticReID",
    "Trainer",
    "__version__",
    "load_model",
    "load_run",
    "rank",
]

lighten()
ignore_missing_widgets()


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    if name in _FACES:
        return import_module(f"fedsim.{name}")
    raise AttributeError(f"module 'fedsim' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, *_FACES]
