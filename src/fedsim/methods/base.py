"""A federated method: a few hooks in the order of the round.

The defaults are the plain FedAvg round: a method's file holds only the changes of its paper, in this order. Methods do
not inherit from one another. They hold settings only: tensors that live between rounds belong to the client (its
private state) or to the server. A hook that only calls its base changes nothing. Everything else that the round depends
on is declared, by a property or, where it is constant, by a class attribute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from fedsim.core.arguments import ChecksArguments
from fedsim.functional.weighting import size_weights, uniform_weights
from fedsim.models.groups import Group, body_groups
from fedsim.settings.facts import Facts
from fedsim.training.messages import Report, Upload

if TYPE_CHECKING:
    from fedsim.training.batch import Batch
    from fedsim.training.client import Client
    from fedsim.training.flat_model import FlatModel
    from fedsim.training.server import Server
    from fedsim.training.settings import LocalTraining
    from fedsim.training.uploads import Uploads

SizeOrUniform = Literal["size", "uniform"]
Weighting = Annotated[SizeOrUniform, Facts(needs="data.partition != 'union' or model.privacy != 'Privacy'")]
Delivered = Literal["global", "personalised", "ensemble"]
Need = Literal[
    "identities", "common_classes", "held_out", "public_images", "speeds", "masks", "uploads", "whole_batches",
    "plain_steps", "built_in_model", "losses",
]  # fmt: skip
Signal = Literal["client", "tensor"]
Replicas = Mapping[str, Literal["trained", "frozen"]]
"""role of a further model on the rank, see :meth:`FlatModel.replica` -> whether it trains"""
KeptModels = Mapping[str, Literal["model", "shared", "private", "people"] | int]
"""name of a tensor that :meth:`Client.keep` keeps -> the part of the client's model that is as large as it; or a row
for each person, of so many columns, and for ``people`` of as many as features have"""
Stage = tuple[torch.nn.Module, tuple[int, ...], int]
"""a network through which gradients pass to inputs, the shape of a batch of these, and the bytes of other tensors"""


@dataclass(frozen=True)
class Payload:
    """The tensors that are sent with the model of an architecture in one round; the ledger counts them."""

    down: tuple[str, ...] = ()
    """names of the server's tensors (``server.keep``) that every client gets; it finds them in
    ``client.received.extras``"""
    known: tuple[str, ...] = ()
    """names of such tensors that clients have had since the first round: also in ``extras``, but not counted"""
    up: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """names and shapes of ``Upload.extras``"""
    tables: Mapping[str, int] = field(default_factory=dict)
    """name -> columns of tables to which clients add rows of their own (``Upload.rows``), as many as they have; every
    client finds in ``extras`` the rows [n, columns] that had arrived when the round began, at first none. The ledger
    counts the rows that are sent, in both directions"""
    mask: str | None = None
    """name of the server's mask, bool [num_shared_parameters], if the server prunes for all: downloads are reduced to
    it, and clients get it in ``extras``, too. None: the server does not prune"""


@dataclass(frozen=True)
class InitialState:
    """Tensors that are kept from the start, by name."""

    client: Mapping[str, Tensor] = field(default_factory=dict)
    """by every client, also by one that changes its backbone"""
    server: Mapping[str, Tensor] = field(default_factory=dict)
    """by the server, of each architecture"""


@dataclass(frozen=True)
class Weights:
    """How the clients of one architecture enter its new global model."""

    clients: Mapping[str, float]
    """client -> weight; they sum to 1"""
    parameters: Mapping[str, Sequence[float]] | None = None
    """client -> one weight of all parameter tensors, or one for each; :attr:`clients` then holds for running statistics
    only. None: as :attr:`clients`"""
    step_size: float = 1.0
    """step of the parameters from the global model towards the mean; 1 is all the way"""


def weigh(weighting: Weighting, reports: Mapping[str, Report]) -> Weights:
    """Return the weights that most methods choose from: ``size`` is n_k / n, ``uniform`` is 1 / K."""
    if weighting == "uniform":
        return Weights(uniform_weights(reports))
    return Weights(size_weights({client: report.num_images for client, report in reports.items()}))


class Method(ChecksArguments, ABC, option="model.method"):
    """One round, hook by hook.

    Hooks on the client get the live :class:`~fedsim.training.client.Client`. ``client.received`` is the server's
    message, and all of the server that a hook may use: the global model from the start of the round and the declared
    :attr:`Payload`. ``client.keep(name, tensor)`` keeps tensors between rounds (an expert, a control variate, the
    previous model), ``server.keep(arch, name, tensor)`` does so on the server; checkpoints contain both.
    """

    # -- declared: the same on every rank ------------------------------------------------------------------------------

    session_copies = 0  # without a type: the parser would not see the types of settings below a ClassVar of a base
    """further tensors of the size of a model that a client has while it trains; ``fedsim describe`` counts them"""

    @property
    @abstractmethod
    def shared_groups(self) -> frozenset[Group]:
        """The parameter groups that clients send and receive. ``bn_stats`` may keep statistics private all the same."""

    def shared_tensors(self, names: Sequence[str]) -> Collection[str]:
        """Return the tensors that are shared, of those of :attr:`shared_groups`: by default all.

        ``names`` are in the order of the network.
        """
        return names

    @property
    def delivers(self) -> Delivered:
        """The kind of model by whose scores checkpoints are selected.

        ``global``: the server's. ``personalised``: the clients' own. ``ensemble``: the clients' own on their data sets,
        and all of them together on unseen data sets (``evaluation.ensemble``).
        """
        return "global"

    @property
    def has_own_models(self) -> bool:
        """Whether :meth:`personalise` may load another model than the global one; that model is then scored, too."""
        return self.delivers != "global"

    @property
    def requires(self) -> frozenset[Need]:
        """Conditions without which the method cannot run.

        ``identities``: clients have identity labels. ``common_classes``: of one label space, and some class is of two
        clients. ``held_out``: ``data.val`` holds images out. ``public_images``: ``data.public``. ``speeds``: of
        devices, in ``model.hardware``. ``masks``: uploads may be pruned, which costs a second vector in the sums.
        ``uploads``: the server gets single uploads, and :meth:`aggregate` combines them. ``whole_batches``: a batch
        must not be cut into micro-batches (``micro_batch``), as the method uses all of it at once, or steps more than
        once. ``plain_steps``: a step must not be a CUDA graph (``graph``), as the host waits or decides in it, or the
        method does not train by ``client.train_on``. ``built_in_model``: the method works on features, logits or layers
        of fedsim's own model, or steps two in turn; a user's LightningModule (``model.module``) allows neither.
        ``losses``: the method changes losses, which such a module does not allow if it optimizes manually.
        """
        return frozenset()

    # the next six, and session_copies, are for the memory that fedsim describe counts
    @property
    def replicas(self) -> Replicas:
        """The further models that a client has on the rank."""
        return {}

    @property
    def server_batch(self) -> int:
        """Number of public images in a batch on which the server trains; 0: it does not."""
        return 0

    @property
    def passes(self) -> int:
        """Number of passes of a batch that one backward pass goes through: each keeps its activations until then."""
        return 1

    @property
    def keeps(self) -> KeptModels:
        """The models, and parts of them, that clients keep, and that :meth:`initial_state` does not contain."""
        return {}

    def loose_tensors(self, image: tuple[int, int, int]) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the float32 tensors that clients train, and keep, beside their models.

        See :meth:`Client.loose_optimizer`; ``image`` is the shape (3, H, W) of a training image.
        """
        return {}

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of networks that a rank has once, for all clients, and that are never trained or sent."""
        return 0

    def first_stage(self, images: int, people: int, features: int) -> Stage | None:
        """Return the stage before the batches of a client with so many images, people and features; None: none."""
        return None

    @property
    def measures(self) -> Mapping[str, Signal]:
        """Names of ``Upload.signals``: one number for each client, or one for each shared parameter tensor."""
        return {}

    @property
    def server_every(self) -> int:
        """Rounds from one :meth:`server_step` to the next; 0: there is none, and no rank waits for it."""
        return 0

    @property
    def reads_on_ranks(self) -> frozenset[str]:
        """Names of tensors of the server that every rank needs, beside those of :meth:`payload`.

        They are those that :meth:`server_tensors` and :meth:`aggregate` read. After a :meth:`server_step`, rank 0 sends
        these and those of the payload to the other ranks, which drop all others: a tensor that only
        :meth:`server_step` reads costs no broadcast.
        """
        return frozenset()

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return the tensors that are sent with the model in round ``round_``, from 0."""
        return Payload()

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return tensors to keep from the start; ``model`` holds the global model and initial private weights."""
        return InitialState()

    def server_tensors(self, server: Server, arch: str) -> Mapping[str, Tensor]:
        """Return tensors outside shared_groups, by name, that the server can supply when it scores unseen data."""
        return {}

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse settings of a client's training that the method cannot work with, before anything is written.

        It is called for each client, with its own settings, when the federation is assembled. So a refusal here costs
        nothing; one in :meth:`train` ends a run that has begun.

        Raises:
            ConfigError: which names the field, such as ``model.client.accumulate``.
        """

    # -- on the client -------------------------------------------------------------------------------------------------

    def download(self, client: Client) -> None:
        """Load the global model: every shared entry. The private groups have been loaded already."""
        client.model.shared.copy_(client.received.vector)

    def train(self, client: Client) -> None:
        """Local training: E epochs of mini-batches."""
        client.fit(self)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar with gradient."""
        return client.training_step(batch)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step the optimizer: ``client.step`` can change the gradient first, and returns whether weights moved."""
        client.step(loss)

    @property
    def sees_steps(self) -> bool:
        """Whether the method changes or counts steps: then a user's module must not take them past Lightning."""
        return type(self).take_step is not Method.take_step

    def upload(self, client: Client) -> Upload:
        """Return the client's message after training: the model, extras and signals.

        Leave numbers on the device, as :class:`~fedsim.training.messages.Measured`: then the host waits for it once.
        """
        return Upload(client.model.shared)

    # -- on the server -------------------------------------------------------------------------------------------------

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return aggregation weights over the clients of one architecture: by default n_k / n.

        Reports of a method without :attr:`measures` may be from before the training, and have ``num_images`` only.
        """
        return weigh("size", reports)

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:
        """Return the mean [num_shared] float32 on the CPU of single uploads, of methods that require ``uploads``.

        Every rank computes it, so it must not depend on the rank's random numbers.
        """
        raise NotImplementedError

    def server_step(self, server: Server) -> None:
        """Change the new global model, for example distil on public data.

        It runs on rank 0; the other ranks receive the vectors, and the tensors that are declared
        (:attr:`reads_on_ranks`). ``server.vector(arch)`` is the new global model, and ``server.before[arch]`` that from
        the start of the round. ``server.models`` are models to load vectors into, ``server.answers`` are the clients'
        reports and extras, and ``server.keep`` keeps tensors.
        """

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def personalise(self, client: Client) -> None:
        """Load the model that the client would use: by default the new global model.

        The private groups and the tensors that the method keeps have been loaded already.
        """
        self.download(client)


@dataclass(frozen=True, kw_only=True)
class BodySharing:
    """A setting of methods that share backbone and neck."""

    share_head: bool = False
    """average the identity head, too; for clients with a common label space"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """Backbone, neck, and the head if it is shared."""
        return body_groups(True, self.share_head)


@dataclass(frozen=True, kw_only=True)
class PartSharing(BodySharing):
    """Settings of methods that share the backbone."""

    share_neck: bool = True
    """average the embedding layers before the head, too"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The backbone, and neck and head if they are shared."""
        return body_groups(self.share_neck, self.share_head)


