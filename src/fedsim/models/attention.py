"""Attentive normalisation, and attention blocks at the end of residual branches, put into networks of torchvision.

Shapes: B images, C channels, H x W pixels of a map, K mixtures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.errors import ConfigError

__all__ = [
    "CBAM",
    "AttentiveNorm2d",
    "NormInit",
    "NormKind",
    "Place",
    "SqueezeExcitation",
    "holds_attention",
    "insert_attention",
]

NormKind = Literal["bn", "attentive", "se", "cbam"]
NormInit = Literal["convert", "random"]


class AttentiveNorm2d(nn.Module):
    """Attentive normalisation (Li, Sun and Wu, arXiv:1908.01259; Eq. (2) of paper 000, where K is called M).

    Batch normalisation whose affine transformation is mixed for each image from K of them. The weights lambda come from
    statistics of the image's own map, and do not sum to 1.

    Args:
        channels: C.
        num_mixtures: K.
        eps: of the batch normalisation.
        momentum: of the batch normalisation.
    """

    def __init__(self, channels: int, num_mixtures: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, eps, momentum, affine=False)
        self.gamma = nn.Parameter(torch.empty(num_mixtures, channels))
        self.beta = nn.Parameter(torch.empty(num_mixtures, channels))
        self.attention = nn.Linear(channels, num_mixtures, bias=False)  # a 1x1 convolution of a 1x1 map
        self.attention_norm = nn.BatchNorm1d(num_mixtures)
        nn.init.normal_(self.gamma, 1.0, 0.1)
        nn.init.normal_(self.beta, 0.0, 0.1)
        nn.init.kaiming_normal_(self.attention.weight, mode="fan_out", nonlinearity="relu")

    @classmethod
    @torch.no_grad()
    def from_batch_norm(cls, norm: nn.BatchNorm2d, num_mixtures: int, init: NormInit = "convert") -> AttentiveNorm2d:
        """Return a layer with the running statistics of ``norm`` and, after ``convert``, with its output, too.

        ``convert``: lambda = hardsigmoid(0) = 1/2 for every image and mixture, and each mixture holds 2/K of the affine
        transformation. The attention then starts to train through the weight of its normalisation, which is 0.
        """
        layer = cls(norm.num_features, num_mixtures, norm.eps, norm.momentum).to(norm.weight)
        layer.norm.load_state_dict(dict(norm.named_buffers()))
        if init == "convert":
            layer.gamma.copy_(2 * norm.weight / num_mixtures)
            layer.beta.copy_(2 * norm.bias / num_mixtures)
            nn.init.zeros_(layer.attention_norm.weight)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps [B, C, H, W].

        Raises:
            ConfigError: in training on one image: lambda is normalised over the batch.
        """
        if self.training and len(x) < 2:
            raise ConfigError(
                "model.client.batch_size: attentive normalisation cannot train on a batch of one image; "
                "set it to at least 2"
            )
        mixture = F.hardsigmoid(self.attention_norm(self.attention(_instance_statistics(x))))  # lambda [B, K]
        scale, shift = mixture @ self.gamma, mixture @ self.beta
        return torch.addcmul(shift[..., None, None], scale[..., None, None], self.norm(x))  # Eq. (2)


def _instance_statistics(x: Tensor) -> Tensor:
    """Return each channel's mean over its standard deviation [B, C]; the variance is unbiased where it can be."""
    correction = int(x.shape[2] * x.shape[3] > 1)
    variance, mean = torch.var_mean(x, dim=(2, 3), correction=correction)
    return mean / torch.sqrt(variance + 1e-3)


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation block (Hu, Shen and Sun, CVPR 2018, Eqs. (2) to (4)): a gate for each channel.

    Args:
        channels: C.
        reduction: r; the excitation has C / r hidden units, at least one. As in the equations it has no biases.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.excite = _Excitation(channels, reduction)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Weights that open the gate by sigmoid(0) = 1/2 if they are 0."""
        return (self.excite.expand.weight,)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of maps [B, C, H, W]."""
        gate = torch.sigmoid(self.excite(x.mean(dim=(2, 3))))
        return x * gate[..., None, None]


