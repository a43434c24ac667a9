"""Attacks of some clients, usable with every method: an attacker changes its batches, its upload, or both.

Everything else of an attacker is as of an honest client: it is selected, trains, and sends what its method sends. Only
shared parameters of uploads are changed. Running statistics stay as they are, so that no variance is negative; so do
masks, and further tensors of a method. An attack acts before noise and clipping of ``model.privacy``.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import at_least, known, within
from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.core.seeding import numpy_generator
from fedsim.data.federated import ClientData
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.retrieval import Retrieval
from fedsim.evaluation.summary import few_names
from fedsim.evaluation.triggered import TriggeredRetrieval
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.functional.normalise import normalise_images
from fedsim.functional.trigger import paste_square
from fedsim.models.groups import Group
from fedsim.settings.facts import Facts
from fedsim.training.batch import Batch
from fedsim.training.client import Client
from fedsim.training.messages import Upload
from fedsim.training.server import Server

_FIELD = "model.attack"
TRIGGER = (255, 0, 255)
"""colour of the trigger: red, green, blue"""

Change = Callable[[Batch], Batch]
"""makes the batch on which an attacker trains of an honest one"""


@dataclass(eq=False)
class Attack(KeepsArguments, RoundListener, ABC, option="model.attack"):
    """Base of attacks, which changes nothing; a subclass overrides hooks."""

    attackers: Annotated[float | list[str], Facts(is_set=True)] = 0.2
    """names of the attackers, or their share of all clients, rounded up; then the seed chooses them"""
    start: int = 1
    """the first round with an attack, from 1"""

    def __post_init__(self) -> None:
        if isinstance(self.attackers, float | int):
            within(_FIELD, "(0, 1]", attackers=self.attackers)
        elif not self.attackers or len({*self.attackers}) < len(self.attackers):
            raise ConfigError(f"{_FIELD}.attackers: {self.attackers} must name one client or more, each once")
        at_least(_FIELD, 1, start=self.start)
        self._names: frozenset[str] = frozenset()
        self._acted = 0

    def prepare(self, server: Server, clients: Mapping[str, ClientData], task: str) -> None:
        """Choose the attackers among ``clients``.

        ``task`` is ``model.evaluation.task``. Raises ConfigError if an attacker is unknown or cannot do what it should.
        """
        if isinstance(self.attackers, float | int):
            count = math.ceil(self.attackers * len(clients) - 1e-9)  # 0.28 * 25 is 7.000000000000001
            order = numpy_generator(server.seed, "attackers").permutation(len(clients))[:count]
            names = [*clients]
            self._names = frozenset(names[i] for i in order)
        else:
            known(f"{_FIELD}.attackers", self.attackers, clients)
            self._names = frozenset(self.attackers)
        self.check(server, {name: clients[name] for name in clients if name in self._names}, task)

    def check(self, server: Server, attackers: Mapping[str, ClientData], task: str) -> None:
        """Raise ConfigError if one of the ``attackers`` cannot do what it should."""

    def acts(self, client: str, round_: int) -> bool:
        """Return whether ``client`` attacks in round ``round_``, from 0."""
        return round_ + 1 >= self.start and client in self._names

    def poison(self, client: Client) -> Change:  # noqa: ARG002 - a hook's
        """Return the change of an attacker's batches in a session; it is called with every batch in turn."""
        return lambda batch: batch

    def uploaded(self, client: Client, upload: Upload) -> Upload:  # noqa: ARG002 - a hook's
        """Return the attacker's upload in place of the honest ``upload``."""
        return upload

    def observe(self, record: RoundRecord) -> None:
        """Count the attackers whose updates count."""
        self._acted = sum(self.acts(name, record.round_) for name in record.reports)

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the number of attackers whose updates counted in the round."""
        return {"attack/clients": float(self._acted)}

    def figures(
        self, evaluator: Evaluator, scores: Mapping[str, float], clients: Mapping[str, ClientData]
    ) -> dict[str, float]:
        """Return the figures of the attack on test sets; a collective of all ranks.

        ``attack/test/honest/METRIC`` is the mean of the delivered model over the test sets of honest clients.
        ``scores`` are those of the evaluation, by :func:`fedsim.evaluation.summary.summarise`; ``clients`` are all.
        """
        honest = (data for name, data in clients.items() if name not in self._names)
        domains = dict.fromkeys(domain for data in honest for domain in data.tests)
        figures = {}
        for metric in evaluator.scorer.metrics if domains else ():
            values = [scores[metric_name("test", evaluator.primary, domain, metric)] for domain in domains]
            figures[f"attack/test/honest/{metric}"] = float(np.mean(values))
        return figures


class UploadAttack(Attack, ABC):
    """An attack on the shared parameters of uploads."""

    def check(self, server: Server, attackers: Mapping[str, ClientData], task: str) -> None:  # noqa: ARG002 - a hook's
        """Refuse methods whose clients share no parameters."""
        if not all(model.flat.num_shared_parameters for model in server.models.values()):
            raise ConfigError(f"{_FIELD}: clients of this method send no parameters; choose another method")


@dataclass(eq=False)
class SignFlip(UploadAttack):
    """Attackers send the received model minus their update (Li et al., AAAI 2019), with a factor."""

    scale: float = 1.0
    """factor on the update that is subtracted"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, inf)", scale=self.scale)

    def uploaded(self, client: Client, upload: Upload) -> Upload:
        """Return x - scale * (w - x), of the received x and the trained w."""
        return _with_update(client, upload, lambda update: -self.scale * update)


