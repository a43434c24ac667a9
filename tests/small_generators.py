"""Small generators for the tests: built and trained in one process, or by the command line."""

import numpy as np
import torch
from lightning import Trainer

from fedsim.__main__ import main
from fedsim.generation.losses import LossWeights
from fedsim.generation.networks import Networks
from fedsim.generation.training import GeneratorSteps, GeneratorTraining
from fedsim.models import SmallCNN

SMALL = Networks(width=2, structure_blocks=1, decoder_blocks=2, hidden=5, scales=2)
LABELS = np.array([4, 0, 4, 2, 0, 4, 0, 2, 1, 4])
"""Of 10 images; identity 1 has one, identity 3 none."""
CLASSES = 5


def noise(count, size=(16, 20), seed=0):
    """Images, uint8 [count, 3, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator)


def new(*, labels=LABELS, losses=None, make_backbone=None, networks=SMALL, size=(16, 20), seed=3, **steps):
    """A generator in training that has not begun; a line of losses for every step."""
    torch.manual_seed(1)  # the backbone's initial weights
    return GeneratorTraining(
        client="north", pixels=noise(len(labels), size), labels=labels, num_classes=CLASSES,
        backbone=make_backbone() if make_backbone else SmallCNN(4), networks=networks, losses=losses or LossWeights(),
        training=GeneratorSteps(**{"steps": 4, "batch_size": 6, "save_every": 1} | steps), seed=seed,
    )  # fmt: skip


def train(module):
    """Train to the end."""
    settings = module.training_settings
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-(-settings.steps // settings.save_every), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, range(settings.save_every))
    return module


def equal(a, b):
    """Whether two modules' weights and running statistics are bit-equal."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- by the command line -----------------------------------------------------------------------------------------------

STEPS = ("--training.steps", "10", "--training.save_every", "4", "--training.batch_size", "4")  # 4, 4 and 2
WIDTHS = ("--networks.width", "4", "--networks.decoder_blocks", "1", "--appearance.width", "4")


class StoppedError(Exception):
    """What :func:`stop` raises."""


def stop(*_, **__):
    """Stand for a function that must not be called, or is interrupted."""
    raise StoppedError


def fit(config, folder, *options, code=0):
    """Run ``fedsim augment fit``; return the folder of generators."""
    args = ["augment", "fit", "--config", config, "--output", folder, *STEPS, *WIDTHS, "--device", "cpu", *options]
    assert main([str(arg) for arg in args]) == code
    return folder


def run(command, config, folder, *options):
    """Run ``fedsim augment preview`` or ``write``."""
    args = ["augment", command, "--config", config, "--generators", folder, *options]
    assert main([str(arg) for arg in args]) == 0


def trained(folder, client="town1"):
    """The bytes of a client's trained generator."""
    return (folder / client / "generator.safetensors").read_bytes()


def contents(folder):
    """Names and bytes of all files of a client's folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def untrained_generator(client, pixels, backbone, networks, training):
    """Return the generator of a client before its training."""
    return GeneratorTraining(
        client=client.name, pixels=pixels, labels=client.labels, num_classes=client.num_classes, backbone=backbone,
        networks=networks, losses=LossWeights(), training=training, seed=0,
    )  # fmt: skip