class CBAM(nn.Module):
    """Convolutional block attention module (Woo, Park, Lee and Kweon, ECCV 2018): a gate for channels, one for pixels.

    As in its equations there is no normalisation behind the 7 x 7 convolution, and no bias.

    Args:
        channels: C.
        reduction: r, as for :class:`SqueezeExcitation`.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.excite = _Excitation(channels, reduction)
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Weights that open the two gates by sigmoid(0) = 1/2 each if they are 0."""
        return self.excite.expand.weight, self.spatial.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels, then the pixels, of maps [B, C, H, W]."""
        gate = torch.sigmoid(self.excite(x.mean(dim=(2, 3))) + self.excite(x.amax(dim=(2, 3))))  # Eq. (2)
        x = x * gate[..., None, None]
        pooled = torch.stack([x.mean(dim=1), x.amax(dim=1)], dim=1)  # [B, 2, H, W]
        return x * torch.sigmoid(self.spatial(pooled))  # Eq. (3)


class _Excitation(nn.Module):
    """``W_2 relu(W_1 z)`` with C / r hidden units."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.reduce = nn.Linear(channels, hidden, bias=False)
        self.expand = nn.Linear(hidden, channels, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """Map pooled features [B, C] to logits of gates [B, C]."""
        logits: Tensor = self.expand(F.relu(self.reduce(z)))
        return logits


class Place(NamedTuple):
    """Where a block of a backbone can have attention: names of two of its BatchNorm2d."""

    inner: str
    """replaced by attentive normalisation"""
    last: str
    """followed by a squeeze-and-excitation block or CBAM: the end of the residual branch"""
    num_mixtures: int
    """K of attentive normalisation"""


@torch.no_grad()
def insert_attention(backbone: nn.Module, places: Iterable[Place], norm: NormKind, init: NormInit) -> None:
    """Put attention into a backbone. With ``init: convert`` the backbone computes what it did before.

    Args:
        backbone: with its (pretrained) weights.
        places: of its blocks.
        norm: which attention; ``bn`` is none.
        init: ``convert``, or ``random`` as in the papers, for networks trained from scratch.
    """
    for place in places:
        if norm == "attentive":
            layer = AttentiveNorm2d.from_batch_norm(_norm_at(backbone, place.inner), place.num_mixtures, init)
            backbone.set_submodule(place.inner, layer, strict=True)
        elif norm != "bn":
            last = _norm_at(backbone, place.last)
            block = (SqueezeExcitation if norm == "se" else CBAM)(last.num_features).to(last.weight)
            backbone.set_submodule(place.last, _follow(last, block, init), strict=True)


def _norm_at(backbone: nn.Module, name: str) -> nn.BatchNorm2d:
    norm = backbone.get_submodule(name)
    assert isinstance(norm, nn.BatchNorm2d), f"{name} is a {type(norm).__name__}"
    return norm


def _follow(norm: nn.BatchNorm2d, block: SqueezeExcitation | CBAM, init: NormInit) -> nn.Sequential:
    """Put ``block`` behind ``norm``; after ``convert``, each of its gates halves what the norm has doubled."""
    if init == "convert":
        for gate in block.gates:
            nn.init.zeros_(gate)
            norm.weight.mul_(2)
            norm.bias.mul_(2)
    return nn.Sequential(OrderedDict(norm=norm, attention=block))


def holds_attention(names: Iterable[str]) -> bool:
    """Whether tensors are of a backbone into which :func:`insert_attention` has put something.

    >>> holds_attention(["layer1.0.bn2.attention.weight"]), holds_attention(["layer1.0.bn2.weight"])
    (True, False)
    """
    return any(".attention." in f".{name}" for name in names)
