"""What a federated method is: a handful of hooks in the order of the round.

The defaults are the plain FedAvg round, so a method's file holds only what its paper changes, in this order. Methods do
not inherit from one another, and hold settings only: what lives between rounds belongs to the client (its private
state) or to the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fedsim.core.messages import Report, Upload
from fedsim.functional.weighting import size_weights, uniform_weights
from fedsim.models.groups import Group

if TYPE_CHECKING:
    from fedsim.training.client import Batch, Client
    from fedsim.training.flat_model import Resident
    from fedsim.training.server import Server

__all__ = ["Method", "Weighting", "weigh"]

Weighting = Literal["size", "uniform"]


def weigh(weighting: Weighting, reports: Mapping[str, Report]) -> dict[str, float]:
    """Return the weights that most methods choose from: ``size`` is n_k / n, ``uniform`` is 1 / K."""
    if weighting == "uniform":
        return uniform_weights(reports)
    return size_weights({client: report.num_images for client, report in reports.items()})


class Method(ABC):
    """One round, hook by hook.

    Every hook of the client's side gets the live :class:`~fedsim.training.client.Client` and
    :class:`~fedsim.training.server.Server`; ``server.model(arch)`` is the global model as it was at the start of the
    round. What a client must remember between rounds (an expert, a control variate, its previous model) goes in by
    ``client.keep(name, tensor)``, what the server must by ``server.keep(arch, name, tensor)``; both are saved.
    """

    # -- what a method declares: the same on every rank ----------------------------------------------------------------

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Names of the numbers that :meth:`signals` returns."""
        return ()

    @property
    def has_tensor_signals(self) -> bool:
        """Whether :meth:`tensor_signals` measures anything."""
        return False

    @property
    def measures(self) -> bool:
        """Whether weights are unknown until all clients have trained."""
        return bool(self.signal_names) or self.has_tensor_signals

    @property
    def has_masks(self) -> bool:
        """Whether clients prune: :attr:`Upload.mask` says which elements count. Costs a second vector in the sums."""
        return False

    def server_mask(self, server: Server, arch: str) -> Tensor | None:
        """Which shared parameters are not pruned where the server prunes for all, bool [num_shared_parameters].

        It is what downloads are reduced to, for :mod:`fedsim.federation.ledger` to count. None: the server does not
        prune.
        """
        return None

    def has_server_step(self, server: Server) -> bool:
        """Whether :meth:`server_step` does anything in round ``server.round``; if not, no rank waits for it."""
        return type(self).server_step is not Method.server_step

    @property
    def needs_public_images(self) -> bool:
        """Whether the server must have public images."""
        return False

    @property
    def needs_hardware(self) -> bool:
        """Whether weights depend on the speed of devices."""
        return False

    @property
    def needs_identities(self) -> bool:
        """Whether clients must know who is on their images: clusters will not do."""
        return False

    @property
    @abstractmethod
    def shared_groups(self) -> frozenset[Group]:
        """The parameter groups that clients send and receive. ``bn_stats`` may keep statistics private all the same."""

    @property
    def shares_head(self) -> bool:
        """Whether the identity head is shared; it then has the size of the largest label space."""
        return Group.HEAD in self.shared_groups

    def extras_down(self, server: Server, arch: str) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of float32 tensors that clients get in this round beside the global model."""
        return {}

    def extras_up(self, server: Server, arch: str) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what ``Upload.extras`` holds in this round, which is ``server.round``."""
        return {}

    def initial_kept(self, resident: Resident) -> Mapping[str, Tensor]:
        """Return what a client keeps before its first round, or its first one with another backbone.

        Args:
            resident: of the client's architecture, with the global model and initial private weights.
        """
        return {}

    def initial_server_kept(self, resident: Resident) -> Mapping[str, Tensor]:
        """Return what the server keeps before the first round; ``resident`` has the initial weights."""
        return {}

    # -- on the client -------------------------------------------------------------------------------------------------

    def download(self, client: Client, server: Server) -> None:
        """Load the global model: every shared entry. The private groups have been loaded already."""
        client.resident.flat.shared.copy_(server.model(client.resident.arch))

    def train(self, client: Client, server: Server) -> None:
        """Local training: E epochs of mini-batches."""
        correct = partial(self.before_step, client, server)
        for epoch in range(client.local_epochs):
            self.before_epoch(client, server, epoch)
            for batch in client.batches(epoch):
                if client.step(self.loss(client, server, batch), correct):
                    self.after_step(client, server)

    def before_epoch(self, client: Client, server: Server, epoch: int) -> None:  # noqa: B027 - optional
        """Prepare a local epoch, for example new pseudo-labels."""

    def loss(self, client: Client, server: Server, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar with gradient."""
        return client.training_step(batch)

    def before_step(self, client: Client, server: Server) -> None:  # noqa: B027 - optional
        """Change a step's gradient, complete and not yet clipped, by ``client.optimizer.add_to_gradients``."""

    def after_step(self, client: Client, server: Server) -> None:  # noqa: B027 - optional
        """Act after each optimizer step, for example re-apply a mask."""

    def signals(self, client: Client, server: Server) -> dict[str, float]:
        """Measure what the server's weights depend on; keys are :attr:`signal_names`."""
        return {}

    def tensor_signals(self, client: Client, server: Server) -> Sequence[float]:
        """Measure a number for each tensor in ``client.resident.flat.shared_parameters``."""
        return ()

    def upload(self, client: Client, server: Server) -> Upload:
        """Return what leaves the client."""
        return Upload(client.resident.flat.shared)

    # -- on the server -------------------------------------------------------------------------------------------------

    def weights(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """Return aggregation weights that sum to 1 over the clients of one architecture: by default n_k / n."""
        return weigh("size", reports)

    def parameter_weights(self, reports: Mapping[str, Report]) -> Mapping[str, Sequence[float]] | None:
        """Return weights of the parameters that differ from :meth:`weights`, which then are those of the statistics.

        Returns:
            client -> one weight for all parameter tensors, or one for each; None: there are none.
        """
        return None

    def step_size(self, reports: Mapping[str, Report]) -> float:
        """Return how far the parameters move from the global model towards the mean: 1 is all the way."""
        return 1.0

    def server_step(self, server: Server) -> None:  # noqa: B027 - optional
        """Change the new global model, for example distil on public data.

        Runs on rank 0; the others receive the result. ``server.residents`` are models to load vectors into,
        ``server.received`` is what came beside the uploads, ``server.keep`` remembers tensors.
        """

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def personalise(self, client: Client, server: Server) -> None:
        """Load the model that the client would use: by default the new global model.

        The private groups and what the method keeps have been loaded already.
        """
        self.download(client, server)

    @property
    def unseen_by_all(self) -> bool:
        """Whether unseen domains are for all clients' personalised models together, as ``evaluation.ensemble`` has it.

        It matters where the server has no model of its own; else every client's model is scored, and the scores
        averaged.
        """
        return False

    def server_groups(self, server: Server, arch: str) -> frozenset[Group]:
        """Return what :meth:`generalise` loads beside the shared groups, where it can do so by now."""
        return frozenset()

    def generalise(self, resident: Resident, server: Server) -> None:
        """Load the server's own model: by default the shared groups, to which a method may add others."""
        resident.flat.shared.copy_(server.model(resident.arch))
