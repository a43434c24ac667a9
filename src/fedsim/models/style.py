"""Style layers for backbones: MixStyle and CrossStyle change the style of training images, others remove style.

The style of an image is mean and deviation of each channel over the pixels of its map. MixStyle and CrossStyle have no
parameters and do nothing in evaluation; Standardise has none, and does the same in both; SNR has some. A diversified
norm takes the place of a batch normalisation. Random numbers come from torch's global stream, which is set for each
(seed, round, client). All draws stay on the device, and none decides on the host: steps can be CUDA graphs.

Shapes: B images, C channels, H x W pixels of a map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Gamma

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.functional.style import mix_styles, standardise, swap_styles
from fedsim.models.diversify import DiversifiedNorm2d
from fedsim.models.map_checks import check_images, check_pixels
from fedsim.models.memory_order import in_order_of
from fedsim.settings.facts import Facts

_PREFIX = "style_"
"""of the names of the layers in a backbone"""
_TRIES = 32
"""boxes that are sampled at once, of which the first large one counts"""
_SMALLEST_BOX = 0.1
"""share of the map's pixels"""


@dataclass(frozen=True, kw_only=True)
class StyleLayers(Section, option="model.backbone.style"):
    """Style layers of a backbone."""

    kind: Literal["none", "mix", "cross", "standardise", "snr", "diversify"] = "none"
    """``mix``: :class:`MixStyle`; ``cross``: :class:`CrossStyle`; ``standardise``: :class:`Standardise`; ``snr``:
    :class:`SNR`; ``diversify``: :class:`DiversifiedNorm2d` in place of the last batch normalisation of a stage"""
    after: Annotated[tuple[str, ...], Facts(needs="kind != 'none'", is_set=True)] = ("layer1", "layer2")
    """places of the layers: ``input``, the images; ``layer1``, ``layer2``, ``layer3``, the maps at the ends of a
    network's first three stages; ``patches``, the patches of a vision transformer with their positions"""
    p: Annotated[float, Facts(needs="kind in ('mix', 'cross', 'diversify')")] = 0.5
    """of ``mix``, ``cross`` and ``diversify``: probability that a batch is changed, at each place anew"""
    alpha: Annotated[float, Facts(needs="kind == 'mix'")] = 0.1
    """of ``mix``: an image's share of its own style is Beta(alpha, alpha); small values are near 0 or 1"""
    crop: Annotated[Literal["none", "style", "content", "both"], Facts(needs="kind == 'cross'")] = "none"
    """of ``cross``: ``style``: the partner's style is that of a random box; ``content``: only a random box of the image
    is changed; ``both``; or neither. Boxes are the same for all images of a batch"""
    beta: Annotated[float, Facts(needs="kind == 'cross' and crop != 'none'")] = 0.5
    """of ``cross``: a box has the share Beta(beta, beta) of the map's pixels, before it is cut at the edges"""
    reduction: Annotated[int, Facts(needs="kind == 'snr'")] = 16
    """of ``snr``: the gates have C / reduction hidden units"""
    adapt: Annotated[float, Facts(needs="kind == 'diversify'")] = 0.1
    """of ``diversify``: share of an image's own statistics in evaluation, beside the running ones; 0: none"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        within("backbone.style", "[0, 1]", p=self.p, adapt=self.adapt)
        within("backbone.style", "[1e-6, 1000]", alpha=self.alpha, beta=self.beta)
        at_least("backbone.style", 1, reduction=self.reduction)
        if twice := [place for place, count in Counter(self.after).items() if count > 1]:
            raise ConfigError(f"backbone.style.after: {twice[0]} is there twice; leave one out")

    def build(self, place: str, channels: int) -> nn.Module:
        """Return the layer for a ``place`` with maps of so many ``channels``."""
        if self.kind == "snr":
            return SNR(channels, self.reduction, place)
        if self.kind == "cross":
            return CrossStyle(self.p, self.crop, self.beta, place)
        if self.kind == "standardise":
            return Standardise(place)
        assert self.kind == "mix", "a diversified norm takes the place of another one"
        return MixStyle(self.p, self.alpha, place)


class MixStyle(nn.Module):
    """MixStyle (Zhou, Yang, Qiao and Xiang, ICLR 2021): an image gets a mixture of its style and another image's.

    The other images are a random permutation of the batch. The paper's other mode pairs images of two domains; a
    client's batch has one.

    Args:
        p: probability that a batch is changed.
        alpha: the share of the own style is Beta(alpha, alpha), for each image.
        place: of the layer, for messages.
    """

    def __init__(self, p: float = 0.5, alpha: float = 0.1, place: str = "input") -> None:
        super().__init__()
        self.p, self.alpha, self.place = p, alpha, place

    def forward(self, x: Tensor) -> Tensor:
        """Mix the styles of maps [B, C, H, W] in training.

        Raises:
            ConfigError: for maps of one pixel, and in training for one image.
        """
        check_pixels(x, self.place)
        if not self.training:
            return x
        check_images(x, type(self).__name__)
        # lambda is 1 in a batch that is not changed: so the host need not know
        shares = torch.where(_happens(self.p, x), _sample_beta(self.alpha, len(x), x.device), 1.0)
        return mix_styles(x, shares, _sample_partners(x))

    def extra_repr(self) -> str:
        """Return the settings; backbones with others are other architectures."""
        return f"p={self.p}, alpha={self.alpha}"


class Standardise(nn.Module):
    """Instance normalisation without parameters (Ulyanov, Vedaldi and Lempitsky, 2016): style is removed.

    At ``input`` each image is standardised, whatever its light and the contrast of its colours. ``place`` is that of
    the layer, for messages.
    """

    def __init__(self, place: str = "input") -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        """Standardise maps [B, C, H, W], in training and evaluation; raise ConfigError for maps of one pixel."""
        check_pixels(x, self.place)
        return standardise(x)


class CrossStyle(nn.Module):
    """CrossNorm (Tang et al., ICCV 2021), which DACS (Yang et al., AAAI 2024) calls CrossStyle: images swap styles.

    DACS has it on the images, in every batch, with ``crop: both``. SelfNorm, the second part of the source, is left
    out. Paper silent on boxes of one pixel, which have no deviation; here they are sampled again.

    Args:
        p: probability that a batch is changed.
        crop: see :class:`StyleLayers`.
        beta: see :class:`StyleLayers`.
        place: of the layer, for messages.
    """

    def __init__(
        self, p: float = 0.5, crop: Literal["none", "style", "content", "both"] = "none", beta: float = 0.5,
        place: str = "input",
    ) -> None:  # fmt: skip
        super().__init__()
        self.p, self.crop, self.beta, self.place = p, crop, beta, place

    def forward(self, x: Tensor) -> Tensor:
        """Swap the styles of maps [B, C, H, W] in training; raise ConfigError as :class:`MixStyle` does."""
        check_pixels(x, self.place)
        if not self.training:
            return x
        check_images(x, type(self).__name__)
        happens, partners = _happens(self.p, x), _sample_partners(x)
        style_box = _sample_box(x, self.beta) if self.crop in ("style", "both") else None
        content_box = _sample_box(x, self.beta) if self.crop in ("content", "both") else None
        return torch.where(happens, swap_styles(x, partners, style_box=style_box, content_box=content_box), x)

    def extra_repr(self) -> str:
        """Return the settings; backbones with others are other architectures."""
        return f"p={self.p}, crop={self.crop}, beta={self.beta}"


class Separated(NamedTuple):
    """The parts that an SNR layer separates, pooled: each [B, C]. Through a head of the layer: logits, each [B, Z]."""

    normalised: Tensor
    """of F~, without style: the bias of the normalisation, for each image"""
    relevant: Tensor
    """of F+, with the part of the residual that goes on"""
    irrelevant: Tensor
    """of F-, with the other part"""


class SNR(nn.Module):
    """Style normalisation and restitution (Jin et al., CVPR 2020).

    Instance normalisation removes an image's style. Gates for each channel then return a part of what was lost. The
    gates have biases and start as in the authors' code, by He et al.'s rule for outputs. At the start the layer is not
    the identity, so pretrained weights behind it meet other maps than in their training. The loss is
    ``model.objective.causality``.

    Args:
        channels: C.
        reduction: the gates have C / ``reduction`` hidden units, at least one.
        place: of the layer, for messages.
    """

    def __init__(self, channels: int, reduction: int = 16, place: str = "input") -> None:
        super().__init__()
        self.channels = channels
        hidden = max(1, channels // reduction)
        self.norm = nn.InstanceNorm2d(channels, affine=True)
        self.reduce = nn.Linear(channels, hidden)
        self.expand = nn.Linear(hidden, channels)
        for layer in (self.reduce, self.expand):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.place = place
        self.keeps = False
        """whether a training pass keeps what it has separated, for the loss"""
        self._separated: Separated | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return F+ of maps F [B, C, H, W]; raise ConfigError for maps of one pixel."""
        _, relevant, irrelevant = self.separate(x)
        if self.keeps and self.training:
            # the mean of a normalised map is the bias; as a mean, its rounding would have a gradient
            pooled = self.norm.bias.expand(len(x), -1)
            self._separated = Separated(pooled, relevant.mean(dim=(2, 3)), irrelevant.mean(dim=(2, 3)))
        return relevant

    def take_separated(self) -> Separated | None:
        """Return the parts that the last training pass kept, once: afterwards nothing holds its graph."""
        separated, self._separated = self._separated, None
        return separated

    def separate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three maps like ``x``: normalised, with the relevant part of the residual, and with the other part.

        These are F~, F+ and F-; F+ + F- = F~ + F.
        """
        check_pixels(x, self.place)
        normalised = in_order_of(self.norm(x), x)  # F~
        residual = x - normalised  # R
        gate = self.gate(residual)
        return normalised, normalised + gate * residual, normalised + (1 - gate) * residual

    def gate(self, residual: Tensor) -> Tensor:
        """Return a in (0, 1), [B, C, 1, 1], of residuals R [B, C, H, W]."""
        hidden = F.relu(self.reduce(residual.mean(dim=(2, 3))))
        return torch.sigmoid(self.expand(hidden))[..., None, None]


class StylePlace(NamedTuple):
    """A place for a style layer in a backbone."""

    module: str
    """name of the part after which it stands, a child of an nn.Sequential"""
    channels: int
    """C of its map"""
    norm: str
    """name of the last batch normalisation before its end"""


def insert_style(backbone: nn.Sequential, style: StyleLayers | None, places: Mapping[str, StylePlace]) -> None:
    """Put style layers into a backbone; ``places`` are those that it has besides ``input``, which has no norm.

    Names of tensors do not change. Raises ConfigError for places that the backbone does not have.
    """
    if style is None or style.kind == "none":
        return
    if style.kind == "diversify":
        check_places(style, places, type(backbone).__name__)
        for place in sorted(style.after):  # in one order, as initial weights are drawn one after the other
            _diversify(backbone, places[place].norm, style, place)
        return
    check_places(style, ["input", *places], type(backbone).__name__)
    for place in sorted(style.after):
        module, channels, _ = places.get(place, StylePlace("", 3, ""))
        parent, _, name = module.rpartition(".")
        sequence = backbone.get_submodule(parent)
        assert isinstance(sequence, nn.Sequential), f"{parent} is a {type(sequence).__name__}"
        _insert_after(sequence, name, f"{_PREFIX}{place}", style.build(place, channels))


def _diversify(backbone: nn.Module, name: str, style: StyleLayers, place: str) -> None:
    """Replace the batch normalisation ``name``; its tensors keep their names and values."""
    norm = backbone.get_submodule(name)
    if type(norm) is not nn.BatchNorm2d:
        raise ConfigError(
            f"backbone.style.kind: diversify needs a plain batch normalisation at {place}, and {name} is a "
            f"{type(norm).__name__}; set backbone.norm to bn"
        )
    backbone.set_submodule(name, DiversifiedNorm2d.from_batch_norm(norm, style.p, style.adapt, place), strict=True)


def check_places(style: StyleLayers, places: Iterable[str], backbone: str) -> None:
    """Raise ConfigError if a style layer stands where a ``backbone`` has no place for it, or nowhere."""
    choices = ", ".join(places)
    if not style.after:
        raise ConfigError(f"backbone.style.after: {style.kind} needs a place; choose from {choices}")
    for place in style.after:
        if place not in choices.split(", "):
            raise ConfigError(
                f"backbone.style.after: {backbone} has no place {place} ahead of its last stage; choose from {choices}"
            )


def holds_style(names: Iterable[str]) -> bool:
    """Whether these names of tensors are of a backbone with style layers that have parameters.

    >>> holds_style(["style_layer1.norm.weight"]), holds_style(["layer1.0.bn2.weight"])
    (True, False)
    """
    return any(part.startswith(_PREFIX) for name in names for part in name.split("."))


def _insert_after(sequence: nn.Sequential, name: str, new_name: str, layer: nn.Module) -> None:
    """Put a layer behind the child ``name`` of a sequence; "": ahead of all. Other children keep their names."""
    children = list(sequence.named_children())
    position = 1 + [child for child, _ in children].index(name) if name else 0
    for child, _ in children[position:]:
        delattr(sequence, child)  # to be added again behind the layer
    for child, module in [(new_name, layer), *children[position:]]:
        sequence.add_module(child, module)


def _happens(p: float, x: Tensor) -> Tensor:
    """Return true with probability p, as a tensor [] on the device of ``x``."""
    return torch.rand((), device=x.device) < p


def _sample_partners(x: Tensor) -> Tensor:
    """Return a random permutation [B] of the images."""
    return torch.rand(len(x), device=x.device).argsort()


def _sample_beta(alpha: float, size: int, device: torch.device) -> Tensor:
    """Return ``size`` samples of Beta(alpha, alpha), float32.

    X / (X + Y) with X, Y from Gamma(alpha), computed from logarithms: for small alpha both are 0 in float32.
    Gamma(alpha) is Gamma(alpha + 1) times U^(1 / alpha), and -ln U is exponential.
    """
    ones = torch.ones(2, size, device=device)
    gammas = Gamma((1 + alpha) * ones, ones, validate_args=False).sample()  # a validation would wait for the device
    first, second = gammas.log() - torch.empty_like(ones).exponential_() / alpha
    return torch.sigmoid(first - second)


def _sample_box(x: Tensor, beta: float) -> Tensor:
    """Return the pixels [H, W] bool of a random box: a share Beta(beta, beta), a uniform center, cut at the edges.

    It has more than a tenth of the pixels, and at least two. On maps of few pixels all boxes may be smaller; then it is
    the whole map.
    """
    height, width = x.shape[2:]
    side, device = _sample_beta(beta, _TRIES, x.device).sqrt(), x.device
    bounds = []
    for size in (height, width):
        center, half = (torch.rand(_TRIES, device=device) * size).floor(), ((side * size).floor() / 2).floor()
        bounds += [(center - half).clamp(0, size), (center + half).clamp(0, size)]
    top, bottom, left, right = bounds
    is_large = (bottom - top) * (right - left) > max(_SMALLEST_BOX * height * width, 1)
    first = is_large.float().argmax(dim=0, keepdim=True)
    top, bottom, left, right = torch.stack(bounds).index_select(1, first)  # an index on the device, for it stays there
    rows, columns = (torch.arange(size, device=device) for size in (height, width))
    box = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return torch.logical_or(box, ~is_large.any())
