"""Residual networks for images of 32 x 32 pixels."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models.backbones import Backbone

_WIDTHS = (16, 32, 64)


class CifarResNet(Backbone):
    """ResNet for CIFAR-10 without pooling and classifier (He et al., CVPR 2016, Section 4.2): 64 channels, stride 4.

    A 3x3 convolution with 16 channels, then three stages of n blocks with 16, 32 and 64 channels. Shortcuts have no
    parameters (option A). Convolutions start as in He et al. (ICCV 2015, Equation 10).

    Args:
        depth: 6 n + 2 layers with the classifier, which is left out: 20, 32, 44 or 56.
    """

    def __init__(self, depth: Literal[20, 32, 44, 56] = 32) -> None:
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)),
            ("bn1", nn.BatchNorm2d(_WIDTHS[0])),
            ("relu", nn.ReLU(inplace=True)),
        ]
        width = _WIDTHS[0]
        for stage, channels in enumerate(_WIDTHS, start=1):
            widths = [width, *[channels] * ((depth - 2) // 6)]
            blocks = [_Block(c_in, c_out) for c_in, c_out in itertools.pairwise(widths)]
            layers.append((f"layer{stage}", nn.Sequential(*blocks)))
            width = channels
        super().__init__(OrderedDict(layers))
        self.out_channels = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first has stride 2 if the number of channels grows."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.stride = 1 if c_in == c_out else 2
        self.more_channels = c_out - c_in
        self.conv1 = nn.Conv2d(c_in, c_out, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        # every second pixel, and zeros for the channels that the input lacks
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more_channels))
        return F.relu(out + shortcut)
