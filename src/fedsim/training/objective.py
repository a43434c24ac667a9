"""The supervised loss of a batch, and its settings. B images, D features, Z identities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedsim.core.arguments import Section
from fedsim.core.checks import not_negative, positive, within
from fedsim.core.errors import ConfigError
from fedsim.functional.losses import (
    batch_hard_triplet,
    causality_loss,
    center_loss,
    entropy_causality,
    soft_cross_entropy,
)
from fedsim.models.reid import HEAD_STD, Features
from fedsim.models.style import Separated
from fedsim.settings.facts import Facts
from fedsim.training.batch import Batch, ScoredBatch
from fedsim.training.batch_loss import BatchLoss
from fedsim.training.flat_model import Output
from fedsim.training.metric_loss import MetricLoss, as_metric_loss

_TRIPLET = Facts(needs="triplet")


def supervised_loss(objective: Objective, output: Output, batch: Batch, centers: Tensor | None = None) -> ScoredBatch:
    """Return the loss of a batch: ``sum over terms t of w_t L_t``, with the weights ``Objective.weights``.

    It is a pure function: it changes none of its arguments. ``centers`` [Z, D] float32 are those of center loss,
    D the width of its features; without center loss they are unused. :mod:`fedsim.training.centers` moves them.
    """
    weights, terms = objective.weights, loss_terms(objective, output, batch, centers)
    first, *further = terms
    loss = weighted(weights[first], terms[first])
    for name in further:
        loss = loss + weighted(weights[name], terms[name])
    logged = tuple(term.detach() for term in terms.values()) if further else ()
    return ScoredBatch(loss, output.logits.argmax(1), batch.labels, logged)


def loss_terms(objective: Objective, output: Output, batch: Batch, centers: Tensor | None) -> dict[str, Tensor]:
    """Return the terms L_t of the loss, scalars without weights: one for each name in ``Objective.weights``.

    Arguments are those of :func:`supervised_loss`. Raises AssertionError if center loss has no ``centers``.
    """
    features, labels = output.features, batch.labels
    logits, smoothing = output.logits, objective.label_smoothing
    if batch.targets is None:
        terms = {"cross_entropy": cross_entropy(logits, labels, label_smoothing=smoothing)}
    else:
        terms = {"cross_entropy": soft_cross_entropy(logits, batch.targets, smoothing)}
    if objective.triplet > 0:
        terms["triplet"] = triplet_loss(objective, features, labels)
    if objective.center is not None:
        assert centers is not None, "center loss needs the centers"
        terms["center"] = center_loss(features.layer(objective.center.features), labels, centers)
    if (metric := objective.metric) is not None:
        term = metric.of(output, batch) if isinstance(metric, BatchLoss) else metric(features, labels, output.head)
        terms["metric"] = term.to(labels.device)  # a user's may be computed on the CPU
    if objective.causality is not None:
        terms["causality"] = objective.causality(output.separated, labels)
    return terms


def triplet_loss(objective: Objective, features: Features, labels: Tensor) -> Tensor:
    """Return the batch-hard triplet loss (scalar) of features with labels [B] int64."""
    x = features.layer(objective.triplet_on)
    return batch_hard_triplet(normalize(x) if objective.unit_length else x, labels, objective.margin, objective.squared)


def weighted(weight: float, term: Tensor) -> Tensor:
    """Return ``weight * term``; a weight of 1 costs no kernel."""
    return term if weight == 1 else weight * term


@dataclass(frozen=True, kw_only=True)
class Objective(Section, option="model.objective"):
    """The supervised loss of local training: cross-entropy, and maybe triplet, center, metric and causality losses.

    Eq. (9) of paper 002, with lambda: ``cross_entropy: lambda``, ``triplet: 1 - lambda``.
    """

    cross_entropy: float = 1.0
    """weight of the cross-entropy"""
    label_smoothing: float = 0.0
    """share of the target spread over all identities"""
    triplet: float = 0.0
    """weight of the batch-hard triplet loss; use it with ``sampler: identity``"""
    margin: Annotated[float, _TRIPLET] = 0.3
    """of the triplet loss"""
    squared: Annotated[bool, _TRIPLET] = False
    """whether the triplet loss has squared distances (paper 002, Eq. (8))"""
    unit_length: Annotated[bool, _TRIPLET] = False
    """scale the features of the triplet loss to length 1 first (FaceNet, Schroff et al., CVPR 2015): with ``squared``,
    cross-entropy hardly counts otherwise"""
    triplet_on: Annotated[Literal["neck", "pool"], _TRIPLET] = "neck"
    """the features it acts on; ``pool`` with a bnneck"""
    center: CenterLoss | None = None
    """center loss, which is added; null: none"""
    metric: MetricLoss | nn.Module | None = None
    """one more loss, which is added: one of pytorch-metric-learning by its name; or, by its class_path, your own
    :class:`~fedsim.training.batch_loss.BatchLoss`, or a module of features [B, D] and labels [B]; null: none"""
    causality: Causality | None = None
    """the loss of SNR's layers, which is added; null: none"""

    @cached_property  # read for each batch
    def weights(self) -> dict[str, float]:
        """The weight of each term of the loss, by name: the cross-entropy with any weight, further terms if above 0."""
        weights = {"cross_entropy": self.cross_entropy}
        if self.triplet > 0:
            weights["triplet"] = self.triplet
        if self.center is not None:
            weights["center"] = self.center.weight
        if self.metric is not None:
            assert isinstance(self.metric, MetricLoss | BatchLoss), "any other module has become a MetricLoss"
            weights["metric"] = self.metric.weight
        if self.causality is not None:
            weights["causality"] = 1.0
        return weights

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the terms that are logged for each client, without their weights, if there are two or more."""
        names = tuple(self.weights)
        return names if len(names) > 1 else ()

    @property
    def sees_batches(self) -> bool:
        """Whether a loss sees more of a batch than features and labels: cameras, round, views."""
        return isinstance(self.metric, BatchLoss)

    @cached_property  # read for each batch
    def num_views(self) -> int:
        """The number of views of each image that the losses compare."""
        return self.metric.views if isinstance(self.metric, BatchLoss) else 1

    @property
    def head_std(self) -> float:
        """The deviation of the weights of a new identity head: 1, as the library has it, where only angles count.

        Shorter rows of the head have larger gradients: of rows of length 0.02 these would be thousands.
        """
        return 1.0 if isinstance(self.metric, MetricLoss) and self.metric.compares_with_head else HEAD_STD

    def __post_init__(self) -> None:
        if self.metric is not None and not isinstance(self.metric, BatchLoss):
            object.__setattr__(self, "metric", as_metric_loss(self.metric))
        within("model.objective", "[0, 1)", label_smoothing=self.label_smoothing)
        not_negative("model.objective", cross_entropy=self.cross_entropy, triplet=self.triplet, margin=self.margin)
        if self.cross_entropy == self.triplet == 0 and self.metric is None:
            also = "" if self.center is None else ", and center loss alone pulls all features to one point"
            raise ConfigError(
                f"model.objective: cross_entropy and triplet are both 0; nothing would be learnt{also}; "
                "set one of them above 0"
            )


@dataclass(frozen=True, kw_only=True)
class CenterLoss(Section, option="model.objective.center"):
    """Center loss: features are pulled to a center for each identity, which follows them (Wen et al., ECCV 2016).

    Each client has centers of its own, which stay with it. They start at 0, and move with every batch.
    """

    weight: float = 0.001
    """of the loss in the sum. 0.001 is the 0.0005 of the bag of tricks' code (layers/center_loss.py
    of michuanhaohao/reid-strong-baseline), whose mean over the batch has no factor 1/2"""
    rate: float = 0.5
    """alpha in [0, 1]: a center with n images in a batch goes alpha * n / (1 + n) of the way to their mean"""
    features: Literal["neck", "pool"] = "pool"
    """the features it acts on"""

    def __post_init__(self) -> None:
        positive("model.objective.center", weight=self.weight)
        within("model.objective.center", "[0, 1]", rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class Causality(Section, option="model.objective.causality"):
    """The dual causality loss of SNR: of distances (Jin et al., CVPR 2020), or of entropies (arXiv:2101.00588).

    It acts on the layers of ``style: {kind: snr}``: see :func:`causality_loss` and :func:`entropy_causality`. Equation
    and weights of the distances are from memory: the paper was not at hand. The mean of an instance-normalised map is
    its bias, the same for all images, so distances of F~ are 0 here, and its entropy is that of one image.
    """

    weights: tuple[float, ...] = (0.1, 0.1, 0.5)
    """a weight for each layer, in the order of the network; the paper's four of the distances are 0.1, 0.1, 0.5, 0.5.
    Of the entropies: 0.01 each in the authors' code, and in DACS's and SSCU's beside their losses; 1 in DACS's row of
    SNR"""
    form: Literal["distance", "entropy"] = "distance"
    """the quantities that are compared in a layer: distances of the batch's people, or entropies of a classifier of the
    layer, which stays with its client, as the identity head does (it is shared where that is)"""
    cross_entropy: tuple[float, ...] = ()
    """of ``entropy``: a weight for each layer of the cross-entropy of F+; empty: none, and the classifiers learn from
    the entropies alone, as in DACS's code. The authors' code has 0, 0, 0.01"""

    def __post_init__(self) -> None:
        section = "model.objective.causality"
        for weight in self.weights:
            not_negative(section, weights=weight)
        for weight in self.cross_entropy:
            not_negative(section, cross_entropy=weight)
        if self.cross_entropy and self.form == "distance":
            raise ConfigError(f"{section}.cross_entropy: only form entropy has classifiers; leave it empty")
        if self.cross_entropy and len(self.cross_entropy) != len(self.weights):
            raise ConfigError(
                f"{section}.cross_entropy: there are {len(self.cross_entropy)} numbers, and {len(self.weights)} "
                "weights; give one for each layer"
            )

    @property
    def has_heads(self) -> bool:
        """Whether each layer has a classifier."""
        return self.form == "entropy"

    def __call__(self, separated: Sequence[Separated], labels: Tensor) -> Tensor:
        """Return the weighted sum over the layers, a scalar, for ``labels`` [B] int64.

        ``separated`` are pooled maps, or logits of the layers' classifiers.
        """
        assert len(separated) == len(self.weights), "the loss needs a training pass of the model"
        if self.form == "distance":
            terms = [causality_loss(*parts, labels) for parts in separated]
        else:
            terms = [entropy_causality(*parts) for parts in separated]
        weighted_terms = [weight * term for weight, term in zip(self.weights, terms, strict=True)]
        for weight, parts in zip(self.cross_entropy, separated, strict=False):
            if weight > 0:
                weighted_terms.append(weight * cross_entropy(parts.relevant, labels))
        return torch.stack(weighted_terms).sum()
