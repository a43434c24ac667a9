"""``fedsim predict --images``: the features of a folder of images, of any data set or none."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from fedsim.core.checked import checked
from fedsim.core.checks import Count
from fedsim.core.devices import Device
from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.paths import Arrays, InputFolder, SavedRun
from fedsim.data.leftovers import has_image_suffix, is_rubbish, left_out_in, summary
from fedsim.inference.model import load_model

log = logging.getLogger(__name__)


@checked("--")
def predict_images(
    ckpt_path: SavedRun, images: InputFolder, output: Arrays | None = None, client: str | None = None,
    checkpoint: str = "best", arch: str | None = None, device: Device = "cpu", batch_size: Count = 64,
) -> str:  # fmt: skip
    """Write the features of all images in a folder and its sub-folders, with their files, into an npz file.

    It holds ``features`` [n, D] float32, not normalised, and ``files`` [n], their paths below the folder, sorted.

    Args:
        ckpt_path: a run directory of fedsim fit, or a checkpoint.
        images: the folder.
        output: the file to write; default: features/images-FOLDER.npz in the run directory.
        client: the client whose personalised model embeds; default: the global model.
        checkpoint: of a run directory: best, or the last if none is best; last.
        arch: the architecture, if the federation has several.
        device: cpu, cuda, cuda:1 ...
        batch_size: number of images that run at a time.

    Raises:
        DataError: if there are no images, one cannot be read, or the file cannot be written.
        ConfigError: if there is no such model.
    """
    folder, run = Path(images), Path(ckpt_path)
    candidates = (path for path in folder.rglob("*") if has_image_suffix(path.name))
    files = sorted(path for path in candidates if not any(map(is_rubbish, path.relative_to(folder).parts)))
    if not files:
        raise DataError(f"--images: {folder} holds no images; their names end with .jpg, .png and the like")
    if output is None and not (run / "checkpoints").is_dir():
        raise DataError(f"--output: {run} is no run directory; name the file for the features")
    path = run / "features" / f"images-{folder.resolve().name}.npz" if output is None else Path(output)
    features = load_model(run, client, checkpoint, arch, device).embed(files, batch_size)
    if unread := summary(list(left_out_in(folder, set(map(str, files)), is_deep=True))):
        log.warning("%s: files that are not read: %s", folder, unread)
    names = np.array([file.relative_to(folder).as_posix() for file in files])
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, features=features.numpy(), files=names)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error
    return f"wrote {path}: features {list(features.shape)} of {len(files)} images"
