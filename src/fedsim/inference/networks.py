"""The network of a run, with the weights of a checkpoint: fedsim's own model, or the user's module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentParser
from lightning import LightningModule
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.readable import has_file
from fedsim.models.onnx_file import Layer, network_of, size_in
from fedsim.models.reid import ReIDModel
from fedsim.parsing.class_names import missing_class
from fedsim.parsing.config_files import read_config
from fedsim.strategy.checkpoint_files import CONTENT_KEY, find_version
from fedsim.training.own_module.blueprint import Blueprint, MakesModule
from fedsim.training.own_module.network import PART, ModuleNetwork, features_of, tensors_of

Size = tuple[int, int]
"""height and width"""


class Network(NamedTuple):
    """Network, layer and image size of a run."""

    model: ReIDModel
    layer: Layer
    """whose output the run compares"""
    size: Size
    """of its images"""


class OfScript(NamedTuple):
    """Arguments of ``load_model``, in place of fields of a run's config."""

    module: MakesModule | LightningModule | None = None
    """the user's module, its class, or a partial of it"""
    size: Size | None = None
    """of the images"""


def holds_module(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the clients of a checkpoint train a module of the user's."""
    content = checkpoint[CONTENT_KEY]
    layouts = [*content["layouts"].values(), *content["private_layouts"].values()]
    return any(entry["name"].startswith(f"{PART}.") for layout in layouts for entry in layout)


def saved_network(
    source: Path, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor], client: str | None, of_script: OfScript
) -> Network:
    """Build the network of a run with the weights ``tensors`` of its global model, or of a ``client``.

    Args:
        source: the checkpoint's path; the version that it names has the config.
        checkpoint: its content.
        tensors: by the names of :func:`fedsim.inference.tensors.chosen_tensors`.
        client: whose number of classes a user's module is built for; None: the largest one of the run.
        of_script: what the config may lack.

    Raises:
        ConfigError: if there is no such network.
    """
    config = find_version(source) / "config.yaml"
    content = read_config(str(config)) if has_file(config) else {}
    if not holds_module(checkpoint):
        if of_script != OfScript():
            raise ConfigError("module, size: only for runs of your own LightningModule; leave them out")
        if not content:
            raise ConfigError(f"{config}: is missing, so the network is unknown; give a run of fedsim fit")
        return Network(*network_of(content, config, tensors))
    if not content and None in of_script:
        raise ConfigError(
            f"{config}: is missing, so the run's own module is unknown; in Python, "
            "fedsim.load_model(RUN, module=MyModule, size=(HEIGHT, WIDTH)) takes it"
        )
    size = of_script.size or size_in(content, config)
    make = _module_in(content, config) if of_script.module is None else of_script.module
    classes: Mapping[str, int] = checkpoint[CONTENT_KEY]["clients"]
    seed = content.get("seed_everything")  # by which the run's module was built
    blueprint = Blueprint(make, seed if isinstance(seed, int) else 0, max(classes.values()))
    module = blueprint.ready(classes[client]) if client else blueprint.first
    return Network(_with_weights(module, tensors, size), "module", size)


def _module_in(content: Mapping[str, Any], config: Path) -> MakesModule:
    """Return the callable that builds the module of a config."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--module", type=MakesModule)
    spec = content.get("model", {}).get("module") if isinstance(content.get("model"), dict) else None
    name = spec.get("class_path") if isinstance(spec, dict) else spec
    try:
        if spec is None:
            raise ValueError("model.module is missing")
        make: MakesModule = parser.instantiate_classes(parser.parse_object({"module": spec})).module
    except Exception as error:  # of the parser, or of the file that has the class
        reason = " ".join(str(error).split())
        problem = missing_class("model.module", reason, str(name)) or f"{type(error).__name__}: {reason[:200]}"
        raise ConfigError(
            f"{config}: model.module: {problem} (or, in Python, fedsim.load_model(RUN, module=MyModule))"
        ) from error
    return make


def _with_weights(module: LightningModule, tensors: Mapping[str, Tensor], size: Size) -> ModuleNetwork:
    """Return a module with the weights of a checkpoint as a network.

    What the checkpoint lacks, such as the classifiers of the clients, has no values: NaN. Features must not need it.
    """
    class_name, expected = type(module).__name__, tensors_of(module)
    for name, tensor in tensors.items():
        if name not in expected or expected[name].shape != tensor.shape:
            has = f"has the shape {list(expected[name].shape)}" if name in expected else "is missing"
            raise ConfigError(
                f"model.module: {name} {has} in {class_name}, and is {list(tensor.shape)} in the checkpoint; give the "
                "class and the arguments of the run"
            )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, tensor in expected.items():
            tensor.copy_(tensors.get(name, torch.tensor(math.nan)))
        features = features_of(module.eval(), torch.randn(2, 3, *size))
    if not features.isfinite().all():
        lacking = next((name for name in expected if name not in tensors), "nothing")
        raise ConfigError(
            f"model.module: the features of {class_name} need tensors that this model of the checkpoint lacks, such as "
            f"{lacking}; give a client's model, or define embed(images) without them"
        )
    return ModuleNetwork(module, features.shape[1])
