"""Train the generator of one client, from the start or from a checkpoint, to the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from tqdm import tqdm

from fedsim.core.allocator import is_out_of_memory
from fedsim.core.devices import device_named
from fedsim.core.errors import ConfigError, DataError, TrainingError
from fedsim.core.files import replacing
from fedsim.data.federated import ClientData
from fedsim.generation.sampling import check_identities
from fedsim.generation.saved import CHECKPOINT, is_finished, write_losses, write_trained
from fedsim.generation.training import GeneratorTraining

log = logging.getLogger(__name__)

LINE_EVERY = 60.0
"""seconds between two lines of progress without a terminal"""


def check_client(client: ClientData) -> None:
    """Raise DataError unless a client has at least two identities, whose appearances can be swapped."""
    if not client.knows_identities:
        raise DataError(f"client {client.name}: a generator needs identities, and its images have none; leave it out")
    check_identities(client.name, client.labels)


def fit_generator(
    module: GeneratorTraining,
    client: ClientData,
    folder: Path,
    device: torch.device,
    encoder: dict[str, Tensor] | None = None,
    row: int = 0,
) -> None:
    """Train a generator and write it, unless the folder holds a trained one. The training sends nothing.

    ``folder`` is the client's folder of the generators; ``encoder`` the initial state of the appearance encoder's
    backbone, None: as in the module; ``row`` the position of the progress bar, if several processes have one.

    Raise DataError if ``training.ckpt`` cannot be continued, TrainingError if a loss or a weight is not finite.
    """
    checkpoint = folder / CHECKPOINT
    if is_finished(folder):
        checkpoint.unlink(missing_ok=True)  # left by a call that was stopped just before the end
        return
    if encoder is not None:
        module.generator.appearance.backbone.load_state_dict(encoder)
    settings = module.training_settings
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=-(-settings.steps // settings.save_every),
        plugins=[LightningEnvironment()],  # Slurm's would requeue the job, and save within an epoch
        callbacks=[_SaveTraining(folder), _Progress(settings.steps, row)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    resumed = checkpoint if checkpoint.is_file() else None
    if resumed:
        _check_checkpoint(resumed, module)
    trainer.fit(module, range(settings.save_every), ckpt_path=resumed, weights_only=True)
    tensors = {name: value for name, value in module.state_dict().items() if not name.startswith("discriminator.")}
    for name, tensor in tensors.items():  # the last losses are finite, but the weights after that step may not be
        if not bool(tensor.isfinite().all()):
            raise TrainingError(
                f"client {client.name}: {name} is not finite at the end; lower training.rate, in another --output"
            )
    size = (module.pixels.shape[2], module.pixels.shape[3])
    write_trained(folder, tensors, client, size, module.images_hash)
    checkpoint.unlink(missing_ok=True)


def _check_checkpoint(path: Path, module: GeneratorTraining) -> None:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common error for damaged files
        reason = f"cannot be continued ({type(error).__name__})"
        raise DataError(f"{path}: {reason}; remove it, and this client begins again") from error
    if not isinstance(content, dict) or content.get("images_hash") != module.images_hash:
        raise DataError(
            f"{path}: was trained on other images than client {module.client} has now; give the --config that the "
            "training began with, or remove it"
        )


class _SaveTraining(Checkpoint):
    """Writes a checkpoint after each epoch, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GeneratorTraining)
        write_losses(self.folder, pl_module.history)  # first, since a continued training writes later lines only
        with replacing(self.folder / CHECKPOINT) as partial:
            trainer.save_checkpoint(partial)


class _Progress(Callback):
    """Steps, time left, and the reconstruction error of the last epoch: as a bar, or as lines without a terminal."""

    def __init__(self, steps: int, row: int) -> None:
        self.steps, self.row = steps, row
        self.bar: tqdm[NoReturn] | None = None
        self.error = ""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GeneratorTraining)
        if self.bar is None:
            self.begun = self.done = trainer.current_epoch * pl_module.training_settings.save_every
            self.started = self.logged = time.monotonic()
            self.bar = tqdm(
                total=self.steps, initial=self.done, desc=f"generator of {pl_module.client}", unit=" steps",
                position=self.row, disable=None, leave=False, file=sys.stderr,
            )  # fmt: skip
            if self.bar.disable:
                log.info("generator of %s: %d of %d steps", pl_module.client, self.done, self.steps)
        if pl_module.history:
            self.error = f"{pl_module.history[-1]['self'] / 2:.3f}"
            self.bar.set_postfix({"error": self.error}, refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:  # noqa: ARG002 - Lightning's
        assert isinstance(pl_module, GeneratorTraining)
        assert self.bar is not None
        self.done = min(self.done + 1, self.steps)  # the last epoch may be longer than what is left
        self.bar.update(self.done - self.bar.n)
        now = time.monotonic()
        if self.bar.disable and now - self.logged >= LINE_EVERY:
            self.logged = now
            left = (self.steps - self.done) * (now - self.started) / (self.done - self.begun) / 60
            error = f", error {self.error}" if self.error else ""
            progress = f"{self.done} of {self.steps} steps{error}, about {left:.0f} minutes left"
            log.info("generator of %s: %s", pl_module.client, progress)

    def teardown(self, *_: object, **__: object) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def needing_memory(client: str, device: torch.device, advice: str) -> Iterator[None]:
    """Raise ConfigError, with advice, if the block runs out of memory for a client's generator."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ConfigError(f"the generator of {client} does not fit on {device}; {advice} ({reason})") from error


def device_of(name: str, row: int = 0) -> torch.device:
    """Return a device by its name (``auto``, ``cpu``, ``cuda`` or ``cuda:N``); raise ConfigError if there is none.

    With ``auto`` and ``cuda``, the processes take the GPUs in turn; ``row`` is the number of this process.
    """
    gpus = torch.cuda.device_count()
    if name in ("auto", "cuda") and gpus:
        return device_named(f"cuda:{row % gpus}")
    return device_named("cpu" if name == "auto" else name)
