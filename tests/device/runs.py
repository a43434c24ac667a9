"""Tiny fits by every method's config, on the CPU and on simulated GPUs."""

import csv
import functools
import json
from pathlib import Path
from unittest import mock

import lightning
import torch
import yaml
from jsonargparse import ArgumentParser

import small
from failing import last, read_result
from fedsim.cli.fit import FederatedDataModule, Federation
from fedsim.data import SyntheticReID
from fedsim.federation.checks.requirements import TORCH_FOR_GRAPHS
from fedsim.federation.components import robust
from fedsim.federation.trainer import Trainer
from fedsim.generation.quality import discriminator_accuracy
from fedsim.methods import Ditto
from fedsim.parsing.command_line import with_clients
from fedsim.training import server_optimizers
from lightning_modules import DropsOut, federation, module_state
from small_tower import small_tower

HAS_GRAPHS = torch.__version__ >= TORCH_FOR_GRAPHS
"""whether this torch can record steps; else that is refused"""
CONFIGS = Path(__file__).parents[2] / "configs" / "methods"
METHODS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
CONFIG = {
    "seed_everything": 0,
    "model": {
        "method": "FedPav",
        "backbone": {"class_path": "SmallCNN", "init_args": {"width": 8}},
        "client": {"batch_size": 8},
    },
    "data": {
        "source": {"class_path": "SyntheticReID", "init_args": {"clients": 2, "unseen": 1, "scale": 0.2}},
        "val_fraction": 0.3,
        "limit_client_batches": 2,
        "size": [32, 16],
        "augmentation": {"pad": 2, "flip": 0.5, "erase": 0.5},
    },
}
OF_MACHINES = ("time/", "memory/")
"""beginnings of names of numbers that depend on the machine"""
_CLUSTERS = ["--model.client.cluster.k1=6", "--model.client.cluster.k2=2", "--model.client.cluster.min_samples=2"]
_MASKS = ["--model.method.target=0.7", "--model.method.step=0.3"]
SETTINGS = {
    "fedala": ["--model.method.start_epochs=3"],
    "fedcapr": _CLUSTERS,
    "feddip": ["--model.method.rounds=3", "--model.method.initial=0.3", "--model.method.reconfig_interval=2"],
    "fedklpr": [
        *_CLUSTERS, "--model.method.prune_from=1", "--model.method.min_accuracy=0", "--model.method.plateau=1",
        "--model.method.tolerance=1",
    ],
    "feduca": _CLUSTERS,
    "feducc": _CLUSTERS,
    "fedureid": ["--model.client.long_round.local_epochs=2", "--model.client.local_epochs=2"],
    "lotteryfl": [*_MASKS, "--model.method.start_accuracy=0"],
    "parameter_average": ["--model.client.long_round.local_epochs=2"],
    "pfedme": ["--model.method.inner_steps=2"],
    "text_anchors": [f"--model.method.tower={small_tower()}", "--model.method.prompt_epochs=2"],
    "subfedavg": [
        *_MASKS, "--model.client.local_epochs=2", "--model.method.min_accuracy=0", "--model.method.min_distance=0",
    ],
}  # fmt: skip
"""Config -> options by which two short rounds of few images have what it is about: clusters, pruning."""


def options(folder, name, *more, gpus=0, rounds=2):
    """Return the command line of a fit by ``configs/methods/NAME.yaml``; ``gpus`` of 0: on the CPU."""
    where = (
        ["--trainer.accelerator=gpu", f"--trainer.devices={gpus}"]
        if gpus
        else ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    )
    short = [f"--trainer.max_epochs={rounds}", f"--trainer.check_val_every_n_epoch={rounds}"]
    quiet = "--trainer.enable_progress_bar=false"
    configs = ["--config", json.dumps(CONFIG), "--config", str(CONFIGS / f"{name}.yaml")]
    return ["fit", *configs, *SETTINGS.get(name, ()), *where, *short, quiet, f"--run_dir={folder}", *more]


def fit(folder, name, *more, gpus=0, rounds=2, scored=True, **trainer):
    """Fit as that command does, but without its half a second beside the rounds; return what rank 0 leaves.

    Args:
        folder: the run directory.
        name: of the method's config.
        more: options below ``model`` and ``data``.
        gpus: ranks, each with a GPU; 0: one on the CPU.
        rounds: their number.
        scored: evaluate after the last one.
        trainer: its arguments.
    """
    where = {"accelerator": "gpu", "devices": gpus} if gpus else {"accelerator": "cpu", "devices": 1}
    lightning.seed_everything(0, verbose=False)
    made = _parser().instantiate_classes(_settings(name, *more))
    every = rounds if scored else rounds + 1
    settings = {
        "max_epochs": rounds,
        "check_val_every_n_epoch": every,
        "enable_progress_bar": False,
        **where,
        **trainer,
    }
    used = Trainer(run_dir=folder, **settings)
    used.fit(made.model, datamodule=made.data)
    return left_by(folder) if used.is_global_zero else None  # it may be writing still


def fit_module(rounds, accelerator="gpu", devices=1, module=DropsOut, **options):
    """Train a user's module at two clients of unequal numbers of identities, by two models each."""
    model, data = federation(Ditto(), module), small.make_data(SyntheticReID(clients=2, unseen=1, scale=0.1))
    return small.fit(model, data, rounds=rounds, accelerator=accelerator, devices=devices, **options)


def learnt(model):
    """Return all that a run of a module has learnt, on the CPU."""
    return {name: tensor.cpu() for name, tensor in module_state(model).items()}


@functools.cache
def _parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=int)
    parser.add_class_arguments(Federation, "model")
    parser.add_class_arguments(FederatedDataModule, "data")
    assert robust, server_optimizers  # the parser knows short names of loaded classes
    return parser


@functools.cache
def _settings(name, *more):
    method = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    method.pop("trainer", None)
    configs = [word for config in (CONFIG, method) for word in ("--config", json.dumps(config))]
    return _parser().parse_args(with_clients([*configs, *SETTINGS.get(name, ()), *more]))


def judged_in_two_steps():
    """Let ``fedsim augment fit`` judge its images by a discriminator of two steps in the place of 200."""
    return mock.patch.object(discriminator_accuracy, "__defaults__", (2,))


def left_by(folder):
    """Return what a fit has left, without the numbers that depend on the machine."""
    with (folder / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith(OF_MACHINES)} for row in csv.DictReader(file)]
    trained = last(folder).exists()  # Random-Guess trains nothing
    return (read_result(last(folder)) if trained else {}), rows


def without_scores(left):
    """Return what the same fit leaves without an evaluation."""
    tensors, rows = left
    kept = [{k: v for k, v in row.items() if not k.startswith(("oracle/", "test/", "val/"))} for row in rows]
    return tensors, [row for row in kept if row["round"]]


def differences(a, b):
    """Return the names of what differs between two fits; nothing if they have the same bits."""
    (tensors, rows), (others, other_rows) = a, b
    names = [name for name in tensors.keys() | others.keys() if not _equal(tensors.get(name), others.get(name))]
    pairs = zip(rows, other_rows, strict=True)
    return sorted(names) + [f"row {n}: {k}" for n, (x, y) in enumerate(pairs) for k in x if x[k] != y.get(k)]


def _equal(a, b):
    return a is not None and b is not None and torch.equal(a, b)
