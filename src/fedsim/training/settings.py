"""Groups of settings as they appear in configs. They are frozen: a run never changes its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least, not_negative, positive, within
from fedsim.core.errors import ConfigError
from fedsim.functional.schedules import cosine_factor, milestone_factor, step_factor, warmup_factor
from fedsim.models.backbones import Backbone
from fedsim.settings.facts import NOTHING, ROUNDING, Facts
from fedsim.settings.table import argument_of, setting_at
from fedsim.training.labels import BottomUp, Clustering, ClusterOverride

ELEMENTWISE = (SGD, Adam, AdamW, Adadelta, Adamax, NAdam, RAdam, RMSprop)
"""Optimizers whose state is one tensor of a parameter's shape for each moment, and that start without state."""
_ARGUMENTS = {"learning rate": "lr", "beta parameter": "betas", "epsilon": "eps"}
"""torch's words for arguments of optimizers; it calls the others by their names"""


def _default_optimizer(params: Iterable[Any]) -> Optimizer:
    """FedReIDBench's (paper 003's code): SGD with Nesterov momentum, backbone rate 0.005."""
    return SGD(params, lr=0.005, momentum=0.9, nesterov=True, weight_decay=5e-4)


@dataclass(frozen=True, kw_only=True)
class RateSchedule(Section, option="model.client.schedule"):
    """The client learning rate as a function of the global round."""

    kind: Literal["constant", "step", "milestones", "cosine"] = "constant"
    """``constant``; ``step``: times gamma every ``step`` rounds; ``milestones``: times gamma at each of these rounds;
    ``cosine``: half a cosine over ``rounds``"""
    step: Annotated[int, Facts(needs="kind == 'step'")] = 40
    """rounds between two drops"""
    milestones: Annotated[tuple[int, ...], Facts(needs="kind == 'milestones'", is_set=True)] = (40, 70)
    """rounds of the drops, from 0: those of the bag of tricks (Luo et al., CVPRW 2019)"""
    gamma: Annotated[float, Facts(needs="kind in ('step', 'milestones')")] = 0.1
    """factor of each drop"""
    drops: Annotated[int | None, Facts(needs="kind == 'step'")] = None
    """largest number of drops; null: no limit"""
    rounds: Annotated[int, Facts(needs="kind == 'cosine'")] = 100
    """length of ``cosine``"""
    warmup: int = 0
    """rounds of linear warm-up; the schedule multiplies it"""
    warmup_start: Annotated[float, Facts(needs="warmup")] = 0.01
    """factor at round 0 of the warm-up"""

    def check(self, section: str) -> None:
        """Raise ConfigError, which names the field of this ``section``, if a number is invalid."""
        at_least(section, 1, step=self.step, rounds=self.rounds, milestones=min(self.milestones, default=1))
        not_negative(section, gamma=self.gamma, warmup_start=self.warmup_start)
        at_least(section, 0, warmup=self.warmup)
        within(section, "[0, 1]", warmup_start=self.warmup_start)
        at_least(section, 0, "; use null for no limit", drops=self.drops)

    def factor(self, round_: int) -> float:
        """Return the factor on every learning rate in round ``round_`` = 0, 1, ..."""
        warm = warmup_factor(round_, self.warmup, self.warmup_start) if self.warmup else 1.0
        if self.kind == "step":
            last = round_ if self.drops is None else min(round_, self.step * self.drops)
            return warm * step_factor(last, self.step, self.gamma)
        if self.kind == "milestones":
            return warm * milestone_factor(round_, self.milestones, self.gamma)
        return warm * (cosine_factor(round_, self.rounds) if self.kind == "cosine" else 1.0)


@dataclass(frozen=True, kw_only=True)
class LongRound(Section, option="model.client.long_round"):
    """One round with other local epochs: FedCAPR's code trains 50 in the last of its 20 rounds."""

    round: int
    """number of the round, from 1"""
    local_epochs: int
    """E in that round"""
    schedule: RateSchedule = field(default_factory=RateSchedule)
    """of learning rates over the local epochs of that round, on top of the round's own factor"""

    def check(self, section: str) -> None:
        """Raise ConfigError, which names the field of this ``section``, if a number is invalid."""
        at_least(section, 1, round=self.round, local_epochs=self.local_epochs)
        self.schedule.check(f"{section}.schedule")


