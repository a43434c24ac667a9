"""Ranks that share a GPU: the GPUs to request from Lightning, the GPU of each rank, and the ranks of each GPU.

A batch of 32 images does not fill a large GPU, so two or more ranks may work on one. For users, see docs/gpus.md.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.nvidia import failure_in
from fedsim.strategy.compute_mode import (
    exclusive_gpus,
    has_mps,
    is_refused_by_mode,
    read_listing,
    why_busy,
    why_not_shared,
)
from fedsim.strategy.launch import Devices, Environment, check_place, find_launch, follow_launcher, leave_launcher

FIELD = "trainer.strategy.ranks_per_device"
_MOST_HERE, _MOST_ELSEWHERE = 64, 1024
"""largest plausible number of ranks of a machine, for this machine if it has no more cores; a larger one is a mistake.
Each rank is a process with a PyTorch of its own. More ranks than cores gain nothing, but help to try a large federation
on a small machine"""


def gpus_for(devices: Devices, ranks_per_device: int, environ: Environment = os.environ) -> Devices:
    """Return the devices to request from Lightning, where ``trainer.devices`` counts ranks.

    A list names GPUs, and each of them gets ``ranks_per_device`` ranks; so do all GPUs of ``auto``. If a launcher has
    bound its task to a single GPU, the result is that one.

    >>> gpus_for(4, 2, {}), gpus_for([0, 3], 2, {}), gpus_for("auto", 2, {}), gpus_for(4, 1, {})
    (2, [0, 3], 'auto', 4)

    Raises:
        ConfigError: if the ranks cannot be spread evenly.
    """
    check_number(ranks_per_device)
    if not str(devices).strip().isdigit():
        return devices
    ranks = int(str(devices))
    if ranks % ranks_per_device:
        raise ConfigError(
            f"{FIELD}: {ranks_per_device} does not divide the {ranks} rank{'s' * (ranks > 1)} of trainer.devices; "
            f"set devices to {ranks + -ranks % ranks_per_device}, or leave ranks_per_device out"
        )
    gpus = ranks // ranks_per_device
    is_bound = gpus > 1 and find_launch(environ) is not None and torch.cuda.device_count() == 1
    return 1 if is_bound else gpus if ranks_per_device > 1 else devices


def devices_of_run(devices: Devices, num_nodes: int, ranks_per_device: int, elsewhere: bool) -> tuple[Devices, int]:
    """Return the devices and machines to request from Lightning: :func:`follow_launcher`, then :func:`gpus_for`.

    ``elsewhere``: the run is only described here, so the launcher of this process does not count.

    Raises:
        ConfigError: if no machine takes that many ranks, or they cannot be spread evenly.
    """
    _check_ranks(devices, _MOST_ELSEWHERE if elsewhere else max(_MOST_HERE, os.cpu_count() or 1))
    if elsewhere:
        leave_launcher()
    else:
        devices, num_nodes = follow_launcher(devices, num_nodes, ranks_per_device=ranks_per_device)
        check_place()
    return gpus_for(devices, ranks_per_device), num_nodes


def _check_ranks(devices: Devices, most: int) -> None:
    """Refuse a number of ranks that would overload the machine: each of them is a process."""
    number = str(devices).strip()
    if number.isdigit() and int(number) > most:
        raise ConfigError(f"trainer.devices: {number} ranks are too many for a machine; give at most {most}")


def check_number(ranks_per_device: int) -> None:
    """Raise ConfigError unless ``ranks_per_device`` is positive."""
    if ranks_per_device < 1:
        raise ConfigError(f"{FIELD}: {ranks_per_device} is not a number of ranks; set it to 1 or more")


def spread(
    devices: Sequence[torch.device], ranks_per_device: int, environ: Environment = os.environ
) -> list[torch.device]:
    """Return the device of each rank of a machine; neighbours have different devices, for rank groups.

    >>> gpus = [torch.device("cuda", index) for index in range(2)]
    >>> [device.index for device in spread(gpus, 2, {})]
    [0, 1, 0, 1]
    """
    if len(devices) == 1 and (launch := find_launch(environ)) is not None:
        # the single GPU of a task; tasks may share it
        return [*devices] * launch.per_node
    return [*devices] * max(ranks_per_device, 1)


def address_of(device: torch.device) -> int:
    """Return the place of a GPU in its machine, from 0: the same for all of its MIG slices, as in NCCL."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these fields
    return int((properties.pci_domain_id << 16) | (properties.pci_bus_id << 8) | properties.pci_device_id)


