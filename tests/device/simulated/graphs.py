"""CUDA graphs: operations are recorded while a step runs, whose effects are then undone; a replay runs them again.

While a real GPU records, it computes nothing. So memory from before goes back to its old values, and tensors that were
made meanwhile hold nonsense until the first replay, which computes into the same tensors. A replay refuses to read
memory that the program has given back. Whatever depends on the host is refused while it is recorded.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from simulated import rules
from simulated.draws import Draws

_NONSENSE = 0xC7
"""a byte; four of them are a large negative float"""


class _Operation(NamedTuple):
    func: Any
    args: Any
    options: dict[str, Any]
    device: torch.device
    results: list[tuple[int, Tensor]]
    """new tensors, by their places among all results"""


class Recording:
    """The operations of one graph.

    ``generators`` are those that the program registered, ``stream`` is the number of the stream that it records on, and
    torch registers the default generators of ``draws`` itself.
    """

    def __init__(self, generators: list[torch.Generator], stream: int, draws: Draws) -> None:
        self.stream, self._draws = stream, draws
        self.has_failed = False
        """whether the host did something meanwhile that cannot be recorded: no graph comes of it any more"""
        self.generators = {generator._cdata for generator in generators}  # type: ignore[attr-defined] # not in the stubs
        self._states = [(generator, generator.get_state()) for generator in (*generators, *draws.generators)]
        self._operations: list[_Operation] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory from before: a tensor in it, its content
        self._made: dict[int, Tensor] = {}  # memory from meanwhile, of the host, too
        self._held: Counter[int] = Counter()  # tensors of ours in each

    def run(self, func: Any, args: Any, options: dict[str, Any], device: torch.device) -> Any:
        """Run an operation on the GPU's tensors, and remember it."""
        given = {tensor.untyped_storage()._cdata: tensor for tensor in rules.tensors_in(args, options)}
        with _plainly():
            for address, tensor in given.items():
                if address not in self._made and address not in self._before:
                    self._before[address] = (self._alias(tensor), _bytes(tensor).clone())
            mine = self._aliases(args), self._aliases(options)
        with self._draws.by(func, options, device):
            result = func(*args, **options)
        new = []
        with _plainly():
            for place, tensor in enumerate(rules.tensors_in(result)):
                if tensor.untyped_storage()._cdata not in given:
                    self.remember(tensor)
                    new.append((place, self._alias(tensor)))
        self._operations.append(_Operation(func, *mine, device, new))
        return result

    def remember(self, tensor: Tensor) -> None:
        """Note that a tensor's memory was made while this was recorded."""
        self._made.setdefault(tensor.untyped_storage()._cdata, tensor)

    def is_from_before(self, tensor: Tensor) -> bool:
        """Whether the program had this memory before."""
        return tensor.untyped_storage()._cdata not in self._made

    def end(self) -> None:
        """Undo the effects: nothing was computed."""
        with _plainly():
            for tensor, content in self._before.values():
                _bytes(tensor).copy_(content)
            for operation in self._operations:
                for _, tensor in operation.results:
                    _bytes(tensor).fill_(_NONSENSE)
        for generator, state in self._states:
            generator.set_state(state)
        self._made.clear()

    def replay(self) -> None:
        """Run the operations again."""
        with _plainly():
            for func, args, options, device, results in self._operations:
                if not results and not func._schema.is_mutable and "batch_norm" not in func._schema.name:
                    continue  # a view
                with self._draws.by(func, options, device):
                    found = rules.tensors_in(func(*args, **options))
                for place, tensor in results:
                    tensor.copy_(found[place])

    @property
    def memory(self) -> list[Tensor]:
        """A tensor in each piece of memory from before."""
        return [tensor for tensor, _ in self._before.values()]

    def given_back(self) -> list[Tensor]:
        """Memory from before that nobody else holds any more: the program may have put other things there."""
        return [
            tensor
            for address, (tensor, _) in self._before.items()
            if torch._C._storage_Use_Count(address) <= self._held[address] + 1  # one more is the storage's own object
        ]

    def _alias(self, tensor: Tensor) -> Tensor:
        alias = tensor.detach()
        self._held[alias.untyped_storage()._cdata] += 1
        return alias

    def _aliases(self, values: Any) -> Any:
        """Return nested lists and dictionaries with tensors of our own in the place of the program's."""
        if isinstance(values, Tensor):
            return self._alias(values)
        if isinstance(values, (list, tuple)):
            return type(values)(self._aliases(value) for value in values)
        if isinstance(values, dict):
            return {name: self._aliases(value) for name, value in values.items()}
        return values


class Pools:
    """Pools of memory: torch gives one up with its last graph, and then it cannot be used again."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._graphs: dict[int, weakref.WeakSet[Any]] = {}

    def join(self, graph: Any, pool: int | None) -> int:
        """Let a graph use a pool, or one of its own; return its number."""
        if pool is None:
            pool = len(self._graphs)
            self._graphs[pool] = weakref.WeakSet()
        elif not len(self._graphs[pool]):
            self._refuse("it->second->use_count > 0 INTERNAL ASSERT FAILED: the pool's last graph is gone")
        self._graphs[pool].add(graph)
        return pool


def _bytes(tensor: Tensor) -> Tensor:
    """Return all memory of a tensor's storage [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@contextmanager
def _plainly() -> Iterator[None]:
    """Nothing is simulated, and autograd does not look."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