_LABELLED = Facts(needs="not cluster and not bottom_up")


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Section, option="model.client"):
    """Local training of a client in a round."""

    local_epochs: Annotated[
        int,
        Facts(
            usage="N",
            synonyms=("epochs", "local_ep"),
            needs="model.method != 'FedSGD' or model.method.steps != 1 or model.timing != 'Synchronous' "
            "or model.module or model.availability.straggle != 0",
        ),
    ] = 1
    """E: passes over the client's images"""
    local_steps: int | None = None
    """largest number of optimizer steps in a round, if E epochs have more; null: no limit"""
    batch_size: Annotated[int | None, Facts(usage="N")] = 32
    """B: images per batch, or all images of a client that has fewer; null: all images in one batch"""
    micro_batch: Annotated[int | None, Facts(null_is="batch_size")] = None
    """images per micro-batch of a batch: ranks of a machine can then share a client's batches, and less memory is
    needed. Normalisation layers and losses see one micro-batch at a time. null: a batch is one micro-batch"""
    sampler: Annotated[
        Literal["shuffle", "identity", "people"], Facts(needs="not cluster and (not bottom_up or drop_partial)")
    ] = "shuffle"
    """``shuffle``: plain random batches; ``identity``: B / K identities with K = ``num_instances`` images each, those
    with more images more often; ``people``: each identity once in a pass, so that all come equally often"""
    num_instances: Annotated[int, Facts(needs="sampler != 'shuffle' or cluster or model.clients")] = 4
    """K: images per identity of ``sampler: identity`` and ``people``, or per proxy of ``cluster``"""
    positives: Annotated[Literal["any", "other_cameras"], _LABELLED] = "any"
    """of ``sampler: identity`` and ``people``: the K images of an identity. ``other_cameras``: one, and K - 1 of other
    cameras, as far as there are such"""
    drop_partial: Annotated[
        bool,
        Facts(
            needs="model.clients or model.module or "
            "(batch_size is not None and (bottom_up or (sampler == 'shuffle' and not cluster)))"
        ),
    ] = False
    """drop a last batch with fewer than B images (FedReIDBench's code does)"""
    accumulate: Annotated[int, Facts(needs="batch_size is not None or model.clients or model.module")] = 1
    """batches per optimizer step, which takes the mean gradient of their images"""
    grad_clip: float | None = None
    """largest gradient norm; null does not clip"""
    optimizer: Annotated[OptimizerCallable, Facts(needs="model.module is None")] = field(default=_default_optimizer)
    """the optimizer of a client; ``lr`` applies to the backbone"""
    optimizer_state: Annotated[
        Literal["reset", "keep"] | None,
        Facts(needs="optimizer != 'torch.optim.SGD' or optimizer.momentum or model.module or model.clients"),
    ] = None
    """``reset``: moments start from zero in each round; ``keep``: a client continues with its own, which checkpoints
    contain; null: keep where nothing is averaged (a single client, a method that shares nothing), with torch's own
    optimizers"""
    channels_last: Annotated[bool, ROUNDING] = False
    """train on maps whose channels lie side by side in memory, the fastest order for convolutions on GPUs, above all in
    bf16. Weights and checkpoints stay as they are; results differ in the last bits"""
    compile: Annotated[bool, ROUNDING] = False
    """compile the backbone for whole batches with torch.compile (docs/gpus.md): the first one takes about a minute,
    for each architecture. Results differ in the last bits. Not together with ``graph``"""
    graph: Annotated[bool, NOTHING] = False
    """replay training steps as CUDA graphs (docs/gpus.md): each is one launch of the host, which large GPUs would wait
    for otherwise. It takes the memory of a second step's activations; on CPUs steps stay plain"""
    prefetch: Annotated[bool, NOTHING] = False
    """copy the next images to a GPU while it trains on these; for images that are not there already (``data.cache``)"""
    head_lr: float | None = None
    """learning rate of neck and head; null: that of the backbone"""
    schedule: RateSchedule = field(default_factory=RateSchedule)
    """learning rate over rounds"""
    cluster: Annotated[Clustering | None, Facts(group="loss")] = None
    """train on clusters of the images and ignore identities; null: train on identities"""
    bottom_up: Annotated[BottomUp | None, Facts(group="loss")] = None
    """train on clusters that grow from round to round; set instead of ``cluster``"""
    long_round: LongRound | None = None
    """one round that is longer than the others; null: none"""

    @cached_property
    def clusters(self) -> bool:
        """Whether the client trains on clusters instead of identities."""
        return self.cluster is not None or self.bottom_up is not None

    def epochs_in(self, round_: int) -> int:
        """Return E in round ``round_``, from 0."""
        if self.long_round is not None and self.long_round.round == round_ + 1:
            return self.long_round.local_epochs
        return self.local_epochs

    def rate_factor(self, round_: int, epoch: int = 0) -> float:
        """Return the factor on every learning rate in a local epoch of a round, both from 0."""
        factor = self.schedule.factor(round_)
        if self.long_round is not None and self.long_round.round == round_ + 1:
            factor *= self.long_round.schedule.factor(epoch)
        return factor

    @property
    def passes(self) -> int:
        """Passes over the client's images in a usual round, the cost of a round."""
        return self.local_epochs * (1 if self.cluster is None else self.cluster.replicate)

    @property
    def fewest_epochs(self) -> int:
        """The local epochs of the round with the fewest."""
        return min([self.local_epochs, *([self.long_round.local_epochs] if self.long_round is not None else [])])

    @property
    def draws_people(self) -> bool:
        """Whether a batch has several images of each of some identities."""
        return self.sampler != "shuffle"

    def batch_of(self, num_images: int) -> int:
        """Return B for a client with that many images: at most all of them, unless a sampler repeats images."""
        if self.batch_size is None:
            return num_images
        return self.batch_size if self.draws_people or self.cluster else min(self.batch_size, num_images)

    def micro_batch_of(self, num_images: int) -> int | None:
        """Return the images per micro-batch for a client with that many images; None if its batches are not cut."""
        return (
            self.micro_batch if self.micro_batch is not None and self.micro_batch < self.batch_of(num_images) else None
        )

    def micro_batches_of(self, num_images: int) -> int:
        """Return the number of micro-batches per batch for a client with that many images."""
        size = self.micro_batch_of(num_images)
        return math.ceil(self.batch_of(num_images) / size) if size else 1

    def keeps_state(self, trains_alone: bool) -> bool:
        """Return whether a client's optimizer keeps its state between rounds; ``trains_alone``: nothing is averaged."""
        if self.optimizer_state is not None or not trains_alone:  # an optimizer is not made for each of many clients
            return self.optimizer_state == "keep"
        return type(self.optimizer([nn.Parameter(torch.zeros(1))])) in ELEMENTWISE

    @cached_property
    def backbone_lr(self) -> float:
        """The optimizer's own learning rate."""
        return float(self.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])

    def lr_in(self, round_: int) -> float:
        """Return the backbone's learning rate in round ``round_``, from 0, in closed form."""
        return self.backbone_lr * self.schedule.factor(round_)

    def check(self, section: str) -> None:
        """Raise ConfigError, which names the field of this ``section``, if a number is invalid."""
        at_least(
            section, 1, local_epochs=self.local_epochs, num_instances=self.num_instances, accumulate=self.accumulate
        )
        at_least(section, 1, "; use null for whole epochs", local_steps=self.local_steps)
        made = try_optimizer(f"{section}.optimizer", self.optimizer)
        if self.optimizer_state == "keep" and type(made) not in ELEMENTWISE:
            names = ", ".join(optimizer_class.__name__ for optimizer_class in ELEMENTWISE)
            raise ConfigError(f"{section}.optimizer_state: keep works only for {names}; set it to reset")
        self.schedule.check(f"{section}.schedule")
        if self.long_round is not None:
            self.long_round.check(f"{section}.long_round")
        positive(section, "; use null for no clipping", grad_clip=self.grad_clip)
        not_negative(section, head_lr=self.head_lr)
        at_least(section, 2, ", the smallest batch for batch normalisation", batch_size=self.batch_size)
        self._check_micro_batches(section)
        if self.compile and self.graph:
            raise ConfigError(f"{section}.compile: a step is either compiled or a graph; set compile or graph to false")
        if self.compile and self.batch_size is None:
            raise ConfigError(f"{section}.compile: needs batches of one size; set batch_size, or set compile to false")
        in_groups = self.draws_people or self.cluster is not None
        if in_groups and (self.batch_size is None or self.batch_size % self.num_instances):
            size = "null" if self.batch_size is None else self.batch_size
            raise ConfigError(f"{section}.batch_size: {size} is not a multiple of num_instances ({self.num_instances})")
        if self.positives != "any" and not self.draws_people:
            raise ConfigError(
                f"{section}.positives: {self.positives} needs sampler: people or identity; set one, or positives to any"
            )
        if self.bottom_up is not None:
            self.bottom_up.check(f"{section}.bottom_up")
            if self.cluster is not None:
                raise ConfigError(f"{section}.bottom_up: cluster is set, too; set one of them to null")
        if self.cluster is not None:
            self.cluster.check(f"{section}.cluster")
            at_least(section, 2, ", the smallest number for cluster", num_instances=self.num_instances)

    def check_counts(self, method: str) -> None:
        """Raise ConfigError, naming ``method``, unless it can count the gradients of a round: see sgd_normaliser."""
        made = self.optimizer([nn.Parameter(torch.zeros(1))])
        if type(made) is not SGD or made.param_groups[0]["dampening"]:
            raise ConfigError(f"model.client.optimizer: {method} needs torch.optim.SGD without dampening; choose it")
        if self.optimizer_state == "keep":
            raise ConfigError(
                f"model.client.optimizer_state: {method} counts the gradients of a single round; set it to reset"
            )

    def _check_micro_batches(self, section: str) -> None:
        size, batch = self.micro_batch, self.batch_size
        at_least(section, 1, "; use null for whole batches", micro_batch=size)
        if size is None:
            return
        entry = f"{section}.micro_batch: {size}"
        if batch is not None and size > batch:
            raise ConfigError(f"{entry} is larger than the batch ({batch}); set it to at most that, or to null")
        if self.draws_people and size % self.num_instances:
            raise ConfigError(
                f"{entry} is not a multiple of num_instances ({self.num_instances}); set it to a multiple, or to null"
            )
        if self.clusters and size != batch:
            raise ConfigError(
                f"{entry} cuts batches, but training on clusters needs whole batches; set it to {batch or 'null'}"
            )


