"""The rounds of ``many_clients.py`` in pfl-research, which that script starts with a Python that has pfl.

Users are made when they are called, as pfl documents it: ``FederatedDataset`` with a function of the user's id, and its
own sampler over N ids. A user's labels are computed in that function (``function``), or all users' labels are held in a
dictionary from the start (``held``), as ``from_slices`` does it and as fedsim's clients do. The whole network is
averaged; pfl's federated averaging keeps nothing of a user. Batch-norm statistics stay where they are.
"""

from __future__ import annotations

import argparse
import functools
import json

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from round_clock import RoundClock

PER_ROUND = 100
CLASSES = 10
BATCH = 10
IMAGES = 20
SIZE = (16, 8)
POOL = 100
"""arrays of images, one of which a user has"""
WIDTH = 4


class Network(nn.Module):
    """fedsim's ``SmallCNN``, ``bnneck`` and head by hand, with the two methods that pfl calls."""

    scale: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        self.register_buffer("scale", 1 / (255 * std))
        self.register_buffer("offset", -mean / std)
        channels, layers = (3, WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH), list[nn.Module]()
        for i in range(4):
            convolution = nn.Conv2d(channels[i], channels[i + 1], 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels[i + 1]), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)] if i < 3 else []
        self.body = nn.Sequential(*layers)
        self.neck, self.head = nn.BatchNorm1d(channels[-1]), nn.Linear(channels[-1], CLASSES)
        self.steps = 0

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [B, 3, H, W] to logits [B, classes]."""
        maps = self.body(images.mul(self.scale).add_(self.offset))
        logits: Tensor = self.head(self.neck(maps.mean((2, 3))))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        self.steps += 1
        return F.cross_entropy(self(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Return what pfl reports of a user; it asks in the first round only."""
        with torch.no_grad():
            return {"loss": Weighted(F.cross_entropy(self(images), labels).item() * len(labels), len(labels))}


class Ticks(TrainingProcessCallback[PyTorchModel]):
    """Reports to the clock when rounds begin and end."""

    def __init__(self, clock: RoundClock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The assembly is over."""
        self.clock.begin_rounds()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round is over."""
        self.clock.end_round()
        return False, Metrics()


def make_users(clients: int, is_held: bool) -> FederatedDataset:
    """Return the federation, with the sampler that pfl recommends."""
    pool = [torch.randint(0, 256, (IMAGES, 3, *SIZE), dtype=torch.uint8) for _ in range(POOL)]
    labels = np.arange(IMAGES, dtype=np.int64) % CLASSES
    held = {k: labels.copy() for k in range(clients)} if is_held else {}

    def make_user(k: int) -> PyTorchTensorDataset:
        of_user = held[k] if is_held else labels.copy()
        return PyTorchTensorDataset((pool[k % POOL], torch.from_numpy(of_user)), user_id=f"client{k}")

    return FederatedDataset(make_user, get_user_sampler("minimize_reuse", range(clients)))


def measure(clients: int, rounds: int, is_held: bool) -> dict[str, float]:
    """Train, and return the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - pfl draws from this stream
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # the first one imports PyTorch's compiler
    clock = RoundClock()
    users, network = make_users(clients, is_held), Network()
    backend = SimulatedBackend(users, val_data=users, postprocessors=[WeightByDatapoints()])
    model = PyTorchModel(
        network, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD(network.parameters(), lr=1.0)
    )
    settings = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=rounds, train_cohort_size=PER_ROUND, val_cohort_size=0
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.05, local_batch_size=BATCH)
    FederatedAveraging().run(settings, backend, model, local, callbacks=[Ticks(clock)])
    assert network.steps == rounds * PER_ROUND * IMAGES // BATCH
    return clock.result(clients) | {"parameters": sum(p.numel() for p in network.parameters())}


def main() -> None:
    """Print the result as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--users", choices=["function", "held"], required=True)
    args = parser.parse_args()
    print(json.dumps(measure(args.clients, args.rounds, args.users == "held")))


if __name__ == "__main__":
    main()
