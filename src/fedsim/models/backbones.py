"""Backbones: images in, feature map out.

A backbone is any ``nn.Module`` that maps images [B, 3, H, W] to a map [B, C, h, w] (or a vector [B, C]) and has an int
attribute ``out_channels`` = C. Those below keep torchvision's parameter names, so that an exported global model loads
into the plain torchvision network; with attention (``norm`` is not ``bn``), it loads only into these.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Literal

import torchvision.models as tv
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv2 import InvertedResidual

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import renormalisation
from fedsim.models.attention import NormInit, NormKind, Place, insert_attention
from fedsim.models.fusion import MSCAM, FusionKind, StageFusion, fuse_residuals, fused_resnet
from fedsim.models.ibn import insert_ibn
from fedsim.models.known_weights import check_known
from fedsim.models.mobilenet_names import to_torchvision
from fedsim.models.style import StyleLayers, StylePlace, insert_style
from fedsim.models.weights import SUFFIXES, is_file, load_around
from fedsim.settings.facts import Facts

_HALF = (0.5, 0.5, 0.5)
_STAGE_MIXTURES = (10, 10, 20, 20)
"""K of attentive normalisation at strides 4, 8, 16 and 32: ResNet-50 in the authors' code. Paper 000 silent."""
_MOBILE_STAGES = (3, 6, 13)
"""Last blocks of MobileNetV2 at strides 4, 8 and 16."""
_FILE = Facts(is_file=True, suffixes=SUFFIXES)


class Backbone(KeepsArguments, nn.Sequential, option="model.backbone"):
    """Base of fedsim's own backbones, which configs can name by the class alone."""

    out_channels: int
    """C: channels of the output map"""


class PartlyFixed(Backbone, ABC):
    """Base of backbones around another one, ``below``, most of whose tensors stay as they are.

    Raises:
        ConfigError: if the other one has fixed tensors itself: then nothing would train.
    """

    def __init__(self, name: str, below: nn.Module) -> None:
        super().__init__(OrderedDict({name: below}))
        for module in below.modules():
            if isinstance(module, PartlyFixed):
                raise ConfigError(
                    f"model.backbone: {type(self).__name__} and {type(module).__name__} fix each other's weights; "
                    "leave one out"
                )

    @abstractmethod
    def fixed(self, name: str) -> bool:
        """Whether the tensor of this name in the module is fixed."""


