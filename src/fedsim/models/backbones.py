"""Backbones: images in, feature map out.

A backbone is any ``nn.Module`` that maps images [B, 3, H, W] to a map [B, C, h, w] (or a vector [B, C]) and has an int
attribute ``out_channels`` = C. Those below keep torchvision's parameter names, so that an exported global model loads
into the plain torchvision network; where they have attention (``norm`` is not ``bn``), it loads into them alone.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
import torchvision.models as tv
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv2 import InvertedResidual

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import IMAGENET_MEAN, IMAGENET_STD
from fedsim.models.attention import NormInit, NormKind, Place, holds_attention, insert_attention
from fedsim.models.fusion import MSCAM, FusionKind, StageFusion, fuse_residuals, fused_resnet

_may_download: ContextVar[bool] = ContextVar("may_download", default=True)
"""false where weights are of no use, see :func:`without_downloads`"""
_STAGE_MIXTURES = (10, 10, 20, 20)
"""K of attentive normalisation at strides 4, 8, 16 and 32: ResNet-50 in the authors' code. Paper 000 silent."""


class Backbone(nn.Sequential):
    """Base of fedsim's own backbones, which configs can name by the class alone."""

    out_channels: int
    """C: channels of the output map"""


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
            each residual branch, before the sum.
        norm_init: ``convert``: at the start, the network computes the same as without attention; ``random``: as in the
            papers on attention, which spoils pretrained weights. Files with attention overwrite both.
        relu_after_stem: false removes the first ReLU, as in the code of CAP and FedCAPR; other code that loads such a
            model must remove it, too.
        fam: feature attention of paper 002. ``mscam``: multi-scale channel attention weighs the last map. ``aff34``: it
            fuses the maps of the last two stages to one, of the earlier map's shape. ``aff_residual``: it replaces the
            sums of all blocks. With ``norm_init: convert`` all gates start at 1/2: ``aff_residual`` then computes the
            same as the plain network, ``mscam`` half of it.
    """

    def __init__(
        self,
        depth: Literal[18, 34, 50] = 50,
        last_stride: Literal[1, 2] = 2,
        weights: str | None = None,
        *,
        norm: NormKind = "bn",
        norm_init: NormInit = "convert",
        relu_after_stem: bool = True,
        fam: FusionKind = "none",
    ) -> None:
        name = f"resnet{depth}"
        network = fused_resnet(depth) if fam == "aff_residual" else tv.get_model(name)
        if last_stride == 1:
            for module in network.layer4[0].modules():
                if isinstance(module, nn.Conv2d):
                    module.stride = (1, 1)
        without = {"avgpool", "fc"} | (set() if relu_after_stem else {"relu"})
        super().__init__(OrderedDict((n, m) for n, m in network.named_children() if n not in without))
        self.out_channels = int(network.fc.in_features)
        last = "bn3" if depth == 50 else "bn2"
        places = [
            Place(f"layer{stage}.{i}.bn2", f"layer{stage}.{i}.{last}", num_mixtures)
            for stage, num_mixtures in enumerate(_STAGE_MIXTURES, start=1)
            for i, _ in enumerate(network.get_submodule(f"layer{stage}").children())
        ]

        def insert() -> None:
            insert_attention(self, places, norm, norm_init)
            _end_with_mscam(self, fam, norm_init)
            if fam == "aff_residual":
                fuse_residuals(self, norm_init)
            elif fam == "aff34":
                self.out_channels //= 2
                self.add_module("fusion", StageFusion(self.out_channels, norm_init))

        _load_around(self, weights, name, insert)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the last map."""
        maps = earlier = images
        for name, module in self.named_children():
            maps = module(earlier, maps) if name == "fusion" else module(maps)
            if name == "layer3":
                earlier = maps
        return maps


class MobileNetV2(Backbone):
    """torchvision's MobileNetV2 features (Sandler et al., CVPR 2018).

    Args:
        width: width multiplier.
        weights: as for :class:`ResNet`; torchvision has weights for width 1.0 only.
        norm_eps: epsilon of the batch normalisations. Weights converted from Keras need 1e-3.
        pixels: the input of the pretrained weights. ``imagenet``: images normalised by ImageNet's mean and deviation;
            ``symmetric``: pixels from -1 to 1, for weights converted from Keras.
        norm: as for :class:`ResNet`; ``attentive`` replaces the norm after each depthwise convolution, with 10 mixtures
            up to stride 8 and 20 beyond; ``se`` and ``cbam`` end each inverted residual.
        norm_init: as for :class:`ResNet`.
    """

    def __init__(
        self,
        width: float = 1.0,
        weights: str | None = None,
        norm_eps: float = 1e-5,
        *,
        pixels: Literal["imagenet", "symmetric"] = "imagenet",
        norm: NormKind = "bn",
        norm_init: NormInit = "convert",
    ) -> None:
        network = tv.mobilenet_v2(width_mult=width)
        layers = OrderedDict(features=network.features)
        super().__init__(OrderedDict(rescale=_Symmetric()) | layers if pixels == "symmetric" else layers)
        self.out_channels = int(network.last_channel)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = norm_eps
        places = _inverted_residuals(network.features)
        _load_around(self, weights, "mobilenet_v2", lambda: insert_attention(self, places, norm, norm_init))


