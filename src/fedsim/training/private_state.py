"""The tensors of a client between its sessions: private groups, its own head, and those that it keeps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedsim.core.seeding import torch_generator
from fedsim.core.store import STORABLE, ClientStore
from fedsim.training.flat_model import FlatModel, Head

_KEPT = "kept."
"""prefix of the names of kept tensors in the store"""


def kept_tensors(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that a method keeps by their names in a private state, where the model's is ``state``."""
    return {_KEPT + name: tensor for name, tensor in kept.items()}


class PrivateState:
    """The tensors of a client in a store, and those that it keeps while it trains; the client sets the attributes."""

    client_name: str
    num_classes: int
    model: FlatModel
    store: ClientStore
    seed: int
    kept: dict[str, Tensor]
    """during a session: tensors of the method that live between rounds, by name; see :meth:`keep`"""

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of ``tensor`` between rounds and in checkpoints.

        Raises:
            ValueError: if name or type of the tensor cannot be stored.
        """
        if "/" in name or tensor.dtype not in STORABLE:
            raise ValueError(
                f"{name}, {tensor.dtype}: give a name without a slash, and one of the types {list(STORABLE)}"
            )
        self.kept[name] = tensor.detach().clone()

    def load(self) -> None:
        """Copy the private groups and the own head into the rank's model, and fetch the kept tensors."""
        stored = self.private_state()
        self.model.set_num_classes(self.num_classes)
        self.model.private.copy_(stored.pop("state"), non_blocking=True)
        # copies: methods may change them in place, and the session may be discarded
        self.kept = {
            n.removeprefix(_KEPT): t.to(self.model.device, non_blocking=True, copy=True) for n, t in stored.items()
        }

    def unload(self) -> None:
        """Drop the kept tensors and the server's message."""
        self.kept = {}
        self.__dict__.pop("received", None)

    def remembered(self, name: str) -> Tensor:
        """Return a kept tensor as it was before the session."""
        return self.private_state()[_KEPT + name]

    def store_private(self, state: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Store private groups with the own head [num_private + own head], and kept tensors, in place of older ones."""
        self.store.write(self.client_name, {"state": state, **kept_tensors(kept)})

    def private_state(self) -> dict[str, Tensor]:
        """Return the stored tensors, read-only: ``state`` [num_private + own head], and ``kept.NAME``.

        They are the initial ones until the first session: a function of the seed and the name, which needs no store.
        """
        return self.store.read(self.client_name) or self._initial_state()

    def _initial_state(self) -> dict[str, Tensor]:
        """Return :meth:`private_state` before the first session, on the CPU."""
        generator = torch_generator(self.seed, self.client_name, "head")
        state = self.model.initial_state(self.num_classes, generator)
        return {"state": state, **kept_tensors(self.model.initial_kept)}

    def load_private_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`private_state`."""
        self.store.write(self.client_name, state)

    @property
    def private(self) -> Tensor:
        """The stored private groups of the model [num_private], without the own head."""
        return self.private_state()["state"][: self.model.initial_private.numel()]

    @property
    def head(self) -> Head | None:
        """The stored own head; None where heads are shared."""
        if not self.model.has_own_heads:
            return None
        return self.model.head_of(self.private_state()["state"], self.num_classes)
