"""SSCU: clients of domain generalisation whose loss compares with a memory that follows restyled images.

X. Xu et al. ACM MM 2025, arXiv:2507.16238. Its text was not at hand: this is the reading of two public codes.

| hook      | in the authors' code (reid/user.py and FedDG_SSCU.py of Renchaoyue111/SSCU)                            |
|-----------|--------------------------------------------------------------------------------------------------------|
| download  | f_G is the server's model; its head stays with the client                                              |
| train     | (S1) at first M_y is the mean feature of person y under the received model, scaled to length 1         |
| train     | (S4) the client trains with a copy of M, which (S3) follows; M takes the copy if the ``gate`` is open  |
| train     | Client-L: (S2) L_mem(x; f_L) = CE(M z / tau), z = f_L(x) / |f_L(x)|, on the images x of a batch        |
| train     | DACS, Eqs. (1), (2): the style model (s, m) turns x into x'                                            |
| train     | (S3) M_y <- (0.9 M_y + 0.1 z') / |...|, z' of x' under f_G, image after image, in every round          |
| train     | Client-G: L_mem(x; f_G) + [L_loc(x'; f_G) + lambda_div L_div + lambda_au L_au], one step of all of it  |
| upload    | backbone and neck of f_G                                                                               |
| weights   | n_k / n                                                                                                |

What is in brackets comes from round ``first_styled_round`` on. L_div, L_au and the style model are those of
:class:`~fedsim.methods.DACS`, in the reading of its code: L_au moves the head, the expert f_L has no head of its own,
and L_div compares variances. L_loc is the objective, cross-entropy and triplet. M has no gradient.

The two codes (the copy: leavlong/FedBPrompt) differ in five ways; the defaults are the authors' own, but for the gate:

| what                  | the authors'                    | FedBPrompt's copy                | option                |
|-----------------------|---------------------------------|----------------------------------|-----------------------|
| gate                  | the target's rank-1 >= the last | open after rounds 10, 20, ...    | ``gate``              |
| statistics in Eq. (1) | of each place, over the batch   | of each image and channel        | ``statistics``        |
| L_mem                 | alone                           | with the triplet loss of x       | ``triplet_on_images`` |
| lambda_au             | 1                               | 5                                | ``lam_au``            |
| f_G in L_au           | a fixed copy in evaluation      | a fixed copy in training mode    | ``judge``             |
|                       | mode; with SNR itself           |                                  |                       |

Both have two slips that act on each step, and are off by default. The memory moves in place between forward and
backward of L_mem(x; f_G), so its gradient is that by the moved memory: ``memory_gradient: after``. And f_G sees x'
twice, first without gradient for (S3), so its running statistics have x' twice: ``own_pass: true``. With both, sessions
agree with those of the codes' own functions, run unchanged, but for rounding (``benchmarks/authors_functions.py``).

Deviations and silences:

- **No gate looks at the target**, on which no client trains. ``gate: own`` scores the received model at the start of
  each session on the client's held-out people (``data.val``): rank-1 of each of their images among the others. The gate
  is open if it is not below that of the session before; the first is open, as in the code.
- The codes keep all features of a round to repeat their updates on M. The copy had the same updates, so M takes it.
- M starts at a client's first session; in the codes that is before the first round. With SNR it starts from features of
  length 1, since the code's network with SNR returns such in evaluation.
- An image that is alone of its person in a batch has no triplet loss; in the codes the image itself, at distance 0, is
  then its positive. Batches of people (``sampler: people``) have hardly any.
- The expert starts from the received model. Each round begins with new optimizers (``optimizer_state``).
- With SNR, the default of the authors' script, the losses of x have SNR's loss, too, in Client-L and in Client-G, and
  L_loc has it of x': ``model.objective.causality``, which is ``{form: entropy, weights: [0.01, 0.01, 0.01]}`` there.
  Client-L has no heads for it of its own: they are Client-G's, and Client-L does not move them. L_au then moves f_G:
  ``judge: itself``, in training mode, with the passes that the other losses have.
- Loss and accuracy in the log are of L_mem(x; f_G): its guess is the person of the most similar vector of M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize

from fedsim.core.checks import positive, within
from fedsim.functional.losses import authenticity, mean_entropy
from fedsim.functional.memory import mean_memory, memory_logits, update_memory
from fedsim.functional.retrieval import leave_one_out
from fedsim.functional.style import restyle, style_gap, style_of, style_of_places
from fedsim.methods.base import BodySharing, KeptModels, Method, Need, WeightingChoice
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
from fedsim.training.client import Batch, Client, Output
from fedsim.training.features import PLAIN, extract_features
from fedsim.training.flat_model import FlatModel
from fedsim.training.objective import triplet_loss

_MEMORY, _CANDIDATE, _RANK1 = "memory", "candidate", "rank1"
_AUTHENTICITY = Facts(needs="lam_au")


@dataclass(frozen=True, kw_only=True)
class SSCU(BodySharing, WeightingChoice, Restyles, Method):
    """Averaging of clients that compare images with a memory of people, which follows restyled images."""

    lam_au: float = 1.0
    """weight of DACS's authenticity loss; 0: there is no expert"""
    temperature: float = 0.05
    """tau"""
    momentum: float = 0.9
    """of the memory: the share that a vector keeps when an image moves it"""
    gate: Literal["always", "own", "never", "tenth"] = "always"
    """when the memory takes the copy of the last session; ``own``: if the received model is not worse than before on
    the client's held-out people, which needs ``data.val``; ``tenth``: of rounds 10, 20, ..., from 0 (FedBPrompt's
    code)"""
    statistics: Literal["place", "image"] = "place"
    """means and deviations in Eq. (1): of each place over the batch, or of each image and channel over its pixels"""
    triplet_on_images: Annotated[bool, Facts(needs="model.objective.triplet")] = False
    """whether the losses of x have the objective's triplet loss, too (FedBPrompt's code)"""
    judge: Annotated[Literal["copy", "training", "itself"], _AUTHENTICITY] = "copy"
    """f_G in L_au: a copy in evaluation mode, which L_au does not move; such a copy in training mode (FedBPrompt's
    code); or f_G itself, which L_au trains (the authors' code with SNR)"""
    memory_gradient: Literal["before", "after"] = "before"
    """M in the gradient of L_mem(x; f_G): that of its value, or M after x' has moved it (the codes)"""
    own_pass: bool = False
    """whether f_G sees x' twice, first without gradient for (S3) (the codes)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model.method", temperature=self.temperature)
        within("model.method", "[0, 1]", momentum=self.momentum)

    @property
    def requires(self) -> frozenset[Need]:
        """A memory of people; a loop of its own; a style model that steps with the whole batch."""
        needs: frozenset[Need] = frozenset({"identities", "plain_steps", "whole_batches", "built_in_model"})
        return needs | {"held_out"} if self.gate == "own" else needs

    @property
    def has_judge(self) -> bool:
        """Whether a copy of f_G judges restyled images."""
        return self.lam_au > 0 and self.judge != "itself"

    @property
    def keeps(self) -> KeptModels:
        """The expert, M and its copy."""
        return {**super().keeps, _MEMORY: "people", _CANDIDATE: "people"}

    @property
    def passes(self) -> int:
        """As DACS, and f_G on x' once more with ``own_pass``."""
        return super().passes + self.own_pass

    def train(self, client: Client) -> None:
        """Step the expert, and then f_G and the style model, on each batch; keep memory, expert and style model."""
        memory = self._open_memory(client)
        expert = load_expert(client, has_head=False) if self.lam_au else None
        if self.has_judge:  # one stream for the session; in evaluation mode nothing is drawn
            stream = client.generator("dropout judge", device=client.device)
            client.model.replica(JUDGE).network.set_generator(stream)
        style: StyleModel | None = None
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                if style is None:
                    style = load_style(client, batch.images.shape[1:])
                    loose = [client.loose_optimizer("style", style, self.style_lr)] if self._is_styled(client) else []
                if expert is not None:
                    self._step_expert(client, expert, memory, batch)
                loss, memory = self._joint_loss(client, (expert, style), memory, batch)
                client.step(loss, loose=loose)
        client.keep(_CANDIDATE, memory)
        keep_models(client, expert, style)

    def _is_styled(self, client: Client) -> bool:
        return client.round >= self.first_styled_round

    def _open_memory(self, client: Client) -> Tensor:
        """Return M [Z, D], after the gate: a tensor that is not changed."""
        if _MEMORY not in client.kept:  # (S1)
            labels, features = client.images.labels.to(client.device), client.plain_features()
            if client.objective.causality is not None:
                features = normalize(features)
            client.keep(_MEMORY, mean_memory(features, labels, client.num_classes))
        elif self._is_open(client):  # (S4)
            client.keep(_MEMORY, client.kept[_CANDIDATE])
        return client.kept[_MEMORY]

    def _is_open(self, client: Client) -> bool:
        """Whether the gate is open; ``own`` scores the received model."""
        if self.gate == "tenth":
            return client.round > 10 and client.round % 10 == 1
        if self.gate != "own":
            return self.gate == "always"
        rank1 = torch.tensor(_held_out_rank1(client))
        last = client.kept.get(_RANK1, torch.zeros(()))
        client.keep(_RANK1, rank1)
        return bool(rank1 >= last.cpu())

    def _step_expert(self, client: Client, expert: FlatModel, memory: Tensor, batch: Batch) -> None:
        """Step Client-L by (S2)."""
        if client.objective.causality is not None:
            lend_heads(client, expert)
        output = expert.forward(batch.images, client.session.precision)
        loss = self._memory_loss(client, output, memory, batch)
        client.step(loss, optimizer=expert.optimizer(client.training_settings))

    def _memory_loss(
        self,
        client: Client,
        output: Output,
        memory: Tensor,
        batch: Batch,
        *,
        moved: Tensor | None = None,
        counts: bool = False,
    ) -> Tensor:
        """Return L_mem of a batch's output, a scalar, with SNR's loss if there is one; if it ``counts``, log L_mem.

        Its gradient is by the memory ``moved`` [Z, D], if that is given.
        """
        logits = memory_logits(memory, output.features.neck, self.temperature, moved)
        loss = cross_entropy(logits, batch.labels)  # (S2)
        if counts:
            client.session.metrics.add(loss.detach(), logits.argmax(1), batch.labels)
        if client.objective.causality is not None:
            loss = loss + client.objective.causality(output.separated, batch.labels)
        if not self.triplet_on_images:
            return loss
        return loss + client.objective.triplet * triplet_loss(client.objective, output.features, batch.labels)

    def _joint_loss(
        self, client: Client, models: tuple[FlatModel | None, StyleModel], memory: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of Client-G, a scalar, and the memory [Z, D] after the batch."""
        (expert, style), is_styled = models, self._is_styled(client)
        plain = client.forward(batch.images)
        of_images = style_of_places(batch.images) if self.statistics == "place" else style_of(batch.images, 0.0)
        styled = restyle(batch.images, of_images, style.style)  # DACS, Eqs. (1), (2)
        with torch.set_grad_enabled(is_styled and not self.own_pass):
            output = client.forward(styled)
        z = normalize(output.features.neck)
        moved = update_memory(memory, z, batch.labels, self.momentum, batch.most_repeated)  # (S3)
        of_gradient = moved if self.memory_gradient == "after" else None
        loss = self._memory_loss(client, plain, memory, batch, moved=of_gradient, counts=True)
        if not is_styled:
            return loss, moved
        judged = self._judge(client, (batch.images, styled)) if self.has_judge else None
        if self.own_pass:
            output = client.forward(styled)
        loss = loss + client.supervised_loss(output, batch, counts=False)
        if self.lam_div:
            loss = loss - self.lam_div * style_gap(of_images, style.style, variances=True)
        if expert is not None:
            by_f_g = judged or (plain.features.neck, output.features.neck)
            loss = loss + self.lam_au * self._authenticity(client, expert, by_f_g, styled)
        return loss, moved

    def _authenticity(self, client: Client, expert: FlatModel, by_f_g: tuple[Tensor, Tensor], styled: Tensor) -> Tensor:
        """Return DACS's L_au of images x and x', a scalar; ``by_f_g`` are their features [B, D], x' is ``styled``."""
        f_x, f_styled = by_f_g
        with expert.frozen():  # not no_grad: gradients pass through it to x'
            f_local = expert.forward(styled, client.session.precision).features.neck
        head = head_of(client.model, moves=True)
        return authenticity(*(mean_entropy(linear(features, *head)) for features in (f_x, f_styled, f_local)))

    def _judge(self, client: Client, images: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the features [B, D] of images x and x', both [B, 3, H, W], by a copy of f_G that is fixed."""
        judge = client.model.frozen_replica(JUDGE, client.model.whole)
        judge.network.train(self.judge == "training")
        with judge.frozen():  # not no_grad: gradients pass through it to x'
            f_x, f_styled = (judge.forward(x, client.session.precision).features.neck for x in images)
        return f_x, f_styled


def _held_out_rank1(client: Client) -> float:
    """Return rank-1 of the client's model among its held-out images, in evaluation mode."""
    network, parts = client.model.network, client.images.held_out
    features = torch.cat([extract_features(network, pixels, PLAIN, client.device) for pixels, _ in parts])
    network.train()
    people, cameras = (np.concatenate(column) for column in zip(*((s.pids, s.camids) for _, s in parts), strict=True))
    return leave_one_out(features, torch.from_numpy(people), torch.from_numpy(cameras)).rank1
