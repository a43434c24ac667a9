"""Common parts of methods that prune: the prunable weights of a model, and the mask of a client.

A client's mask is kept under the name ``mask``, bool [num_shared_parameters]; see :mod:`fedsim.functional.pruning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.functional.pruning import zero_pruned_
from fedsim.methods.base import Delivered, InitialState, Need, Weights, weigh
from fedsim.training.features import PLAIN, extract_features
from fedsim.training.labels.source import Clusters
from fedsim.training.messages import Report, Upload

if TYPE_CHECKING:
    from fedsim.core.flat import Entry
    from fedsim.training.client import Client
    from fedsim.training.flat_model import FlatModel


class OwnMask:
    """Hooks of a method whose clients prune: client k trains, sends and uses theta_k * M_k, where M_k begins as ones.

    The server takes, per element, the plain mean over the clients that have not pruned it.
    """

    delivers: Delivered = "personalised"
    requires: frozenset[Need] = frozenset({"masks"})

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

    Names and numbers of dimensions do not tell: in ConvNeXt 93 % of the weights belong to linear layers, and its
    three-dimensional ``layer_scale`` does not. Norms, biases and private heads are never pruned.
    """
    modules = model.network.named_modules()
    names = {f"{path}.weight" for path, module in modules if isinstance(module, nn.Conv2d | nn.Linear)}
    return [entry for entry in model.flat.shared_parameters if entry.name in names]


def prunable_layers(model: FlatModel) -> list[slice]:
    """Return where :func:`prunable_entries` lie in the vector of shared parameters."""
    return [entry.span for entry in prunable_entries(model)]


def full_mask(model: FlatModel) -> Tensor:
    """Return the mask of a model that is not pruned: ones [num_shared_parameters]."""
    return torch.ones(model.flat.num_shared_parameters, dtype=torch.bool, device=model.device)


def zero_pruned(client: Client) -> Tensor:
    """Apply the client's mask to the model on which it trains; return its shared parameters, a view."""
    return zero_pruned_(client.model.shared[: len(client.kept["mask"])], client.kept["mask"])


def upload_masked(client: Client, signals: Mapping[str, float] | None = None, zeros_count: bool = False) -> Upload:
    """Return the model with the client's mask; see :attr:`Upload.zeros_count`."""
    mask = client.kept["mask"]
    is_new = not torch.equal(mask, client.remembered("mask").to(mask.device))
    return Upload(client.model.shared, signals=signals or {}, mask=mask, is_new_mask=is_new, zeros_count=zeros_count)


@torch.no_grad()
def own_accuracy(client: Client, num_images: int | None = None) -> float:
    """Return the share of training images that the client's model classifies right, in evaluation mode.

    No test image is used, and images are not augmented. Where labels are clusters, it is the share of clustered images
    whose nearest proxy belongs to their own cluster; before the first local epoch, clusters are found for it.

    ``num_images`` random images are drawn anew in each round; None: all. With clusters it is always all.
    """
    if client.training_settings.clusters:
        return proxy_accuracy(client)
    total = client.data.num_images
    order = torch.arange(total)
    if num_images is not None and num_images < total:
        order = torch.randperm(total, generator=client.generator("accuracy images"))[:num_images]
    client.model.network.eval()
    hits = torch.zeros((), dtype=torch.int64, device=client.device)
    for batch in client.images.plain_batches(order, client.batch_size):
        hits += (client.forward(batch.images).logits.argmax(1) == batch.labels).sum()
    client.model.network.train()
    return int(hits) / len(order)


def proxy_accuracy(client: Client) -> float:
    """Return the accuracy of the proxies of the current local epoch; 0 without clusters."""
    model, source = client.model, client.visit.source
    assert isinstance(source, Clusters)
    pseudo = source.pseudo or source.find()
    index = (pseudo.labels >= 0).nonzero().flatten()
    if not len(index):
        return 0.0
    features = extract_features(model.network, client.images.pixels, PLAIN, model.device)
    model.network.train()
    nearest = (F.normalize(features) @ pseudo.proxies.memory.T).argmax(1)
    guesses = pseudo.proxies.clusters[nearest][(index % client.data.num_images).to(nearest.device)]
    truth = pseudo.proxies.clusters[pseudo.labels[index].to(nearest.device)]
    return float((guesses == truth).double().mean())
