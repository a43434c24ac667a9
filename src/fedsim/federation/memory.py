"""Memory of a device that a rank needs: models with all that training keeps for them, activations of a batch."""

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
"""that CUDA and its libraries take for each process, about"""


@dataclass(frozen=True)
class DeviceMemory:
    """An estimate for one rank, bytes; images that wait on the device and workspaces of kernels come on top."""

    models: int
    """the rank's models, each with its gradient and two moments; and models beside them"""
    trained: int
    """models of each architecture that train"""
    frozen: int
    """further ones, that do not"""
    activations: int | None
    """of the largest batch, or micro-batch of one; None: the backbone does not let itself be asked"""
    images: int
    """in that batch or micro-batch"""

    @property
    def total(self) -> int:
        """All of it, with CUDA's own."""
        return self.models + (self.activations or 0) + CUDA_BYTES


def device_memory(how: Settings, parts: Parts, data: FederatedDataModule, precision: str) -> DeviceMemory:
    """Return the memory of a rank; no number is computed for it."""
    beside = list(how.method.replicas.values()) if isinstance(how.method, HoldsModels) else []
    trained, frozen = 1 + beside.count("trained"), beside.count("frozen")
    model_bytes = 4 * sum(flat.flat.buffer.numel() for flat in parts.models.values())
    fixed_bytes = sum(flat.fixed_bytes for flat in parts.models.values())
    sizes = dict.fromkeys(parts.models, 0)
    for client in parts.federated.clients:
        settings, arch = settings_of(client, how.client, how.overrides), parts.archs[client.name]
        images = settings.micro_batch_of(client.num_images) or settings.batch_of(client.num_images)
        sizes[arch] = max(sizes[arch], images)
    pixels = data.augmentation.crop or data.size
    found = {a: kept_by(parts.models[a].network, (images, 3, *pixels)) for a, images in sizes.items() if images}
    known = {arch: size for arch, size in found.items() if size is not None}
    largest = max(known or found, key=lambda arch: known.get(arch, 0))
    half = 2 if precision == "bf16-mixed" else 1
    activations = known[largest] // half if known else None
    models = (4 * trained + frozen) * model_bytes + (trained + frozen) * fixed_bytes
    return DeviceMemory(models, trained, frozen, activations, sizes[largest])


def kept_by(network: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the bytes that a forward pass of images of this shape keeps for the backward pass, in float32.

    It runs without memory or numbers, on torch's device ``meta``. None: a layer cannot do that.

    >>> kept_by(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), (2, 3))  # 2 x 3 inputs, 2 x 8 results
    88
    """
    named = itertools.chain(network.named_parameters(), network.named_buffers())
    tensors = {n: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for n, t in named}
    own = {t.untyped_storage()._cdata for t in tensors.values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # alive: its address stays its own
        return tensor

    was = network.training
    network.train()
    for layer in network.modules():
        if isinstance(layer, KeyedDropout):  # its generator is not of that device
            layer.eval()
    try:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(network, tensors, (torch.empty(shape, device="meta"),))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # of a user's layer
        return None
    finally:
        network.train(was)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


def check_memory(trainer: Trainer, how: Settings, parts: Parts, data: FederatedDataModule) -> None:
    """Raise ConfigError if ranks that share a GPU need more memory than it has."""
    strategy = strategy_of(trainer)
    ranks, device = strategy.ranks_per_device, strategy.root_device
    if ranks == 1 or device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    if "MIG" in found.name:  # each rank has a slice, with memory of its own
        return
    memory = device_memory(how, parts, data, str(trainer.precision))
    need, there = ranks * memory.total / 2**30, found.total_memory / 2**30
    if need > there:
        raise ConfigError(
            f"{FIELD}: {ranks} ranks need about {need:.1f} GiB on {device}, which has {there:.1f} GiB; set it to "
            f"{max(int(ranks * there / need), 1)}, or model.client.micro_batch to a part of {memory.images} images"
        )
