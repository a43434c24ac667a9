"""The re-ID model: backbone, pooling, neck, and a shared head; private heads are outside.

Shapes: B images, C channels of the last map, D neck features, Z identities.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import skip_init

from fedsim.core.arguments import Section
from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.core.work import Work
from fedsim.models.session_layers import SessionLayer
from fedsim.models.style import SNR, Separated
from fedsim.settings.facts import Facts

HEAD_STD = 0.001
"""of the weights of a head for cross-entropy: all identities are as likely at first"""
_LINEAR = Facts(needs="kind == 'linear'")


class Features(NamedTuple):
    """Features of a batch of images."""

    pool: Tensor
    """[B, C] pooled map"""
    neck: Tensor
    """[B, D] embedding: the head's input, and the default feature for retrieval"""

    def layer(self, name: Literal["neck", "pool"]) -> Tensor:
        """Return the features of this name."""
        return self.neck if name == "neck" else self.pool


class KeyedDropout(nn.Module):
    """Dropout with its own generator, which is set for each (seed, round, client, role).

    With torch's global generator, one model of a client would depend on the other (in SKA), and on the other clients
    of the rank. ``p``: the probability of dropping an element.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        within("model.neck", "[0, 1)", dropout=p)
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Scale kept elements by 1 / (1 - p) in training; identity in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        keep = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self.generator)
        return x * keep / (1.0 - self.p)


class GeM(nn.Module):
    """Generalised mean over a map's pixels (Radenovic, Tolias and Chum, TPAMI 2019, Eq. (3)).

    ``(mean of max(x, eps)^p)^(1 / p)``, with one exponent p for all channels, which is learnt: 1 is the mean, and large
    values come near the maximum. ``p`` is the exponent at the start; ``eps`` keeps powers and their gradients finite.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([p]))
        self.eps = eps

    def forward(self, maps: Tensor) -> Tensor:
        """Pool maps [B, C, h, w] to [B, C] float32: powers of bfloat16 numbers would lose most of their digits."""
        powers: Tensor = maps.float().clamp_min(self.eps).pow(self.p)
        return powers.mean(dim=(2, 3)).pow(1 / self.p)


@dataclass(frozen=True, kw_only=True)
class Neck(Section, option="model.neck"):
    """Pooling, and the layers between the pooled features and the identity head."""

    pooling: Literal["average", "gem"] = "average"
    """of the backbone's map: the mean over its pixels, or the generalised mean (:class:`GeM`), whose exponent starts at
    3 and belongs to the backbone"""
    kind: Literal["linear", "bnneck", "none"] = "linear"
    """``linear``: Linear + BatchNorm1d (FedReIDBench, FedReID, SKA); ``bnneck``: BatchNorm1d alone (Luo et al.);
    ``none``: the pooled feature itself."""
    dim: Annotated[int, _LINEAR] = 512
    """width of the ``linear`` neck"""
    dropout: float = 0.5
    """dropout before the head"""
    activation: Annotated[Literal["none", "relu", "leaky_relu"], _LINEAR] = "none"
    """after the ``linear`` neck's BatchNorm: none in FedReIDBench's code, leaky_relu(0.1) in FedReID's"""
    bias: Annotated[bool, Facts(needs="kind != 'none' and affine")] = True
    """whether the BatchNorm adds a bias; Luo et al. and FedCAPR train a ``bnneck`` without one"""
    affine: Annotated[bool, Facts(needs="kind != 'none'")] = True
    """whether the BatchNorm has weights at all; DACS's features are only standardised"""

    def build(self, in_channels: int) -> nn.Sequential:
        """Return the layers for ``in_channels`` pooled features; the Linear layer is initialised by Kaiming fan-out."""
        within("model.neck", "[1, 65536]", dim=self.dim)  # beyond, a mistake: 2,048 x 65,536 weights are 0.5 GB
        layers: list[nn.Module] = []
        if self.kind == "linear":
            linear = nn.Linear(in_channels, self.dim)
            nn.init.kaiming_normal_(linear.weight, mode="fan_out")
            nn.init.zeros_(linear.bias)
            layers.append(linear)
        if self.kind != "none":
            norm = nn.BatchNorm1d(self.out_features(in_channels), affine=self.affine)
            if self.affine:
                nn.init.normal_(norm.weight, 1.0, 0.02)
            if not self.bias:
                norm.register_parameter("bias", None)
            layers.append(norm)
        if self.kind == "linear" and self.activation != "none":
            layers.append(nn.ReLU() if self.activation == "relu" else nn.LeakyReLU(0.1))
        return nn.Sequential(*layers, *([KeyedDropout(self.dropout)] if self.dropout else []))

    def out_features(self, in_channels: int) -> int:
        """Return D."""
        return self.dim if self.kind == "linear" else in_channels


