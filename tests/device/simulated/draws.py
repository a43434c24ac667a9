"""The stream of random numbers that each GPU has beside the CPU's: that of torch's default generator on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_AT_START = 67280421310721
"""torch's seed of generators that nobody has seeded"""


class Draws:
    """The generators; their numbers are those of a CPU's generator with the same seed."""

    def __init__(self, num_gpus: int) -> None:
        self.generators = [torch._C.Generator(device="cpu").manual_seed(_AT_START + n) for n in range(num_gpus)]

    @contextmanager
    def by(self, func: Any, options: Mapping[str, Any], device: torch.device) -> Iterator[None]:
        """Let an operation on a GPU draw from its stream, unless it has a generator or draws nothing."""
        if not _draws(func) or options.get("generator") is not None:
            yield
            return
        own, default = self.generators[device.index or 0], torch.default_generator
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
