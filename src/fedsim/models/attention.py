"""Attentive normalisation, and attention blocks for the end of residual branches of torchvision's networks.

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
from fedsim.models.assembled import assemble_norms

NormKind = Literal["bn", "attentive", "se", "cbam", "xan"]
NormInit = Literal["convert", "random"]


class AttentiveNorm2d(nn.Module):
    """Attentive normalisation (Li, Sun and Wu, arXiv:1908.01259; Eq. (2) of paper 000, where K is called M).

    Batch normalisation with K affine transformations, which each image mixes with weights lambda of its own. The
    weights come from statistics of the image's map, and do not sum to 1. ``channels`` is C, ``num_mixtures`` K; ``eps``
    and ``momentum`` are those of the batch normalisation.
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
        """Return a layer with the running statistics of ``norm`` and, for ``convert``, the same output.

        ``convert``: lambda = hardsigmoid(0) = 1/2 for every image and mixture, and each mixture is 2/K of the affine
        transformation. The attention starts to train through the weight of its normalisation, which is 0.
        """
        layer = cls(norm.num_features, num_mixtures, norm.eps, norm.momentum).to(norm.weight)
        layer.norm.load_state_dict(dict(norm.named_buffers()))
        if init == "convert":
            layer.gamma.copy_(2 * norm.weight / num_mixtures)
            layer.beta.copy_(2 * norm.bias / num_mixtures)
            nn.init.zeros_(layer.attention_norm.weight)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps [B, C, H, W]; raise ConfigError in training on one image, as lambda is normalised over B."""
        if self.training and len(x) < 2:
            raise ConfigError(
                "model.client.batch_size: attentive normalisation cannot train on a batch of one image; "
                "set it to at least 2"
            )
        # the mean of each channel over its standard deviation; the variance is unbiased if the map has several pixels
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=int(x.shape[2] * x.shape[3] > 1))
        statistics = mean / torch.sqrt(variance + 1e-3)  # [B, C]
        mixture = F.hardsigmoid(self.attention_norm(self.attention(statistics)))  # lambda [B, K]
        scale, shift = mixture @ self.gamma, mixture @ self.beta
        return torch.addcmul(shift[..., None, None], scale[..., None, None], self.norm(x))  # Eq. (2)


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation block (Hu, Shen and Sun, CVPR 2018, Eqs. (2) to (4)): a gate for each channel.

    With ``reduction`` r, the excitation has C / r hidden units, at least one, and no biases, as in the equations.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.excite = _excitation(channels, reduction)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Weights that, if they are 0, set the gate to sigmoid(0) = 1/2."""
        return (self.get_parameter("excite.expand.weight"),)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of maps [B, C, H, W]."""
        gate = torch.sigmoid(self.excite(x.mean(dim=(2, 3))))
        return x * gate[..., None, None]


class CBAM(nn.Module):
    """Convolutional block attention module (Woo et al., ECCV 2018): a gate for each channel, then for each pixel.

    As in its equations, the 7 x 7 convolution has no bias and no normalisation after it. For the arguments see
    :class:`SqueezeExcitation`.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.excite = _excitation(channels, reduction)
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Weights that, if they are 0, set the two gates to sigmoid(0) = 1/2 each."""
        return self.get_parameter("excite.expand.weight"), self.spatial.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels, then the pixels, of maps [B, C, H, W]."""
        gate = torch.sigmoid(self.excite(x.mean(dim=(2, 3))) + self.excite(x.amax(dim=(2, 3))))  # Eq. (2)
        x = x * gate[..., None, None]
        pooled = torch.stack([x.mean(dim=1), x.amax(dim=1)], dim=1)  # [B, 2, H, W]
        return x * torch.sigmoid(self.spatial(pooled))  # Eq. (3)


def _excitation(channels: int, reduction: int) -> nn.Sequential:
    """``W_2 relu(W_1 z)`` with C / r hidden units: pooled features [B, C] to logits of gates [B, C]."""
    hidden = max(1, channels // reduction)
    layers = {"reduce": nn.Linear(channels, hidden, bias=False), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(**layers, expand=nn.Linear(hidden, channels, bias=False)))


class Place(NamedTuple):
    """A place for attention in a block of a backbone: the names of two BatchNorm2d layers."""

    inner: str
    """the layer that attentive normalisation replaces"""
    last: str
    """the layer that ends the residual branch; a squeeze-and-excitation block or CBAM follows it"""
    num_mixtures: int
    """K of attentive normalisation"""


@torch.no_grad()
def insert_attention(backbone: nn.Module, places: Iterable[Place], norm: NormKind, init: NormInit) -> None:
    """Put attention of kind ``norm`` (``bn``: none) into the blocks of a backbone that has its (pretrained) weights.

    With ``init: convert`` its output stays the same; ``random``, as in the papers, is for training from scratch.
    ``xan`` is no attention: it replaces all batch normalisations.
    """
    if norm == "bn":
        return
    if norm == "xan":
        assemble_norms(backbone)
        return
    for place in places:
        name = place.inner if norm == "attentive" else place.last
        old = backbone.get_submodule(name)
        assert isinstance(old, nn.BatchNorm2d), f"{name} is a {type(old).__name__}"
        new: nn.Module
        if norm == "attentive":
            new = AttentiveNorm2d.from_batch_norm(old, place.num_mixtures, init)
        else:
            block = (SqueezeExcitation if norm == "se" else CBAM)(old.num_features).to(old.weight)
            for gate in block.gates if init == "convert" else ():
                nn.init.zeros_(gate)
                old.weight.mul_(2)  # as the gate of 1/2 halves the norm's output
                old.bias.mul_(2)
            new = nn.Sequential(OrderedDict(norm=old, attention=block))
        backbone.set_submodule(name, new, strict=True)


def holds_attention(names: Iterable[str]) -> bool:
    """Whether these names of tensors are of a backbone with attention, see :func:`insert_attention`.

    >>> holds_attention(["layer1.0.bn2.attention.weight"]), holds_attention(["layer1.0.bn2.weight"])
    (True, False)
    """
    return any(".attention." in f".{name}" for name in names)