class ResNet(Backbone):
    """torchvision's ResNet without pooling and classifier (He et al., CVPR 2016).

    Args:
        depth: 18, 34 or 50.
        last_stride: stride of the last stage: torchvision's 2, or 1, which doubles the resolution of the last map (Luo
            et al., "Bag of tricks", CVPRW 2019).
        weights: a torchvision name (``IMAGENET1K_V1``), the path of a local ``.pth`` or ``.safetensors`` file, or null
            for random weights. Give V1 or V2 explicitly: they are different networks.
        norm: ``bn``: torchvision's network. ``attentive``: attentive normalisation replaces the second norm of each
            block (``bn2``), with 10, 10, 20 and 20 mixtures in the four stages. ``se``, ``cbam``: such a block ends
            each residual branch, before the sum. ``xan``: a sum of batch and instance normalisation with learnt weights
            replaces every norm, which changes what pretrained weights compute.
        ibn: half of the channels of each block's first norm, except in the last stage, get instance
            normalisation: IBN-a of Pan et al. (ECCV 2018), with the names of the authors' files, such as
            ``resnet50_ibn_a``; torchvision has no weights of it.
        norm_init: ``convert``: at the start, the network computes the same as without attention; ``random``: as in the
            papers on attention, which spoils pretrained weights. Files with attention overwrite both.
        relu_after_stem: false removes the first ReLU, as in the code of CAP and FedCAPR; other code that loads such a
            model must remove it, too.
        style: layers that change or remove the style of images, at ``input``, ``layer1``, ``layer2``, ``layer3``, where
            strides are 1, 4, 8 and 16; null: none.
        fam: feature attention of paper 002. ``mscam``: multi-scale channel attention weighs the last map. ``aff34``: it
            fuses the maps of the last two stages to one, of the earlier map's shape. ``aff_residual``: it replaces the
            sums of all blocks. With ``norm_init: convert`` all gates start at 1/2: ``aff_residual`` then computes the
            same as the plain network, ``mscam`` half of it.
    """

    def __init__(
        self,
        depth: Literal[18, 34, 50] = 50,
        last_stride: Literal[1, 2] = 2,
        weights: Annotated[str | None, _FILE] = None,
        *,
        norm: NormKind = "bn",
        ibn: bool = False,
        norm_init: Annotated[NormInit, Facts(needs="norm not in ('bn', 'xan') or fam != 'none'")] = "convert",
        relu_after_stem: bool = True,
        fam: FusionKind = "none",
        style: StyleLayers | None = None,
    ) -> None:
        name = f"resnet{depth}"
        network = fused_resnet(depth) if fam == "aff_residual" else tv.get_model(name)
        if last_stride == 1:
            for module in network.layer4[0].modules():
                if isinstance(module, nn.Conv2d):
                    module.stride = (1, 1)
        if ibn:
            insert_ibn(network)
            name = f"{name}_ibn_a"
        without = {"avgpool", "fc"} | (set() if relu_after_stem else {"relu"})
        super().__init__(OrderedDict((n, m) for n, m in network.named_children() if n not in without))
        self.out_channels = int(network.fc.in_features)
        last = "bn3" if depth == 50 else "bn2"
        places = [
            Place(f"layer{stage}.{i}.bn2", f"layer{stage}.{i}.{last}", num_mixtures)
            for stage, num_mixtures in enumerate(_STAGE_MIXTURES, start=1)
            for i, _ in enumerate(network.get_submodule(f"layer{stage}").children())
        ]
        stages = _style_places(self, {f"layer{i}": f"layer{i}" for i in (1, 2, 3)})

        def insert() -> None:
            insert_attention(self, places, norm, norm_init)
            _end_with_mscam(self, fam, norm_init)
            if fam == "aff_residual":
                fuse_residuals(self, norm_init)
            elif fam == "aff34":
                self.out_channels //= 2
                self.add_module("fusion", StageFusion(self.out_channels, norm_init))
            insert_style(self, style, stages)

        load_around(self, weights, name, insert)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the last map."""
        maps = earlier = images
        for name, module in self.named_children():
            maps = module(earlier, maps) if name == "fusion" else module(maps)
            if name.endswith("layer3"):  # also a style layer behind it
                earlier = maps
        return maps


class MobileNetV2(Backbone):
    """torchvision's MobileNetV2 features (Sandler et al., CVPR 2018).

    Args:
        width: width multiplier.
        weights: as for :class:`ResNet`; torchvision has weights for width 1.0 only. Files of other libraries with the
            same network load, too: see :mod:`fedsim.models.mobilenet_names`.
        norm_eps: epsilon of the batch normalisations. Weights converted from Keras need 1e-3.
        pixels: the input of the pretrained weights. ``imagenet``: images normalised by ImageNet's mean and deviation;
            ``symmetric``: pixels from -1 to 1, for weights converted from Keras.
        norm: as for :class:`ResNet`; ``attentive`` replaces the norm after each depthwise convolution, with 10 mixtures
            up to stride 8 and 20 beyond; ``se`` and ``cbam`` end each inverted residual.
        norm_init: as for :class:`ResNet`.
        style: as for :class:`ResNet`; ``layer1``, ``layer2`` and ``layer3`` end at strides 4, 8 and 16.
    """

    def __init__(
        self,
        width: float = 1.0,
        weights: Annotated[str | None, _FILE] = None,
        norm_eps: float = 1e-5,
        *,
        pixels: Literal["imagenet", "symmetric"] = "imagenet",
        norm: NormKind = "bn",
        norm_init: Annotated[NormInit, Facts(needs="norm not in ('bn', 'xan')")] = "convert",
        style: StyleLayers | None = None,
    ) -> None:
        network = tv.mobilenet_v2(width_mult=width)
        layers = OrderedDict(features=network.features)
        super().__init__(OrderedDict(rescale=_Symmetric()) | layers if pixels == "symmetric" else layers)
        self.out_channels = int(network.last_channel)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = norm_eps
        places = _inverted_residuals(network.features)
        stages = _style_places(self, {f"layer{i}": f"features.{end}" for i, end in enumerate(_MOBILE_STAGES, start=1)})

        def insert() -> None:
            insert_attention(self, places, norm, norm_init)
            insert_style(self, style, stages)

        def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
            named = to_torchvision(state)
            check_known(named, str(weights), {"norm_eps": norm_eps, "pixels": pixels})
            return named

        load_around(self, weights, "mobilenet_v2", insert, rename=renamed)


class _Symmetric(nn.Module):
    """Maps images [B, 3, H, W], normalised by ImageNet's mean and deviation, to pixels from -1 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        scale, offset = renormalisation(_HALF, _HALF, x.device)
        return x * scale + offset


def _inverted_residuals(features: nn.Sequential) -> list[Place]:
    """Places in the blocks: (expansion,) depthwise convolution with norm, projection, norm."""
    places, stride = [], 1
    for i, block in enumerate(features):
        stride *= max((m.stride[0] for m in block.modules() if isinstance(m, nn.Conv2d)), default=1)
        if isinstance(block, InvertedResidual):
            end = len(block.conv) - 1
            num_mixtures = _STAGE_MIXTURES[0] if stride <= 8 else _STAGE_MIXTURES[-1]
            places.append(Place(f"features.{i}.conv.{end - 2}.1", f"features.{i}.conv.{end}", num_mixtures))
    return places


