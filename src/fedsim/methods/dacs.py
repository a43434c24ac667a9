"""Diversity-Authenticity Co-constrained Stylization for Federated Domain Generalization in Person Re-ID (DACS).

F. Yang et al. AAAI 2024.

| hook      | Section "Method"                                                                                       |
|-----------|--------------------------------------------------------------------------------------------------------|
| download  | f_G is the server's model; its head stays with the client                                              |
| train     | Eq. (7): the local expert f_L trains on the images x of a batch; it lives from round to round          |
| train     | Eqs. (1), (2): the style model (s, m) turns x into x'                                                  |
| train     | Eqs. (3), (4): L_div = -(mu - m)^2 - (sigma - s)^2                                                     |
| train     | Eqs. (5), (6): L_au = sp(H(f_G(x)) - H(f_G(x'))) + sp(H(f_G(x')) - H(f_L(x'))), sp(t) = ln(1 + e^t)     |
| train     | Eq. (8): L = L_loc(x; f_G) + L_loc(x'; f_G) + lambda_div L_div + lambda_au L_au, one step of all of it |
| upload    | backbone and neck of f_G                                                                               |
| weights   | Eq. (9): theta <- sum over k of (n_k / n) theta_k                                                      |

Which loss moves what; in L_au, f_G and f_L are fixed:

| loss           | f_L | head of f_L                      | f_G | head of f_G                    | s, m |
|----------------|-----|----------------------------------|-----|--------------------------------|------|
| L_loc(x; f_L)  | yes | yes; not ``expert_head: shared`` | no  | no                             | no   |
| L_loc(x; f_G)  | no  | no                               | yes | yes                            | no   |
| L_loc(x'; f_G) | no  | no                               | yes | yes                            | yes  |
| L_div          | no  | no                               | no  | no                             | yes  |
| L_au           | no  | no                               | no  | if ``authenticity_moves_head`` | yes  |

Paper and code (user.py of FlyingRoastDuck/DACS_official), where they differ; the default is the paper's:

| what                | paper               | code                                       | option                      |
|---------------------|---------------------|--------------------------------------------|-----------------------------|
| lambda_au           | 5                   | 1 for ResNet-50, 5 for ViT                 | ``lam_au``                  |
| sigma in Eq. (1)    | of all pixels       | unbiased                                   | ``statistics``              |
| sigma, s in Eq. (4) | deviations          | variances                                  | ``diversity``               |
| head of f_L         | its own, by Eq. (7) | that of f_G, moved by the joint step alone | ``expert_head``             |
| L_au                | moves s, m alone    | moves the head, too                        | ``authenticity_moves_head`` |

The code's settings are ``lam_au: 1``, ``statistics: unbiased``, ``diversity: variance``, ``expert_head: shared`` and
``authenticity_moves_head: true``. With them three rounds agree with ``train_dacs`` of the code, run unchanged, to 1e-6
without triplet loss, whose kinks let rounding grow.

Deviations and silences:

- Squared norms in Eqs. (3) and (4) are means over images, channels and places, as in the code; the paper has neither
  sum nor mean. **L_div is inert as released**: its gradient for a number of s is at most 4 s |s^2 - sigma^2| / (C H W),
  below the weight decay of 5e-4. It moves s by 0.002 in all 40 rounds, where the initial noise is 0.1. As a sum, m
  would run away thirty-fold in a round, so there is no such option.
- Start of the style model (the code's): s ~ N(1, 0.1^2), m ~ N(0, 0.1^2), once for each client; eps = 1e-8. Momentum
  and weight decay are those of the client's optimizer.
- The expert starts from the received model and the client's head when the client first takes part. Each round begins
  with new optimizers, as for the models of other methods (``optimizer_state``).
- The first round is plain in the code, since heads are random before: ``first_styled_round: 1``. The expert trains.
- f_L and f_G see x' in training mode, so x' enters their running statistics. In L_au f_G is a copy in evaluation mode,
  whose running statistics have x, and not x', as in the code; f_L is the expert after its step.
- An image that is alone of its person in a batch has no triplet loss; in the code the image itself, at distance 0, is
  then its positive. Batches of people (``sampler: people``) have hardly any.
- Entropies are means over the batch, and sp acts on their differences; the code leaves out probabilities below 1e-6.
  Logits of L_au are float32 in any precision.
- With ``lam_au: 0`` nothing reads the expert, so there is none. With ``style_lr: 0`` the style model stays as it was
  drawn, which is one reading of the row RS of Table 2.
- With SNR the code is another method (statistics of each place over the batch, no L_div, f_G moves in L_au); it is not
  built. SNR's losses are (``model.objective.causality``): of x and x', in f_G and in the expert.
- A batch costs five passes instead of one, about four times FedPav's time. Loss and accuracy in
  the log are those of f_G on x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from torch.nn.functional import linear

from fedsim.functional.losses import authenticity, mean_entropy
from fedsim.functional.style import restyle, style_gap, style_of
from fedsim.methods.base import BodySharing, Method, Need, WeightingChoice
from fedsim.methods.restyling import (
    JUDGE,
    Restyles,
    StyleModel,
    head_of,
    keep_models,
    lend_heads,
    load_expert,
    load_style,
)
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel

_EXPERT = Facts(needs="lam_au")


@dataclass(frozen=True, kw_only=True)
class DACS(BodySharing, WeightingChoice, Restyles, Method):
    """Averaging of clients that also train on restyled images, in a style that each of them learns."""

    requires: ClassVar[frozenset[Need]] = frozenset({"identities", "plain_steps", "whole_batches", "built_in_model"})
    # a client's heads share one label space; a loop of its own; the style model steps with the whole batch

    lam_au: float = 5.0
    """$\\lambda_{au}$, weight of the authenticity loss; 0: there is no expert"""
    diversity: Annotated[Literal["deviation", "variance"], Facts(needs="lam_div")] = "deviation"
    """whether Eq. (4) compares deviations, or variances (the authors' code)"""
    statistics: Literal["population", "unbiased"] = "population"
    """whether variances of images divide by H W, or by H W - 1 (the authors' code)"""
    expert_head: Annotated[Literal["own", "shared"], _EXPERT] = "own"
    """the expert's head: its own, or the client's, which the expert does not move (the authors' code)"""
    authenticity_moves_head: Annotated[bool, _EXPERT] = False
    """whether the authenticity loss moves the client's head, too (the authors' code)"""

    def train(self, client: Client) -> None:
        """Step the expert, and then f_G and the style model, on each batch; keep expert and style model."""
        expert = load_expert(client, has_head=self.expert_head == "own") if self.lam_au else None
        style: StyleModel | None = None
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                if expert is not None:
                    _step_expert(client, expert, batch)
                if client.round < self.first_styled_round:
                    client.step(client.training_step(batch))
                    continue
                if style is None:
                    style = load_style(client, batch.images.shape[1:])
                    optimizer = client.loose_optimizer("style", style, self.style_lr)
                client.step(self._joint_loss(client, expert, style, batch), loose=[optimizer])
        keep_models(client, expert, style)

    def _joint_loss(self, client: Client, expert: FlatModel | None, style: StyleModel, batch: Batch) -> Tensor:
        """Return L of Eq. (8), a scalar."""
        of_images = style_of(batch.images, 0.0, unbiased=self.statistics == "unbiased")  # Eq. (1)
        styled = restyle(batch.images, of_images, style.style)  # Eq. (2)
        loss = client.training_step(batch)  # Eq. (7)
        l_au = None if expert is None else self._authenticity(client, expert, (batch.images, styled))
        loss = loss + client.supervised_loss(client.forward(styled), batch, counts=False)  # Eq. (7) of x'
        if self.lam_div:  # Eqs. (3), (4)
            loss = loss - self.lam_div * style_gap(of_images, style.style, variances=self.diversity == "variance")
        return loss if l_au is None else loss + self.lam_au * l_au

    def _authenticity(self, client: Client, expert: FlatModel, images: tuple[Tensor, Tensor]) -> Tensor:
        """Return L_au of images x and x', both [B, 3, H, W]: a scalar."""
        judge, precision = client.model.frozen_replica(JUDGE, client.model.whole), client.session.precision
        with judge.frozen(), expert.frozen():  # not no_grad: gradients pass through them to x'
            f_x, f_styled = (judge.forward(x, precision).features.neck for x in images)
            f_local = expert.forward(images[1], precision).features.neck
        head = head_of(client.model, moves=self.authenticity_moves_head)
        local_head = head if self.expert_head == "shared" else head_of(expert, moves=False)
        h_x, h_styled, h_local = (
            mean_entropy(linear(features, *layer))
            for features, layer in ((f_x, head), (f_styled, head), (f_local, local_head))
        )
        return authenticity(h_x, h_styled, h_local)  # Eqs. (5), (6)


def _step_expert(client: Client, expert: FlatModel, batch: Batch) -> None:
    """Step the expert by Eq. (7)."""
    if not expert.head.weight.requires_grad:  # the client's own, which its joint steps move
        lend_heads(client, expert)
    output = expert.forward(batch.images, client.session.precision)
    loss = client.supervised_loss(output, batch, counts=False)
    client.step(loss, optimizer=expert.optimizer(client.training_settings))
