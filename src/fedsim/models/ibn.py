"""Instance and batch normalisation side by side.

X. Pan, P. Luo, J. Shi, X. Tang, "Two at Once: Enhancing Learning and Generalization Capacities via IBN-Net", ECCV 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.models.memory_order import in_order_of


class IBN(nn.Module):
    """Instance normalisation of the first half of ``channels``, batch normalisation of the second (Fig. 3 (a)).

    Names of tensors are those of the authors' files: ``IN.weight``, ``BN.running_mean``, ...
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_instance = channels // 2
        self.IN = nn.InstanceNorm2d(self.num_instance, affine=True)
        self.BN = nn.BatchNorm2d(channels - self.num_instance)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps [B, C, H, W]."""
        first, second = (in_order_of(part, x) for part in (x[:, : self.num_instance], x[:, self.num_instance :]))
        return torch.cat([in_order_of(self.IN(first), x), self.BN(second)], dim=1)


def insert_ibn(resnet: nn.Module) -> None:
    """Make torchvision's ResNet IBN-a: in the first norm of each block, except in the last stage."""
    for stage in ("layer1", "layer2", "layer3"):
        for block in resnet.get_submodule(stage).children():
            norm = block.get_submodule("bn1")
            assert isinstance(norm, nn.BatchNorm2d)
            block.add_module("bn1", IBN(norm.num_features))
