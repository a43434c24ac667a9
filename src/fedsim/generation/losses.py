r"""The losses of a generator of people (paper 002, Figure 6).

The paper gives no equations; these are the published ones of the network that it names (Zheng et al., "Joint
discriminative and generative learning for person re-identification", CVPR 2019, Section 3).

Images of one batch: $x_i$, another image $x_t$ of the same identity $y_i = y_t$, and $x_j$ of another one; $a = E_a(x)$
and $s = E_s(x)$ their codes of appearance and structure, $G(a, s)$ the decoder, $D$ the discriminator; $x_{ij}$ short
for $G(a_i, s_j)$, with the appearance of i and the structure of j.

| loss             | equation                                                                            |
|------------------|-------------------------------------------------------------------------------------|
| self             | $\mathrm{E}\,|x_i - G(a_i, s_i)|$                                                   |
| same             | $\mathrm{E}\,|x_i - G(a_t, s_i)|$                                                   |
| identity         | $-\mathrm{E}\log p(y_i \mid a_i)$                                                   |
| appearance code  | $\mathrm{E}\,|a_i - E_a(x_{ij})|$                                                   |
| structure code   | $\mathrm{E}\,|s_j - E_s(x_{ij})|$                                                   |
| swapped identity | $-\mathrm{E}\log p(y_i \mid E_a(x_{ij}))$                                           |
| adversarial      | $\mathrm{E}\,(D(x_{ij}) - 1)^2$, and of D: $\mathrm{E}\,(D(x_i) - 1)^2 + D(x_{ij})^2$ |
| soft             | $\mathrm{E}\,\mathrm{KL}(q(x_{ij}) \,\|\, p(E_a(x_{ij})))$, q the teacher's         |

$|\cdot|$ is a mean of absolute values over elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedsim.core.checks import within


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Factors of the losses; the defaults are the published ones."""

    image: float = 5.0
    """factor of both reconstruction losses"""
    code: float = 1.0
    """factor of both code losses"""
    identity: float = 1.0
    """factor of the identity loss on real images"""
    swapped_identity: float = 0.5
    """factor of the identity loss on swapped images"""
    adversarial: float = 1.0
    """factor of the adversarial loss"""
    soft: float = 2.0
    """factor of the soft-label loss: the appearance encoder learns the teacher's soft labels of swapped images"""
    soft_after: float = 0.3
    """share of the steps without the soft-label loss, as images and teacher are poor at first"""

    def __post_init__(self) -> None:
        within("losses", "[0, inf)", **asdict(self))


def realness_loss(scores: Sequence[Tensor], wanted: float) -> Tensor:
    """Mean squared distance of the discriminator's scores from the wanted score, 1 or 0, summed over its scales.

    Mao et al., "Least squares generative adversarial networks", ICCV 2017. ``scores`` are [B, 1, h, w] of each scale.

    >>> realness_loss([torch.tensor([0.0, 1.0]), torch.tensor([0.5])], 1.0)
    tensor(0.7500)
    """
    return torch.stack([(of_scale - wanted).square().mean() for of_scale in scores]).sum()
