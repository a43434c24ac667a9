"""pfl-research: FederatedAveraging.run on a SimulatedBackend, as in its tutorials; under torchrun, on several workers.

pfl draws one user at a time, so a user's name is (round, client) here, and its data are in the order of the batches.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain

import torch
import torch.nn.functional as F
from common import BATCH, LR, Clock, Normalise, Work, load_work, parse_job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Module(nn.Sequential):
    """A network with the two methods that pfl calls."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(self(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Return what pfl reports of a user; it asks in the first round only."""
        with torch.no_grad():
            return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}


class ToChannelsFirst(nn.Module):
    """The first layer of the network of pfl's benchmark, whose images have the colours last."""

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, H, W, 3] to [B, 3, H, W], which stays as it is in memory."""
        return images.permute(0, 3, 1, 2)


class Script(Module):
    """The network of pfl's CIFAR-10 benchmark, which sets its mode in each call."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, with dropout."""
        self.train()
        return super().loss(images, labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Return loss and accuracy of a user, without dropout."""
        self.eval()
        with torch.no_grad():
            logits = self(images)
            loss = F.cross_entropy(logits, labels, reduction="sum").item()
            correct = (logits.argmax(-1) == labels).float().sum().item()
        return {"loss": Weighted(loss, len(labels)), "accuracy": Weighted(correct, len(labels))}


class Stopwatch(TrainingProcessCallback[PyTorchModel]):
    """Ticks after each round."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_central_iteration(
        self,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        *,
        central_iteration: int,
    ) -> tuple[bool, Metrics]:
        """Tick, and go on."""
        self.clock.tick(model.variable_map)
        return False, Metrics()


def make_users(work: Work, images: Tensor) -> FederatedDataset:
    """Return the users in the order in which they train; ``images`` are the work's, as the network takes them."""
    sessions = chain.from_iterable([(r, client) for client in clients] for r, clients in enumerate(work.selected))

    def make_user(name: tuple[int, int]) -> PyTorchTensorDataset:
        work.seed_dropout(*name)
        index = work.index(*name)
        return PyTorchTensorDataset((images[index], work.labels[index]), user_id=str(name))

    return FederatedDataset(make_user, user_sampler=lambda: next(sessions))


def make_model(net: nn.Sequential, is_script: bool) -> PyTorchModel:
    """Return pfl's model; a central rate of 1 is plain averaging."""
    layers = OrderedDict(net.named_children())
    if is_script:  # images are normalised once
        layers["normalise"] = ToChannelsFirst()
    module = (Script if is_script else Module)(layers)
    return PyTorchModel(module, torch.optim.SGD, central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0))


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    work = load_work(job.work)
    is_script = job.model == "cifar"
    images = Normalise()(work.images).permute(0, 2, 3, 1).contiguous() if is_script else work.images
    users = make_users(work, images)
    weighting = WeightByUser() if is_script else WeightByDatapoints()
    backend = SimulatedBackend(users, val_data=users, postprocessors=[weighting])
    settings = NNAlgorithmParams(
        central_num_iterations=job.rounds,
        evaluation_frequency=job.rounds,
        train_cohort_size=len(work.selected[0]),
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR[job.model], local_batch_size=BATCH)
    model = make_model(work.start(job.model), is_script)
    FederatedAveraging().run(settings, backend, model, local, callbacks=[Stopwatch(clock)])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        clock.report(job, "pfl")


if __name__ == "__main__":
    main()
