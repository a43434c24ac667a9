"""Common parts of methods that prune: the prunable weights of a model, and the mask of a client.

A client's mask is kept under the name ``mask``, bool [num_shared_parameters]; see :mod:`fedsim.functional.pruning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.functional.pruning import smallest_count_above, zero_pruned_
from fedsim.functional.retrieval import leave_one_out
from fedsim.methods.base import Delivered, InitialState, Need, Weights, weigh
from fedsim.training.labels.labeller import Clusters, PseudoLabels
from fedsim.training.messages import Report, Signals, Upload
from fedsim.training.proxies import make_proxies

if TYPE_CHECKING:
    from fedsim.core.flat import Entry
    from fedsim.training.client import Client
    from fedsim.training.flat_model import FlatModel


_PRUNABLE = (
    ((nn.Conv2d, nn.Linear), ("weight",)),
    ((nn.MultiheadAttention,), ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
)
"""types of modules, and the names of their weights"""


class OwnMask:
    """Hooks of a method whose clients prune: client k trains, sends and uses theta_k * M_k, where M_k begins as ones.

    The server takes, per element, the plain mean over the clients that have not pruned it.
    """

    @property
    def delivers(self) -> Delivered:
        """The personalised models: theta_g * M_k."""
        return "personalised"

    @property
    def requires(self) -> frozenset[Need]:
        """Uploads are pruned."""
        return frozenset({"masks"})

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return M_k: ones."""
        return InitialState({"mask": full_mask(model)})

    def download(self, client: Client) -> None:
        """Load theta_g * M_k."""
        client.model.shared.copy_(client.received.vector)
        zero_pruned(client)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, and apply M_k."""
        if client.step(loss):
            zero_pruned(client)

    def upload(self, client: Client) -> Upload:
        """Return theta_k and M_k."""
        return upload_masked(client)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / K."""
        return weigh("uniform", reports)


def check_pruning(target: float, step: float, accuracy_images: int | None) -> None:
    """Raise ConfigError, naming the method's field, if a number is out of range; see the fields of these names."""
    within("model.method", "[0, 1)", target=target)
    if not 0 < step < 1:
        raise ConfigError(f"model.method.step: {step} is not between 0 and 1")
    at_least("model.method", 1, "; null takes all", accuracy_images=accuracy_images)


def prunable_entries(model: FlatModel) -> list[Entry]:
    """Return the shared weights of convolutions and linear layers, by module type, in the order of the buffer.

    Names and numbers of dimensions are no criterion: in ConvNeXt 93 % of the weights belong to linear layers, and its
    three-dimensional ``layer_scale`` does not. Self-attention's projections of queries, keys and values are linear
    layers, too. Norms, biases, embeddings of classes and positions, and private heads are never pruned.
    """
    names = {
        f"{path}.{name}"
        for path, module in model.network.named_modules()
        for types, weights in _PRUNABLE
        if isinstance(module, types)
        for name in weights
    }
    return [entry for entry in model.flat.shared_parameters if entry.name in names]


def prunable_layers(model: FlatModel) -> list[slice]:
    """Return the places of :func:`prunable_entries` in the vector of shared parameters."""
    return [entry.span for entry in prunable_entries(model)]


def full_mask(model: FlatModel) -> Tensor:
    """Return the mask of a model that is not pruned: ones [num_shared_parameters]."""
    return torch.ones(model.flat.num_shared_parameters, dtype=torch.bool, device=model.device)


def zero_pruned(client: Client) -> Tensor:
    """Apply the client's mask to the model on which it trains; return its shared parameters, a view."""
    return zero_pruned_(client.model.shared[: len(client.kept["mask"])], client.kept["mask"])


def upload_masked(client: Client, signals: Signals | None = None, zeros_count: bool = False) -> Upload:
    """Return the model with the client's mask; see :attr:`Upload.zeros_count`."""
    mask = client.kept["mask"]
    is_new = (mask != client.remembered("mask").to(mask.device, non_blocking=True)).any()
    return Upload(client.model.shared, signals=signals or {}, mask=mask, is_new_mask=is_new, zeros_count=zeros_count)


Measure = Literal["mAP", "rank1", "centroids", "classifier"]
"""Accuracy of a client's model on its training images, without augmentation; see :func:`own_accuracy`"""


@torch.no_grad()
def own_accuracy(client: Client, num_images: int | None = None, measure: Measure | None = None) -> float:
    """Return an accuracy of the client's model on its training images, in evaluation mode; no test image is used.

    ``mAP`` and ``rank1``: each image searches for its group among the others, see
    :func:`~fedsim.functional.retrieval.leave_one_out`. ``centroids``: the share nearest to a centroid of their own
    group, of which there is one in each camera. ``classifier``: the share that the head classifies correctly, of
    ``num_images`` random images, sampled in each round; None: of all. For clusters it is the share nearest to a proxy
    of their own, as the last batch has left the proxies.

    Groups are people, or clusters: those of the current local epoch, or new ones before the first epoch. Images outside
    clusters do not count. None for ``measure`` is ``classifier`` for clients with identities, else ``rank1``, and also
    for a user's module, whose classifier fedsim does not know.
    """
    clusters = client.training_settings.clusters
    measure = measure or ("classifier" if client.has_guesses and not clusters else "rank1")
    if measure == "classifier" and not clusters:
        hits, images = _head_hits(client, num_images)
        return int(hits) / images
    groups, cameras, features = _groups(client), client.images.cameras, client.plain_features()
    if not (groups >= 0).any():
        return 0.0
    if measure in ("mAP", "rank1"):
        return float(getattr(leave_one_out(features, groups, cameras), measure))
    proxies = _pseudo(client).proxies if measure == "classifier" else make_proxies(features, groups, cameras)[0]
    guesses = proxies.clusters[(F.normalize(features) @ proxies.memory.T).argmax(1)].cpu()
    return float((guesses == groups)[groups >= 0].double().mean())


def exceeds(client: Client, num_images: int | None, accuracy: float) -> Tensor:
    """Return whether :func:`own_accuracy` is larger than ``accuracy``, bool on the device: the host need not wait."""
    if client.training_settings.clusters or not client.has_guesses:
        return torch.tensor(own_accuracy(client, num_images) > accuracy, device=client.device)
    hits, images = _head_hits(client, num_images)
    return hits >= smallest_count_above(accuracy, images)


def _head_hits(client: Client, num_images: int | None) -> tuple[Tensor, int]:
    """Return the number of images that the head classifies correctly, on the device, and the number of images."""
    total = client.data.num_images
    order = torch.arange(total)
    if num_images is not None and num_images < total:
        order = torch.randperm(total, generator=client.generator("accuracy images"))[:num_images]
    client.model.network.eval()
    hits = torch.zeros((), dtype=torch.int64, device=client.device)
    for batch in client.images.plain_batches(order, client.batch_size):
        hits += (client.forward(batch.images).logits.argmax(1) == batch.labels).sum()
    client.model.network.train()
    return hits, len(order)


def _pseudo(client: Client) -> PseudoLabels:
    labeller = client.session.labeller
    assert isinstance(labeller, Clusters)
    return labeller.pseudo or labeller.find()


def _groups(client: Client) -> Tensor:
    """Return the person or cluster of each image [n] int64 on the CPU, -1: none. Of copies, the first one counts."""
    if not client.training_settings.clusters:
        return client.images.labels
    pseudo = _pseudo(client)
    labels = pseudo.labels[: client.data.num_images]
    clusters = pseudo.proxies.clusters.cpu()
    return torch.where(labels >= 0, clusters[labels], labels) if len(clusters) else labels
