"""Common parts of methods whose clients train on restyled images: DACS and SSCU.

A client's style model is kept under the names ``style_mean`` and ``style_std``, both [C, H, W].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsim.core.checks import at_least, not_negative
from fedsim.core.seeding import torch_generator
from fedsim.core.transfer import send
from fedsim.methods.base import KeptModels, Replicas
from fedsim.training.flat_model import Head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedsim.training.client import Client
    from fedsim.training.flat_model import FlatModel

EXPERT, JUDGE = "expert", "judge"
"""roles of further models: the local one, and the copy of the global one that judges restyled images"""
_MEAN, _STD = "style_mean", "style_std"
_NOISE = 0.1
"""deviation of a new style model's numbers"""


class StyleModel(nn.Module):
    """A client's style model: a deviation s and a mean m for each channel and place, both [C, H, W]."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean, self.std = nn.Parameter(mean), nn.Parameter(std)

    @property
    def style(self) -> tuple[Tensor, Tensor]:
        """Return m and s."""
        return self.mean, self.std


@dataclass(frozen=True, kw_only=True)
class Restyles:
    """Settings of methods with a style model, and, with an authenticity loss, an expert and a judge."""

    lam_div: float = 1.0
    """$\\lambda_{div}$, weight of DACS's diversity loss; it hardly acts, whatever its weight"""
    lam_au: float
    """$\\lambda_{au}$, weight of DACS's authenticity loss; 0: there is no expert"""
    first_styled_round: int = 1
    """the first round, from 0, in which restyled images train"""
    style_lr: float | None = None
    """learning rate of the style model, with the client's schedule; null: that of the client"""

    def __post_init__(self) -> None:
        not_negative("model.method", lam_div=self.lam_div, lam_au=self.lam_au, style_lr=self.style_lr)
        at_least("model.method", 0, first_styled_round=self.first_styled_round)

    @property
    def has_judge(self) -> bool:
        """Whether a copy of f_G judges restyled images."""
        return self.lam_au > 0

    @property
    def replicas(self) -> Replicas:
        """The expert, and the copy of f_G that judges restyled images."""
        expert: Replicas = {EXPERT: "trained"} if self.lam_au else {}
        return {**expert, JUDGE: "frozen"} if self.has_judge else expert

    @property
    def passes(self) -> int:
        """f_G on x and x', and judge and expert on x'."""
        return 2 + (self.lam_au > 0) + self.has_judge

    @property
    def keeps(self) -> KeptModels:
        """The expert."""
        return {EXPERT: "model"} if self.lam_au else {}

    def loose_tensors(self, image: tuple[int, int, int]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of m and s."""
        return {_MEAN: image, _STD: image}


def load_style(client: Client, shape: torch.Size) -> StyleModel:
    """Return the client's style model for images of this ``shape`` [C, H, W]: the kept one, or a new one."""
    if _MEAN in client.kept:
        return StyleModel(client.kept[_MEAN].clone(), client.kept[_STD].clone())
    stream = torch_generator(client.seed, client.client_name, "style")
    std, mean = send(_NOISE * torch.randn((2, *shape), generator=stream), client.device)
    return StyleModel(mean, 1 + std)  # Paper silent; the authors' code


def keep_models(client: Client, expert: FlatModel | None, style: StyleModel | None) -> None:
    """Keep the models that there are for the next round."""
    if expert is not None:
        client.keep(EXPERT, expert.whole)
    if style is not None:
        client.keep(_MEAN, style.mean)
        client.keep(_STD, style.std)


def head_of(model: FlatModel, moves: bool) -> Head:
    """Return weight and bias of a model's head; a loss of them has a gradient if the head ``moves``."""
    weight, bias = model.head.weight, model.head.bias
    return Head(weight, bias) if moves else Head(weight.detach(), bias.detach())


def load_expert(client: Client, has_head: bool) -> FlatModel:
    """Return the client's expert, ready to train; at first it is the received model with the client's head.

    ``has_head``: whether it keeps heads of its own; else no loss moves them, and :func:`lend_heads` renews them.
    """
    expert = client.model.replica(EXPERT)
    expert.whole.copy_(client.kept.get(EXPERT, client.model.whole))
    for parameter in () if has_head else expert.head_parameters:  # before its optimizer is made
        parameter.requires_grad_(False)
    return client.trainable_replica(EXPERT)


def lend_heads(client: Client, expert: FlatModel) -> None:
    """Give an expert the client's heads as they are now."""
    with torch.no_grad():
        for of_expert, of_client in zip(expert.head_parameters, client.model.head_parameters, strict=True):
            of_expert.copy_(of_client)
