"""fedsim by its public interface: a Federation, a FederatedDataModule with an own source, a FederatedTrainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import fedsim  # noqa: F401 # before Lightning, which then starts faster

# isort: split
import numpy as np
import torch
from common import BATCH, CLIENTS, COLOURS_LAST, IMAGES, LR, SELECTED, WIDTH, Clock, Work, body, load_work, parse_job
from lightning import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.cli.describe import FederatedTrainer
from fedsim.data import Augmentation, Domain, FederatedDataModule, Images, ReIDSource, Split
from fedsim.data.images import Size
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.callbacks import Preemption
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.federation import Federation
from fedsim.methods import FedAvg
from fedsim.models import Backbone, Neck
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.settings import LocalTraining

SEED = 0


def name_of(client: int) -> str:
    """Return the name of client 0 to 999; names sort like numbers."""
    return f"client{client:03}"


class PlainBackbone(Backbone):
    """The layers before the last as a backbone."""

    def __init__(self, layers: nn.Sequential, width: int) -> None:
        super().__init__(*layers)
        self.out_channels = width


class Memory(Images):
    """Images that are decoded already.

    Args:
        pixels: [N, 3, 32, 32] uint8: all images of the work, which are not copied before they are decoded.
        index: [n] int64: which of them these are.
    """

    def __init__(self, pixels: NDArray[np.uint8], index: NDArray[np.int64]) -> None:
        self.pixels = pixels
        self.index = index

    def __len__(self) -> int:
        """Return n."""
        return len(self.index)

    def take(self, index: NDArray[np.int64]) -> Memory:
        """Return the images at ``index``."""
        return Memory(self.pixels, self.index[index])

    def decode(self, size: Size) -> Tensor:
        """Return them, [n, 3, 32, 32]."""
        return torch.from_numpy(self.pixels[self.index])


class Pictures(ReIDSource):
    """The work's images as data sets of IMAGES images each."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.all = Split(Memory(images, np.arange(len(images))), labels, np.zeros_like(labels))

    def domains(self) -> list[Domain]:
        """Return one data set per client, with nothing to test on."""
        nothing = self.all.take(np.arange(0))
        spans = np.split(np.arange(len(self.all.images)), len(self.all.images) // IMAGES)
        return [Domain(name_of(k), self.all.take(span), nothing, nothing) for k, span in enumerate(spans)]


class Stopwatch(Callback):
    """Checks the initial model, and ticks after each round."""

    def __init__(self, clock: Clock, initial: dict[str, Tensor]) -> None:
        self.clock = clock
        self.initial = initial

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Assert that fedsim starts where the others do."""
        weights = named_weights(pl_module)
        assert weights.keys() == self.initial.keys(), f"fedsim's model consists of {list(weights)}"
        assert all(weights[n].equal(t) for n, t in self.initial.items()), "fedsim starts from other weights"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Tick."""
        if trainer.is_global_zero:
            self.clock.tick(named_weights(pl_module))


def make_model(layers: nn.Sequential, model: str) -> Federation:
    """Return the federation of one of the networks."""

    def sgd(params: Iterable[Any]) -> torch.optim.SGD:
        return torch.optim.SGD(params, lr=LR[model])

    return Federation(
        FedAvg(share_head=True),
        backbone=PlainBackbone(layers, WIDTH[model]),
        neck=Neck(kind="none", dropout=0.0),
        client=LocalTraining(batch_size=BATCH, optimizer=sgd, channels_last=model in COLOURS_LAST),
        selection=RandomFraction(SELECTED[model] / CLIENTS[model]),
        evaluation=Evaluation(test_during_fit=False),
        seed=SEED,
    )


def make_data(source: ReIDSource) -> FederatedDataModule:
    """Return the data of all clients, without augmentation or validation."""
    return FederatedDataModule(source, val="none", size=(32, 32), augmentation=Augmentation(pad=0, flip=0.0))


def named_weights(federation: LightningModule) -> dict[str, Tensor]:
    """Return the global model of a Federation by tensor name."""
    assert isinstance(federation, Federation)
    assert federation.server is not None, "it is not assembled"
    (arch, model), *more_models = federation.parts.models.items()
    assert not more_models, "all clients have the same network"
    vector = federation.server.vector(arch)
    return {entry.name: vector[entry.span].view(entry.shape) for entry in model.flat.shared_entries}


def make_trainer(rounds: int, workers: int, callback: Callback) -> FederatedTrainer:
    """Return a trainer that does nothing but train."""
    return FederatedTrainer(
        accelerator="cpu",
        devices=workers,
        strategy=FederatedStrategy(),
        max_epochs=rounds,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback, Preemption()],  # as the command line has it
    )


def source_of(work: Work) -> Pictures:
    """Return the work's images as fedsim's data sets."""
    return Pictures(work.images.numpy(), work.labels.numpy())


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    work = load_work(job.work)
    weights = work.weights
    layers = body(job.model)
    layers.load_state_dict({n.removeprefix("backbone."): t for n, t in weights.items() if n.startswith("backbone.")})
    trainer = make_trainer(job.rounds, job.workers, Stopwatch(clock, weights))
    trainer.fit(make_model(layers, job.model), datamodule=make_data(source_of(work)))
    if trainer.is_global_zero:
        clock.report(job, "fedsim")


if __name__ == "__main__":
    main()
