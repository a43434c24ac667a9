"""The single uploads of a round, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_PIECE = 2**24
"""Numbers of all clients together in one piece: 64 MiB of float32."""


class Uploads:
    """The vectors of a given length that the clients of one architecture have sent, one row for each client.

    A rank holds those of its own clients, and one piece of all: ``piece`` is span -> [K, span] float32 on the CPU,
    equal on every rank. It is a collective: all ranks must go through the same pieces.
    """

    def __init__(self, clients: Sequence[str], length: int, piece: Callable[[slice], Tensor]) -> None:
        self.clients = tuple(clients)
        self.length = length
        self._piece = piece

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (span, [K, span] float32) from the front of the vectors to their end."""
        size = max(_PIECE // max(len(self.clients), 1), 1)
        for start in range(0, self.length, size):
            span = slice(start, min(start + size, self.length))
            yield span, self._piece(span)

    def combine(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the vector [length] float32 that ``rule`` makes of the pieces: [K, c] -> [c].

        >>> vectors = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
        >>> Uploads(["a", "b"], 2, lambda span: vectors[:, span]).combine(lambda x: x.mean(0))
        tensor([2., 3.])
        """
        result = torch.empty(self.length)
        for span, piece in self.pieces():
            result[span] = rule(piece)
        return result