@dataclass(frozen=True, kw_only=True)
class ClientOverride(Section, option="model.clients.NAME"):
    """Settings of one client that differ from the others'; null keeps the common value.

    Fields without a description have the meaning of those in :class:`LocalTraining`.
    """

    backbone: Annotated[Backbone | nn.Module | None, Facts(group="network")] = None
    """its own network; the server averages it only with clients of the same architecture"""
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    micro_batch: int | None = None
    sampler: Literal["shuffle", "identity", "people"] | None = None
    num_instances: Annotated[
        int | None, Facts(needs="(sampler or model.client.sampler) != 'shuffle' or cluster or model.client.cluster")
    ] = None
    drop_partial: Annotated[
        bool | None,
        Facts(
            needs="model.module or ((batch_size or model.client.batch_size) is not None and "
            "(bottom_up or model.client.bottom_up or ((sampler or model.client.sampler) == 'shuffle' and "
            "not cluster and not model.client.cluster)))"
        ),
    ] = None
    accumulate: Annotated[int | None, Facts(needs="(batch_size or model.client.batch_size) is not None")] = None
    grad_clip: float | None = None
    optimizer: Annotated[OptimizerCallable | None, Facts(needs="model.module is None")] = None
    head_lr: float | None = None
    cluster: Annotated[ClusterOverride | None, Facts(group="loss")] = None
    """clustering for this client only, or the settings in which its clustering differs"""
    bottom_up: Annotated[BottomUp | None, Facts(group="loss")] = None

    def apply(self, common: LocalTraining) -> LocalTraining:
        """Return the common settings, overridden by this client's own."""
        overrides = _set_values(self)
        overrides.pop("backbone", None)
        if self.cluster is not None:
            overrides["cluster"] = replace(common.cluster or Clustering(), **_set_values(self.cluster))
        return replace(common, **overrides)


