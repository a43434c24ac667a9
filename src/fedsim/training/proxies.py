"""Proxies: the mean features of clusters, one for each camera, kept in a memory while a client trains.

A proxies, B images of a batch, C cameras, D features. Paper 004, Section III; M. Wang et al., "Camera-aware Proxies for
Unsupervised Person Re-Identification", AAAI 2021 (CAP).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.transfer import send
from fedsim.data.batches import sampled


@dataclass
class Proxies:
    """The proxies of a client's clusters, one for each camera, sorted by cluster, then by camera."""

    memory: Tensor
    """K, [A, D] float32 of unit length; it changes while the client trains"""
    clusters: Tensor
    """[A] int64"""
    cameras: Tensor
    """[A] int64"""

    def __len__(self) -> int:
        """Return A."""
        return len(self.clusters)

    @cached_property
    def by_camera(self) -> Tensor:
        """Whether a proxy belongs to a camera, [C, A] bool."""
        cameras: Tensor = self.cameras.unique()
        return self.cameras == cameras[:, None]


def make_proxies(features: Tensor, clusters: Tensor, cameras: Tensor) -> tuple[Proxies, Tensor]:
    """Return the proxies of clustered images, and the proxy of each image.

    A proxy is the mean of its images' features [n, D] of unit length, scaled to unit length. ``clusters`` (-1: none)
    and ``cameras`` are [n] int64 on the CPU. The proxies are on the device of the features; the proxy of each image is
    [n] int64 on the CPU, -1: none.

    >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    >>> proxies, of_image = make_proxies(x, torch.tensor([0, 0, 0, -1]), torch.tensor([0, 0, 1, 1]))
    >>> proxies.memory
    tensor([[0.7071, 0.7071],
            [0.0000, 1.0000]])
    >>> of_image
    tensor([ 0,  0,  1, -1])
    """
    inside = (clusters >= 0).nonzero().flatten()
    pairs = torch.stack([clusters[inside], cameras[inside]], dim=1)
    kinds, labels = pairs.unique(dim=0, return_inverse=True)
    of_image = torch.full_like(clusters, -1)
    of_image[inside] = labels
    device = features.device
    unit = F.normalize(features.index_select(0, send(inside, device)).float())
    order = labels.argsort(stable=True)  # sums in the order of the images, the same on every device
    groups = unit.index_select(0, send(order, device)).split(labels.bincount(minlength=len(kinds)).tolist())
    means = [group.mean(dim=0) for group in groups]
    memory = F.normalize(torch.stack(means)) if means else features.new_empty(0, features.shape[1])
    clusters, cameras = send(kinds.T.contiguous(), device)
    return Proxies(memory, clusters, cameras), of_image


def proxy_batches(labels: Tensor, num_proxies: int, num_instances: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of P proxies with K images each; as many as the clustered images fill, at least one.

    A pass takes all proxies in random order, P at a time, each with K of its images, which repeat if there are fewer.
    The rest of a pass is dropped. With fewer than P proxies a batch holds all of them.

    ``labels`` [n] int64 are the proxies of the images, -1: none; ``num_proxies`` is P, ``num_instances`` K; the
    generator is on the CPU. Returns int64 index tensors of P * K positions in ``labels``; none without proxies.

    >>> labels = torch.tensor([0, 1, 1, -1, 1])
    >>> [batch.tolist() for batch in proxy_batches(labels, 2, 1, torch.Generator().manual_seed(0))]
    [[0, 1], [0, 2]]
    """
    inside = (labels >= 0).nonzero().flatten()
    if not len(inside):
        return []
    by_proxy = inside[labels[inside].argsort(stable=True)]
    members = by_proxy.split(labels[inside].bincount().tolist())
    per_batch = min(num_proxies, len(members))
    count = max(1, len(inside) // (num_proxies * num_instances))
    batches: list[Tensor] = []
    while len(batches) < count:
        order = torch.randperm(len(members), generator=generator)[: len(members) // per_batch * per_batch]
        drawn = torch.cat([sampled(members[proxy], num_instances, generator) for proxy in order.tolist()])
        batches += drawn.split(per_batch * num_instances)
    return batches[:count]