def neighbours_by(addresses: Sequence[float], per_machine: int, ranks_per_device: int) -> list[list[int]]:
    """Return the ranks of each GPU; ``addresses`` are those of the ranks, on machines of ``per_machine`` each.

    >>> neighbours_by([7, 9, 7, 9], 4, 2), neighbours_by([7, 7], 1, 2)
    ([[0, 2], [1, 3]], [[0], [1]])

    Raises:
        ConfigError: if a GPU has more than ``ranks_per_device``.
    """
    ranks_of: dict[tuple[int, float], list[int]] = {}
    for rank, address in enumerate(addresses):
        ranks_of.setdefault((rank // per_machine, address), []).append(rank)
    most = max(ranks_of.values(), key=len)
    if len(most) > ranks_per_device:
        raise ConfigError(
            f"{FIELD}: {ranks_per_device}, but ranks {', '.join(map(str, most))} have one GPU; "
            f"set it to {len(most)}, or bind fewer tasks to a GPU"
        )
    return list(ranks_of.values())


def check_shared_gpus(devices: Sequence[torch.device], ranks_per_device: int) -> None:
    """Raise ConfigError if one of the GPUs, of this machine's ranks, takes one process only."""
    listing, with_mps = read_listing(), has_mps()
    for device in dict.fromkeys(devices) if exclusive_gpus(listing) else ():
        if (why := why_not_shared(address_of(device), listing, with_mps)) is not None:
            raise ConfigError(f"{FIELD}: {ranks_per_device}, but ranks cannot share {device}: {why}")


@contextmanager
def naming_the_mode(device: torch.device, ranks_per_device: int) -> Iterator[None]:
    """Run the block in which this rank takes its GPU; where nvidia-smi is missing, CUDA is the first to refuse it.

    Raises:
        ConfigError: if the GPU takes one process only, and has it, or if CUDA does not start.
    """
    try:
        yield
    except RuntimeError as error:
        if (failure := failure_in(str(error))) is not None:
            raise ConfigError(f"trainer.devices: {device} cannot be used: {failure.cause}; {failure.remedy}") from error
        if not is_refused_by_mode(str(error)):
            raise
        raise ConfigError(f"{FIELD}: {ranks_per_device}, but {device} {why_busy(ranks_per_device)}") from error


def unbind_group_of_all() -> None:
    """Let smaller groups not inherit the GPU to which the group of all ranks is bound.

    By that GPU, NCCL has connected at once, so that its errors come early. But torch would split a smaller group from
    the group of all ranks. gloo cannot do so. Up to torch 2.14 the ranks outside a group of gloo's would split NCCL's,
    and those inside would not.
    """
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = None


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks that have found each other."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_refused_by_nccl(error: str) -> bool:
    """Whether NCCL refuses several ranks on one GPU; the text changed with NCCL 2.30.

    >>> is_refused_by_nccl("Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000")
    True
    """
    return any(phrase in error for phrase in ("Duplicate GPU", "Multiple Ranks are using the same GPU/Partition"))


class SharedGpus:
    """Sums of ranks that share GPUs: within a GPU in the host's memory, among GPUs by one rank of each.

    NCCL accepts only one rank per GPU. All ranks of the run create this together.

    Args:
        gpus: the ranks of each GPU.
        rank: of this process.
        backend: of the sums among GPUs.
        timeout: of a sum.
        wait: waits for a collective.
    """

    def __init__(
        self, gpus: Sequence[list[int]], rank: int, backend: str, timeout: timedelta, wait: Callable[[Any], None]
    ) -> None:
        self._wait = wait
        self._within: Any
        for ranks in gpus:
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            if rank in ranks:
                self._within, self._first, self._is_first = group, ranks[0], rank == ranks[0]
        self.among: Any = None
        """the group of ranks that sum among GPUs"""
        if len(gpus) > 1:
            self.among = dist.new_group([ranks[0] for ranks in gpus], timeout=timeout, backend=backend)
            atexit.register(_destroy_dist_connection)  # as Lightning does for NCCL

    def sum_(self, tensor: Tensor) -> None:
        """Sum a GPU's tensor over all ranks in place."""
        self.through_host(tensor, lambda host: self._sum(host, tensor))

    def through_host(self, tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
        """Let a collective change a GPU's tensor by way of page-locked memory of the host."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        collective(host)
        tensor.copy_(host)

    def _sum(self, host: Tensor, tensor: Tensor) -> None:
        """Sum ``host`` within each GPU, then among GPUs; the second sum overwrites ``tensor``."""
        self._wait(dist.all_reduce(host, group=self._within, async_op=True))
        if self.among is None:
            return
        if self._is_first:
            tensor.copy_(host)
            self._wait(dist.all_reduce(tensor, group=self.among, async_op=True))
            host.copy_(tensor)
        self._wait(dist.broadcast(host, src=self._first, group=self._within, async_op=True))
