"""Performance Optimization for Federated Person Re-identification via Benchmark Analysis (FedReIDBench).

W. Zhuang, Y. Wen, X. Zhang, X. Gan, D. Yin, D. Zhou, S. Zhang, S. Yi. ACM Multimedia 2020. arXiv:2008.11560.

| hook            | Algorithm 1 (Federated Partial Averaging)                                    |
|-----------------|------------------------------------------------------------------------------|
| (selection)     | line 4: C_t, K of the N clients                                              |
| download        | line 13: the client joins w with its stored additional layers v, its head    |
| train           | lines 14-20: E epochs of mini-batches of size B                              |
| upload          | lines 21-22: store v, return w                                               |
| weights         | line 9: w^{t+1} <- sum over k in C_t of (n_k / n) w_k^{t+1}                   |
|                 | Algorithm 3 (Cosine Distance Weight, ``weighting: cdw``)                     |
| upload          | lines 22-28: m_k, how far logits of a batch have turned in training          |
| weights         | lines 8-9: w^{t+1} <- sum over k in C_t of (m_k / m) w_k^{t+1}                |
|                 | Algorithm 2 (Knowledge Distillation, ``distillation``)                       |
| upload          | line 25: l_k, features of the public images                                  |
| server_step     | lines 11-12: w^{t+1} is fine-tuned on l = (1 / K) sum over k in C_t of l_k     |

Algorithm 5 is both at once.

Deviations and silences:

- Paper: n is the "total size of datasets". Over all clients, weights would not sum to 1 when K < N. Here n = sum of n_k
  over C_t, as in the authors' code.
- The authors' code never averages BatchNorm's running statistics: the server keeps those of one random client.
  ``bn_stats: first`` does the same; fedsim's default is ``mean``.
- The authors' code also sends ResNet-50's unused ImageNet classifier (8.2 MB per direction); here it does not exist.
- Algorithm 3, line 8, prints m <- sum of 1 / m_k: weights that do not sum to 1. Here m = sum of m_k, as in the code.
- The code computes m_k on an augmented batch with dropout: w_k^{t+1} in training mode, and w^t, too, except in round 0
  and in the round after each test (every 10 rounds), where w^t is in evaluation mode. ``cdw_mode: train`` has both in
  training mode in every round; ``cdw_mode: eval`` compares the models as they are scored, on plain images. Dropout of
  one half alone gives a distance of a half for untrained heads, and less the longer heads are trained and the fewer
  people they have: compare with ``weighting: uniform``. The code computes m_k in every run, and its batch shifts the
  running statistics of both models, which the server may keep; here it does not. If all m_k vanish, weights are
  uniform. The batch has B images, or all if the client has fewer.
- Algorithm 2 gives neither loss nor duration of line 12: mean squared error on the neck's features, one epoch, SGD with
  Nesterov momentum 0.9, weight decay 5e-4 and rate 5e-4, as in the code (the rate is in the paper). The student is in
  training mode. The paper distils in every round, the code in every 10th (``every: 10``).
- The authors run the code with ``--kd --regularization``: teachers' features have unit length, the student's do not
  (``target_norm: teacher``). Their loss is a mean of squares over D. Of two unit vectors this mean is 1 / D of their
  squared distance, which at D = 512 changes weights less than weight decay does: so ``both`` sums over D.
- The code leaves the teachers in training mode (``teacher_mode: train``): dropout, and statistics of each batch. Here
  they are in evaluation mode by default, so that l_k is the feature that an evaluation uses. Its teachers are all
  clients, also those that do not take part; here they are C_t.
- The code augments the public images as in training (pad, crop, flip), equally for clients and server: ``view:
  seeded_train``. The default is plain images.
- All clients get the public images once; the traffic of a round does not count them. CUHK02, the paper's public data
  set, contains the people of CUHK01, one of its clients: unlabelled, but not unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least, positive
from fedsim.core.seeding import torch_generator
from fedsim.core.transfer import send
from fedsim.functional.losses import distillation_loss, mean_cosine_distance
from fedsim.functional.weighting import normalise, uniform_weights
from fedsim.methods.base import Method, Need, Payload, Replicas, Signal, Weights, weigh
from fedsim.methods.declared import has_server_step
from fedsim.models.groups import BODY
from fedsim.settings.facts import Facts
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Measured, Report, Upload
from fedsim.training.public import PublicImages
from fedsim.training.server import Server

_CDW_FLOOR = 1e-8
"""Smallest sum of distances that gives weights; below it weights are uniform."""
_SMALLEST_BATCH = 2
"""Batch normalisation cannot train on one image: teachers and student skip a last batch of one."""


@dataclass(frozen=True, kw_only=True)
class Distillation(Section, option="model.method.distillation"):
    """Fine-tuning of the global model on public images, with the clients' features as targets."""

    every: int = 1
    """rounds between two distillations: 1 in the paper, 10 in its code"""
    epochs: int = 1
    """passes over the public images"""
    lr: float = 5e-4
    """learning rate of the fine-tuning"""
    batch_size: int = 32
    """images per batch, on the server and on the clients"""
    target_norm: Literal["none", "teacher", "both"] = "teacher"
    """features that are scaled to unit length: none, the clients' as in the code, or also the server's"""
    teacher_mode: Literal["eval", "train"] = "eval"
    """mode of the clients' models: as in an evaluation, or as in the code"""
    view: Literal["eval", "seeded_train"] = "eval"
    """public images as they are, or augmented as in training, equally for clients and server"""

    def __post_init__(self) -> None:
        section = "model.method.distillation"
        at_least(section, 1, every=self.every, epochs=self.epochs)
        at_least(section, 2, batch_size=self.batch_size)
        positive(section, lr=self.lr)

    def batches(self, public: PublicImages, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the round's public images: (index [b], images [b, 3, H, W])."""
        return public.batches(round_, self.batch_size, self.view == "seeded_train")


@dataclass(frozen=True, kw_only=True)
class FedPav(Method):
    """Backbone and neck are averaged; every client keeps its identity head."""

    shared_groups = BODY

    weighting: Annotated[
        Literal["size", "uniform", "cdw"], Facts(needs="data.partition != 'union' or weighting == 'cdw'")
    ] = "size"
    """$n_k / n$ in Algorithm 1, line 9; ``uniform`` is $1 / K$; ``cdw`` is $m_k / m$ in Algorithm 3"""
    cdw_mode: Annotated[Literal["train", "eval"], Facts(needs="weighting == 'cdw'")] = "train"
    """mode of the models whose logits ``cdw`` compares: as in most rounds of the authors' code, or as in evaluations"""
    distillation: Distillation | None = None
    """knowledge distillation on the images of ``data.public`` (Algorithm 2); null: none"""

    @property
    def measures(self) -> Mapping[str, Signal]:
        """The cosine distance, if it is the weight."""
        return {"cdw": "client"} if self.weighting == "cdw" else {}

    @property
    def requires(self) -> frozenset[Need]:
        """Public images to distil on; identities for the logits that ``cdw`` compares (FedCAPR compares features)."""
        cdw: frozenset[Need] = frozenset({"identities", "built_in_model"} if self.weighting == "cdw" else ())
        return cdw | frozenset({"public_images"} if self.distillation is not None else ())

    @property
    def replicas(self) -> Replicas:
        """The models whose logits ``cdw`` compares, one after the other; the teacher."""
        roles = ["cdw"] * (self.weighting == "cdw") + ["teacher"] * (self.distillation is not None)
        return dict.fromkeys(roles, "frozen")

    @property
    def server_batch(self) -> int:
        """Public images in a batch of the distillation; 0: there is none."""
        return 0 if self.distillation is None else self.distillation.batch_size

    @property
    def server_every(self) -> int:
        """Rounds between two distillations; 0: none."""
        return 0 if self.distillation is None else self.distillation.every

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Features of the public images, in rounds that distil."""
        if self.distillation is None or not has_server_step(self, round_):
            return Payload()
        return Payload(up={"features": (server.num_public, server.models[arch].network.num_features)})

    def _change(self, client: Client) -> Tensor:
        """Return m_k, the change of the logits of a batch by training (Algorithm 3, lines 22-28)."""
        received = (client.received.vector, client.private_state()["state"])
        trained = (client.model.shared, client.model.private)
        replica = _measured(client, "cdw", self.cdw_mode)
        augment = client.generator("cdw augment", device=client.device) if self.cdw_mode == "train" else None
        images = client.images.sample(client.batch_size, client.generator("cdw images"), augment)
        logits = []
        for shared, private in (received, trained):
            replica.shared.copy_(shared)
            replica.private.copy_(private)
            with torch.no_grad():
                logits.append(replica.forward(images, client.session.precision).logits)
        return mean_cosine_distance(*logits)

    def upload(self, client: Client) -> Upload:
        """Return the model, m_k if that is the weight, and l_k in rounds that distil (Algorithm 2, line 25)."""
        signals = {"cdw": Measured(self._change(client))} if self.weighting == "cdw" else {}
        distillation, public = self.distillation, client.received.public
        if distillation is None or public is None or not has_server_step(self, client.round):
            return Upload(client.model.shared, signals=signals)
        teacher = _measured(client, "teacher", distillation.teacher_mode)
        teacher.whole.copy_(client.model.whole)
        features = torch.zeros(len(public), teacher.network.num_features, device=client.device)
        for index, images in distillation.batches(public, client.round):
            if len(index) >= _SMALLEST_BATCH:
                with torch.no_grad():
                    features[send(index, client.device)] = teacher.network(images).neck
        extras = {"features": features if distillation.target_norm == "none" else F.normalize(features)}
        return Upload(client.model.shared, extras, signals)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the share of each client in the average (Algorithm 1, line 9; Algorithm 3, lines 8-9)."""
        if self.weighting != "cdw":
            return weigh(self.weighting, reports)
        distances = {client: report.signals["cdw"] for client, report in reports.items()}
        return Weights(normalise(distances) if sum(distances.values()) >= _CDW_FLOOR else uniform_weights(distances))

    def server_step(self, server: Server) -> None:
        """Fine-tune the mean model on the mean features (Algorithm 2, line 12)."""
        assert self.distillation is not None
        for arch, answers in server.answers.items():
            _fine_tune(server, arch, answers.extras["features"], self.distillation)


def _measured(client: Client, role: str, mode: Literal["eval", "train"]) -> FlatModel:
    """Return a second model in ``mode``, to load weights into: only its own running statistics change."""
    replica = client.model.replica(role)
    replica.network.train(mode == "train")
    replica.network.set_generator(client.generator(f"{role} dropout", device=client.device))
    return replica


def _fine_tune(server: Server, arch: str, targets: Tensor, distillation: Distillation) -> None:
    """Train an architecture's global model on ``targets`` [n, D], the mean features of the public images."""
    flat, public = server.models[arch], server.public
    assert public is not None
    network = flat.network.train()
    flat.shared.copy_(server.vector(arch))
    network.set_generator(torch_generator(server.seed, server.round, "distillation dropout", device=flat.device))
    optimizer = SGD(network.parameters(), lr=distillation.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for _ in range(distillation.epochs):
        for index, images in distillation.batches(public, server.round):
            if len(index) < _SMALLEST_BATCH:
                continue
            optimizer.zero_grad()
            goal = targets[send(index, targets.device)]
            distillation_loss(network(images).neck, goal, distillation.target_norm == "both").backward()
            optimizer.step()
    optimizer.zero_grad()
    server.vector(arch).copy_(flat.shared)
