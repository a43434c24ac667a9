"""A rank's memory on a device: models with their gradients and moments, and activations of a batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.checks.requirements import settings_of
from fedsim.federation.events import strategy_of
from fedsim.federation.parts import Parts
from fedsim.federation.settings import Settings
from fedsim.methods.base import HoldsModels
from fedsim.models.reid import KeyedDropout
from fedsim.strategy.sharing import FIELD

CUDA_BYTES = 2**29
"""memory that CUDA and its libraries take for each process, about"""


@dataclass(frozen=True)
class DeviceMemory:
    """An estimate for one rank, in bytes, without images that wait on the device and workspaces of kernels."""

    models: int
    """of all the rank's models: trained ones with their gradients and two moments, and frozen ones"""
    trained: int
    """number of models of each architecture that train"""
    frozen: int
    """number of models of each architecture that do not train"""
    activations: int | None
    """of the largest batch or micro-batch; None: they cannot be estimated for the backbone"""
    images: int
    """number of images in that batch or micro-batch"""

    @property
    def total(self) -> int:
        """All of it, including CUDA's own memory."""
        return self.models + (self.activations or 0) + CUDA_BYTES


def device_memory(settings: Settings, parts: Parts, data: FederatedDataModule, precision: str) -> DeviceMemory:
    """Return the memory of a rank; nothing is computed on the device for it."""
    replicas = list(settings.method.replicas.values()) if isinstance(settings.method, HoldsModels) else []
    trained, frozen = 1 + replicas.count("trained"), replicas.count("frozen")
    model_bytes = 4 * sum(flat.flat.buffer.numel() for flat in parts.models.values())
    fixed_bytes = sum(flat.fixed_bytes for flat in parts.models.values())
    sizes = dict.fromkeys(parts.models, 0)
    for client in parts.federated.clients:
        arch, training = parts.archs[client.name], settings_of(client, settings.client, settings.overrides)
        images = training.micro_batch_of(client.num_images) or training.batch_of(client.num_images)
        sizes[arch] = max(sizes[arch], images)
    pixels = data.augmentation.crop or data.size
    kept = {a: kept_by(parts.models[a].network, (images, 3, *pixels)) for a, images in sizes.items() if images}
    estimates = {arch: size for arch, size in kept.items() if size is not None}
    largest = max(estimates or kept, key=lambda arch: estimates.get(arch, 0))
    half = 2 if precision == "bf16-mixed" else 1
    activations = estimates[largest] // half if estimates else None
    models = (4 * trained + frozen) * model_bytes + (trained + frozen) * fixed_bytes
    return DeviceMemory(models, trained, frozen, activations, sizes[largest])


def kept_by(network: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the bytes that a forward pass of images of this shape keeps for the backward pass, in float32.

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
            functional_call(network, tensors, (torch.empty(shape, device="meta"),))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # of a user's layer
        return None
    finally:
        network.train(was_training)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in of_network)


def check_memory(trainer: Trainer, settings: Settings, parts: Parts, data: FederatedDataModule) -> None:
    """Raise ConfigError if ranks that share a GPU need more memory than it has."""
    strategy = strategy_of(trainer)
    ranks, device = strategy.ranks_per_device, strategy.root_device
    if ranks == 1 or device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    if "MIG" in properties.name:  # each rank has a slice, with memory of its own
        return
    memory = device_memory(settings, parts, data, str(trainer.precision))
    needed, available = ranks * memory.total / 2**30, properties.total_memory / 2**30
    if needed > available:
        fitting = max(int(ranks * available / needed), 1)
        raise ConfigError(
            f"{FIELD}: {ranks} ranks need about {needed:.1f} GiB on {device}, which has {available:.1f} GiB; set it to "
            f"{fitting}, or model.client.micro_batch to a part of {memory.images} images"
        )
