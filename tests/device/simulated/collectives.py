"""What NCCL refuses, and the order of collectives on all ranks.

A simulated NCCL group is a gloo group whose tensors must be on this rank's GPU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from simulated import rules
from simulated.places import Places
from simulated.record import Record

DUPLICATE = (
    "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration."
)
"""what NCCL 2.30 says; earlier versions say "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"."""
_WORLD = "the default group"


class Collectives:
    """The process groups of this rank, and what it has asked of the other ranks.

    ``board`` is a folder that all ranks see: each writes its collectives there, and compares. None: alone.
    """

    def __init__(self, places: Places, record: Record, board: Path | None) -> None:
        self._places, self._record, self._board = places, record, board
        self._names: dict[str, str] = {}  # group name -> its name in messages
        self._nccl: set[str] = set()
        self._counts: Counter[str] = Counter()  # of the collectives of all ranks, and of those of each smaller group
        self._unconnected: set[str] = set()  # those of NCCL that have done nothing yet
        if board is not None:
            board.mkdir(parents=True, exist_ok=True)

    def opened(self, group: Any, backend: str) -> None:
        """Remember a process group, and the backend that was asked for."""
        if group is None or not isinstance(group, dist.ProcessGroup):  # this rank is not in it
            return
        self._names[group.group_name] = f"group {group.group_name}" if self._names else _WORLD
        if "nccl" in backend:
            self._nccl.add(group.group_name)
            self._unconnected.add(group.group_name)

    def is_nccl(self, group: Any) -> bool:
        """Whether a group, None for the default one, is said to be NCCL's."""
        group = dist.group.WORLD if group is None else group
        return group is not None and group.group_name in self._nccl

    def problems(self, name: str, args: Any, tensors: list[Tensor]) -> Iterator[str]:
        """Yield why this collective cannot work; it is entered in the list of this rank's."""
        group = next((found for found in map(_group, args) if found is not None), None)
        name = name.removeprefix("c10d::").strip("_")
        shapes = " ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        of_group = self._names.get(group.group_name, "?") if group is not None else _WORLD
        all_of_them = group is None or group.size() == dist.get_world_size()
        yield from self._out_of_order(f"{name} of {shapes} in {of_group}", "all" if all_of_them else group.group_name)
        if self.is_nccl(group):
            yield from self.duplicates(dist.group.WORLD if group is None else group, self._places.current)
        if self.is_nccl(group) and name != "barrier":
            for tensor in tensors:
                yield from self._refusals(name, tensor)
            reduction = next((found for found in map(_reduction, args) if found is not None), "SUM")
            if reduction not in rules.NCCL_REDUCTIONS:
                yield f"NCCL cannot reduce by {reduction}"

    def duplicates(self, group: Any, gpu: int) -> Iterator[str]:
        """Yield an error if ranks of NCCL's have the same GPU, ``gpu`` on this one; asked once, when they connect."""
        if group.group_name not in self._unconnected:
            return
        self._unconnected.discard(group.group_name)
        with _disable_current_modes():
            mine = torch.tensor([self._places.buses[gpu]])
            found = [torch.empty_like(mine) for _ in range(group.size())]
            group.allgather([found], [mine]).wait()
            buses = [int(bus) for bus in torch.cat(found).numpy()]
        if len(set(buses)) < len(buses):
            yield DUPLICATE

    def _refusals(self, name: str, tensor: Tensor) -> Iterator[str]:
        device = self._places.of(tensor)
        if device.type != "cuda":
            yield f"No backend type associated with device type cpu: NCCL's {name} of {list(tensor.shape)}"
        elif device.index != self._places.current:
            yield f"NCCL's {name} of a tensor on {device}, but the current device is {self._places.current}"
        if tensor.dtype not in rules.NCCL_TYPES:
            yield f"Input tensor data type is not supported for NCCL process group: {tensor.dtype} in {name}"
        if not tensor.is_contiguous():
            yield f"Tensors must be contiguous: NCCL's {name} of {list(tensor.shape)}"

    def _out_of_order(self, text: str, ranks: str) -> Iterator[str]:
        """Compare a collective of certain ranks with what the others of them call at the same place."""
        number = self._counts[ranks]
        self._counts[ranks] += 1
        self._record.collectives.append(text)
        if self._board is None:
            return
        partial = self._board / f".{os.getpid()}"
        partial.write_text(text)
        partial.replace(self._board / f"{ranks}-{number}-{dist.get_rank()}")
        for path in self._board.glob(f"{ranks}-{number}-*"):  # of two ranks that differ, the later one sees both
            if (other := path.read_text()) != text:
                yield f"collective {number}: rank {path.name.rpartition('-')[2]} calls {other}, this rank {text}"


def _group(value: object) -> Any:
    """Return the process group in an operation's argument, or None."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except RuntimeError:
            return None
    return None


def _reduction(value: object) -> str | None:
    """Return the name of the reduction in an operation's argument, or None."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return str(dist.ReduceOp.unbox(value).op).rpartition(".")[2]  # type: ignore[attr-defined] # torch's stubs lack it
    except (RuntimeError, TypeError, AttributeError):
        return None
