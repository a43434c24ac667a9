"""Lightning alone on the batches of a client's trainings: what a module under fedsim must agree with, bit by bit."""

import copy
import random
import shutil
import tempfile
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

import fedsim.training.own_module.module_client as clients
from fedsim.training.own_module.inner_trainer import package_of


class Recorded(NamedTuple):
    """One training of a client."""

    start: dict
    """values of the module when it began"""
    batches: list
    """of each epoch"""
    seed: int
    horizon: object
    options: object
    end: dict
    """values of the module when it ended"""


def values_of(module):
    """All tensors of a module, those, too, that its state_dict leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def clone(values):
    return {name: value.detach().clone() for name, value in values.items()}


def recording(into):
    """Let trainings of clients be recorded."""
    original = clients.train

    def train(module, training, horizon, options, seed):
        epochs, start = [[] for _ in training.sizes], {}
        read, load = training.read, training.load

        def recorded_read(epoch):
            epochs[epoch].clear()
            for batch in read(epoch):
                epochs[epoch].append(copy.deepcopy(batch))
                yield batch

        def recorded_load(loaded):
            load(loaded)
            start.update(clone(values_of(loaded)))

        training.read, training.load = recorded_read, recorded_load
        logged = original(module, training, horizon, options, seed)
        into.append(Recorded(start, epochs, seed, horizon, options, clone(values_of(module))))
        return logged

    return mock.patch.object(clients, "train", train)


class Epochs:
    """Recorded batches, of one epoch after the other."""

    def __init__(self, epochs, trainer):
        self.epochs, self.trainer = epochs, trainer

    @property
    def now(self):
        return self.epochs[min(self.trainer.current_epoch, len(self.epochs) - 1)]

    def __len__(self):
        return len(self.now)

    @property
    def dataset(self):
        labels = [[*batch.values()][-1] if isinstance(batch, dict) else batch[1] for batch in self.now]
        return range(sum(map(len, labels)))

    def __iter__(self):
        yield from copy.deepcopy(self.now)


def train_alone(module, recorded, **options):
    """Train a module by Lightning's Trainer alone; return its values."""
    package = package_of(module)

    def start(module):
        """Give a module, before ``setup`` or after it, the values of those tensors that it has."""
        own = values_of(module)
        with torch.no_grad():
            for name, value in recorded.start.items():
                if name in own and own[name].shape != value.shape:
                    own[name].resize_(value.shape)
                if name in own and not equal(own[name], value):
                    own[name].copy_(value)

    class Start(package.Callback):
        def on_fit_start(self, trainer, pl_module):
            start(pl_module)

    start(module)

    torch.manual_seed(recorded.seed)
    random.seed(recorded.seed)
    np.random.seed(recorded.seed % 2**32)  # noqa: NPY002 - the stream that modules of users draw from
    folder = tempfile.mkdtemp()
    logger = type("Files", (package.loggers.logger.DummyLogger,), {"log_dir": folder, "save_dir": folder})()
    trainer = package.Trainer(
        max_epochs=recorded.horizon.epochs, accelerator="cpu", devices=1, precision=recorded.options.precision,
        accumulate_grad_batches=recorded.options.accumulate, gradient_clip_val=recorded.options.grad_clip,
        logger=logger, default_root_dir=folder, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Start()],
        reload_dataloaders_every_n_epochs=1, limit_val_batches=0, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(module, Epochs(recorded.batches, trainer))
    shutil.rmtree(folder)
    return clone(values_of(module))


def differences(a, b):
    """Names of the values that are not equal, bit by bit."""
    names = [*a, *(name for name in b if name not in a)]
    return [n for n in names if n not in a or n not in b or not equal(a[n], b[n])]


def equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
