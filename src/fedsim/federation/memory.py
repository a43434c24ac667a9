"""A rank's memory on a device: models, gradients, moments, sums, private states, images, activations, uploads."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError
from fedsim.core.placement import Placement, place
from fedsim.core.room import memory_room, room_of
from fedsim.core.shared import memory_folder, slow_folder
from fedsim.core.store import StorePlace
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.federation.aggregation.gathered import gathered_bytes
from fedsim.federation.aggregation.masked import MaskedSum, clients_prune
from fedsim.federation.aggregation.sums import ModelSum
from fedsim.federation.checks.requirements import settings_by_client
from fedsim.federation.events import strategy_of
from fedsim.federation.parts import Parts, trains_alone
from fedsim.federation.settings import Settings
from fedsim.methods.base import Method
from fedsim.models.reid import KeyedDropout
from fedsim.strategy.sharing import FIELD
from fedsim.training.flat_model import FlatModel

log = logging.getLogger(__name__)

CUDA_BYTES = 2**29
"""memory that CUDA and its libraries take for each process, about"""


@dataclass(frozen=True)
class DeviceMemory:
    """An estimate of the most that a rank has on its device in a fit, in bytes, without workspaces of kernels."""

    models: int
    """of all the rank's models, with their initial private tensors, and of fixed networks of the method"""
    gradients: int
    """of a client's model, and of tensors that train beside it; models that train together for a client step in turn"""
    moments: int
    """of the optimizers of all models that train for a client"""
    trained: int
    """number of models of each architecture that train"""
    frozen: int
    """number of models of each architecture that do not train"""
    server: int
    """of the global models, of the server optimizer, and of tensors that the server keeps or has received"""
    sums: int
    """of uploads, and of micro-batches"""
    states: int
    """of the clients' private tensors between rounds"""
    states_place: StorePlace
    """where these are"""
    kept: int
    """of the tensors that a client keeps between rounds, while it trains, and of the method's copies of its model"""
    pixels: int
    """of decoded training images; 0: they are not on the device"""
    graphs: int
    """of a captured step, which has memory of its own; 0: steps are plain"""
    activations: int | None
    """of the largest batch or micro-batch; None: they cannot be estimated for the backbone"""
    images: int
    """number of images in that batch or micro-batch"""
    stage: int
    """of what a client trains before its batches, when there are no activations yet"""
    uploads: int
    """of single uploads that a rule or an attack gathers, and of its copies of them, when no client trains"""

    @property
    def lasting(self) -> int:
        """All that lives beside a batch."""
        models = self.models + self.gradients + self.moments + self.server + self.sums + self.kept
        states = self.states if self.states_place == "device" else 0
        return models + states + self.pixels + self.graphs

    @property
    def tensors(self) -> int:
        """All of it that torch allocates: activations, a stage and uploads come one after the other."""
        return self.lasting + max(self.activations or 0, self.stage, self.uploads)

    @property
    def total(self) -> int:
        """All of it, including CUDA's own memory."""
        return self.tensors + CUDA_BYTES


def device_memory(
    settings: Settings, parts: Parts, data: FederatedDataModule, placement: Placement, precision: str
) -> DeviceMemory:
    """Return the memory of the rank that has most; nothing is computed on the device for it."""
    return _Estimate(settings, parts, data, placement, precision).memory


