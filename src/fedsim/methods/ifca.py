"""An Efficient Framework for Clustered Federated Learning (IFCA).

A. Ghosh, J. Chung, D. Yin, K. Ramchandran. NeurIPS 2020. arXiv:2006.04088.

| hook          | Algorithm 1, option II (model averaging)                                                     |
|---------------|----------------------------------------------------------------------------------------------|
| initial_state | the initialisations theta_j, j = 1 .. k                                                      |
| payload       | the server broadcasts all theta_j                                                            |
| download      | the cluster estimate: argmin over j of F_i(theta_j), the loss on the client's own data       |
| upload        | the trained model, and the estimate s_i                                                      |
| aggregate     | theta_j <- sum over i of s_ij theta_i / sum over i of s_ij; an empty cluster keeps its model |
| personalise   | theta_j of the client's last estimate                                                        |

Deviations and silences:

- theta_1 is the server's vector; the others are kept with it, and every client downloads all k of them. A server
  optimizer acts on theta_1 only. Unseen data sets are scored by theta_1, or by all clients' models together
  (``evaluation.ensemble``): the paper has no new clients.
- F_i is the supervised loss in evaluation mode, on images without augmentation and with the client's own head. In the
  first round that head is random, and so is the estimate.
- The paper starts from k random models. With a pretrained backbone all clusters would start from the same model, so
  theta_2 .. theta_k are theta_1 with Gaussian noise: ``spread`` times the standard deviation of each tensor.
- For the paper's neural networks that share their first layers, set ``share_neck`` and ``share_head``.
- ``bn_stats`` must be mean, local or recalibrate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.core.checks import at_least, positive
from fedsim.core.transfer import send
from fedsim.methods.base import InitialState, Method, PartSharing, Payload, Signal, Weighting, WeightingChoice
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Measured, Report, Upload
from fedsim.training.server import Server
from fedsim.training.uploads import Uploads


@dataclass(frozen=True, kw_only=True)
class IFCA(PartSharing, WeightingChoice, Method):
    """Clusters of clients, each with a model of its own; a client joins the cluster whose model fits its data best."""

    delivers = "personalised"
    requires = frozenset({"uploads", "identities"})  # for the means of clusters; for the losses that a client compares
    measures: ClassVar[Mapping[str, Signal]] = {"cluster": "client"}  # from 0

    clusters: int = 2
    """$k$, models on the server"""
    spread: float = 0.1
    """size of the noise by which initial models differ, relative to each tensor's standard deviation"""
    weighting: Weighting = "uniform"
    """weights within a cluster: equal as in the paper, or ``size``: $n_k / n$"""

    def __post_init__(self) -> None:
        at_least("model.method", 1, clusters=self.clusters)
        positive("model.method", spread=self.spread)

    @property
    def _names(self) -> list[str]:
        """Names of theta_2 .. theta_k among the server's tensors."""
        return [f"cluster{j}" for j in range(1, self.clusters)]

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return theta_2 .. theta_k."""
        return Payload(down=tuple(self._names))

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return theta_2 .. theta_k: theta_1 with noise on its parameters."""
        return InitialState(server={name: self._perturbed(model, j) for j, name in enumerate(self._names, start=1)})

    def _perturbed(self, model: FlatModel, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(model.checksum + number)  # of the initial weights, so of the seed
        theta = model.shared.cpu().clone()
        for entry in model.flat.shared_parameters:
            values = theta[entry.span]
            noise = torch.randn(entry.numel, generator=generator)
            values += self.spread * values.std(correction=0) * noise
        return theta

    def download(self, client: Client) -> None:
        """Load the model that fits the client's data best."""
        models = self._models(client)
        choice = torch.stack([self._loss_of(client, theta) for theta in models]).argmin()  # the first of equal ones
        client.keep("cluster", choice)
        client.model.shared.copy_(models[0])
        for j, theta in enumerate(models[1:], start=1):  # on the device: the host does not wait for the choice
            client.model.shared.copy_(torch.where(choice == j, theta, client.model.shared))

    def _models(self, client: Client) -> list[Tensor]:
        return [client.received.vector, *(client.received.extras[name] for name in self._names)]

    @torch.no_grad()
    def _loss_of(self, client: Client, theta: Tensor) -> Tensor:
        """Return F_i(theta), on the device."""
        client.model.shared.copy_(theta)
        client.model.network.eval()
        total = torch.zeros((), dtype=torch.float64, device=client.device)
        # drawn, as losses of pairs depend on the images of a batch, and files are sorted by person
        order = torch.randperm(client.data.num_images, generator=client.generator("cluster choice"))
        for batch in client.images.plain_batches(order, client.batch_size):
            total += len(batch.labels) * client.supervised_loss(client.forward(batch.images), batch, counts=False)
        client.model.network.train()
        return total / client.data.num_images

    def upload(self, client: Client) -> Upload:
        """Return the model and the cluster."""
        return Upload(client.model.shared, signals={"cluster": Measured(client.kept["cluster"])})

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:
        """Renew all theta_j; return theta_1."""
        shares = self.weights(reports).clients
        weights = torch.zeros(self.clusters, len(uploads.clients), dtype=torch.float64)
        for column, name in enumerate(uploads.clients):
            weights[int(reports[name].signals["cluster"]), column] = shares[name]
        thetas = [server.vector(arch), *(server.kept[arch][name] for name in self._names)]
        thetas = [theta.clone() for theta in thetas]
        joined = [(theta, row / row.sum()) for theta, row in zip(thetas, weights, strict=True) if row.any()]
        rows = [(theta, send(row, theta.device)) for theta, row in joined]
        for span, chunk in uploads.chunks():
            for theta, row in rows:
                theta[span] = row @ chunk.double()
        for name, theta in zip(self._names, thetas[1:], strict=True):
            server.keep(arch, name, theta)
        return thetas[0]

    def personalise(self, client: Client) -> None:
        """Load the model of the client's cluster; theta_1 if the client has not taken part yet."""
        client.model.shared.copy_(self._models(client)[int(client.kept.get("cluster", 0))])
