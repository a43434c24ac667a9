"""Pictures of a round in the loggers of a run: W&B, TensorBoard with its projector, MLflow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray
from PIL import Image

from fedsim.core.files import replacing
from fedsim.core.replaced_run import PICTURES
from fedsim.federation.callbacks.tracking import short_patience


@dataclass(frozen=True, eq=False)
class Embedding:
    """n test images for TensorBoard's projector."""

    name: str
    features: NDArray[np.float64]
    """[n, D]"""
    columns: Sequence[str]
    """names of the columns of ``metadata``"""
    metadata: Sequence[Sequence[str]]
    """n rows"""
    thumbnails: NDArray[np.uint8]
    """[n, side, side, 3]"""


def log_picture(trainer: Trainer, path: Path, round_: int) -> None:
    """Give a PNG file to the loggers of a run, as ``pictures/NAME``; for the first rank. ``round_`` counts from 1."""
    name = f"{PICTURES}/{path.stem}"
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            logger.experiment.add_image(name, pixels, round_ - 1, dataformats="HWC")  # its steps begin at 0
        elif isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({name: wandb.Image(str(path)), "round": round_})
        elif isinstance(logger, MLFlowLogger):
            with short_patience():
                logger.experiment.log_artifact(logger.run_id, str(path), f"{PICTURES}/round-{round_}")


def has_projector(trainer: Trainer) -> bool:
    """Whether a logger of the run takes embeddings."""
    return any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)


def log_embedding(trainer: Trainer, embedding: Embedding, round_: int) -> None:
    """Give an embedding to TensorBoard's projector, beside those of other rounds; for the first rank."""
    images = torch.from_numpy(embedding.thumbnails).permute(0, 3, 1, 2) / 255
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            folder, step = Path(logger.experiment.log_dir), round_ - 1
            # torch prints a line on standard output about files that a round has left before a resume
            shutil.rmtree(folder / f"{step:05}" / embedding.name, ignore_errors=True)
            listed = folder / "projector_config.pbtxt"
            earlier = _read_list(listed)
            logger.experiment.add_embedding(
                embedding.features, [list(row) for row in embedding.metadata], images, step, embedding.name,
                list(embedding.columns),
            )  # fmt: skip
            _join_lists(listed, earlier)


def _read_list(path: Path) -> Any:
    """Return the projector's list of embeddings; an empty one if there is no file."""
    from google.protobuf import text_format
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    config = ProjectorConfig()
    if path.is_file():
        text_format.Parse(path.read_text(), config)
    return config


def _join_lists(path: Path, earlier: Any) -> None:
    """Put the embeddings of a resumed run back into the list: a new writer writes only its own."""
    from google.protobuf import text_format

    config = _read_list(path)
    names = {entry.tensor_name for entry in config.embeddings}
    missing = [entry for entry in earlier.embeddings if entry.tensor_name not in names]
    if missing:
        joined = sorted([*missing, *config.embeddings], key=lambda entry: entry.tensor_name.rpartition(":")[2])
        del config.embeddings[:]
        config.embeddings.extend(joined)
        with replacing(path) as partial:
            partial.write_text(text_format.MessageToString(config))