class _Estimate:
    """An estimate in parts; the arguments are those of :func:`device_memory`."""

    def __init__(
        self, settings: Settings, parts: Parts, data: FederatedDataModule, placement: Placement, precision: str
    ) -> None:
        self._settings, self._parts, self._data = settings, parts, data
        self._placement, self._precision = placement, precision
        replicas = list(settings.method.replicas.values())
        self._trained, self._frozen = 1 + replicas.count("trained"), replicas.count("frozen")
        self._training = settings_by_client(parts.federated, parts.training, settings.overrides)
        self._clients, self._archs, self._micro_batches = _trained_on(parts), parts.archs, parts.micro_batches
        if (root := parts.root) is not None:
            name, training = root.data.name, root.training_settings
            self._training[name], self._archs = training, parts.archs | {name: root.model.arch}
            self._micro_batches = {**parts.micro_batches, name: training.micro_batches_of(root.data.num_images)}
        self._num_classes = {client.name: client.num_classes for client in self._clients}
        self._moments_of = {id(t): _state_of(t.optimizer) for t in self._training.values()}
        models = parts.models.items()
        self._trainable = {a: sum(p.nbytes for p in m.network.parameters() if p.requires_grad) for a, m in models}
        self._loose = _loose_bytes(settings.method, data)
        self._start = {arch: sum(tensor.nbytes for tensor in model.initial_kept.values()) for arch, model in models}

    @property
    def memory(self) -> DeviceMemory:
        flats, per_arch = self._parts.models.values(), self._trained + self._frozen
        models = sum(f.flat.buffer.nbytes + f.initial_private.nbytes + f.fixed_bytes for f in flats)
        names = [client.name for client in self._clients]
        activations, images = self._activations()
        gradients = max(self._gradients(name) for name in names)
        records = any(training.graph for training in self._training.values())
        # sums of a batch that is cut are float64
        cut = max(2 * self._trained * self._gradients(name) * (self._micro_batches[name] > 1) for name in names)
        copies, on_device = self._settings.method.session_copies, self._data.cache == "device"
        return DeviceMemory(
            models=per_arch * models + self._settings.method.fixed_bytes,
            gradients=gradients,
            moments=max(self._moments(name) for name in names),
            trained=self._trained,
            frozen=self._frozen,
            server=self._server(),
            sums=self._sums() + cut,
            states=self.states,
            states_place="host" if self._in_shared_files else self._settings.client_store,
            kept=max(self._kept(name) + copies * 4 * self._model(name).flat.num_model + self._loose for name in names),
            pixels=self._most_of_a_rank(training_pixels(self._parts, self._data)) if on_device else 0,
            graphs=gradients + (activations or 0) if records else 0,
            activations=activations,
            images=images,
            stage=self._stage(),
            uploads=self._uploads(),
        )

    @property
    def states(self) -> int:
        """The bytes of the private states of the rank that has most."""
        return self._most_of_a_rank({name: self._state(name) + self._kept(name) for name in self._parts.names})

    @property
    def _in_shared_files(self) -> bool:
        """Whether private states are in files in the host's memory, as ranks share their clients."""
        return self._settings.client_store == "device" and self._placement.per_machine > 1

    def _most_of_a_rank(self, bytes_of: Mapping[str, int]) -> int:
        return most_of_a_rank(bytes_of, self._parts, self._placement)

    def _model(self, client: str) -> FlatModel:
        return self._parts.models[self._archs[client]]

    def _head(self, client: str) -> int:
        return 4 * self._model(client).head_room(self._num_classes[client])

    def _gradients(self, client: str) -> int:
        return self._trainable[self._archs[client]] + self._head(client) + self._loose

    def _moments(self, client: str) -> int:
        tensors = self._trained * (self._gradients(client) - self._loose) + self._loose
        return round(_copies(self._moments_of[id(self._training[client])]) * tensors)

    def _server(self) -> int:
        make, server = self._settings.server_optimizer, self._parts.server
        vectors = sum(model.shared.nbytes for model in self._parts.models.values())
        kept = sum(tensor.nbytes for tensors in server.kept.values() for tensor in tensors.values())
        answers = 4 * sum(map(self._extras, self._parts.models))  # the means of the last round
        # a server that trains has the models from the start of the round, too; another one has no moments then
        before = vectors if self._settings.method.server_batch else 0
        trained = 0 if self._parts.root is None else vectors  # on the server's images, for the rule
        return vectors + trained + (round(_copies(_state_of(make)) * vectors) if make else 0) + kept + answers + before

    def _extras(self, arch: str) -> int:
        """Return the elements of the extra tensors of an upload."""
        shapes = self._settings.method.payload(self._parts.server, arch, 0).up.values()
        return sum(math.prod(shape) for shape in shapes)

    def _sums(self) -> int:
        """Return the bytes of the sums over clients: of models, and of the method's extra tensors."""
        form = MaskedSum() if clients_prune(self._settings.method) else ModelSum()
        elements = sum(form.length(policy) + self._extras(arch) for arch, policy in self._parts.statistics.items())
        return elements * (8 if self._settings.reduction == "exact" else 4)

    def _state(self, client: str) -> int:
        return self._model(client).initial_private.nbytes + self._head(client)

    def _kept(self, client: str) -> int:
        """Return the bytes of the tensors that the method and the optimizers of a client keep between rounds."""
        model, method, center = self._model(client), self._settings.method, self._settings.objective.center
        whole, column = 4 * model.flat.num_model + self._head(client), 4 * self._num_classes[client]
        sizes = {"model": whole, "shared": model.shared.nbytes, "private": self._state(client)}
        sizes["people"] = column * model.network.num_features
        kept = self._start[self._archs[client]] + self._loose
        kept += sum(column * part if isinstance(part, int) else sizes[part] for part in method.keeps.values())
        kept += 0 if center is None else column * model.network.width_of(center.features)
        if self._training[client].keeps_state(trains_alone(method, self._parts.federated)):
            kept += len(self._moments_of[id(self._training[client])]) * (self._trained * whole + self._loose)
        return kept

    def _stage(self) -> int:
        """Return the bytes of what the largest client trains before its batches."""
        images, people = max(c.num_images for c in self._clients), max(c.num_classes for c in self._clients)
        width = max(model.network.num_features for model in self._parts.models.values())
        stage = self._settings.method.first_stage(images, people, width)
        return 0 if stage is None else stage[2] + (kept_by(*stage[:2], to_inputs=True) or 0)

    def _uploads(self) -> int:
        """Return the bytes of a round's single uploads, at most: all clients may take part, with one architecture."""
        lengths = [policy.num_shared for policy in self._parts.statistics.values()]
        return gathered_bytes(len(self._parts.archs), max(lengths)) if self._settings.needs_all_uploads else 0

    def _activations(self) -> tuple[int | None, int]:
        """Return the bytes that the largest batch or micro-batch keeps for the backward pass, and its images."""
        of_server = min(self._settings.method.server_batch, len(self._parts.federated.public or ()))
        sizes, archs = dict.fromkeys(self._parts.models, of_server), self._archs
        for client in self._clients:
            training = self._training[client.name]
            images = training.micro_batch_of(client.num_images) or training.batch_of(client.num_images)
            sizes[archs[client.name]] = max(sizes[archs[client.name]], images)
        estimates = {arch: self._kept_by(arch, (n, *_image_of(self._data))) for arch, n in sizes.items() if n}
        counted = {arch: size for arch, size in estimates.items() if size is not None}
        largest = max(counted or estimates, key=lambda arch: counted.get(arch, 0))
        activations = counted.get(largest)
        passes = self._settings.method.passes * self._settings.objective.num_views
        return None if activations is None else passes * activations, sizes[largest]

    def _kept_by(self, arch: str, shape: tuple[int, ...]) -> int | None:
        """Return the activations of an architecture in the run's precision: bf16 halves them, and casts weights."""
        network = self._parts.models[arch].network
        size = kept_by(network, shape)
        if size is None or self._precision != "bf16-mixed":
            return size
        return (size + sum(p.nbytes for p in network.parameters() if p.dim() > 1)) // 2


