"""The single uploads of a round, in chunks that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from fedsim.core.transfer import send

CHUNK = 2**24
"""Numbers of all clients together in one chunk: 64 MiB of float32."""
_LANES = 16
"""Partial sums over chunks, each of which one rank has: so the order of a sum does not depend on their number."""


class Uploads:
    """The vectors of a given length that the clients of one architecture have sent, one row for each client.

    A rank holds those of its own clients, and one chunk of all: ``chunk`` is span -> [K, span] float32 on
    ``device``, equal on every rank. It is a collective: all ranks must go through the same chunks.

    ``sum_`` sums a tensor over the ``num_ranks`` ranks in place, of which this is number ``rank``. Work on chunks is
    shared among them; the results have the same bits on any number of ranks.
    """

    def __init__(
        self, clients: Sequence[str], length: int, chunk: Callable[[slice], Tensor], *, rank: int = 0,
        num_ranks: int = 1, sum_: Callable[[Tensor], Tensor] = lambda x: x, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        self.clients = tuple(clients)
        self.length = length
        self._size = max(CHUNK // max(len(self.clients), 1), 1)
        self._chunk, self._sum, self._rank, self._num_ranks, self._device = chunk, sum_, rank, num_ranks, device

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (span, [K, span] float32) from the front of the vectors to their end."""
        for start in range(0, self.length, self._size):
            span = slice(start, min(start + self._size, self.length))
            yield span, self._chunk(span)

    def averaged(self, groups: Sequence[Sequence[int]]) -> Uploads:
        """Return vectors of which each is the mean of some of these; ``groups`` has their row numbers, one or more.

        >>> vectors = torch.tensor([[1.0, 5.0], [3.0, 1.0], [0.0, 0.0]])
        >>> mixed = Uploads(["a", "b", "c"], 2, lambda span: vectors[:, span]).averaged([[0, 1], [2]])
        >>> mixed.clients, mixed.combine(lambda x: x.amax(0))
        (('a+b', 'c'), tensor([2., 3.]))
        """
        rows = [torch.tensor(group) for group in groups]

        def chunk(span: slice) -> Tensor:
            """Return the means of the rows of a chunk."""
            whole = self._chunk(span)
            means = [whole.index_select(0, send(group, whole.device)).double().mean(0).float() for group in rows]
            return torch.stack(means)

        mixed = copy(self)
        mixed.clients, mixed._chunk = tuple("+".join(self.clients[i] for i in group) for group in groups), chunk
        return mixed  # with chunks as short as before: all rows are exchanged

    def combine(self, rule: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """Return the vector [length] float32 that ``rule`` makes of the chunks: [K, c] -> [c].

        ``rule`` also gets the same part [c] of each of the further ``vectors`` [length].

        >>> vectors = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
        >>> Uploads(["a", "b"], 2, lambda span: vectors[:, span]).combine(lambda x: x.mean(0))
        tensor([2., 3.])
        """
        result = torch.zeros(self.length, device=self._device)
        for _, span, chunk in self._own_chunks():
            result[span] = rule(chunk, *(vector[span] for vector in vectors))
        return self._sum(result).add_(0.0)  # -0 becomes 0 also on a single rank

    def total(self, term: Callable[..., Tensor], shape: Sequence[int], *vectors: Tensor) -> Tensor:
        """Return the sum of a ``term`` over all chunks, float64 of the given ``shape``; see :meth:`combine`.

        >>> vectors = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
        >>> Uploads(["a", "b"], 2, lambda span: vectors[:, span]).total(lambda x: x.sum(1), [2])
        tensor([6., 4.], dtype=torch.float64)
        """
        lanes = torch.zeros(_LANES, *shape, dtype=torch.float64, device=self._device)
        for lane, span, chunk in self._own_chunks():
            lanes[lane] += term(chunk, *(vector[span] for vector in vectors))
        self._sum(lanes)
        result = lanes[0]
        for lane in range(1, _LANES):
            result = result + lanes[lane]
        return result

    def _own_chunks(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield lane, span and chunk of those on which this rank computes."""
        for number, (span, chunk) in enumerate(self.chunks()):
            if number % _LANES % self._num_ranks == self._rank:
                yield number % _LANES, span, chunk