class ConvNeXt(Backbone):
    """torchvision's ConvNeXt without pooling and classifier (Liu et al., CVPR 2022).

    The norm between pooling and classifier is left out, too. In training, blocks are skipped at random (stochastic
    depth, as in torchvision). The last map has stride 32: images need about 64 x 32 pixels or more.

    Args:
        size: ``tiny``, ``small``, ``base``, ``large``; or ``micro``, four blocks of 8 to 64 channels, for tests.
        weights: as for :class:`ResNet`; torchvision has none for ``micro``.
        fam: ``mscam``: as for :class:`ResNet`.
    """

    def __init__(
        self,
        size: Literal["tiny", "small", "base", "large", "micro"] = "tiny",
        weights: Annotated[str | None, _FILE] = None,
        *,
        fam: Literal["none", "mscam"] = "none",
    ) -> None:
        name = f"convnext_{size}"
        micro = [CNBlockConfig(8 * 2**i, 16 * 2**i if i < 3 else None, 1) for i in range(4)]
        network: nn.Module = tv.ConvNeXt(micro, 0.1) if size == "micro" else tv.get_model(name)
        classifier = network.get_submodule("classifier.2")
        assert isinstance(classifier, nn.Linear)
        super().__init__(OrderedDict(features=network.get_submodule("features")))
        self.out_channels = classifier.in_features
        if weights is not None and size == "micro" and not is_file(weights):
            raise ConfigError("backbone.weights: torchvision has none for ConvNeXt micro; give a file, or null")

        load_around(self, weights, name, lambda: _end_with_mscam(self, fam))


class SmallCNN(Backbone):
    """Four 3x3 convolutions with batch normalisation, for CPUs and small images.

    Args:
        width: channels of the first layer; the others have 2, 4 and 4 times as many.
        norm: as for :class:`ResNet`, at ``bn2`` and ``bn4``: ``attentive`` replaces them, with 10 and 20 mixtures;
            ``se`` and ``cbam`` follow them.
        norm_init: as for :class:`ResNet`.
        fam: ``mscam``: as for :class:`ResNet`.
        style: as for :class:`ResNet`; ``layer1``, ``layer2`` and ``layer3`` stand for the first three convolutions.
    """

    def __init__(
        self,
        width: int = 32,
        *,
        norm: NormKind = "bn",
        norm_init: Annotated[NormInit, Facts(needs="norm not in ('bn', 'xan') or fam != 'none'")] = "convert",
        fam: Literal["none", "mscam"] = "none",
        style: StyleLayers | None = None,
    ) -> None:
        within("backbone", "[1, 4096]", width=width)  # a wider layer takes more than 10 GB
        channels = [3, width, 2 * width, 4 * width, 4 * width]
        layers: list[tuple[str, nn.Module]] = []
        for i, (c_in, c_out) in enumerate(itertools.pairwise(channels), start=1):
            layers += [
                (f"conv{i}", nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)),
                (f"bn{i}", nn.BatchNorm2d(c_out)),
                (f"relu{i}", nn.ReLU(inplace=True)),
            ]
            if i < len(channels) - 1:
                layers.append((f"pool{i}", nn.MaxPool2d(2)))
        super().__init__(OrderedDict(layers))
        self.out_channels = channels[-1]
        places = [Place("bn2", "bn2", _STAGE_MIXTURES[0]), Place("bn4", "bn4", _STAGE_MIXTURES[-1])]
        insert_attention(self, places, norm, norm_init)
        _end_with_mscam(self, fam, norm_init)
        insert_style(self, style, {f"layer{i}": StylePlace(f"relu{i}", channels[i], f"bn{i}") for i in (1, 2, 3)})


def _end_with_mscam(backbone: Backbone, fam: FusionKind, init: NormInit = "convert") -> None:
    if fam == "mscam":
        backbone.add_module("attention", MSCAM(backbone.out_channels, init=init))


def _style_places(backbone: Backbone, ends: Mapping[str, str]) -> dict[str, StylePlace]:
    """Return the places of style layers; ``ends`` are the names of places and of the parts that end there.

    A part has the channels of its last convolution.
    """
    places = {}
    for place, part in ends.items():
        modules = dict(backbone.get_submodule(part).named_modules(prefix=part))
        convolutions = [module for module in modules.values() if isinstance(module, nn.Conv2d)]
        norms = [name for name, module in modules.items() if isinstance(module, nn.BatchNorm2d)]
        places[place] = StylePlace(part, convolutions[-1].out_channels, norms[-1])
    return places
