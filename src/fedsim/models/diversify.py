"""Feature diversification: batch normalisation that mixes an image's style with the federation's.

S. Yang, S. Choi, H. Park, S. Choi, S. Chang, S. Yun, "Feature Diversification and Adaptation for Federated Domain
Generalization", ECCV 2024, arXiv:2407.08245 (FedFD-A). Its abstract and that of an earlier version ("Client-agnostic
Learning and Zero-shot Adaptation", ICLR 2023 submission) were at hand, neither text nor code. So this is a reading:

- The global feature statistics are the running mean and variance of a batch normalisation in the received model, "the
  aggregated average statistics over all participating clients, shared through the global model's parameters".
- Diversification changes the input of this layer in training, in one step with MixStyle's: an image's mean and
  deviation become ``lambda`` times its own plus ``1 - lambda`` times the global ones, with ``lambda`` from U(0, 1) for
  each image, and without a gradient through statistics. With probability ``1 - p`` a batch stays as it is. The layer
  then normalises by the batch, as always, and its running statistics follow the changed maps.
- Adaptation: in evaluation, the layer normalises each image by ``adapt`` times its own mean and deviation plus
  ``1 - adapt`` times the running ones. The paper trains an adapter that chooses this share; here it is a setting.
- Left out are the paper's objectives, by which features of an image with and without a change are to agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.functional.style import mix_styles_with, normalise_with_mixture
from fedsim.models.map_checks import check_pixels


class DiversifiedNorm2d(nn.BatchNorm2d):
    """Batch normalisation of maps whose style is mixed with the received running statistics.

    It has the tensors of ``nn.BatchNorm2d``, under their names, and no others.

    Args:
        channels: C.
        p: probability that a training batch is changed.
        adapt: share of an image's own statistics in evaluation; 0: plain batch normalisation.
        place: of the layer, for messages.
        eps: as of ``nn.BatchNorm2d``.
        momentum: as of ``nn.BatchNorm2d``.
    """

    def __init__(
        self, channels: int, p: float = 0.5, adapt: float = 0.1, place: str = "layer1", eps: float = 1e-5,
        momentum: float | None = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(channels, eps, momentum)
        self.p, self.adapt, self.place = p, adapt, place
        self.received: Tensor | None = None
        """[2, C]: running mean and variance from before the session's first batch. They are no buffer, so they are
        neither sent nor stored. None: the running ones are taken, such as on the server"""

    @classmethod
    def from_batch_norm(cls, norm: nn.BatchNorm2d, p: float, adapt: float, place: str) -> DiversifiedNorm2d:
        """Return a layer with the tensors of ``norm``."""
        layer = cls(norm.num_features, p, adapt, place, norm.eps, norm.momentum).to(norm.weight)
        layer.load_state_dict(norm.state_dict())
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps [B, C, H, W]; raise ConfigError for maps of one pixel."""
        check_pixels(input, self.place)
        if self.training:
            return super().forward(self._diversified(input))
        if self.adapt == 0:
            return super().forward(input)
        statistics, affine = self._as_style(torch.stack(self._running)), (self.weight, self.bias)
        return normalise_with_mixture(input, self.adapt, statistics, affine, self.eps)

    def begin_session(self) -> None:
        """Remember the running statistics, which are those that the client has received."""
        self.received = torch.stack(self._running)

    def end_session(self) -> None:
        """Forget them."""
        self.received = None

    def extra_repr(self) -> str:
        """Return the settings; backbones with others are other architectures."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, p={self.p}, adapt={self.adapt}"

    def _diversified(self, x: Tensor) -> Tensor:
        received = torch.stack(self._running) if self.received is None else self.received
        # lambda is 1 in a batch that is not changed: so the host need not know
        happens = torch.rand((), device=x.device) < self.p
        shares = torch.where(happens, torch.rand(len(x), device=x.device), 1.0)
        return mix_styles_with(x, shares, self._as_style(received), self.eps)

    def _as_style(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation, both [1, C, 1, 1], of running statistics [2, C]."""
        mean, variance = statistics[:, None, :, None, None]
        return mean, (variance + self.eps).sqrt()

    @property
    def _running(self) -> tuple[Tensor, Tensor]:
        return self.get_buffer("running_mean"), self.get_buffer("running_var")
