"""A model in a folder of its own, as model hubs keep them: weights, configuration, preprocessing, and a card.

The names of the files, and the keys of the preprocessing, are those of the Hugging Face hub and of transformers' image
processors (``BitImageProcessor``), so that their tools read the folder. It needs no run, and no file of it is a pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim._version import __version__
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import follow_umask, new_folder
from fedsim.core.names import one_line
from fedsim.core.tensor_file import problem_of_weights, write_tensors
from fedsim.functional.normalise import IMAGENET_MEAN, IMAGENET_STD
from fedsim.inference.networks import Network
from fedsim.models.onnx_file import network_of, size_in
from fedsim.parsing.config_files import read_config
from fedsim.strategy.checkpoint_files import MODEL_FILE

WEIGHTS, CONFIG, PREPROCESSING, CARD = MODEL_FILE, "config.json", "preprocessor_config.json", "README.md"

About = Mapping[str, Any]
"""method, model and round"""


def is_model_folder(path: Path) -> bool:
    """Return whether a folder is one of :func:`write_model_folder`."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def write_model_folder(
    folder: Path, tensors: Mapping[str, Tensor], run: Mapping[str, Any], about: About, card: str
) -> None:
    """Write a model into a folder, after all its files are complete.

    Args:
        folder: is missing, or empty, or a fresh clone of a hub's repository: files of git alone may be there.
        tensors: by the names of :func:`fedsim.inference.tensors.chosen_tensors`.
        run: the config of the model's run.
        about: method, model and round.
        card: content of the model card.

    Raises:
        ConfigError: if the folder has files, or the network has a class that is not fedsim's: no other machine has it.
        DataError: if the folder cannot be written.
    """
    real = Path(os.path.realpath(folder))
    if os.path.isdir(real) and not all(path.name.startswith(".git") for path in real.iterdir()):
        raise ConfigError(f"--folder: {folder} is not empty; name a new folder")
    content = _of_network(run)
    if (name := _foreign_class(content)) is not None:
        raise ConfigError(
            f"--folder: the backbone {name} is not fedsim's, so other machines lack its class; write --output"
        )
    height, width = size_in(content, folder / CONFIG)
    try:
        with new_folder(real) as partial:
            write_tensors(partial / WEIGHTS, tensors, {"format": "pt"})
            follow_umask(partial / WEIGHTS)
            config = {"library_name": "fedsim", "fedsim_version": __version__, "trained": dict(about), **content}
            _write_json(partial / CONFIG, config)
            _write_json(partial / PREPROCESSING, _preprocessing(height, width))
            (partial / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); choose another --folder"
        raise DataError(f"{one_line(str(folder), 160)}: {problem}") from error


def read_model_folder(folder: Path) -> tuple[Network, dict[str, Any]]:
    """Return the network of a folder with its weights, and method, model and round.

    Raises:
        DataError: if a file cannot be read, or a weight is not finite.
        ConfigError: if the files do not describe a network of fedsim's classes.
    """
    path = folder / CONFIG
    content = read_config(str(path))
    if content.get("library_name") != "fedsim":
        raise ConfigError(f"{path}: is the model of another library; give a folder of fedsim export")
    if (name := _foreign_class(content)) is not None:
        raise ConfigError(f"{path}: names the backbone {name}, which is not fedsim's; no other class is run")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder / WEIGHTS}: cannot be read ({error}); fetch it again") from error
    if problem := problem_of_weights(tensors.items()):
        raise DataError(f"{folder / WEIGHTS}: {problem}; fetch it again")
    about = content.get("trained")
    if not isinstance(about, dict):
        raise ConfigError(f"{path}: trained: is missing; was it edited?")
    return Network(*network_of(content, path, tensors)), about


def _of_network(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's config that describes its networks, without paths of files."""
    data, model = run["data"], run["model"]
    clients = {
        name: {"backbone": _without_weights(changes["backbone"])}
        for name, changes in (model.get("clients") or {}).items()
        if (changes or {}).get("backbone")
    }
    return {
        "data": {"size": data.get("test_size") or data["size"]},
        "model": {
            "backbone": _without_weights(model["backbone"]),
            "clients": clients,
            "neck": model["neck"],
            "evaluation": {name: model["evaluation"][name] for name in ("layer", "distance")},
        },
    }


def _without_weights(backbone: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(backbone.get("init_args") or {})
    return {**backbone, "init_args": {**arguments, "weights": None} if "weights" in arguments else arguments}


def _foreign_class(content: Mapping[str, Any]) -> str | None:
    """Return the first class of a backbone that is not fedsim's; None if all are."""
    try:
        model = content["model"]
        backbones = [model["backbone"], *(client["backbone"] for client in (model.get("clients") or {}).values())]
        names = [str(backbone["class_path"]) for backbone in backbones]
    except (AttributeError, KeyError, TypeError):
        return None  # the reader says that no network is described
    return next((name for name in names if not name.startswith("fedsim.")), None)


def _preprocessing(height: int, width: int) -> dict[str, Any]:
    """Return the steps from an image to the input of the network, in the words of transformers."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": int(Image.Resampling.BICUBIC),
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