def _image_of(data: FederatedDataModule) -> tuple[int, int, int]:
    return 3, *(data.augmentation.crop or data.size)


def _loose_bytes(method: Method, data: FederatedDataModule) -> int:
    return 4 * sum(map(math.prod, method.loose_tensors(_image_of(data)).values()))


def placement_of(settings: Settings, parts: Parts, num_ranks: int, per_machine: int) -> Placement:
    """Return the placement of the clients on ``num_ranks``; those of a machine share clients if sums are exact."""
    return place(parts.costs, num_ranks, per_machine if settings.reduction == "exact" else 1)


def _trained_on(parts: Parts) -> list[ClientData]:
    """Return the data of all clients, and those on which the server trains as on a client's."""
    return [*parts.federated.clients, *([] if parts.root is None else [parts.root.data])]


def most_of_a_rank(bytes_of: Mapping[str, int], parts: Parts, placement: Placement) -> int:
    """Return the most that a rank has of something of its clients: in the course of a run, of all it may train.

    ``bytes_of`` may also have the server's own images, which are on rank 0.
    """
    sums = {ranks: sum(bytes_of[name] for name in placement.shared_by(ranks)) for ranks in placement.groups}
    root = 0 if parts.root is None else bytes_of.get(parts.root.data.name, 0)
    return max(size + root * (0 in ranks) for ranks, size in sums.items())