@dataclass(frozen=True, kw_only=True)
class IdentityHead(Section, option="model.head"):
    """The identity classifier behind the neck, a linear layer."""

    bias: bool = True
    """whether it adds a bias; without one the bias is 0 and does not train, for heads that stay with their clients"""
    init: Literal["normal", "torch"] = "normal"
    """its start: ``normal``: all identities are as likely (:func:`make_head`); ``torch``: uniform numbers up to
    1 / sqrt(D), torch's own for linear layers"""


STAGE_HEAD = IdentityHead(init="torch")
"""of SNR layers: a head whose guesses are all as likely has entropies without a gradient"""


class ReIDModel(nn.Module):
    """Backbone, pooling, neck and, where it is shared, the head.

    The rank's model: one per rank and architecture is on the device, and clients are loaded into it in turn. For
    backbones see :mod:`fedsim.models.backbones`; ``neck`` are the layers after the pooling. ``num_classes`` is the size
    of a shared head; None: each client has its own head, outside this model. ``head_std`` and ``head_kind`` are for
    both kinds: see :func:`make_head`.

    Raises:
        ConfigError: if the backbone has no ``out_channels``, or a shared head shall have no bias.
    """

    def __init__(
        self, backbone: nn.Module, neck: Neck, num_classes: int | None = None, head_std: float = HEAD_STD,
        head_kind: IdentityHead = IdentityHead(),
    ) -> None:  # fmt: skip
        super().__init__()
        channels = getattr(backbone, "out_channels", None)
        if not isinstance(channels, int):
            raise ConfigError(
                f"model.backbone: {type(backbone).__name__} has no int attribute out_channels; "
                "set it to the number of channels of its output"
            )
        self.backbone = backbone
        self.pooling = GeM() if neck.pooling == "gem" else None
        """None: the mean"""
        self.neck = neck.build(channels)
        self.num_pooled = channels
        self.num_features = neck.out_features(channels)
        self.head_std, self.head_kind = head_std, head_kind
        if num_classes is not None and not head_kind.bias:
            raise ConfigError(
                "model.head.bias: a shared head has one; set it to true, or model.method.share_head to false"
            )
        self.head = (
            None if num_classes is None else make_head(self.num_features, num_classes, None, head_std, head_kind)
        )
        self.work = Work()
        self._compiled: Collection[int] | None = None
        self._dropouts = [module for module in self.modules() if isinstance(module, KeyedDropout)]
        self.separating: list[SNR] = []
        """SNR layers that keep what they separate, for their loss"""
        self.stage_heads: nn.ModuleList | None = None
        """classifiers C -> Z of what SNR layers separate, one for each layer, for their loss; None: it has no heads"""
        self._of_session = [module for module in backbone.modules() if isinstance(module, SessionLayer)]
        self._awaits_download = False

    def forward(self, images: Tensor) -> Features:
        """Map normalised images [B, 3, H, W] to features; a backbone that returns vectors has pooled already."""
        self.count(images)
        if self._awaits_download and self.training:
            self._begin_session()
        if self._compiled is None or (self.training and len(images) in self._compiled):
            maps = self.backbone(images)
        else:
            with torch.compiler.set_stance("force_eager"):
                maps = self.backbone(images)
        pool = maps
        if maps.dim() == 4:
            pool = maps.mean(dim=(2, 3)) if self.pooling is None else self.pooling(maps)
        return Features(pool, self.neck(pool) if len(self.neck) else pool)

    def count(self, images: Tensor) -> None:
        """Count a pass over ``images`` [B, ...] as work, if it is one of training: in that mode, with gradients."""
        if self.training and torch.is_grad_enabled():
            self.work.add_images(images.shape[0])

    def begin_training(self) -> None:
        """Set training mode. Most sessions find it set, and torch reads modes faster than it sets them.

        Layers of a session (:class:`SessionLayer`) begin it in the first pass in this mode: the download comes before.
        """
        if not all(module.training for module in self.modules()):
            self.train()
        self._awaits_download = bool(self._of_session)

    def _begin_session(self) -> None:
        # before the backbone, and its compiled code: the host decides
        self._awaits_download = False
        for layer in self._of_session:
            layer.begin_session()

    def end_session(self) -> None:
        """Let layers forget what they keep of a session: nothing depends on earlier sessions."""
        self._awaits_download = False
        for layer in self._of_session:
            layer.end_session()

    def take_separated(self, num_classes: int) -> tuple[Separated, ...]:
        """Return the parts that SNR layers kept in the last training pass, float32, in the order of the network.

        With ``stage_heads`` these are logits of the first ``num_classes`` people: [B, Z].
        """
        kept = [*filter(None, (layer.take_separated() for layer in self.separating))]
        separated = [Separated(*(part.float() for part in parts)) for parts in kept]
        if self.stage_heads is not None and separated:
            heads = [
                (head.get_parameter("weight")[:num_classes], head.get_parameter("bias")[:num_classes])
                for head in self.stage_heads
            ]
            separated = [
                Separated(*(linear(part, weight, bias) for part in parts))
                for parts, (weight, bias) in zip(separated, heads, strict=True)
            ]
        return tuple(separated)

    def keep_separated(self, number: int, num_classes: int | None = None) -> None:
        """Let the model's SNR layers keep what they separate in training; raise ConfigError if not ``number`` many.

        With ``num_classes`` each layer gets a head for so many people, whose start is torch's own.
        """
        self.separating = [module for module in self.backbone.modules() if isinstance(module, SNR)]
        if len(self.separating) != number:
            raise ConfigError(
                f"model.objective.causality.weights: there are {number}, but {len(self.separating)} style layers of "
                "kind snr in the backbone; give one for each layer"
            )
        for layer in self.separating:
            layer.keeps = True
        if num_classes is not None:
            heads = (make_head(layer.channels, num_classes, kind=STAGE_HEAD) for layer in self.separating)
            self.stage_heads = nn.ModuleList(heads)

    def compile_backbone(self, sizes: Collection[int]) -> None:
        """Let torch.compile compile the backbone for training batches of these ``sizes``.

        The first batch of each size takes about a minute. Batches of other sizes, and evaluations, use the backbone
        without compilation, because each new shape would be compiled, too. Parameters keep their names and their
        memory; copies of the model are plain.
        """
        self.backbone.compile(dynamic=False)
        self._compiled = frozenset(sizes)

    def width_of(self, layer: Literal["neck", "pool"]) -> int:
        """Return D of one of the two features."""
        return self.num_features if layer == "neck" else self.num_pooled

    @property
    def has_dropout(self) -> bool:
        """Whether any layer uses the generator of :meth:`set_generator`."""
        return any(dropout.p > 0 for dropout in self._dropouts)

    def set_generator(self, generator: torch.Generator) -> None:
        """Let every dropout of the model take its random numbers from ``generator``."""
        for dropout in self._dropouts:
            dropout.generator = generator

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that were set, each once."""
        by_id = {id(dropout.generator): dropout.generator for dropout in self._dropouts}
        return [generator for generator in by_id.values() if generator is not None]


def draw_head(weight: Tensor, bias: Tensor, generator: torch.Generator | None, std: float, kind: IdentityHead) -> None:
    """Draw the start of a head into its tensors, [Z, D] and [Z]; arguments are those of :func:`make_head`."""
    nn.init.zeros_(bias)
    if kind.init == "normal":
        nn.init.normal_(weight, std=std, generator=generator)
    else:
        bound = 1 / math.sqrt(weight.shape[1])
        for parameter in (weight, bias) if kind.bias else (weight,):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)


def make_head(
    num_features: int, num_classes: int, generator: torch.Generator | None = None, std: float = HEAD_STD,
    kind: IdentityHead = IdentityHead(),
) -> nn.Linear:  # fmt: skip
    """Return an identity classifier D -> Z: weights N(0, std^2), sampled by ``generator`` or torch's own; bias 0.

    With ``kind.init`` "torch", weights and bias are uniform instead. Without a bias it is 0 and does not train. With a
    ``generator`` torch's own stream does not advance.
    """
    make = nn.Linear if generator is None else partial(skip_init, nn.Linear)
    head: nn.Linear = make(num_features, num_classes)
    draw_head(head.weight, head.bias, generator, std, kind)
    head.bias.requires_grad_(kind.bias)
    return head
