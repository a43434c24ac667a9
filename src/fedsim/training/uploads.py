"""The single uploads of a round, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 2**24
"""Numbers of all clients together in one chunk: 64 MiB of float32."""


class Uploads:
    """The vectors of a given length that the clients of one architecture have sent, one row for each client.

    A rank holds those of its own clients, and one chunk of all: ``chunk`` is span -> [K, span] float32 on the CPU,
    equal on every rank. It is a collective: all ranks must go through the same chunks.
    """

    def __init__(self, clients: Sequence[str], length: int, chunk: Callable[[slice], Tensor]) -> None:
        self.clients = tuple(clients)
        self.length = length
        self._chunk = chunk

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (span, [K, span] float32) from the front of the vectors to their end."""
        size = max(_CHUNK // max(len(self.clients), 1), 1)
        for start in range(0, self.length, size):
            span = slice(start, min(start + size, self.length))
            yield span, self._chunk(span)

    def combine(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the vector [length] float32 that ``rule`` makes of the chunks: [K, c] -> [c].

        >>> vectors = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
        >>> Uploads(["a", "b"], 2, lambda span: vectors[:, span]).combine(lambda x: x.mean(0))
        tensor([2., 3.])
        """
        result = torch.empty(self.length)
        for span, chunk in self.chunks():
            result[span] = rule(chunk)
        return result
