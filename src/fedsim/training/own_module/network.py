"""A user's module as the network of a rank's model."""

from __future__ import annotations

from typing import Self

from lightning import LightningModule
from torch import Tensor, nn

from fedsim.core.work import Work
from fedsim.models.reid import HEAD_STD, Features, IdentityHead, KeyedDropout, ReIDModel
from fedsim.training.own_module.rules import features_of

PART = "module"
"""name of the network's only part; all names of tensors start with it"""


class ModuleNetwork(ReIDModel):
    """A network whose only part is a user's module: ``width`` are its features.

    Both layers of features, ``pool`` and ``neck``, are those of the module.
    """

    module: LightningModule
    """the one that is seated: of a client's number of classes, and in its session a copy of it"""

    def __init__(self, module: LightningModule, width: int) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.num_features = self.num_pooled = width
        self.pooling, self.head, self.head_std, self.head_kind = None, None, HEAD_STD, IdentityHead()
        self.separating, self.work = [], Work()
        self._still = [name for name, part in module.named_modules() if not part.training]

    def forward(self, images: Tensor) -> Features:
        """Map normalised images [B, 3, H, W] to features [B, D] float32."""
        features = features_of(self.module, images).float()
        return Features(features, features)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; parts that the user has built in evaluation mode stay in it, as under Lightning's Trainer."""
        super().train(mode)
        for name in self._still if mode else ():
            self.module.get_submodule(name).training = False
        return self

    @property
    def _dropouts(self) -> list[KeyedDropout]:  # type: ignore[override] # modules come and go
        """The layers with a random stream of their own."""
        return [layer for layer in self.modules() if isinstance(layer, KeyedDropout)]
