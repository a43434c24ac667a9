"""A model's parameters and float buffers as views of one contiguous buffer.

Loading the global model is then one ``copy_``, an upload is one slice, and aggregation is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Entries start at multiples of this many elements, so that vectorised kernels see aligned memory as usual."""


def aligned(numel: int) -> int:
    """Return the elements that a tensor of ``numel`` elements takes in a flat buffer, with padding.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """One tensor of the model and its place in the flat buffer."""

    name: str
    kind: str
    """``parameter`` or ``buffer``"""
    shared: bool
    shape: torch.Size
    offset: int
    """in elements"""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def span(self) -> slice:
        """The slice of the buffer with its elements."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def end(self) -> int:
        """Offset of the next entry."""
        return self.offset + aligned(self.numel)


class FlatParameters:
    """Parameters and float buffers of ``module`` as views of one float32 buffer.

    The buffer is sorted [shared parameters | shared buffers | private parameters | private buffers]. Integer buffers
    (``num_batches_tracked``) stay where they are, and so do tensors that are left out by name.

    Trap: ``module.to(device)`` replaces the tensors by new ones, which are not views of the buffer. Move the module
    first, and call :meth:`check` in each round.

    ``is_shared`` returns, for a name, whether the tensor is exchanged with the server. ``left_out`` returns whether the
    tensor is outside the buffer: it never changes, and is neither shared nor private. At the end of the buffer,
    ``reserve`` elements are free for tensors of single clients.

    Raises:
        TypeError: if a parameter or floating buffer is not float32.
    """

    def __init__(
        self,
        module: nn.Module,
        is_shared: Callable[[str], bool],
        reserve: int = 0,
        left_out: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.module = module
        tensors: dict[str, tuple[str, Tensor]] = {n: ("parameter", t) for n, t in module.named_parameters()}
        tensors |= {n: ("buffer", t) for n, t in module.named_buffers() if t.is_floating_point()}
        tensors = {name: (tensor_kind, tensor) for name, (tensor_kind, tensor) in tensors.items() if not left_out(name)}
        for name, (_, tensor) in tensors.items():
            if tensor.dtype is not torch.float32:
                raise TypeError(f"{name} is {tensor.dtype}: models keep float32 weights (use bf16-mixed for speed)")
        entries: list[Entry] = []
        for name in sorted(tensors, key=lambda name: (not is_shared(name), tensors[name][0] == "buffer")):
            tensor_kind, tensor = tensors[name]
            entries.append(Entry(name, tensor_kind, is_shared(name), tensor.shape, entries[-1].end if entries else 0))
        self.entries = tuple(entries)
        self.num_model = max((entry.end for entry in entries), default=0)
        self.num_shared = max((entry.end for entry in self.shared_entries), default=0)
        self.num_shared_parameters = max((entry.end for entry in self.shared_parameters), default=0)
        device = next(iter(tensors.values()))[1].device if tensors else torch.device("cpu")
        self.buffer = torch.zeros(self.num_model + reserve, dtype=torch.float32, device=device)
        """The whole model and the reserve, shape [num_model + reserve]."""
        for entry in self.entries:
            self.buffer[entry.span] = tensors[entry.name][1].detach().flatten()
        self.bind()

    @property
    def shared(self) -> Tensor:
        """The part that is exchanged with the server: a view of shape [num_shared]."""
        return self.buffer[: self.num_shared]

    @property
    def private(self) -> Tensor:
        """The part that stays with the client: a view of shape [num_model - num_shared]."""
        return self.buffer[self.num_shared : self.num_model]

    @property
    def running(self) -> list[Tensor]:
        """The float buffers, such as running statistics: views of the shared and of the private ones, if any."""
        private = [entry.end for entry in self.entries if not entry.shared and entry.kind == "parameter"]
        spans = ((self.num_shared_parameters, self.num_shared), (max([self.num_shared, *private]), self.num_model))
        return [self.buffer[begin:end] for begin, end in spans if end > begin]

    @property
    def shared_entries(self) -> list[Entry]:
        """The entries of :attr:`shared`, in order."""
        return [entry for entry in self.entries if entry.shared]

    @property
    def shared_parameters(self) -> list[Entry]:
        """The parameters among :attr:`shared_entries`, in order; they end at ``num_shared_parameters``."""
        return [entry for entry in self.shared_entries if entry.kind == "parameter"]

    @property
    def num_shared_elements(self) -> int:
        """Elements of :attr:`shared_parameters`, without the padding between them."""
        return sum(entry.numel for entry in self.shared_parameters)

    def clear_gaps(self, vector: Tensor) -> Tensor:
        """Set the padding between tensors to 0 in ``vector``, the beginning of a shared vector, and return it."""
        for entry in self.shared_entries:
            vector[entry.offset + entry.numel : entry.end] = 0
        return vector

    def place_of(self, tensor: Tensor) -> int:
        """Return where a view of :attr:`buffer` starts, in elements."""
        return (tensor.data_ptr() - self.buffer.data_ptr()) // self.buffer.element_size()

    def bind(self) -> None:
        """Make the module's tensors views of the buffer."""
        start, size = self.buffer.data_ptr(), self.buffer.element_size()
        self._addresses: list[tuple[str, nn.Module, str, int]] = []  # name, owner, attribute, address
        for entry in self.entries:
            path, _, leaf = entry.name.rpartition(".")
            owner = self.module.get_submodule(path)
            view = self.buffer[entry.span].view(entry.shape)
            if entry.kind == "parameter":
                owner.get_parameter(leaf).data = view
            else:
                view = view.data  # as autograd sees it: another buffer that changes leaves its version as it is
                owner.register_buffer(leaf, view, persistent=leaf not in owner._non_persistent_buffers_set)
            if entry.numel:  # an empty tensor has no address
                self._addresses.append((entry.name, owner, leaf, start + entry.offset * size))

    def check(self) -> None:
        """Assert that the module's tensors are still views of the buffer."""
        for name, owner, leaf, address in self._addresses:
            tensor: Tensor = getattr(owner, leaf)
            assert tensor.data_ptr() == address, f"{name} left the flat buffer (was the module moved?)"
