"""From a run to a model: two lines of Python embed images, ``fedsim predict --images`` those of a folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from lightning import LightningModule
from PIL import Image
from torch import Tensor, nn

from fedsim.core.checked import checked
from fedsim.core.checks import Count, Pixels
from fedsim.core.devices import Device
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.paths import FILE, IMAGE_FEATURES, ImageFeatures, InputFolder, Saved, SavedRun
from fedsim.core.readable import has_folder
from fedsim.core.replaced_run import CHECKPOINTS, FEATURES, OF_IMAGES
from fedsim.core.tensor_file import problem_of_weights
from fedsim.core.versions import holding
from fedsim.data.images import ImageArray, ImageFiles, Images, ImagesInParts
from fedsim.data.leftovers import images_outside, left_out_in, summary
from fedsim.data.reading import upright_rgb
from fedsim.inference.model_folder import is_model_folder, read_model_folder
from fedsim.inference.networks import OfScript, Size, saved_network
from fedsim.inference.tensors import chosen_tensors
from fedsim.models.onnx_file import Layer, PixelsToFeatures
from fedsim.models.reid import ReIDModel
from fedsim.strategy.checkpoint_files import CONTENT_KEY, read_checkpoint
from fedsim.strategy.run_checkpoints import checkpoint_at
from fedsim.training.own_module.blueprint import MakesModule

Picture = str | os.PathLike[str] | Image.Image
"""a path, or a picture of Pillow"""
_AS_PIXELS = "give all images as one tensor of RGB pixels, uint8 [n, 3, h, w], such as torch.from_numpy(ARRAY)"


class PicturesKind:
    """One picture, several, or pixels: the kind of argument of :meth:`SavedModel.embed`."""

    def check(self, value: Any, name: str) -> Any:
        """Return the value; raise ConfigError, beginning with ``name``, if it is none."""
        if isinstance(value, np.ndarray):
            _check_pixels(value)
        if not isinstance(value, str | os.PathLike | Image.Image | Iterable):
            raise ConfigError(f"{name}: {type(value).__name__} is no picture; give a path, or one of Pillow, or pixels")
        return value


SomePictures = Annotated[Picture | Sequence[Picture] | Tensor, PicturesKind()]


class SavedModel(nn.Module):
    """A model of a run, which embeds images. It is in evaluation mode, and its weights need no gradient.

    Args:
        network: backbone and neck, or a user's module.
        layer: the layer whose output the run compares.
        size: height and width of its images.
        about: method, model and round.
    """

    def __init__(self, network: ReIDModel, layer: Layer, size: Size, about: dict[str, Any]) -> None:
        super().__init__()
        self.features = PixelsToFeatures(network, layer)
        self.requires_grad_(False).eval()
        self.size, self.about = size, about
        """height and width of its images; method, model and round"""

    def forward(self, images: Tensor) -> Tensor:
        """Map RGB images [B, 3, H, W] uint8, of :attr:`size`, to features [B, D] float32, not normalised.

        Raises:
            ConfigError: if they are no such pixels: floats would be normalised twice.
        """
        _check_pixels(images, self.size)
        features: Tensor = self.features(images)
        return features

    @checked()
    @torch.no_grad()
    def embed(self, images: SomePictures, batch_size: Count = 64) -> Tensor:
        """Return the features [n, D] of images, float32 on the CPU, not normalised, as ``fedsim predict`` writes them.

        Images of another size than :attr:`size` are resized by Pillow's bicubic filter with antialiasing, as in
        training. Other filters give other features.

        Args:
            images: a path or a picture of Pillow, a list of these, or RGB pixels [n, 3, h, w] uint8 of any size.
            batch_size: number of images that run at a time.

        Raises:
            DataError: naming a file that cannot be read; or if features are not finite, as of damaged weights.
            ConfigError: if a tensor is no pixels.
        """
        device = next(self.parameters()).device
        chunks = _images(images).chunks(batch_size)
        parts = [self(chunk.decode(self.size).to(device)).cpu() for chunk in chunks]
        width = self(torch.zeros(1, 3, *self.size, dtype=torch.uint8, device=device)).shape[1] if not parts else 0
        features = torch.cat(parts) if parts else torch.empty(0, width)
        if (wrong := ~features.isfinite().all(dim=1)).any():
            image = int(wrong.nonzero()[0])
            raise DataError(f"images: the features of image {image} are not finite; give a model with smaller weights")
        return features


def _images(images: Picture | Sequence[Picture] | Tensor) -> Images:
    if isinstance(images, Tensor):
        _check_pixels(images)
        return ImageArray(images.permute(0, 2, 3, 1).cpu().contiguous().numpy())
    if isinstance(images, str | os.PathLike | Image.Image):
        images = [images]
    return ImagesInParts([_one(image) for image in images])


def _check_pixels(images: object, size: Size | None = None) -> None:
    """Refuse what is no pixels uint8 [n, 3, h, w]; ``size``: their height and width, if only one is right."""
    if not isinstance(images, Tensor):
        raise ConfigError(f"images: {type(images).__name__} is no tensor; {_AS_PIXELS}")
    is_here = images.layout == torch.strided and not images.is_meta
    if not is_here or images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        description = f"{str(images.dtype)[6:]} {list(images.shape)}"
        raise ConfigError(f"images: a tensor must be RGB pixels, uint8 [n, 3, h, w], and this is {description}")
    if size is not None and tuple(images.shape[2:]) != tuple(size):
        raise ConfigError(
            f"images: {list(images.shape[2:])} pixels are not {list(size)}, the model's height and width; call embed, "
            "which resizes them"
        )


def _one(image: Picture) -> Images:
    if isinstance(image, np.ndarray | Tensor):
        raise ConfigError(f"images: a list holds paths or pictures of Pillow, no pixels; {_AS_PIXELS}")
    if isinstance(image, Image.Image):
        try:
            return ImageArray(np.asarray(upright_rgb(image))[None])
        except Exception as error:  # damaged pictures raise many types
            raise DataError(f"images: cannot read this picture ({error}); give another one") from error
    return ImageFiles([Path(FILE.check(image, "images"))])


@checked()
def load_model(
    run: Saved, client: str | None = None, checkpoint: str = "best", arch: str | None = None,
    device: Device = "cpu", *, module: MakesModule | LightningModule | None = None, size: Pixels | None = None,
) -> SavedModel:  # fmt: skip
    """Load a model of a run.

    >>> model = load_model("runs/mine")  # doctest: +SKIP
    >>> features = model.embed(["a.jpg", "b.jpg"])  # doctest: +SKIP

    Args:
        run: a run directory of fedsim fit, a checkpoint, or a folder of ``fedsim export --folder``, which holds one
            model: the other arguments but ``device`` have no meaning for it.
        client: the client whose personalised model is loaded; None: the global model.
        checkpoint: ``best``, or the last if none is best; ``last``.
        arch: the architecture, if the federation has several.
        device: cpu, cuda, cuda:1 ...
        module: the run's own LightningModule, its class or a partial of it, if the run has no ``config.yaml`` that
            names it, as a class of a script has no name there. Its weights are replaced.
        size: height and width of the images of such a run.

    Raises:
        DataError: if there is no checkpoint, or it cannot be read.
        ConfigError: if it has no such model, or its network is unknown.
    """
    torch_device = torch.device(device)
    if is_model_folder(Path(run)):
        if (client, checkpoint, arch, module, size) != (None, "best", None, None, None):
            raise ConfigError(f"{run}: holds one model, and no run; leave all arguments but device out")
        (network, layer, size), about = read_model_folder(Path(run))
        return SavedModel(network, layer, size, about).to(torch_device)
    path = _checkpoint(Path(run), checkpoint)
    with holding():
        content = read_checkpoint(path)
        try:
            tensors, _ = chosen_tensors(content, path, arch, client, mean=False)
        except ConfigError as error:  # its options are arguments here
            raise ConfigError(str(error).removeprefix("--")) from error
        if problem := problem_of_weights(tensors.items()):
            raise DataError(f"{path}: {problem}; give another checkpoint")
        network, layer, size = saved_network(path, content, tensors, client, OfScript(module, size))
    progress = content["loops"]["fit_loop"]["epoch_progress"]["current"]
    about = {"method": content[CONTENT_KEY]["method"], "model": f"client {client}" if client else "global"}
    return SavedModel(network, layer, size, {**about, "round": progress["started"]}).to(torch_device)


def _checkpoint(path: Path, name: str) -> Path:
    if name not in ("best", "last"):
        raise ConfigError(
            f"checkpoint: there is no {name}; choose best or last, or give the path of a checkpoint as run"
        )
    return checkpoint_at(path, fitting=name == "last")  # a fit continues from the last


log = logging.getLogger(__name__)


@checked("--")
def predict_images(
    ckpt_path: SavedRun, images: InputFolder, output: ImageFeatures | None = None, client: str | None = None,
    checkpoint: str = "best", arch: str | None = None, device: Device = "cpu", batch_size: Count = 64,
) -> str:  # fmt: skip
    """Write the features of all images in a folder and its sub-folders, with their files, into an npz file.

    It holds ``features`` [n, D] float32, not normalised, and ``files`` [n], their paths below the folder, sorted.

    Args:
        ckpt_path: a run directory of fedsim fit, or a checkpoint.
        images: the folder.
        output: the file to write; default: features/images-FOLDER-MARK.npz in the run directory, where FOLDER is the
            last part of the folder's path, and MARK are eight digits of a hash of the whole path.
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
    files = sorted(images_outside(folder, ()))
    if not files:
        raise DataError(f"--images: {folder} holds no images; their names end with .jpg, .png and the like")
    if not is_model_folder(run):
        _checkpoint(run, checkpoint)  # before the output, which depends on what it is
    if output is None:
        if not has_folder(run / CHECKPOINTS):
            raise DataError(f"--output: {run} is no run directory; name the file for the features")
        mark = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]  # folders of one name have one file each
        default = run / FEATURES / f"{OF_IMAGES}{folder.resolve().name}-{mark}.npz"
        output = IMAGE_FEATURES.check(default, "--output", "name a file")
    path = Path(output)
    is_new = not path.exists()
    features = load_model(run, client, checkpoint, arch, device).embed(files, batch_size)
    if unread := summary(list(left_out_in(folder, set(map(str, files)), is_deep=True))):
        log.warning("%s: files that are not read: %s", folder, unread)
    names = np.array([file.relative_to(folder).as_posix() for file in files])
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, features=features.numpy(), files=names)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another --output") from error
    place = "" if is_new else ", in the place of an earlier one"
    return f"wrote {path}{place}: features {list(features.shape)} of {len(files)} images"
