"""What a federated method is: a handful of hooks in the order of the round.

The defaults are the plain FedAvg round, so a method's file holds only what its paper changes, in this order. Methods do
not inherit from one another, and hold settings only: what lives between rounds belongs to the client (its private
state) or to the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim.functional.weighting import size_weights
from fedsim.models.groups import Group

if TYPE_CHECKING:
    from fedsim.client import Batch, Client
    from fedsim.server import Server

__all__ = ["Method", "Report", "Upload"]


@dataclass(frozen=True)
class Upload:
    """What a client sends to the server."""

    vector: Tensor
    """[num_shared] float32 on the device: the shared part of its model, as a rule a view of the resident's buffer"""


@dataclass(frozen=True)
class Report:
    """What the server knows about a client that returned an update."""

    num_images: int
    """n_k"""
    signals: Mapping[str, float]
    """what :meth:`Method.signals` measured"""


class Method(ABC):
    """One round, hook by hook.

    Every hook of the client's side gets the live :class:`~fedsim.client.Client` and :class:`~fedsim.server.Server`;
    ``server.model(arch)`` is the global model as it was at the start of the round. What a client must remember between
    rounds (an expert, a control variate, its previous model) goes in by ``client.keep(name, tensor)``; it is saved.
    """

    # not a ClassVar: with one, jsonargparse stops checking the types of the subclasses' fields
    signal_names: tuple[str, ...] = ()
    """names of the numbers that :meth:`signals` returns; the same on every rank"""

    @property
    @abstractmethod
    def shared_groups(self) -> frozenset[Group]:
        """The parameter groups that clients send and receive. ``bn_stats`` may keep statistics private all the same."""

    @property
    def shares_head(self) -> bool:
        """Whether the identity head is shared; it then has the size of the largest label space."""
        return Group.HEAD in self.shared_groups

    # -- on the client -------------------------------------------------------------------------------------------------

    def download(self, client: Client, server: Server) -> None:
        """Load the global model: every shared entry. The private groups have been loaded already."""
        client.resident.flat.shared.copy_(server.model(client.resident.arch))

    def train(self, client: Client, server: Server) -> None:
        """Local training: E epochs of mini-batches."""
        for epoch in range(client.training_settings.local_epochs):
            self.before_epoch(client, server, epoch)
            for batch in client.batches(epoch):
                if client.step(self.loss(client, server, batch)):
                    self.after_step(client, server)

    def before_epoch(self, client: Client, server: Server, epoch: int) -> None:  # noqa: B027 - optional
        """Prepare a local epoch, for example new pseudo-labels."""

    def loss(self, client: Client, server: Server, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar with gradient."""
        return client.training_step(batch)

    def after_step(self, client: Client, server: Server) -> None:  # noqa: B027 - optional
        """Act after each optimizer step, for example re-apply a mask."""

    def signals(self, client: Client, server: Server) -> dict[str, float]:
        """Measure what the server's weights depend on; keys are :attr:`signal_names`."""
        return {}

    def upload(self, client: Client, server: Server) -> Upload:
        """Return what leaves the client."""
        return Upload(client.resident.flat.shared)

    # -- on the server -------------------------------------------------------------------------------------------------

    def weights(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """Return aggregation weights that sum to 1 over the clients of one architecture: by default n_k / n."""
        return size_weights({client: report.num_images for client, report in reports.items()})

    def server_step(self, server: Server) -> None:  # noqa: B027 - optional
        """Change the new global model, for example distil on public data.

        Runs on rank 0; the others receive the result. ``server.residents`` are models to load vectors into.
        """

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def personalise(self, client: Client, server: Server) -> None:
        """Load the model that the client would use: by default the new global model.

        The private groups and what the method keeps have been loaded already.
        """
        self.download(client, server)
