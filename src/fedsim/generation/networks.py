"""The networks of a generator of people (paper 002, Figure 6).

The appearance encoder encodes clothes, the structure encoder pose and background; the decoder makes an image of both
codes. B is the number of images, of H x W pixels in [-1, 1], RGB; w is the width, Z the number of identities.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.data.images import Size
from fedsim.functional.normalise import normalise_images

LUMA = (0.299, 0.587, 0.114)
"""weights of red, green and blue (ITU-R BT.601)"""
_SLOPE = 0.2  # of LeakyReLU below 0
_STRIDE = 4  # pixels per element of the structure map, along both axes
_SMALLEST = 8  # pixels: the discriminator reduces a smaller image to nothing


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Sizes of a generator's networks, except the appearance encoder, whose size is its backbone's."""

    width: int = 16
    """w: channels at full resolution; the structure map has 4 w"""
    structure_blocks: int = 2
    """residual blocks of the structure encoder"""
    decoder_blocks: int = 3
    """residual blocks of the decoder"""
    parts: int = 2
    """horizontal stripes of the body; the appearance code has a part for each"""
    hidden: int = 128
    """width of the layer between the appearance code and the decoder's scales and offsets"""
    scales: int = 2
    """resolutions at which the discriminator scores images"""

    def __post_init__(self) -> None:
        at_least("networks", 1, **asdict(self))


class StructureEncoder(nn.Module):
    """Images to maps [B, 4w, H/4, W/4] of pose, body and background; see :class:`Networks` for the arguments.

    It uses luma only, and instance normalisation removes brightness and contrast.
    """

    luma: Tensor

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.register_buffer("luma", torch.tensor(LUMA).view(1, 3, 1, 1), persistent=False)
        self.stem = nn.Sequential(
            *_normalised(nn.Conv2d(1, width, 3, 1, 1)),
            *_normalised(nn.Conv2d(width, 2 * width, 4, 2, 1)),
            *_normalised(nn.Conv2d(2 * width, 4 * width, 4, 2, 1)),
        )
        self.blocks = nn.Sequential(*(_StructureBlock(4 * width) for _ in range(blocks)))

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W]."""
        maps: Tensor = self.blocks(self.stem((images * self.luma).sum(1, keepdim=True)))
        return maps


class _StructureBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, 1, 1) for _ in range(2))
        self.branch = nn.Sequential(*_normalised(first), second, nn.InstanceNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


def _normalised(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.InstanceNorm2d(conv.out_channels), nn.LeakyReLU(_SLOPE)]


class AppearanceEncoder(nn.Module):
    """Images to codes [B, parts * C] of colours and prints, and to logits of Z = ``num_classes`` identities.

    The backbone (see :mod:`fedsim.models.backbones`) makes maps of C channels. They are cut into ``parts`` stripes, and
    each stripe is pooled by its maximum.
    """

    def __init__(self, backbone: nn.Module, parts: int, num_classes: int) -> None:
        super().__init__()
        self.backbone, self.parts = backbone, parts
        channels = backbone.out_channels
        assert isinstance(channels, int)
        self.code_size = parts * channels
        self.norm = nn.BatchNorm1d(self.code_size)
        self.head = nn.Linear(self.code_size, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W]."""
        maps = self.backbone(normalise_images((images + 1) * 127.5))
        rows = maps.shape[2]  # cut as by adaptive_max_pool2d, whose backward has no deterministic form on GPUs
        bounds = [(rows * part // self.parts, -(-rows * (part + 1) // self.parts)) for part in range(self.parts)]
        stripes = [maps[:, :, begin:end].flatten(2).max(dim=2).values for begin, end in bounds]
        return torch.stack(stripes, dim=2).flatten(1)

    def logits(self, codes: Tensor) -> Tensor:
        """Classify the identity of codes, [B, Z]."""
        logits: Tensor = self.head(self.norm(codes))
        return logits


class Decoder(nn.Module):
    """Structure maps and appearance codes to images.

    The code sets scale and offset of each channel after instance normalisation (AdaIN; Huang and Belongie, ICCV 2017).
    They are equal at all pixels, so only the structure determines where trousers are. ``code_size``: size of appearance
    codes; see :class:`Networks` for the other arguments.
    """

    def __init__(self, width: int, blocks: int, code_size: int, hidden: int) -> None:
        super().__init__()
        channels = 4 * width
        self.blocks = nn.ModuleList(_AppearanceBlock(channels) for _ in range(blocks))
        self.settings = nn.Sequential(
            nn.Linear(code_size, hidden), nn.LeakyReLU(_SLOPE), nn.Linear(hidden, blocks * 4 * channels)
        )
        self.enlarge = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(channels, 2 * width, 3, 1, 1), nn.LeakyReLU(_SLOPE),
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, 1, 1), nn.LeakyReLU(_SLOPE),
            nn.Conv2d(width, 3, 3, 1, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, structure: Tensor, codes: Tensor) -> Tensor:
        """Make images [B, 3, H, W] from maps and codes."""
        maps = structure
        for block, settings in zip(self.blocks, self.settings(codes).chunk(len(self.blocks), 1), strict=True):
            maps = block(maps, settings)
        images: Tensor = self.enlarge(maps)
        return images


class _AppearanceBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, 1, 1) for _ in range(2))

    def forward(self, x: Tensor, settings: Tensor) -> Tensor:
        """Residual block; settings [B, 4 channels]: scale - 1 and offset of the first and of the second norm."""
        scale, offset, scale_2, offset_2 = settings[:, :, None, None].chunk(4, 1)
        inner = F.leaky_relu(F.instance_norm(self.first(x)) * (1 + scale) + offset, _SLOPE)
        out: Tensor = x + F.instance_norm(self.second(inner)) * (1 + scale_2) + offset_2
        return out