@dataclass(frozen=True, kw_only=True)
class WeightingChoice:
    """A setting of methods that weigh clients by their numbers of images, or equally."""

    weighting: Weighting = "size"
    """$n_k / n$; ``uniform`` is $1 / K$"""

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return aggregation weights."""
        return weigh(self.weighting, reports)


def kept_vector(client: Client, name: str) -> Tensor:
    """Return a vector [num_shared_parameters] that a client keeps, and that begins at 0."""
    zeros = torch.zeros(client.model.flat.num_shared_parameters, device=client.device)
    return client.kept.get(name, zeros)


class KeepsPersonal:
    """Declarations of methods whose clients keep a model of their own, by the name ``personal``, and use it."""

    @property
    def delivers(self) -> Delivered:
        """Their own models."""
        return "personalised"

    @property
    def keeps(self) -> KeptModels:
        """The model of their own."""
        return {"personal": "model"}

    def personalise(self, client: Client) -> None:
        """Load the client's own model; one that has not taken part yet has the global model."""
        client.model.shared.copy_(client.received.vector)
        if "personal" in client.kept:
            client.model.whole.copy_(client.kept["personal"])


@dataclass(frozen=True)
class OtherSteps:
    """The steps of a training beside that of a client's model, such as of a personal one; see :meth:`Client.fit`.

    Make one for each training: a captured step belongs to this object.
    """

    counts: bool = False
    """whether the log has their loss"""
    correct: Callable[[], None] | None = None
    """changes the gradient of a step"""

    @property
    def sees_steps(self) -> bool:
        """See :attr:`Method.sees_steps`."""
        return self.correct is not None

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised loss of a batch, a scalar with gradient."""
        if self.counts:
            return client.training_step(batch)
        return client.supervised_loss(client.forward(batch.images), batch, counts=False)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step the parameters that are not fixed."""
        client.step(loss, self.correct)