def training_pixels(parts: Parts, data: FederatedDataModule) -> dict[str, int]:
    """Return the bytes of each client's decoded training images, with its generated ones, and of the server's own."""
    per_image = 3 * data.size[0] * data.size[1]
    return {client.name: per_image * _images_of(client) for client in _trained_on(parts)}


def _images_of(client: ClientData) -> int:
    return client.num_images + (0 if client.generated is None else len(client.generated))


def _state_of(make: Callable[[list[nn.Parameter]], Optimizer]) -> list[Tensor]:
    """Return the tensors that an optimizer has after a step of a parameter of 64 x 64 elements."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _copies(state: Iterable[Tensor]) -> float:
    """Return the size of the moments in :func:`_state_of`, relative to the parameter."""
    return sum(tensor.nbytes for tensor in state if tensor.numel() > 1) / (4 * 64 * 64)


def kept_by(network: nn.Module, shape: tuple[int, ...], *, to_inputs: bool = False) -> int | None:
    """Return the bytes that a forward pass of images of this shape keeps for the backward pass, in float32.

    ``to_inputs``: gradients pass to the images, or other inputs.

    The pass runs on torch's device ``meta``, without memory or numbers. None: a layer does not support it.

    >>> kept_by(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), (2, 3))  # 2 x 3 inputs, 2 x 8 results
    88
    """
    named = itertools.chain(network.named_parameters(), network.named_buffers())
    tensors = {n: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for n, t in named}
    of_network = {t.untyped_storage()._cdata for t in tensors.values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # keeps it alive, so that no other tensor gets its address
        return tensor

    was_training = network.training
    network.train()
    for layer in network.modules():
        if isinstance(layer, KeyedDropout):  # its generator is on another device
            layer.eval()
    try:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(network, tensors, (torch.empty(shape, device="meta", requires_grad=to_inputs),))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # of a user's layer
        return None
    finally:
        network.train(was_training)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in of_network)


def warn_of_states(trainer: Trainer, settings: Settings, parts: Parts, data: FederatedDataModule) -> None:
    """Warn if the private states of all clients take more room than there is: they are made as clients train."""
    placement = placement_of(settings, parts, trainer.world_size, strategy_of(trainer).num_processes)
    needed = _Estimate(settings, parts, data, placement, str(trainer.precision)).states
    if settings.client_store == "disk":
        room = room_of(slow_folder())
    else:
        room = room_of(memory_folder()) if placement.per_machine > 1 else memory_room()
    if settings.client_store != "device" and needed > room.free:
        remedy = "remove files there" if settings.client_store == "disk" else "set it to disk"
        log.warning(
            "model.client_store: the private states of all %s clients take %.1f GiB, and %.1f GiB are free (%s); if "
            "most clients train, %s", f"{len(parts.names):,}", needed / 2**30, room.free / 2**30, room.where, remedy,
        )  # fmt: skip


def check_memory(trainer: Trainer, settings: Settings, parts: Parts, data: FederatedDataModule) -> None:
    """Raise ConfigError if ranks that share a GPU need more memory than it has."""
    strategy = strategy_of(trainer)
    ranks, device = strategy.ranks_per_device, strategy.root_device
    if ranks == 1 or device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    if "MIG" in properties.name:  # each rank has a slice, with memory of its own
        return
    placement = placement_of(settings, parts, trainer.world_size, strategy.num_processes)
    memory = device_memory(settings, parts, data, placement, str(trainer.precision))
    needed, available = ranks * memory.total / 2**30, properties.total_memory / 2**30
    if needed > available:
        fitting = max(int(ranks * available / needed), 1)
        raise ConfigError(
            f"{FIELD}: {ranks} ranks need about {needed:.1f} GiB on {device}, which has {available:.1f} GiB; set it to "
            f"{fitting}, or model.client.micro_batch to a part of {memory.images} images"
        )
