"""Explicitly assembled normalisation: a weighted sum of batch and instance normalisation.

K. Le, L. Ho, C. Do, D. Le-Phuoc, K.-S. Wong, "Efficiently Assemble Normalization Layers and Regularization for
Federated Domain Generalization", CVPR 2024, arXiv:2403.15605 (gPerXAN). The abstract and the authors' code were at hand
(lhkhiem28/gPerXAN, source/models/modules/normalization.py), and not the text. Which part stays with its client is the
choice of a method: :class:`fedsim.methods.GPerXAN`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.models.memory_order import in_order_of


class AssembledNorm2d(nn.Module):
    """``w_1 BN(x) + w_2 IN(x)``, where w is the softmax of two scores of the layer, at first 1/2 and 1/2.

    Both parts have affine parameters of their own. ``channels`` is C; ``eps`` and ``momentum`` are those of the batch
    normalisation, and ``eps`` also that of the instance normalisation.
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.batch = nn.BatchNorm2d(channels, eps, momentum)
        # no nn.InstanceNorm2d: parameters of the layer itself are in another group than those of its normalisation
        self.instance_weight = nn.Parameter(torch.ones(channels))
        self.instance_bias = nn.Parameter(torch.zeros(channels))
        self.scores = nn.Parameter(torch.ones(2))
        """of the batch normalisation and of the instance normalisation"""

    @classmethod
    @torch.no_grad()
    def from_batch_norm(cls, norm: nn.BatchNorm2d) -> AssembledNorm2d:
        """Return a layer of whose parts each has the affine parameters of ``norm``, with its running statistics."""
        layer = cls(norm.num_features, norm.eps, norm.momentum).to(norm.weight)
        layer.batch.load_state_dict(norm.state_dict())
        layer.instance_weight.copy_(norm.weight)
        layer.instance_bias.copy_(norm.bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps [B, C, H, W]; raise ConfigError for maps of one pixel."""
        if x.shape[2] * x.shape[3] < 2:
            raise ConfigError(
                "backbone.norm: xan normalises each image, and a map has 1 x 1 pixels, which have no deviation; choose "
                "another norm, or larger images"
            )
        weights = self.scores.softmax(0)
        instance = F.instance_norm(x, weight=self.instance_weight, bias=self.instance_bias, eps=self.batch.eps)
        batch: Tensor = self.batch(x)
        return weights[0] * batch + weights[1] * in_order_of(instance, x)  # scalars keep the type of the maps


def assemble_norms(backbone: nn.Module) -> None:
    """Replace each batch normalisation of a backbone that has its (pretrained) weights."""
    norms = {name: norm for name, norm in backbone.named_modules() if isinstance(norm, nn.BatchNorm2d)}
    for name, norm in norms.items():
        backbone.set_submodule(name, AssembledNorm2d.from_batch_norm(norm), strict=True)


def holds_assembled(names: Iterable[str]) -> bool:
    """Whether these names of tensors are of a backbone with assembled normalisation.

    >>> holds_assembled(["layer1.0.bn2.instance_weight"]), holds_assembled(["layer1.0.bn2.weight"])
    (True, False)
    """
    return any(name.rpartition(".")[2] == "instance_weight" for name in names)
