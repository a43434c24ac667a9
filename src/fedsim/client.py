"""One virtual client: private images, private state, and the local training loop."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fedsim.core.errors import TrainingError
from fedsim.core.flat import FlatParameters
from fedsim.core.seeding import derive_seed, torch_generator
from fedsim.data.augmentation import Augmentation
from fedsim.data.batches import identity_batches, shuffled_batches
from fedsim.data.federations import ClientData
from fedsim.functional.losses import batch_hard_triplet, smoothed_cross_entropy
from fedsim.models.groups import Group
from fedsim.models.reid import Features, ReIDModel, make_head
from fedsim.settings import LocalTraining, Objective, autocast

__all__ = ["Batch", "BatchReport", "Client", "Output", "Resident", "Tally"]


class Batch(NamedTuple):
    """A training batch on the device."""

    images: Tensor
    """[B, 3, H, W] float32, augmented and normalised"""
    labels: Tensor
    """[B] int64, 0 .. num_classes - 1"""


class Output(NamedTuple):
    """What the client's model says about a batch."""

    features: Features
    logits: Tensor
    """[B, Z]"""


class BatchReport(NamedTuple):
    """Progress within a client's round, for progress displays."""

    client: str
    done: int
    """batches of this local epoch that are done"""
    total: int
    """batches of this local epoch"""
    share: float
    """of the client's whole round that is done, in (0, 1]"""
    loss: Tensor
    """of the last batch; reading it waits for the device, so do that rarely"""


@dataclass(frozen=True)
class Resident:
    """The model of one architecture that lives on this rank's device; clients are loaded into it one after another."""

    arch: str
    model: ReIDModel
    flat: FlatParameters
    groups: dict[str, Group]
    counters: dict[str, Tensor]
    """initial integer buffers, such as num_batches_tracked: nobody's state, so each client starts from them"""

    @property
    def checksum(self) -> int:
        """48 bits of a hash of all weights: exact in float64."""
        weights = self.flat.buffer.cpu().numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(weights, digest_size=6).digest(), "big")

    @property
    def shared_bytes(self) -> int:
        """Bytes of one transfer of the shared tensors: float32, without padding."""
        return 4 * sum(entry.numel for entry in self.flat.shared_entries)

    def reset_counters(self) -> None:
        """Set integer buffers back."""
        for name, tensor in self.counters.items():
            self.model.get_buffer(name).copy_(tensor)

    @property
    def is_complete(self) -> bool:
        """Whether everything that retrieval needs is shared, so that the server has a model of its own."""
        return all(e.shared for e in self.flat.entries if self.groups[e.name] is not Group.HEAD)


class Tally:
    """Sums over a client's round, kept on the device: no batch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct
        self._images = 0

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one batch: mean loss (scalar), logits [B, Z], labels [B]."""
        correct = (logits.argmax(1) == labels).sum()
        self._sums += torch.stack([loss.double() * len(labels), correct.double()])
        self._images += len(labels)

    def read(self) -> tuple[float, float, float]:
        """Return (sum of losses, correct images, images); waits for the device."""
        loss, correct = self._sums.tolist()
        return loss, correct, float(self._images)


