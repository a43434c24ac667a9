"""Simulated GPUs: real numbers on the CPU, but tensors "are on cuda", and misuse is an error.

``with simulated.cuda() as gpu:`` installs them. Every storage has a place; a mode sees all operations, autograd's too.
It refuses what CUDA, NCCL and torch's deterministic mode refuse, and races of asynchronous copies, and counts kernels,
copies and waits of the host. docs/gpus.md says what this proves, and what it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from simulated.collectives import Collectives
from simulated.kernels import Called, Kernels, SimulatedGPUError
from simulated.places import Places
from simulated.record import Reading, Record
from simulated.surface import shown

__all__ = ["Reading", "Record", "SimulatedGPUError", "cuda", "locked_bytes"]

_PLACES = Places()
"""Of the process: a program may keep tensors from one block to the next, such as constants by device."""


def locked_bytes() -> int:
    """Return the bytes of page-locked memory that is not torch's."""
    return sum(_PLACES.locked.values())


@contextmanager
def cuda(
    gpus: int = 2, board: Path | None = None, with_sites: bool = False, *, buses: Sequence[int] = (), memory: int = 80
) -> Iterator[Record]:
    """Let this machine have so many GPUs, until the end of the block; yield what is counted.

    Args:
        gpus: their number.
        board: a folder that all ranks of a run see; their collectives are compared there.
        with_sites: count kernels by the line of fedsim that launched them, which is slow.
        buses: the place of each GPU in the machine, by which those of several ranks are told apart; their numbers, if
            left out.
        memory: of each, GiB.
    """
    record = Record(with_sites=with_sites)
    _PLACES.num_gpus, _PLACES.current, _PLACES.memory = gpus, 0, memory * 2**30
    _PLACES.buses = tuple(buses) or tuple(range(gpus))
    _PLACES.end_copies()
    kernels = Kernels(_PLACES, record, Collectives(_PLACES, record, board))
    with shown(kernels), Called(_PLACES), kernels:
        yield record
