"""Feature attention of paper 002: attentional feature fusion with multi-scale channel attention.

The equations are of Dai, Gieseke, Oehmcke, Wu and Barnard, "Attentional feature fusion", WACV 2021, the source that
paper 002 names. Paper silent on r, and on which maps are fused. Its description differs from the published module:
dilated convolutions, whose outputs are concatenated and pooled, and two fully connected layers.

Shapes: B images, C channels, H x W pixels of a map.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fedsim.core.errors import ConfigError
from fedsim.models.attention import NormInit

FusionKind = Literal["none", "mscam", "aff34", "aff_residual"]

_LAYERS = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3]}
"""Residual blocks per stage (He et al., CVPR 2016, Table 1)."""


class MSCAM(nn.Module):
    """Multi-scale channel attention: a gate for each channel and pixel, from the pixel and from the whole map.

    As in the authors' code, the pointwise convolutions have biases although normalisation follows. Both branches have
    C / ``reduction`` hidden channels, at least one. ``init: convert``: all gates start at 1/2, so the map is halved;
    ``random`` as published.
    """

    def __init__(self, channels: int, reduction: int = 4, init: NormInit = "convert") -> None:
        super().__init__()
        self.local = _bottleneck(channels, reduction)
        self.whole = _bottleneck(channels, reduction)
        if init == "convert":
            for branch in (self.local, self.whole):
                nn.init.zeros_(branch.get_parameter("4.weight"))  # through which the gates then start to train

    def gate(self, x: Tensor) -> Tensor:
        """Return M(x) in (0, 1), [B, C, H, W]; raise ConfigError in training on one image: its pooled map is 1 x 1."""
        if self.training and len(x) < 2:
            raise ConfigError(
                "model.client.batch_size: multi-scale channel attention (fam) cannot train on a batch of one image; "
                "set it to at least 2, or drop_partial to true"
            )
        return torch.sigmoid(self.local(x) + self.whole(x.mean(dim=(2, 3), keepdim=True)))  # Eqs. (1) to (3)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh a map [B, C, H, W]."""
        return x * self.gate(x)


def _bottleneck(channels: int, reduction: int) -> nn.Sequential:
    hidden = max(1, channels // reduction)
    narrow = [nn.Conv2d(channels, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU(inplace=True)]
    return nn.Sequential(*narrow, nn.Conv2d(hidden, channels, 1), nn.BatchNorm2d(channels))


class AFF(nn.Module):
    """Attentional feature fusion of two maps of equal shape, Eq. (4).

    The result is doubled, as in the authors' code: gates of 1/2 give the plain sum. For the arguments see
    :class:`MSCAM`.
    """

    def __init__(self, channels: int, reduction: int = 4, init: NormInit = "convert") -> None:
        super().__init__()
        self.attention = MSCAM(channels, reduction, init)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Fuse maps [B, C, H, W]."""
        gate = self.attention.gate(x + y)
        return 2 * (x * gate + y * (1 - gate))


class StageFusion(nn.Module):
    """Fuse the last stage's map, of 2 C channels, with the earlier map, of C, after a projection and an enlargement.

    ``init``: of the gates; the projection starts at random.
    """

    def __init__(self, channels: int, init: NormInit = "convert") -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Conv2d(2 * channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.fuse = AFF(channels, init=init)

    def forward(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Return [B, C, H, W] from an earlier map of this shape, and a later one [B, 2 C, h, w]."""
        # repeat each pixel: smoother interpolation has no deterministic gradient on GPUs
        magnified = F.interpolate(self.project(later), size=earlier.shape[2:], mode="nearest")
        fused: Tensor = self.fuse(earlier, magnified)
        return fused


class _Fused:
    """Mixin for torchvision's blocks: after :func:`fuse_residuals`, attention replaces the sum."""

    downsample: nn.Module | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fuse: AFF | None = None

    def join(self, residual: Tensor, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return F.relu(residual + identity if self.fuse is None else self.fuse(residual, identity))


class _FusedBasicBlock(_Fused, BasicBlock):  # type: ignore[misc] # torchvision has no types
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.join(self.bn2(self.conv2(out)), x)


class _FusedBottleneck(_Fused, Bottleneck):  # type: ignore[misc] # as above
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.join(self.bn3(self.conv3(out)), x)


def fused_resnet(depth: Literal[18, 34, 50]) -> Any:
    """Return torchvision's network, made of blocks that :func:`fuse_residuals` can change."""
    return tv.ResNet(_FusedBottleneck if depth == 50 else _FusedBasicBlock, _LAYERS[depth])


def fuse_residuals(backbone: nn.Module, init: NormInit) -> None:
    """Replace the sums of all blocks by attention; with ``init: convert`` the output stays the same at first."""
    for block in backbone.modules():
        if isinstance(block, _Fused):
            last = block.get_submodule("conv3" if isinstance(block, Bottleneck) else "conv2")
            assert isinstance(last, nn.Conv2d)  # the norm behind it may be of any kind
            block.fuse = AFF(last.out_channels, init=init).to(last.weight)
