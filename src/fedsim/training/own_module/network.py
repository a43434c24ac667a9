"""A user's module as the network of a rank's model."""

from __future__ import annotations

from typing import Self

from lightning import LightningModule
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.work import Work
from fedsim.models.reid import HEAD_STD, Features, IdentityHead, KeyedDropout, ReIDModel
from fedsim.training.own_module.package import named
from fedsim.training.own_module.values import CopiedParameters

PART = "module"
"""name of the network's only part; all names of tensors start with it"""


def features_of(module: LightningModule, images: Tensor) -> Tensor:
    """Return the features [B, D] of images [B, 3, H, W], by ``embed``, or by ``forward`` where there is none."""
    hook = "embed" if callable(getattr(module, "embed", None)) else "forward"
    features = getattr(module, hook)(images)
    # by shapes: len() is a plain number, and an export that meets one serves that number of images alone
    if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != images.shape[0]:
        problem = f"shape {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"{named(module)}: {hook} returned {problem} for {len(images)} images; return features [B, D]"
            + ("" if hook == "embed" else ", or define embed(images) that does")
        )
    return features


class ModuleNetwork(ReIDModel):
    """A network whose only part is a user's module: ``width`` are its features.

    Both layers of features, ``pool`` and ``neck``, are those of the module.
    """

    module: LightningModule
    """that of a client's number of classes, and while it trains a copy of it"""

    def __init__(self, module: LightningModule, width: int) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.num_features = self.num_pooled = width
        self.pooling, self.head, self.head_std, self.head_kind = None, None, HEAD_STD, IdentityHead()
        self.separating, self.diversifying, self.work = [], [], Work()
        self._still = [name for name, part in module.named_modules() if not part.training]
        self.flat: CopiedParameters | None = None
        """the values that methods see; None: those of the module alone"""

    def forward(self, images: Tensor) -> Features:
        """Map normalised images [B, 3, H, W] to features [B, D] float32."""
        if self.flat is not None:
            self.flat.spread()
        self.count(images)
        features = features_of(self.module, images).float()
        if self.flat is not None and self.training:
            self.flat.is_stale = True
        return Features(features, features)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; parts that the user has built in evaluation mode stay in it, as under Lightning's Trainer."""
        super().train(mode)
        for name in self._still if mode else ():
            self.module.get_submodule(name).training = False
        return self

    @property
    def _dropouts(self) -> list[KeyedDropout]:  # type: ignore[override] # modules come and go
        return [layer for layer in self.modules() if isinstance(layer, KeyedDropout)]