class Discriminator(nn.Module):
    """Scores patches of images as real or not, at ``scales`` resolutions; each is half of the previous one."""

    def __init__(self, width: int, scales: int) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)
        self.scales = nn.ModuleList()
        for _ in range(scales):
            convs = [nn.Conv2d(c_in, c_out, 4, 2, 1) for c_in, c_out in itertools.pairwise(channels)]
            layers = itertools.chain.from_iterable((conv, nn.LeakyReLU(_SLOPE)) for conv in convs)
            self.scales.append(nn.Sequential(*layers, nn.Conv2d(channels[-1], 1, 1)))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return scores [B, 1, h, w] of each scale; 1: real, 0: not."""
        scores = []
        for scale in self.scales:
            scores.append(scale(images))
            images = F.avg_pool2d(images, 2, ceil_mode=True, count_include_pad=False)
        return scores


class Generator(nn.Module):
    """Both encoders and the decoder, which are kept after the training; ``backbone`` is the appearance encoder's."""

    def __init__(self, backbone: nn.Module, networks: Networks, num_classes: int) -> None:
        super().__init__()
        self.appearance = AppearanceEncoder(backbone, networks.parts, num_classes)
        self.structure = StructureEncoder(networks.width, networks.structure_blocks)
        self.decoder = Decoder(networks.width, networks.decoder_blocks, self.appearance.code_size, networks.hidden)

    def forward(self, structure: Tensor, appearance: Tensor) -> Tensor:
        """Return images with the structure of the first and the appearance of the second images, all [B, 3, H, W]."""
        images: Tensor = self.decoder(self.structure(structure), self.appearance(appearance))
        return images


@torch.no_grad()
def check_backbone(backbone: nn.Module, parts: int, size: Size) -> None:
    """Raise ConfigError unless a backbone turns images of this size into maps with at least ``parts`` rows."""
    name, was_training = type(backbone).__name__, backbone.training
    try:
        maps = backbone.eval()(torch.zeros(1, 3, *size))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"appearance: {name} cannot process images of {list(size)} pixels ({error})") from error
    finally:
        backbone.train(was_training)
    if maps.dim() != 4 or maps.shape[2] < parts:
        raise ConfigError(
            f"appearance: {name} returns {list(maps.shape)} for an image of {list(size)} pixels; networks.parts: "
            f"{parts} needs a map of at least that many rows"
        )


def check_size(size: Size, networks: Networks) -> None:
    """Raise ConfigError unless the networks can make images of this size."""
    smallest = _SMALLEST * 2 ** (networks.scales - 1)
    if min(size) < smallest or any(pixels % _STRIDE for pixels in size):
        raise ConfigError(
            f"size: {list(size)} is not supported; give multiples of {_STRIDE}, at least {smallest}, in pixels"
        )
