"""The order of a client's images within one local epoch. All randomness comes from the given generator."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 2**18  # pixel values per group of batches: a megabyte of float32 fits into a CPU cache


def shuffled_batches(
    num_images: int, batch_size: int, generator: torch.Generator, drop_partial: bool = False
) -> list[Tensor]:
    """Cut a random order of n images into batches: int64 index tensors of B entries; the last one may have fewer.

    A last batch of one image is dropped, because batch normalisation cannot train on it (unless B is 1). With
    ``drop_partial``, any last batch of fewer than B images is dropped. The generator is on the CPU.

    >>> [len(batch) for batch in shuffled_batches(7, 3, torch.Generator().manual_seed(0))]
    [3, 3]
    """
    batches = torch.randperm(num_images, generator=generator).split(batch_size)
    smallest = batch_size if drop_partial else min(2, batch_size)
    return list(batches if len(batches[-1]) >= smallest else batches[:-1])


def identity_batches(
    labels: Tensor, batch_size: int, num_instances: int, generator: torch.Generator, *, cameras: Tensor | None = None
) -> list[Tensor]:
    """Return batches of P identities with K images each (Hermans et al., 2017), as int64 index tensors.

    Each identity's shuffled images are cut into groups of K (a short group repeats images). A batch has one group of
    each of P identities, as long as P identities have groups left; with fewer than P identities, one group of each.
    ``labels`` [n] int64; ``batch_size`` is P * K, ``num_instances`` K; the generator is on the CPU.

    With ``cameras`` [n] int64 there are as many groups, each of a random image and K - 1 of the identity's images of
    other cameras; if it has none, of its other images. The first images differ, the others may come again.
    """
    images = {int(z): torch.nonzero(labels == z).flatten() for z in labels.unique()}
    if cameras is None:
        groups = {z: _groups_of(index, num_instances, generator) for z, index in images.items()}
    else:
        groups = {z: _groups_across(index, cameras[index], num_instances, generator) for z, index in images.items()}
    per_batch = min(batch_size // num_instances, len(groups))
    batches: list[Tensor] = []
    while True:
        left = [z for z, queue in groups.items() if queue]
        if len(left) < per_batch:
            return batches
        order = torch.randperm(len(left), generator=generator)[:per_batch].tolist()
        batches.append(torch.cat([groups[left[i]].pop(0) for i in order]))


def people_batches(
    labels: Tensor, batch_size: int, num_instances: int, generator: torch.Generator, *, cameras: Tensor | None = None
) -> list[Tensor]:
    """Return batches of a pass over the people, as int64 index tensors: all identities come equally often.

    Each identity, in random order, has one group: a random image, and K - 1 others of the identity, with ``cameras``
    [n] int64 of other cameras if it has such. They repeat if there are fewer than K of them to choose from; an image
    that is alone stays alone. The groups, one behind the other, are cut into batches of ``batch_size``, so that a lone
    image shifts those behind it; a last batch of fewer images is dropped, unless it is the only one.
    ``RandomMultipleGallerySampler`` of SpCL (Ge et al., 2020), DACS and SSCU; ``labels`` [n] int64, ``num_instances``
    K, the generator is on the CPU.
    """
    people = labels.unique()
    groups = []
    for z in people[torch.randperm(len(people), generator=generator)]:
        index = torch.nonzero(labels == z).flatten()
        first = int(torch.randint(len(index), (), generator=generator))
        candidates = _partners(index, None if cameras is None else cameras[index], first)
        count = num_instances - 1 if len(candidates) else 0
        if len(candidates) >= num_instances:
            chosen = torch.randperm(len(candidates), generator=generator)[:count]
        else:
            chosen = torch.randint(max(1, len(candidates)), (count,), generator=generator)
        groups.append(torch.cat([index[[first]], candidates[chosen]]))
    batches = torch.cat(groups).split(batch_size)
    return list(batches if len(batches) == 1 or len(batches[-1]) == batch_size else batches[:-1])


def _partners(index: Tensor, cameras: Tensor | None, first: int) -> Tensor:
    """Return an identity's images beside its ``first``: those of other ``cameras`` [n], if there are such."""
    is_other = torch.arange(len(index)) != first
    is_elsewhere = is_other if cameras is None else cameras != cameras[first]
    return index[is_elsewhere if is_elsewhere.any() else is_other]


def _groups_of(index: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Cut the images of an identity into random groups."""
    index = index[torch.randperm(len(index), generator=generator)]
    groups = list(index.split(size))
    short = size - len(groups[-1])
    if short:  # the group that repeats images is the last to be used
        candidates = index[: -len(groups[-1])] if len(groups) > 1 else index
        groups[-1] = torch.cat([groups[-1], sampled(candidates, short, generator)])
    return groups


def _groups_across(index: Tensor, cameras: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Return groups of the images of an identity, each of a random image and some of ``cameras`` [n] other than its."""
    groups = []
    for first in torch.randperm(len(index), generator=generator)[: -(-len(index) // size)].tolist():
        partners = _partners(index, cameras, first)
        groups.append(torch.cat([index[[first]], sampled(partners if len(partners) else index, size - 1, generator)]))
    return groups


def sampled(index: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` of the images ``index`` in random order; they repeat only if there are fewer."""
    return index[torch.randperm(len(index), generator=generator)[torch.arange(count) % len(index)]]


def shares_of_steps(batches: list[Tensor], accumulate: int) -> list[float]:
    """Return each batch's share of the images of its optimizer step: ``accumulate`` batches, the last step maybe fewer.

    >>> shares_of_steps([torch.arange(n) for n in (8, 8, 8, 8, 2)], accumulate=2)
    [0.5, 0.5, 0.5, 0.5, 1.0]
    """
    if accumulate == 1:
        return [1.0] * len(batches)
    groups = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    return [len(batch) / sum(map(len, group)) for group in groups for batch in group]


def limited(batches: list[Tensor], limit: float | None) -> list[Tensor]:
    """Return the first ``limit`` batches; a limit below 1 is a share of them, at least one batch; None: all.

    >>> [len(limited([torch.tensor([0])] * 100, limit)) for limit in (None, 4, 0.255, 0.001, 0.29)]
    [100, 4, 25, 1, 29]
    """
    if limit is None:
        return batches
    # without the margin, 0.29 * 100 = 28.999999999999996 would be 28 batches
    return batches[: int(limit) if limit >= 1 else max(1, int(limit * len(batches) + 1e-9))]


def grouped(batches: list[Tensor], num_values: int) -> list[list[Tensor]]:
    """Group small batches of ``num_values`` pixel values: one operation on a group is faster than one on each batch."""
    step = max(1, _GROUP // max(1, num_values))
    return [batches[start : start + step] for start in range(0, len(batches), step)]
