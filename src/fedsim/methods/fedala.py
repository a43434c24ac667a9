"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan. AAAI 2023. arXiv:2212.01197.

| hook        | Algorithm 1                                                                                  |
|-------------|----------------------------------------------------------------------------------------------|
| download    | lower layers are the server's, Theta^{t-1}                                                   |
| train       | top layers: Theta_hat <- Theta_i + (Theta^{t-1} - Theta_i) * W, Theta_i the client's last    |
| train       | W <- clip(W - eta (gradient of L at Theta_hat) * (Theta^{t-1} - Theta_i), 0, 1), on a random |
|             | sample of s % of the images: until the loss settles the first time, then for an epoch        |
| train       | then local training of all layers, from Theta_hat                                            |
| weights     | Theta^t <- sum over i of (n_i / n) Theta_i                                                   |
| personalise | the model of client i is Theta_hat, of the new Theta^t                                       |

``*`` is element by element. W begins at 1, where Theta_hat is the global model.

Deviations and silences:

- A layer is a module with parameters of its own: a linear neck has two, Linear and BatchNorm. The authors' code counts
  tensors. Private heads are the client's own, and not mixed.
- Running statistics are the server's, and learning W does not move them. The code's stay with the client, as with
  ``bn_stats: local``.
- The sample is random, without augmentation; the code takes consecutive images from a random place. In its training
  it leaves out a client's last partial batch (``drop_partial``), and does not shuffle.
- W settles if the last batch's loss has a deviation below ``threshold`` over ten epochs, as in the code. That waits
  for it without an end; here there are at most ``start_epochs``.
- In the code all clients learn W in all rounds. Here those do that train; all others keep theirs for ``personalise``,
  which does not learn.
- ``eta: 0`` keeps W at 1, and is FedAvg.
- With ``micro_batch`` batches of the sample are as small as micro-batches. Loss and accuracy in the log are
  without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.checks import at_least, not_negative, within
from fedsim.core.progress import note_progress
from fedsim.methods.base import BodySharing, KeptModels, Method, WeightingChoice
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Upload
from fedsim.training.statistics import steady_statistics

_LAST_LOSSES = 10
"""epochs over which the loss must settle, as in the authors' code"""


@dataclass(frozen=True, kw_only=True)
class FedALA(BodySharing, WeightingChoice, Method):
    """Averaging of clients that begin with a mixture of the global model and their last one, by learnt weights."""

    delivers = "personalised"
    requires = frozenset({"identities"})  # clusters are not known before local training

    layers: int | None = 2
    """$p$, number of layers at the top that are mixed; null: all"""
    sample: float = 0.8
    """$s$, share of the images on which W is learnt"""
    eta: float = 1.0
    """$\\eta$, step size of W"""
    threshold: float = 0.1
    """deviation of the last ten losses below which W has settled the first time"""
    start_epochs: int = 100
    """largest number of epochs until then"""

    def __post_init__(self) -> None:
        at_least("model.method", 1, "; use null for all layers", layers=self.layers)
        at_least("model.method", 1, start_epochs=self.start_epochs)
        within("model.method", "(0, 1]", sample=self.sample)
        not_negative("model.method", eta=self.eta, threshold=self.threshold)

    @property
    def keeps(self) -> KeptModels:
        """W and the client's last model, if all of it is mixed; else of the top layers only, which are smaller."""
        return {"weights": "shared", "local": "shared"} if self.layers is None else {}

    def train(self, client: Client) -> None:
        """Learn W, mix, and train."""
        if "local" in client.kept:
            with _undisturbed(client), client.personal_training():
                self._learn(client)
            self._mix(client)
        super().train(client)

    def upload(self, client: Client) -> Upload:
        """Return the model, and keep its top layers for the next time."""
        client.keep("local", client.model.shared[self._top(client.model)])
        if "weights" not in client.kept:
            client.keep("weights", torch.ones_like(client.kept["local"]))
        return super().upload(client)

    def personalise(self, client: Client) -> None:
        """Load the global model, and mix its top layers with those of the client's last model."""
        super().personalise(client)
        if "local" in client.kept:
            self._mix(client)

    def _mix(self, client: Client) -> None:
        """Set the top layers to Theta_hat; W = 1 gives the global ones, bit for bit."""
        top, kept = self._top(client.model), client.kept
        client.model.shared[top] = torch.lerp(kept["local"], client.received.vector[top], kept["weights"])

    def _learn(self, client: Client) -> None:
        """Learn W: in ``client.kept``."""
        top, w = self._top(client.model), client.kept["weights"]
        moves = client.received.vector[top] - client.kept["local"]
        sample = self._sample(client)
        size = client.training_settings.micro_batch_of(client.data.num_images) or client.batch_size
        sample = sample[: len(sample) - (len(sample) % size == 1)]  # batch normalisation cannot train on one image
        is_first, losses = "learnt" not in client.kept, list[Tensor]()
        for _ in range(self.start_epochs if is_first else 1):
            for batch in client.images.plain_batches(sample, size):
                self._mix(client)
                loss = client.supervised_loss(client.forward(batch.images), batch, counts=False)
                w.sub_(self.eta * _gradient(client, loss, top) * moves).clamp_(0, 1)
            losses.append(loss.detach())
            note_progress()
            if self._has_settled(losses):
                break
        client.keep("learnt", torch.ones((), dtype=torch.bool, device=client.device))

    def _sample(self, client: Client) -> Tensor:
        """Return positions of random images, at least two."""
        count = max(int(self.sample * client.data.num_images), 2)
        return torch.randperm(client.data.num_images, generator=client.generator("aggregation"))[:count]

    def _has_settled(self, losses: Sequence[Tensor]) -> bool:
        """Whether the losses of the last epochs hardly differ; the host waits for them."""
        if len(losses) <= _LAST_LOSSES:
            return False
        return float(torch.stack([*losses[-_LAST_LOSSES:]]).std(correction=0)) < self.threshold

    def _top(self, model: FlatModel) -> slice:
        """Return the place of the top layers in the shared vector: its last parameters."""
        entries = model.flat.shared_parameters
        names = [entry.name.rpartition(".")[0] for entry in entries]
        layers = list(dict.fromkeys(names))
        chosen = layers if self.layers is None else layers[-self.layers :]
        end = model.flat.num_shared_parameters
        starts = [entry.offset for entry, name in zip(entries, names, strict=True) if name in chosen]
        return slice(min(starts, default=end), end)


def _gradient(client: Client, loss: Tensor, top: slice) -> Tensor:
    """Return the gradient of a loss with respect to a part of the shared vector, 0 between tensors and where unused."""
    places = {client.model.flat.place_of(p): p for p in client.optimizer.parameters}
    places = {offset: p for offset, p in places.items() if top.start <= offset < top.stop}
    vector = torch.zeros(top.stop - top.start, device=client.device)
    gradients = torch.autograd.grad(loss, list(places.values()), allow_unused=True)
    for offset, gradient in zip(places, gradients, strict=True):
        if gradient is not None:
            vector[offset - top.start :][: gradient.numel()] = gradient.flatten()
    return vector


@contextmanager
def _undisturbed(client: Client) -> Iterator[None]:
    """Leave running statistics and the random stream of dropout as they were; the block has a stream of its own."""
    network = client.model.network
    if network.has_dropout:
        network.set_generator(client.generator("dropout aggregation", device=client.device))
    with steady_statistics(client.model):
        yield
    client.model.reset_counters()
    if network.has_dropout:
        network.set_generator(client.generator("dropout", device=client.device))