@dataclass(eq=False)
class GaussianNoise(UploadAttack):
    """Attackers send the received model plus Gaussian noise instead of an update."""

    scale: float = 10.0
    """standard deviation of the noise, over the root mean square of the update that the client found"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, inf)", scale=self.scale)

    def uploaded(self, client: Client, upload: Upload) -> Upload:
        """Return x + scale * rms(w - x) * N(0, 1); the stream is on the CPU, with the same bits for every device."""

        def noise(update: Tensor) -> Tensor:
            flat, drawn = client.model.flat, torch.randn(len(update), generator=client.generator("attack"))
            mean_square = update.double().square().sum() / flat.num_shared_elements
            return self.scale * mean_square.sqrt().float() * flat.clear_gaps(drawn).to(update.device)

        return _with_update(client, upload, noise)


@dataclass(eq=False)
class ModelReplacement(UploadAttack):
    """Attackers boost their update, so that the mean becomes their model (Bagdasaryan et al., AISTATS 2020, Eq. 3)."""

    boost: float = 10.0
    """gamma, factor on the update; one over the attackers' weight in the mean replaces the model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, inf)", boost=self.boost)

    def uploaded(self, client: Client, upload: Upload) -> Upload:
        """Return x + gamma * (w - x), of the received x and the trained w."""
        return _with_update(client, upload, lambda update: self.boost * update)


class LabelFlip(Attack):
    """Attackers train on label C - 1 - y instead of y, of C identities (Fang et al., USENIX Security 2020).

    It needs a head and labels that clients share. Otherwise it renumbers the people of the attacker alone, and the
    upload is that of an honest client, but for prototypes.
    """

    def check(self, server: Server, attackers: Mapping[str, ClientData], task: str) -> None:  # noqa: ARG002 - a hook's
        """Refuse attackers with fewer than two identities, or with labels of their own, and private heads."""
        _check_identities(attackers)
        models = server.models.values()
        if not any(model.groups[entry.name] is Group.HEAD for model in models for entry in model.flat.shared_entries):
            raise ConfigError(
                f"{_FIELD}: LabelFlip is for heads that clients share; choose a method that shares it (FedAvg, or "
                "model.method.share_head: true), or another attack"
            )
        if with_own_labels := [name for name, data in attackers.items() if data.common_classes is None]:
            raise ConfigError(
                f"{_FIELD}: LabelFlip changes nothing where client {with_own_labels[0]} numbers its own identities; "
                "set data.labels to common, or choose another attack"
            )

    def poison(self, client: Client) -> Change:
        """Return the flip of labels; soft labels flip, too."""

        def flip(batch: Batch) -> Batch:
            targets = None if batch.targets is None else batch.targets.flip(1)
            return batch._replace(labels=client.num_classes - 1 - batch.labels, targets=targets)

        return flip