class _Symmetric(nn.Module):
    """Maps images [B, 3, H, W], normalised by ImageNet's mean and deviation, to pixels from -1 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        scale, offset = _to_symmetric(x.device)
        return x * scale + offset


@cache
def _to_symmetric(device: torch.device) -> tuple[Tensor, Tensor]:
    """``2 std`` and ``2 mean - 1`` [1, 3, 1, 1]; once per device, and no buffers, which would be sent to the server."""
    mean, std = (torch.tensor(c, dtype=torch.float64).view(1, 3, 1, 1) for c in (IMAGENET_MEAN, IMAGENET_STD))
    return (2 * std).float().to(device), (2 * mean - 1).float().to(device)


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
        weights: str | None = None,
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
        if weights is not None and size == "micro" and not _is_file(weights):
            raise ConfigError("backbone.weights: there are none of ConvNeXt micro; give a file, or null")

        _load_around(self, weights, name, lambda: _end_with_mscam(self, fam))


class SmallCNN(Backbone):
    """Four 3x3 convolutions with batch normalisation, for CPUs and small images.

    Args:
        width: channels of the first layer; the others have 2, 4 and 4 times as many.
        norm: as for :class:`ResNet`, at ``bn2`` and ``bn4``: ``attentive`` replaces them, with 10 and 20 mixtures;
            ``se`` and ``cbam`` follow them.
        norm_init: as for :class:`ResNet`.
        fam: ``mscam``: as for :class:`ResNet`.
    """

    def __init__(
        self,
        width: int = 32,
        *,
        norm: NormKind = "bn",
        norm_init: NormInit = "convert",
        fam: Literal["none", "mscam"] = "none",
    ) -> None:
        at_least("backbone", 1, width=width)
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


def _end_with_mscam(backbone: Backbone, fam: FusionKind, init: NormInit = "convert") -> None:
    if fam == "mscam":
        backbone.add_module("attention", MSCAM(backbone.out_channels, init=init))


def _load_around(backbone: nn.Module, weights: str | None, name: str, insert: Callable[[], None]) -> None:
    """Load weights, then ``insert`` attention; the other way round if the weights include attention.

    ``weights``: torchvision's name, a local file (never unpickled beyond tensors), or None. ``name``: torchvision's
    name of the network. Raises ConfigError if the weights do not exist or do not fit.
    """
    state = None if weights is None else _read_weights(weights, name)
    steps: list[Callable[[], None]] = [insert]
    if state is not None:
        steps.insert(0, partial(_load_state, backbone, state, str(weights), name))
    for step in reversed(steps) if state is not None and holds_attention(state) else steps:
        step()


def _load_state(backbone: nn.Module, state: dict[str, Tensor], weights: str, name: str) -> None:
    """Load tensors; those of a classifier or neck are ignored. The last two arguments are for messages."""
    wanted = backbone.state_dict()
    if not any(key in state for key in wanted):  # files of `network.features` lack the leading "features."
        state = {f"features.{key}": value for key, value in state.items()}
    if missing := [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]:
        raise ConfigError(
            f"backbone.weights: {weights} lacks {len(missing)} tensors of {name}, first {missing[0]}; "
            "give weights of the same network, width and norm"
        )
    if strange := [key for key in state if key not in wanted and holds_attention([key])]:
        raise ConfigError(
            f"backbone.weights: {weights} has {strange[0]}, which {name} with this norm lacks; "
            "give weights of the same network, width and norm"
        )
    if wrong := [key for key in wanted if key in state and state[key].shape != wanted[key].shape]:
        key = wrong[0]
        raise ConfigError(
            f"backbone.weights: {weights} has {key} of shape {list(state[key].shape)}, {name} needs "
            f"{list(wanted[key].shape)}; give weights of the same network and width"
        )
    backbone.load_state_dict({key: state[key] for key in wanted if key in state}, strict=False)


def _read_weights(weights: str, name: str) -> dict[str, Tensor] | None:
    if not _is_file(weights):
        return _download(weights, name)
    path = Path(weights).expanduser()
    if not path.is_file():
        raise ConfigError(f"backbone.weights: no file {path}; give an existing file or a torchvision name")
    try:  # only tensors and plain types are unpickled, to the CPU whatever device wrote them
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the readers raise many types for a damaged file
        raise ConfigError(f"backbone.weights: cannot read {path} ({type(error).__name__}); is it complete?") from error
    if not isinstance(state, dict):
        raise ConfigError(f"backbone.weights: {path} holds no state dict but a {type(state).__name__}")
    return state


@contextmanager
def without_downloads() -> Iterator[None]:
    """Let backbones be built without torchvision's weights, whose names are checked all the same."""
    token = _may_download.set(False)
    try:
        yield
    finally:
        _may_download.reset(token)


def _download(weights: str, name: str) -> dict[str, Tensor] | None:
    """Return torchvision's weights; None where nothing shall be downloaded."""
    choices = tv.get_model_weights(name)
    if weights not in choices.__members__:
        known = ", ".join(choices.__members__)
        raise ConfigError(f"backbone.weights: {weights} is no weights of {name}; choose {known}, a file, or null")
    if not _may_download.get():
        return None
    try:
        return dict(choices[weights].get_state_dict(check_hash=True))
    except Exception as error:  # no network, or a damaged file in torch's cache: many types
        raise ConfigError(
            f"backbone.weights: cannot get {choices[weights].url} ({type(error).__name__}: {error}); give a local file "
            "instead, or delete a damaged download from torch's cache"
        ) from error


def _is_file(weights: str) -> bool:
    """Whether ``weights`` is a path, not a name in torchvision."""
    return Path(weights).suffix in {".pth", ".pt", ".safetensors"}