def _set_values(override: ClientOverride | ClusterOverride) -> dict[str, Any]:
    return {name: value for name, value in vars(override).items() if value is not None}


def try_optimizer(field: str, make: OptimizerCallable) -> Optimizer:
    """Return an optimizer of one number; raise ConfigError if it cannot be made.

    The message names the argument below ``field`` that torch calls invalid.
    """
    try:
        made = make([nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError) as error:
        refused = re.match(r"Invalid (learning rate|beta parameter|epsilon|\w+)", str(error))
        name = _ARGUMENTS.get(refused[1], refused[1]) if refused else ""
        remedy = argument_of(setting_at(field).base, name).facts.remedy
        raise ConfigError(f"{field}.{name}: {error}; {remedy}".replace(".: ", ": ").removesuffix("; ")) from error
    _try_step(field, make)
    return made


def _try_step(field: str, make: OptimizerCallable) -> None:
    """Refuse optimizers that need more than a gradient: a closure, or sparse gradients (LBFGS, SparseAdam)."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    if optimizer.defaults.get("differentiable"):
        raise ConfigError(f"{field}.differentiable: no gradient goes through a step here; leave it out")
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        if isinstance(error, TypeError) or "dense gradients" in str(error):  # others depend on the device
            raise ConfigError(
                f"{field}: {type(optimizer).__name__} cannot train here ({error}); choose another, such as SGD or Adam"
            ) from error


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which clients run forward passes: bfloat16 for ``bf16-mixed``, else off."""
    # without the cache: it would keep casts of weights after those of another client have replaced them in place
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False)