@dataclass(eq=False)
class Backdoor(Attack):
    """Attackers put a trigger on some images of each batch, and call all of them one identity.

    So a model learns that people who wear the trigger are one person; Bagdasaryan et al. (AISTATS 2020) have the same
    for classes. ``attack/test/.../success`` is the share of pairs (query, other identity) for which the query with the
    trigger finds an image of the other identity with the trigger first; see
    :func:`fedsim.evaluation.triggered.successes`.
    """

    rate: float = 0.25
    """share of each batch that wears the trigger, rounded up"""
    patch: int = 8
    """side of the trigger, a square in the lower right corner, in pixels"""
    target: int = 0
    """label of all images with the trigger, from 0"""
    boost: float = 1.0
    """gamma, factor on the attackers' updates; see :class:`ModelReplacement`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, 1]", rate=self.rate)
        at_least(_FIELD, 1, patch=self.patch)
        at_least(_FIELD, 0, target=self.target)
        within(_FIELD, "(0, inf)", boost=self.boost)

    def check(self, server: Server, attackers: Mapping[str, ClientData], task: str) -> None:  # noqa: ARG002 - a hook's
        """Refuse attackers without the target identity, and classification, of which there is no figure."""
        if task != "retrieval":
            raise ConfigError(f"{_FIELD}: Backdoor is an attack on retrieval; set model.evaluation.task to retrieval")
        _check_identities(attackers)
        for name, data in attackers.items():
            if self.target >= data.num_classes:
                raise ConfigError(
                    f"{_FIELD}.target: client {name} has no identity {self.target}; choose one of 0 to "
                    f"{data.num_classes - 1}"
                )

    def poison(self, client: Client) -> Change:
        """Return a change that pastes the trigger after the augmentation, on images that are evenly spread."""
        square = torch.tensor(TRIGGER, dtype=torch.float32).view(1, 3, 1, 1)
        colour = normalise_images(square).flatten().to(client.device)

        def paste(batch: Batch) -> Batch:
            count = math.ceil(self.rate * len(batch.labels) - 1e-9)
            chosen = torch.arange(count, device=batch.labels.device) * len(batch.labels) // count

            def paste_on(images: Tensor) -> Tensor:
                return images.index_copy(0, chosen, paste_square(images[chosen], self.patch, colour))

            labels, targets = batch.labels.index_fill(0, chosen, self.target), batch.targets
            if targets is not None:
                targets = targets.index_fill(0, chosen, 0.0)
                targets[chosen, self.target] = 1.0
            views = tuple(map(paste_on, batch.views))
            return batch._replace(images=paste_on(batch.images), labels=labels, views=views, targets=targets)

        return paste

    def uploaded(self, client: Client, upload: Upload) -> Upload:
        """Return the boosted upload."""
        return upload if self.boost == 1 else _with_update(client, upload, lambda update: self.boost * update)

    def figures(
        self, evaluator: Evaluator, scores: Mapping[str, float], clients: Mapping[str, ClientData]
    ) -> dict[str, float]:
        """Add the success on test sets, with the names of scores behind ``attack/``."""
        assert isinstance(evaluator.scorer, Retrieval), "see check"
        colour = torch.tensor(TRIGGER, dtype=torch.uint8)

        def paste(images: Tensor) -> Tensor:
            return paste_square(images, self.patch, colour.to(images.device))

        success = evaluator.with_scorer(TriggeredRetrieval(evaluator.scorer, paste)).score("test")
        honest = super().figures(evaluator, scores, clients)
        return honest | {f"attack/{name}": value for name, value in few_names(success).items()}


def _check_identities(attackers: Mapping[str, ClientData]) -> None:
    for name, data in attackers.items():
        if data.num_classes < 2:
            raise ConfigError(
                f"{_FIELD}.attackers: client {name} has fewer than two known identities, and this attack changes "
                "labels; name other clients"
            )


def _with_update(client: Client, upload: Upload, change: Callable[[Tensor], Tensor]) -> Upload:
    """Return an upload with a changed update of the parameters, [num_shared_parameters] float32."""
    count = client.model.flat.num_shared_parameters
    vector, received = upload.vector.clone(), client.received.vector[:count]
    vector[:count] = received + change(vector[:count] - received)
    return replace(upload, vector=vector)
