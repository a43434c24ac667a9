"""Domain-Aware Suppression and Aggregation for Federated DG ReID (FedSupWA).

Yu et al. AAAI 2026. Its text was not at hand: this is the reading of its release (YZX-codesky/FedSupWA).

| hook     | in the release (train_dps of reid/user.py; FedSupWA.py)                                                 |
|----------|---------------------------------------------------------------------------------------------------------|
| download | theta_0 is the server's model; its head stays with the client                                           |
| train    | the client's objective                                                                                  |
| train    | DPS: theta <- theta_0 + w (theta - theta_0), number by number                                           |
| train    | w = 1 - (d - min d) / (max d - min d + 1e-4) in each tensor, d the size of theta_0 - theta', and theta' |
|          | the client's last upload; 1 at first                                                                    |
| train    | DWA: g_k is the gain in mAP and accuracy of theta over theta_0, on the last batch                       |
| upload   | backbone and neck                                                                                       |
| weights  | exp(g_k) / sum over j of exp(g_j)                                                                       |

So a number moves less, the further the client's last model was from the average. The server has theta' in the release;
here the client keeps it, and nothing else is sent.

Deviations and silences:

- The release trains by SSCU's loop without its diversity loss; here the objective is trained, so that FedPav is the
  same without DPS and DWA (``suppress: false``, ``weighting: size``). The release does not run as it is.
- Its accuracy is that of a head that nothing trains. Here it is the client's own head.
- mAP is that of the batch's images among each other, by their cosines. Images without another one of their person do
  not count; in the release they count as 0. So use a sampler with several images of a person.
- Both scores are of models in training mode, as there, and the batch enters the running statistics of theta once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedsim.functional.retrieval import average_precisions
from fedsim.functional.weighting import normalise
from fedsim.methods.base import BodySharing, KeptModels, Method, Signal, Weights, weigh
from fedsim.training.client import Batch, Client
from fedsim.training.messages import Measured, Report, Upload
from fedsim.training.statistics import steady_statistics

_UPLOAD, _GAIN = "upload", "gain"
_SMALL = 1e-4


@dataclass(frozen=True, kw_only=True)
class FedSupWA(BodySharing, Method):
    """Averaging of suppressed changes, with weights by what training has gained on a batch."""

    requires = frozenset({"identities", "whole_batches", "built_in_model"})  # the last batch, its labels and guesses

    suppress: bool = True
    """whether numbers in which the client's last model was far from the average move less (DPS)"""
    weighting: Literal["gain", "size", "uniform"] = "gain"
    """softmax of the gains (DWA), or $n_k / n$, or $1 / K$"""

    @property
    def keeps(self) -> KeptModels:
        """The client's last upload."""
        return {_UPLOAD: "shared"} if self.suppress else {}

    @property
    def measures(self) -> Mapping[str, Signal]:
        """g_k, if it is the weight."""
        return {_GAIN: "client"} if self.weighting == "gain" else {}

    def train(self, client: Client) -> None:
        """Train, then suppress the change, and measure what it has gained on the last batch."""
        last: Batch | None = None
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                client.train_on(batch, self)
                last = batch
        if _UPLOAD in client.kept:
            _suppress_change(client, client.kept[_UPLOAD])
        if self.weighting == "gain":
            client.keep(_GAIN, torch.zeros((), device=client.device) if last is None else _gain(client, last))
        if self.suppress:
            client.keep(_UPLOAD, client.model.shared)

    def upload(self, client: Client) -> Upload:
        """Return the model and its gain g_k."""
        signals = {_GAIN: Measured(client.kept[_GAIN])} if self.weighting == "gain" else {}
        return Upload(client.model.shared, signals=signals)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the softmax of the gains, or weights by size."""
        if self.weighting != "gain":
            return weigh(self.weighting, reports)
        gains = {name: report.signals[_GAIN] for name, report in reports.items()}
        highest = max(gains.values(), default=0.0)
        return Weights(normalise({name: math.exp(gain - highest) for name, gain in gains.items()}))


def _suppress_change(client: Client, upload: Tensor) -> None:
    """Shorten the change of the client's model by DPS; ``upload`` [num_shared] is its last one."""
    received, shared = client.received.vector, client.model.shared
    for entry in client.model.flat.shared_entries:
        before, after = received[entry.span], shared[entry.span]
        distance = (before - upload[entry.span]).abs()
        low, high = distance.aminmax()
        after.copy_(before + (1 - (distance - low) / (high - low + _SMALL)) * (after - before))


def _gain(client: Client, batch: Batch) -> Tensor:
    """Return g_k, a scalar: the scores of the model after training, less those of the received one."""
    shared, trained = client.model.shared, client.model.shared.clone()
    with steady_statistics(client.model):  # private ones are theta's
        shared.copy_(client.received.vector)
        before = _score(client, batch)
    shared.copy_(trained)
    return (_score(client, batch) - before).float()


@torch.no_grad()
def _score(client: Client, batch: Batch) -> Tensor:
    """Return mAP and accuracy of the client's model on a batch, added: a float64 scalar on the device."""
    output, labels = client.forward(batch.images), batch.labels
    accuracy = (output.logits.argmax(1) == labels).double().mean()
    z = normalize(output.features.neck.float())
    order = (z @ z.T).fill_diagonal_(-torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :-1]
    matches = labels[order] == labels[:, None]
    precisions = average_precisions(matches).nan_to_num(0.0)  # of images without another one of their person
    return precisions.sum() / matches.any(1).sum().clamp_min(1) + accuracy
