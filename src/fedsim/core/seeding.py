"""Stateless seeding: every random choice is a function of (seed, round, client, purpose), not of earlier choices.

So a run does not depend on the number of ranks, and resumes without a saved generator state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # planning a sweep needs no torch, whose import takes seconds
    import torch


def derive_seed(*parts: int | str) -> int:
    """Hash ``parts`` to a seed in [0, 2**63).

    ``("a", "bc")`` and ``("ab", "c")``, or ``1`` and ``"1"``, give different seeds.

    >>> derive_seed(0, 3, "client-a", "batches") == derive_seed(0, 3, "client-a", "batches")
    True
    >>> derive_seed(0, "ab", "c") != derive_seed(0, "a", "bc")
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on ``device``, seeded by :func:`derive_seed`.

    torch's CPU generator uses the low 32 bits of a seed: two streams coincide with probability 2**-32.
    """
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """Return a NumPy generator (Philox), seeded by :func:`derive_seed`."""
    return np.random.Generator(np.random.Philox(derive_seed(*parts)))


def seed_of_process() -> int | None:
    """Return the seed of :func:`lightning.seed_everything`, by which networks are drawn; None if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return int(seed) if seed.isdigit() else None


def seed_global_stream(seed: int) -> None:
    """Seed torch's global generators of the CPU and, where one is in use, of the GPUs.

    ``torch.manual_seed`` does the same for all kinds of accelerators, and takes ten times as long.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded_host(seed: int) -> Iterator[None]:
    """Let a block draw from torch's global stream of the CPU, seeded; afterwards that stream is as it was before.

    ``torch.manual_seed`` in ``fork_rng(devices=[])`` would also reset the streams of GPUs, which clients draw from.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
