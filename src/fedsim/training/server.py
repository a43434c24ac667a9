"""The server: one global vector per architecture, its batch-norm policy, and adaptive server optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.work import Counts, Work, counted_steps
from fedsim.data.augmentation import Augmentation
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Answers, Download
from fedsim.training.public import PublicImages


def arch_name(class_name: str) -> str:
    """Return the name of an architecture whose network is of the class ``class_name``.

    The global vectors are in a ParameterDict, so a name that is one of its attributes gets an underscore.

    >>> arch_name("SmallCNN"), arch_name("Forward"), arch_name("Keys")
    ('smallcnn', 'forward_', 'keys_')
    """
    name = class_name.lower()
    return f"{name}_" if hasattr(nn.ParameterDict(), name) else name


class Server(nn.Module):
    """The global model: a flat vector per architecture. ``state_dict()`` contains only these vectors.

    It begins with the weights of this rank's ``models``, by architecture. ``archs`` has the architecture of every
    client, ``augmentation`` is that of training images, and ``seed`` the run's. ``num_public``, the number of public
    images, is set before they are decoded.
    """

    def __init__(
        self,
        models: Mapping[str, FlatModel],
        archs: Mapping[str, str] | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        num_public: int = 0,
    ) -> None:
        super().__init__()
        self.models, self._archs = dict(models), archs or {}
        self.augmentation = augmentation or Augmentation()
        self.seed, self.num_public = seed, num_public
        self.round = 0
        """the current round, from 0"""
        self.answers: Mapping[str, Answers] = {}
        """by architecture: of the last round, without architectures in which no client returned an update"""
        self.kept: dict[str, dict[str, Tensor]] = {arch: {} for arch in models}
        """architecture -> tensors that the method keeps between rounds, by name; see :meth:`keep`"""
        self.tables: dict[str, Tensor] = {}
        """rows that clients have sent, by table; see :meth:`table`"""
        self.before: Mapping[str, Tensor] = {}
        """during the method's server step: architecture -> global vector [num_shared] from the start of the round"""
        self.work: Counts = (0, 0)
        """images and steps of the server in this round: of the method's server step, and of :attr:`trained`"""
        self.trained: Mapping[str, Tensor] = {}
        """architecture -> vector [num_shared] that the server has trained from this round's global model on labelled
        images of its own; empty unless the rule of the aggregation needs it"""
        self.public: PublicImages | None = None
        """unlabelled images that the server may use, once they are decoded"""
        self.vectors = nn.ParameterDict({a: models[a].shared.cpu().clone() for a in sorted(models)})

    @property
    def num_clients(self) -> Mapping[str, int]:
        """Architecture -> clients in the federation."""
        return Counter(self._archs.values())

    def vector(self, arch: str) -> Tensor:
        """Return the global vector [num_shared] of an architecture, without gradient."""
        vector: Tensor = self.vectors[arch]
        return vector.detach()

    def send(
        self, arch: str, names: Iterable[str], with_public: bool = False, vector: Tensor | None = None
    ) -> Download:
        """Return the message to a client of an architecture, with the kept tensors ``names``.

        ``vector`` takes the place of the global vector.
        """
        extras = {name: self.kept[arch][name] for name in names}
        return Download(self.vector(arch) if vector is None else vector, extras, self.public if with_public else None)

    def keep(self, arch: str, name: str, tensor: Tensor) -> None:
        """Keep a copy of ``tensor`` between rounds and in checkpoints, on the device of the models."""
        self.kept[arch][name] = tensor.detach().to(self.models[arch].device, copy=True)

    def load_kept(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore :attr:`kept` from a checkpoint."""
        for arch, tensors in kept.items():
            for name, tensor in tensors.items():
                self.keep(arch, name, tensor)

    def table(self, name: str, columns: int) -> Tensor:
        """Return the rows [n, columns] that clients of all architectures have sent, on the device of the models."""
        device = next(iter(self.models.values())).device
        return self.tables.get(name, torch.zeros(0, columns, device=device))

    def join(self, rows: Mapping[str, Tensor]) -> None:
        """Append ``rows`` [any number, columns] to tables; every rank does so with the same rows."""
        for name, new in rows.items():
            if len(new):
                old = self.table(name, new.shape[1])
                self.tables[name] = torch.cat([old, new.detach().to(old.device)])

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the images on which this block trains the models, and the steps of its optimizers, to :attr:`work`."""
        work = Work()
        work.add(self.work)
        for model in self.models.values():
            model.begin_work(counts_images=True)
        with counted_steps(work):
            yield
        for model in self.models.values():
            for counts in model.take_work().values():
                work.add(counts)
        self.work = work.take()

    def recalibrate(self, batch_size: int) -> None:
        """Replace all running statistics by plain averages over batches of the public images."""
        assert self.public is not None
        for arch, model in self.models.items():
            model.shared.copy_(self.vector(arch))
            with model.counting():
                torch.optim.swa_utils.update_bn(self.public.plain_batches(batch_size), model.network)
            self.vector(arch).copy_(model.shared)

    def step(
        self,
        optimizer: Callable[[], Any],
        means: Mapping[str, Tensor],
        exact: Mapping[str, slice],
        sizes: Mapping[str, float] | None = None,
        untouched: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Step every vector with the pseudo-gradient ``theta - mean`` (Reddi et al., ICLR 2021).

        Args:
            optimizer: the server optimizer's step.
            means: architecture -> weighted mean of the uploads [num_shared], float32; architectures without an update
                are missing and keep their vector.
            exact: architecture -> the part of the vector that becomes the mean: running statistics, or all of it for
                plain averaging.
            sizes: architecture -> step size of the parameters towards the mean, where it is not 1; statistics always
                become their mean.
            untouched: architecture -> parameters without a mean, bool [num_shared_parameters], if there are any: they
                stay, also under momentum.
        """
        held = {arch: mask.nonzero()[:, 0] for arch, mask in (untouched or {}).items()}
        before = {arch: self.vector(arch)[index] for arch, index in held.items()}
        means = {arch: self._between(arch, mean, (sizes or {}).get(arch, 1.0)) for arch, mean in means.items()}
        for arch, mean in means.items():
            steps = exact[arch] != slice(None)  # otherwise the optimizer only counts its steps
            gradient = self.vector(arch) - mean if steps else None
            if gradient is not None and arch in held:
                gradient[held[arch]] = 0.0
            self.vectors[arch].grad = gradient
        optimizer()
        with torch.no_grad():
            for arch, mean in means.items():
                self.vectors[arch][exact[arch]] = mean[exact[arch]]
            for arch, index in held.items():
                self.vector(arch)[index] = before[arch]
        for vector in self.vectors.values():
            vector.grad = None

    def _between(self, arch: str, mean: Tensor, size: float) -> Tensor:
        """Return ``theta + size * (mean - theta)`` of the parameters, in float64, with the mean's statistics."""
        if size == 1.0:
            return mean
        result, parameters = mean.clone(), slice(self.models[arch].flat.num_shared_parameters)
        theta = self.vector(arch)[parameters].double()
        result[parameters] = theta + size * (mean[parameters].double() - theta)
        return result
