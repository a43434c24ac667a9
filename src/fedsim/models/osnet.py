"""OSNet: features at all scales, from streams of convolutions that an image's own gates combine.

K. Zhou, Y. Yang, A. Cavallaro, T. Xiang, "Omni-Scale Feature Learning for Person Re-Identification", ICCV 2019. Names
and shapes of tensors are those of the authors' library torchreid (``osnet_x1_0`` and narrower ones), whose files load.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.models.backbones import Backbone
from fedsim.models.style import StyleLayers, StylePlace, insert_style
from fedsim.models.weights import SUFFIXES, is_file, load_around
from fedsim.settings.facts import Facts

_CHANNELS = {1.0: (64, 256, 384, 512), 0.75: (48, 192, 288, 384), 0.5: (32, 128, 192, 256), 0.25: (16, 64, 96, 128)}
"""of the stem and the three stages (Table 1), by width"""
_STREAMS = 4
"""T of Eq. (3): scales in a block"""


class OSNet(Backbone):
    """Omni-scale network without pooling and embedding layer: 512 channels and stride 16 at width 1.

    Its embedding layer is ``model.neck: {kind: linear, activation: relu, dropout: 0}``; files have one of their own,
    which is not loaded.

    Args:
        width: multiplier of the channels: 1.0, 0.75, 0.5 or 0.25.
        weights: the path of a local ``.pth`` or ``.safetensors`` file, such as torchreid's
            ``osnet_x1_0_imagenet.pth``, or null for random weights.
        style: as for :class:`~fedsim.models.ResNet`, at ``input``, ``layer1`` and ``layer2``, the stages ``conv2`` and
            ``conv3`` with their transitions.
    """

    def __init__(
        self,
        width: float = 1.0,
        weights: Annotated[str | None, Facts(is_file=True, suffixes=SUFFIXES)] = None,
        *,
        style: StyleLayers | None = None,
    ) -> None:
        if width not in _CHANNELS:
            raise ConfigError(f"backbone.width: {width} is not one of {', '.join(map(str, _CHANNELS))}")
        stem, *stages = _CHANNELS[width]
        layers: dict[str, nn.Module] = {
            "conv1": _convolution(3, stem, 7, stride=2),
            "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
        }
        for number, (c_in, c_out) in enumerate(itertools.pairwise((stem, *stages)), start=2):
            blocks: list[nn.Module] = [_Block(c_in, c_out), _Block(c_out, c_out)]
            if number < 4:  # a transition halves height and width
                blocks.append(nn.Sequential(_convolution(c_out, c_out), nn.AvgPool2d(2)))
            layers[f"conv{number}"] = nn.Sequential(*blocks)
        layers["conv5"] = _convolution(stages[-1], stages[-1])
        super().__init__(OrderedDict(layers))
        self.out_channels = stages[-1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        name = f"osnet_x{str(width).replace('.', '_')}"
        if weights is not None and not is_file(weights):
            raise ConfigError(f"backbone.weights: {weights} is no file; download torchreid's {name}_imagenet.pth")
        # the last part of such a stage is its transition
        places = {
            f"layer{i}": StylePlace(stage, stages[i - 1], f"{stage}.2.0.bn")
            for i, stage in enumerate(("conv2", "conv3"), start=1)
        }
        load_around(self, weights, name, lambda: insert_style(self, style, places))


def _convolution(c_in: int, c_out: int, size: int = 1, *, stride: int = 1, relu: bool = True) -> nn.Sequential:
    """Convolution and batch normalisation, then ReLU unless ``relu`` is false."""
    conv = nn.Conv2d(c_in, c_out, size, stride, padding=size // 2, bias=False)
    layers: dict[str, nn.Module] = {"conv": conv, "bn": nn.BatchNorm2d(c_out)}
    return nn.Sequential(OrderedDict(layers | ({"relu": nn.ReLU(inplace=True)} if relu else {})))


def _lite(channels: int) -> nn.Sequential:
    """Lite 3 x 3: a pointwise convolution, then a depthwise one (Fig. 3)."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, channels, 1, bias=False),
        "conv2": nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=channels),
        "bn": nn.BatchNorm2d(channels),
        "relu": nn.ReLU(inplace=True),
    }
    return nn.Sequential(OrderedDict(layers))


class _Gate(nn.Module):
    """The aggregation gate G of Eq. (3): a weight in (0, 1) for each channel, from the map's mean."""

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.fc2(F.relu(self.fc1(x.mean(dim=(2, 3), keepdim=True))))
        return x * gate.sigmoid()


class _Block(nn.Module):
    """Residual block, Eqs. (2) and (3): the sum over t = 1 .. T of G(F^t(x)), t lite 3 x 3 deep; one gate for all."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        channels = c_out // 4
        self.conv1 = _convolution(c_in, channels)
        self.conv2a = _lite(channels)
        self.conv2b, self.conv2c, self.conv2d = (
            nn.Sequential(*(_lite(channels) for _ in range(depth))) for depth in range(2, _STREAMS + 1)
        )
        self.gate = _Gate(channels)
        self.conv3 = _convolution(channels, c_out, relu=False)
        self.downsample = None if c_in == c_out else _convolution(c_in, c_out, relu=False)

    @property
    def streams(self) -> Sequence[nn.Module]:
        return self.conv2a, self.conv2b, self.conv2c, self.conv2d

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.conv1(x)
        first, *deeper = (self.gate(stream(narrow)) for stream in self.streams)
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.conv3(sum(deeper, start=first)) + shortcut)
