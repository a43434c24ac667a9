"""The rank's model of an architecture on a rank's device; clients are loaded into it one after another."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from fedsim.core.allocator import GraphMemory
from fedsim.core.flat import FlatParameters, aligned
from fedsim.core.work import ROLES, Counts, Role, Work
from fedsim.functional.encodings import dense_bytes
from fedsim.models.groups import BACKBONE, BODY, Group
from fedsim.models.reid import Features, ReIDModel, draw_head
from fedsim.models.style import Separated
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.settings import LocalTraining, autocast

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""torch's own: a class that derives from them may read its counter"""


class Head(NamedTuple):
    """An identity head's tensors."""

    weight: Tensor
    """[Z, D]"""
    bias: Tensor
    """[Z]"""


class Output(NamedTuple):
    """A model's output for a batch."""

    features: Features
    logits: Tensor
    """[B, Z]"""
    head: Tensor
    """[Z, D] weights of the head that gave them"""
    separated: tuple[Separated, ...] = ()
    """the parts that SNR layers separate, in the order of the network, in training with ``objective.causality``"""
    views: tuple[Features, ...] = ()
    """features of the batch's further views, if a loss compares views"""


class FlatModel:
    """A rank's model, its flat buffer with room for a client's identity head, and the clients' optimizers.

    The buffer holds [shared | private | own head]: loading a client is one copy into each of two parts, and its upload
    is one slice. Shared heads belong to the model; then there is no own head.

    The ``network`` is on its device. ``shared`` are the names of the tensors that are sent, ``groups`` the group of
    each tensor, and ``max_classes`` the identities of the largest label space among the clients. Tensors ``outside``
    are in none of the buffer's parts.
    """

    flat_kind: ClassVar[type[FlatParameters]] = FlatParameters

    def __init__(
        self,
        arch: str,
        network: ReIDModel,
        shared: frozenset[str],
        groups: dict[str, Group],
        max_classes: int,
        outside: frozenset[str] = frozenset(),
    ) -> None:
        if self.flat_kind is FlatParameters:
            # a counter that its layer does not read costs a GPU a launch for each batch
            for layer in filter(is_idle, network.modules()):
                layer.register_buffer("num_batches_tracked", None)
        counters = {name: tensor for name, tensor in network.named_buffers() if groups.get(name) is Group.COUNTER}
        self.arch, self.network = arch, network
        self.work: Mapping[Role, Work] = {role: Work() for role in ROLES}
        """the work of this model and its replicas"""
        network.work = self.work["client"]
        self.groups = {name: group for name, group in groups.items() if group is not Group.COUNTER or name in counters}
        self.has_own_heads = network.head is None
        """whether heads belong to clients"""
        self.fixed = [name for name, group in groups.items() if group is Group.FIXED]
        """names of the tensors that are equal on all clients, and not in the buffer"""
        self.flat = self.flat_kind(
            network, shared.__contains__, self.head_room(max_classes), outside.union(self.fixed).__contains__
        )
        self.initial_private = self.flat.private.clone()
        """[num_private] the start of every client"""
        self.initial_kept: Mapping[str, Tensor] = {}
        """tensors of the method that every client keeps from the start, by name, on the CPU"""
        # without initial weights: a replica is made within a session, and must not advance its random streams
        self.head = network.head or skip_init(nn.Linear, network.num_features, 1, device=self.flat.buffer.device)
        """the identity head: the shared one, or that of the current client"""
        if self.has_own_heads:
            self.head.bias.requires_grad_(network.head_kind.bias)
        self._counters = [(counter, counter.clone()) for counter in counters.values()]
        self._optimizers: dict[int, tuple[LocalTraining, LocalOptimizer]] = {}
        self._shared, self._max_classes = shared, max_classes
        self._replicas: dict[str, FlatModel] = {}
        self.channels_last = False
        """whether images are in this order of memory in training"""
        self.num_rounds: int | None = None
        """of the run; None: it has no last one"""
        self.set_num_classes(max_classes)

    def set_num_classes(self, num_classes: int) -> None:
        """Give the own head the size of a client's label space; its values are those in the buffer."""
        self.num_classes = num_classes
        if self.has_own_heads:
            weight, bias = self._cut_head(self.flat.buffer[self.flat.num_model :], num_classes)
            self.head.weight.data, self.head.bias.data = weight, bias
            self.head.out_features = num_classes

    @property
    def shared(self) -> Tensor:
        """The part that is sent and received, [num_shared]: a view."""
        return self.flat.shared

    @property
    def private(self) -> Tensor:
        """The part that belongs to the current client, [num_private + own head]: a view."""
        return self.whole[self.flat.num_shared :]

    @property
    def running(self) -> list[Tensor]:
        """The float buffers of the model that is run, such as running statistics."""
        return self.flat.running

    @property
    def whole(self) -> Tensor:
        """The current client's model with its own head: a view of the buffer."""
        return self.flat.buffer[: self.flat.num_model + self.head_room(self.num_classes)]

    def load_global(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Load the global model [num_shared], and private tensors that the server has, by name."""
        self.shared.copy_(vector)
        for entry in self.flat.entries:
            if entry.name in tensors:
                self.flat.buffer[entry.span].copy_(tensors[entry.name].flatten())

    def initial_state(self, num_classes: int, generator: torch.Generator) -> Tensor:
        """Return :attr:`private` for a client that has not trained yet: a new tensor on the CPU.

        ``num_classes`` is its Z; ``generator`` samples the weights of its head.
        """
        state = torch.zeros(self.initial_private.numel() + self.head_room(num_classes))
        state[: self.initial_private.numel()] = self.initial_private
        if self.has_own_heads and num_classes:
            weight, bias = self.head_of(state, num_classes)  # without a layer, which would take ten times as long
            draw_head(weight, bias, generator, self.network.head_std, self.network.head_kind)
        return state

    def head_of(self, state: Tensor, num_classes: int) -> Head:
        """Return the own head in a stored private state: views."""
        return self._cut_head(state[self.initial_private.numel() :], num_classes)

    def _cut_head(self, room: Tensor, num_classes: int) -> Head:
        features = self.network.num_features
        weight, start = room[: num_classes * features], aligned(num_classes * features)
        return Head(weight.view(num_classes, features), room[start : start + num_classes])

    def head_room(self, num_classes: int) -> int:
        """Elements that an own head takes, weight and bias."""
        sizes = (num_classes * self.network.num_features, num_classes)
        return sum(map(aligned, sizes)) if self.has_own_heads else 0

    def forward(self, images: Tensor, precision: str) -> Output:
        """Run the model and its head on normalised images [B, 3, H, W]; ``precision`` is 32-true or bf16-mixed."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        if precision == "32-true":
            features = self.network(images)
            logits = self.head(features.neck)
        else:
            with autocast(self.device, precision):
                features = self.network(images)
                logits = self.head(features.neck)
            features, logits = Features(features.pool.float(), features.neck.float()), logits.float()
        separated = self.network.take_separated(self.head.out_features) if self.network.separating else ()
        return Output(features, logits, self.head.weight, separated)

    def prepare(self, settings: Iterable[LocalTraining]) -> None:
        """Prepare training by the clients' settings: the memory format, and a backbone compiled for their batches.

        Weights stay in torch's usual order, in the flat buffer, uploads and files. Convolutions of images in another
        order convert their weights to it.
        """
        settings = list(settings)
        self.channels_last = any(training.channels_last for training in settings)
        if sizes := {training.micro_batch or training.batch_size for training in settings if training.compile}:
            self.network.compile_backbone({size for size in sizes if size is not None})

    def replica(self, role: str) -> FlatModel:
        """Return a second model of this architecture, for the same client.

        It is made at the first call, one for each role, such as ``global`` or ``previous``, and has a buffer, a head
        and optimizers of its own. Its weights and its mode, training or evaluation, are those of the last client: set
        both in each session.
        """
        if role not in self._replicas:
            new = self._twin()
            for (_, initial), (_, initial_of_replica) in zip(self._counters, new._counters, strict=True):
                initial_of_replica.copy_(initial)  # for reset_counters(): the copied network has this session's counts
            new.channels_last, new.work = self.channels_last, self.work
            new.network.work = self.work["second"]
            self._replicas[role] = new
        self._replicas[role].set_num_classes(self.num_classes)
        return self._replicas[role]

    def frozen_replica(self, role: str, weights: Tensor) -> FlatModel:
        """Return the :meth:`replica` of a role with ``weights`` [num_model + head], in evaluation mode."""
        replica = self.replica(role)
        replica.whole.copy_(weights)
        replica.network.eval()
        return replica

    def _twin(self) -> FlatModel:
        return FlatModel(self.arch, copy.deepcopy(self.network), self._shared, self.groups, self._max_classes)

    def reset_counters(self) -> None:
        """Reset integer buffers such as num_batches_tracked; no client owns them."""
        for counter, initial in self._counters:
            counter.copy_(initial)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Give layers their counters of batches for a while: a cumulative average reads them."""
        idle = [layer for layer in self.network.modules() if is_idle(layer)]
        for layer in idle:
            layer.register_buffer("num_batches_tracked", torch.tensor(0, device=self.device))
        try:
            yield
        finally:
            for layer in idle:
                layer.register_buffer("num_batches_tracked", None)

    @contextmanager
    def training_only(self, part: Literal["shared", "private"]) -> Iterator[None]:
        """Fix the parameters of the other part for a while: they get no gradient, and no optimizer moves them.

        Layers keep their mode: in training mode, running statistics move.
        """
        trainable = [p for p in (*self.network.parameters(), *self.head.parameters()) if p.requires_grad and p.numel()]
        ends = self.flat.num_shared_parameters
        with _without_gradient([p for p in trainable if (self.flat.place_of(p) < ends) == (part == "private")]):
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Fix all parameters for a while: gradients pass through the model to its images, and none reaches a parameter.

        So no gradient of a parameter is computed, which saves a third of a pass. Layers keep their mode.
        """
        with _without_gradient((*self.network.parameters(), *self.head.parameters())):
            yield

    def optimizer(self, settings: LocalTraining) -> LocalOptimizer:
        """Return the optimizer of clients with these settings; it is made once and reset for each of them."""
        if id(settings) not in self._optimizers:
            neck_and_head = [*self.network.neck.named_parameters(prefix="neck"), *self._named_heads]
            backbone = list(self.network.backbone.named_parameters(prefix="backbone"))
            if self.network.pooling is not None:
                backbone += self.network.pooling.named_parameters(prefix="pooling")
            # with the settings themselves: while they live, nothing else gets their id
            self._optimizers[id(settings)] = (settings, LocalOptimizer(settings, self.flat, [backbone, neck_and_head]))
        return self._optimizers[id(settings)][1]

    def end_session(self) -> None:
        """Let the model, and its replicas, forget what belongs to a session; see :meth:`ReIDModel.end_session`."""
        for model in (self, *self._replicas.values()):
            model.network.end_session()

    def begin_work(self, counts_images: bool) -> None:
        """Count from 0, and images only where this rank ``counts_images``."""
        for work in self.work.values():
            work.take()
            work.counts_images = counts_images

    def take_work(self) -> dict[Role, Counts]:
        """Return images and steps of each role since the last call."""
        return {role: work.take() for role, work in self.work.items()}

    def add_work(self, counts: Mapping[Role, Counts]) -> None:
        """Count images and steps of each role."""
        for role, of_role in counts.items():
            self.work[role].add(of_role)

    @property
    def head_layers(self) -> list[Head]:
        """The layers of the identity head; a bias that does not train is empty."""
        bias = self.head.bias.data if self.network.head_kind.bias else self.head.bias.data[:0]
        return [Head(self.head.weight.data, bias)]

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the identity head, and of the heads of SNR layers."""
        return [parameter for _, parameter in self._named_heads]

    @property
    def _named_heads(self) -> list[tuple[str, nn.Parameter]]:
        stages, head = self.network.stage_heads, [*self.head.named_parameters(prefix="head")]
        return head if stages is None else [*head, *stages.named_parameters(prefix="stage_heads")]

    @property
    def generators(self) -> list[torch.Generator]:
        """The random streams of the model's layers, and of its replicas' layers, in this session."""
        return [g for model in (self, *self._replicas.values()) for g in model.network.generators]

    @cached_property
    def copy_stream(self) -> torch.cuda.Stream:
        """The CUDA stream on which images are copied ahead: one for all sessions, so that its memory is reused."""
        return torch.cuda.Stream(self.device)

    @cached_property
    def graph_memory(self) -> GraphMemory:
        """The memory of captured training steps, which all sessions use; only on GPUs."""
        return GraphMemory(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.initial_private.device

    @property
    def checksum(self) -> int:
        """48 bits of a hash of the model's weights: exact in float64."""
        return _hash([self.flat.buffer[: self.flat.num_model], *self._fixed_tensors])

    @property
    def fixed_checksum(self) -> int | None:
        """The checksum of the tensors that are not in the buffer; None without such tensors."""
        return _hash(self._fixed_tensors) if self.fixed else None

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the tensors that are not in the buffer."""
        return sum(tensor.nbytes for tensor in self._fixed_tensors)

    @property
    def _fixed_tensors(self) -> list[Tensor]:
        state = self.network.state_dict()
        return [state[name] for name in self.fixed]

    @property
    def shared_bytes(self) -> int:
        """Bytes of one transfer of the shared tensors: float32, without padding."""
        return dense_bytes(sum(entry.numel for entry in self.flat.shared_entries))

    def serves(self, layer: Literal["neck", "pool", "head"], names: Container[str] = ()) -> bool:
        """Whether the server has all tensors for the output of ``layer``: shared ones, and those of these ``names``.

        Pooled features need no neck: where it serves them, fedsim export can write the server's model.
        """
        if layer == "head" and self.has_own_heads:
            return False
        needless = {"neck": {Group.HEAD}, "pool": {Group.HEAD, *(BODY - BACKBONE)}, "head": set()}[layer]
        needed = [entry for entry in self.flat.entries if self.groups[entry.name] not in needless]
        return all(entry.shared or entry.name in names for entry in needed)


@contextmanager
def _without_gradient(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Fix those of the parameters that train for a while."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def is_idle(layer: nn.Module) -> bool:
    """Return whether a layer is a batch normalisation of torch that does not read its counter."""
    return isinstance(layer, _BATCH_NORMS) and type(layer) in _BATCH_NORMS and layer.momentum is not None


def _hash(tensors: Iterable[Tensor]) -> int:
    hasher = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        hasher.update(tensor.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(hasher.digest(), "big")