class Client(LightningModule):
    """A participant of the federation.

    Args:
        data: its images and labels, not decoded.
        training: local epochs, batches, optimizer, rates.
        objective: the supervised loss.
        augmentation: of training images.
        resident: the model of its architecture on this rank.
        seed: of the run.
        limit_batches: see FederatedDataModule.limit_client_batches.
    """

    def __init__(
        self,
        *,
        data: ClientData,
        training: LocalTraining,
        objective: Objective,
        augmentation: Augmentation,
        resident: Resident,
        seed: int,
        limit_batches: float | None = None,
    ) -> None:
        super().__init__()
        self.client_name = data.name
        self.data = data
        self.training_settings = training
        self.objective = objective
        self.augmentation = augmentation
        self.resident = resident
        self.seed = seed
        self.limit_batches = limit_batches
        self.head = self._make_head()
        self.private: Tensor
        self.register_buffer("private", resident.flat.private.clone())
        self.kept: dict[str, Tensor] = {}
        """what the method wants to remember between rounds, by name; see :meth:`keep`"""
        self.round = 0
        self.images: Tensor | None = None
        """[n, 3, H, W] uint8 in host memory, once decoded"""
        self.snapshot: Tensor | None = None
        """the whole local model after training, before aggregation [N], in host memory; evaluation rounds only"""

    def _make_head(self) -> nn.Linear | None:
        if self.resident.model.head is not None:  # shared by all clients: it is part of the resident model
            return None
        generator = torch_generator(self.seed, self.client_name, "head")
        return make_head(self.resident.model.num_features, self.data.num_classes, generator)

    # -- one round -----------------------------------------------------------------------------------------------------

    def begin_round(self, round_: int, work: float, precision: str, listener: Callable[[BatchReport], None]) -> None:
        """Load the private state and set every random stream of this visit.

        Args:
            round_: from 0.
            work: share of the local work that gets done (stragglers: below 1).
            precision: Lightning's name, ``32-true`` or ``bf16-mixed``.
            listener: told about every batch.
        """
        self.round, self.precision, self.listener = round_, precision, listener
        self.resident.flat.private.copy_(self.private)
        self.resident.reset_counters()
        self.resident.model.set_generator(self.generator("dropout", device=self.device))
        torch.manual_seed(derive_seed(self.seed, round_, self.client_name, "modules"))  # for foreign modules' own noise
        self.augment_stream = self.generator("augment", device=self.device)
        self.batch_stream = self.generator("batches")
        self.tally = Tally(self.device)
        self.local_optimizer = self.configure_optimizers()
        self.local_optimizer.zero_grad()
        self.work = work
        self.started = time.perf_counter()
        self.resident.model.train()

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of local epoch ``epoch`` = 0, 1, ... as far as the client gets with its share of work."""
        assert self.images is not None
        order = self._epoch_order()
        share = min(max(self.work * self.training_settings.local_epochs - epoch, 0.0), 1.0)
        count = max(int(share * len(order)), 1 if epoch == 0 else 0)
        for position, index in enumerate(order[:count], start=1):
            self.progress = (epoch, position, count)
            images = self.images[index].to(self.device, non_blocking=True)
            labels = torch.from_numpy(self.data.labels)[index].to(self.device, non_blocking=True)
            yield Batch(self.augmentation(images, self.augment_stream), labels)

    def forward(self, images: Tensor) -> Output:
        """Run the client's model on normalised images [B, 3, H, W]."""
        with autocast(self.device, self.precision):
            features = self.resident.model(images)
            logits = self.classifier(features.neck)
        return Output(Features(features.pool.float(), features.neck.float()), logits.float())

    def training_step(self, batch: Batch) -> Tensor:
        """Return the supervised loss of a batch (scalar) and count it."""
        output = self(batch.images)
        goal = self.objective
        loss = smoothed_cross_entropy(output.logits, batch.labels, goal.label_smoothing)
        if goal.triplet > 0:
            features = output.features.pool if goal.triplet_on == "pool" else output.features.neck
            loss = loss + goal.triplet * batch_hard_triplet(features, batch.labels, goal.margin)
        self.tally.add(loss.detach(), output.logits.detach(), batch.labels)
        return loss

    def step(self, loss: Tensor) -> bool:
        """Back-propagate, and step the optimizer after every ``accumulate`` batches and after an epoch's last one.

        Returns:
            whether the optimizer stepped.
        """
        settings = self.training_settings
        epoch, done, total = self.progress
        (loss / settings.accumulate).backward()
        steps = done % settings.accumulate == 0 or done == total
        if steps:
            if settings.grad_clip is not None:
                parameters = [p for group in self.local_optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(parameters, settings.grad_clip)
            self.local_optimizer.step()
            self.local_optimizer.zero_grad()
        share = (epoch + done / total) / settings.local_epochs
        self.listener(BatchReport(self.client_name, done, total, share, loss.detach()))
        return steps

    def end_round(self, keep_snapshot: bool) -> float:
        """Store the private state.

        Args:
            keep_snapshot: whether to keep the local model for an evaluation.

        Returns:
            seconds since :meth:`begin_round`.

        Raises:
            TrainingError: if the loss or a weight is not finite.
        """
        self.private.copy_(self.resident.flat.private)
        del self.local_optimizer  # its moments would occupy the device until the client's next round
        self.snapshot = self.resident.flat.buffer.cpu().clone() if keep_snapshot else None
        loss = self.tally.read()[0]
        if not math.isfinite(loss) or not bool(self.resident.flat.buffer.isfinite().all()):
            raise TrainingError(
                f"client {self.client_name}, round {self.round + 1}: loss or weights are not finite; "
                "lower model.client.optimizer's lr or set model.client.grad_clip"
            )
        return time.perf_counter() - self.started

    def keep(self, name: str, tensor: Tensor) -> None:
        """Remember a copy of ``tensor`` between rounds and in checkpoints."""
        self.kept[name] = tensor.detach().clone()

    def private_state(self) -> dict[str, Tensor]:
        """Return everything that must survive between rounds: private groups, head, and what the method keeps."""
        return {**self.state_dict(), **{f"kept.{name}": tensor for name, tensor in self.kept.items()}}

    def load_private_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`private_state`."""
        kept = {name: tensor for name, tensor in state.items() if name.startswith("kept.")}
        self.kept = {name.removeprefix("kept."): tensor.to(self.device) for name, tensor in kept.items()}
        self.load_state_dict({name: tensor for name, tensor in state.items() if name not in kept})

    # -- pieces --------------------------------------------------------------------------------------------------------

    @property
    def classifier(self) -> nn.Linear:
        """The identity head: the client's own, or the shared one."""
        head = self.head or self.resident.model.head
        assert head is not None
        return head

    def configure_optimizers(self) -> Optimizer:
        """Make the local optimizer: the trunk's rate, the head's rate, both times the schedule's factor."""
        settings, model = self.training_settings, self.resident.model
        rest = [*model.neck.parameters(), *self.classifier.parameters()]
        optimizer = settings.optimizer([{"params": [*model.backbone.parameters()]}, {"params": rest}])
        factor = settings.schedule.factor(self.round)
        for group, own_rate in zip(optimizer.param_groups, (None, settings.head_lr), strict=True):
            group["lr"] = factor * (group["lr"] if own_rate is None else own_rate)
        return optimizer

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a random stream of this client, round and purpose."""
        return torch_generator(self.seed, self.round, self.client_name, purpose, device=device)

    def _epoch_order(self) -> list[Tensor]:
        settings = self.training_settings
        if settings.sampler == "identity":
            labels = torch.from_numpy(self.data.labels)
            order = identity_batches(labels, settings.batch_size, settings.num_instances, self.batch_stream)
        else:
            order = shuffled_batches(
                self.data.num_images, settings.batch_size, self.batch_stream, settings.drop_partial
            )
        return order[: self._limit(len(order))]

    def _limit(self, num_batches: int) -> int:
        limit = self.limit_batches
        if limit is None:
            return num_batches
        return min(num_batches, int(limit)) if limit >= 1 else max(1, int(limit * num_batches))
