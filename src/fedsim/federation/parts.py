"""A federation that has been assembled: its data, models and server, and the clients of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData, FederatedData
from fedsim.evaluation.evaluator import Evaluator
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.scheduling.rank_share import RankShare
from fedsim.methods.base import Method
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.labels.labeller import FACTS
from fedsim.training.lazy_clients import LazyClients
from fedsim.training.objective import Objective
from fedsim.training.public import PublicImages
from fedsim.training.server import Server
from fedsim.training.settings import LocalTraining
from fedsim.training.statistics import BatchNormStatistics


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Server, clients and models; see :func:`~fedsim.federation.assembly.assemble`."""

    method: Method
    """the federated method"""
    federated: FederatedData
    """the images and labels of all clients, not decoded"""
    models: Mapping[str, FlatModel]
    """architecture -> the model of this rank"""
    archs: dict[str, str]
    """client -> architecture, for all clients"""
    statistics: Mapping[str, BatchNormStatistics]
    """architecture -> the treatment of its running statistics"""
    costs: Mapping[str, float]
    """client -> predicted work of a round: images times local epochs"""
    micro_batches: Mapping[str, int]
    """client -> number of micro-batches of a batch; 1: batches are not split"""
    rank_share: RankShare
    """placement of clients on this rank, and the state shared with its machine"""
    server: Server
    """the global models"""
    ledger: Ledger
    """counts the simulated traffic"""
    objective: Objective
    """the supervised loss"""
    clients: LazyClients
    """name -> client, for the clients that this rank may train"""
    training: LocalTraining
    """the common settings of local training, with the optimizer of the user's module where there is one"""
    root: Client | None = None
    """the server's own images, in the form of a client, where the rule of the aggregation trains on the server"""
    logged: tuple[str, ...] = ()
    """names of the numbers that the user's module logs"""

    @cached_property
    def names(self) -> list[str]:
        """All clients."""
        return [client.name for client in self.federated.clients]

    @cached_property
    def data_of(self) -> dict[str, ClientData]:
        """Client -> its data."""
        return {client.name: client for client in self.federated.clients}

    @cached_property
    def num_classes(self) -> dict[str, int]:
        """Client -> number of identities."""
        return {client.name: client.num_classes for client in self.federated.clients}

    def read_images(self, data: FederatedDataModule, evaluator: Evaluator, stage: str, tests: bool) -> None:
        """Decode the images that this rank needs in ``stage``, so that a damaged file stops the run before it starts.

        Args:
            data: opens images.
            evaluator: reads the images of evaluations.
            stage: Lightning's name of the stage.
            tests: whether a fit scores the test sets, too.
        """
        if (machine := self.rank_share.machine) is None:
            self._read(data, evaluator, stage, tests, whole_machine=False)
            return
        images = sum(self.data_of[name].num_images for name in self.clients)
        images += sum(len(sets.query) + len(sets.gallery) for sets in self.federated.tests.values())
        with machine.folder(3 * data.size[0] * data.size[1] * images) as data.shared_folder:
            self._read(data, evaluator, stage, tests, whole_machine=False)
            machine.meet()
            self._read(data, evaluator, stage, tests, whole_machine=True)
        data.shared_folder = None

    def _read(
        self, data: FederatedDataModule, evaluator: Evaluator, stage: str, tests: bool, whole_machine: bool
    ) -> None:
        """Read the images of this rank's clients; ``whole_machine``: those that other ranks have read."""
        if stage == "fit":
            owned = self.rank_share.owned_clients
            on_this_rank = frozenset(owned)
            of_other_ranks = [name for name in self.rank_share.trainable_clients if name not in on_this_rank]
            self.clients.open_images(of_other_ranks if whole_machine else owned, data)
            if self.federated.public is not None and not whole_machine:
                images = data.decode(self.federated.public.images, "public images")
                device = next(iter(self.models.values())).device
                self.server.public = PublicImages(images, self.server.augmentation, self.server.seed, device)
        trained = self.names if stage == "fit" else ()
        if stage in ("fit", "validate"):
            evaluator.prepare("val", trained, whole_machine)
        if stage in ("test", "predict") or (stage == "fit" and tests):
            evaluator.prepare("test", trained, whole_machine)

    def open_root(self, data: FederatedDataModule) -> None:
        """Open the images on which the server trains, if there are any; rank 0 does."""
        if self.root is not None:
            self.root.limit_batches = self.clients.limit_batches
            self.root.images.open(data.open_train)

    @property
    def facts(self) -> tuple[str, ...]:
        """Names of the numbers about a session that are logged for each client."""
        return self.logged + self.objective.parts + (FACTS if self.federated.has_unlabelled else ())


def trains_alone(method: Method, federated: FederatedData) -> bool:
    """Return whether no part of a client's model is averaged with other clients' models."""
    return len(federated.clients) == 1 or not method.shared_groups


def layout_of(backbone: nn.Module) -> tuple[str, ...]:
    """Return a description that is the same for all backbones of one architecture."""
    # repr() contains strides and epsilons, which shapes do not; counters that no layer reads are gone in a rank's model
    shapes = (f"{n}{list(t.shape)}" for n, t in backbone.state_dict().items() if t.is_floating_point())
    return (type(backbone).__name__, repr(backbone), *shapes)
