"""Tiny runs of every method's config by the command line, on the CPU and on pretended GPUs."""

import csv
import os
from pathlib import Path

import torch

from failing import last, read_result
from fedsim.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs" / "methods"
METHODS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
CONFIG = """
seed_everything: 0
trainer: {check_val_every_n_epoch: 2, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.2}}
  val_fraction: 0.3
  limit_client_batches: 2
  size: [32, 16]
  augmentation: {pad: 2, flip: 0.5, erase: 0.5}
"""
_CLUSTERS = ["--model.client.cluster.k1=6", "--model.client.cluster.k2=2", "--model.client.cluster.min_samples=2"]
_MASKS = ["--model.method.target=0.7", "--model.method.step=0.3"]
SETTINGS = {
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
    "subfedavg": [*_MASKS, "--model.method.min_accuracy=0", "--model.method.min_distance=0"],
}  # fmt: skip
"""Config -> options by which two short rounds of few images have what it is about: clusters, pruning."""


def options(folder, name, *more, gpus=0, rounds=2):
    """Return the command line of a fit by ``configs/methods/NAME.yaml``; ``gpus`` of 0: on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".yaml")
    own = config.with_suffix(f".{os.getpid()}")  # ranks write the same file, and none may read half of it
    own.write_text(CONFIG)
    own.replace(config)
    where = ["--trainer.accelerator=gpu", f"--trainer.devices={gpus}"] if gpus else ["--trainer.accelerator=cpu"]
    method = ["--config", str(CONFIGS / f"{name}.yaml"), *SETTINGS.get(name, ())]
    short = [f"--trainer.max_epochs={rounds}", f"--trainer.check_val_every_n_epoch={rounds}"]
    return ["fit", "--config", str(config), *method, *where, *short, f"--run_dir={folder}", *more]


def fit(folder, name, *more, **settings):
    """Run such a fit; return what it leaves: all tensors of its last checkpoint, and the lines of metrics.csv."""
    assert main(options(folder, name, *more, **settings)) == 0
    return left_by(folder)


def left_by(folder):
    """Return what a fit has left, without times."""
    with (folder / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    trained = last(folder).exists()  # Random-Guess trains nothing
    return (read_result(last(folder)) if trained else {}), rows


def differences(a, b):
    """Return the names of what differs between two fits; nothing if they have the same bits."""
    (tensors, rows), (others, other_rows) = a, b
    names = [name for name in tensors.keys() | others.keys() if not _equal(tensors.get(name), others.get(name))]
    pairs = zip(rows, other_rows, strict=True)
    return sorted(names) + [f"row {n}: {k}" for n, (x, y) in enumerate(pairs) for k in x if x[k] != y.get(k)]


def _equal(a, b):
    return a is not None and b is not None and torch.equal(a, b)
