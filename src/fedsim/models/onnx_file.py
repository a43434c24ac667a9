"""A model as an ONNX file, for programs without PyTorch: pixels go in, features come out."""

from __future__ import annotations

import io
import logging
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.onnx import OnnxExporterError

from fedsim.core.checks import SIZE
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.functional.normalise import normalise_images
from fedsim.models import Neck
from fedsim.models.reid import Features, ReIDModel

_NEEDS = ("onnx", "onnxscript")

Layer = Literal["neck", "pool", "module"]
"""of a network; ``module``: a user's module, whose features are all that it has"""

PREPROCESSING = {"resize": "bicubic, antialiased (Pillow)", "features_normalised": "no"}
"""metadata of exported models: what a program does before and after them to get the features of ``fedsim predict``"""


class PixelsToFeatures(nn.Module):
    """A network in evaluation mode that normalises its images itself. ``layer``: the layer to return."""

    def __init__(self, network: ReIDModel, layer: Layer) -> None:
        super().__init__()
        self.network, self.layer = network.eval(), layer

    def forward(self, images: Tensor) -> Tensor:
        """Map RGB images [B, 3, H, W] uint8 to features [B, D] float32, not normalised."""
        features: Features = self.network(normalise_images(images))
        return features.pool if self.layer == "pool" else features.neck


def check_onnx() -> None:
    """Raise ConfigError if a library is missing."""
    for name in _NEEDS:
        load_extra(name, "--output: an ONNX file", "onnx")


def write_onnx(path: Path, model: PixelsToFeatures, size: tuple[int, int], about: Mapping[str, str]) -> None:
    """Write ``model`` for any number of images of ``size`` (height, width), with ``about`` as metadata.

    The input is called ``images``, the output ``features``. No call changes the weights: running statistics are fixed.
    """
    onnx = load_extra("onnx", "--output: an ONNX file", "onnx")
    example = torch.zeros(2, 3, *size, dtype=torch.uint8)
    with torch.no_grad():
        model(example)  # fill caches of first calls with tensors, not with the exporter's placeholders
    with _without_messages(), torch.no_grad():
        try:
            program = torch.onnx.export(
                model, (example,), dynamo=True, input_names=["images"], output_names=["features"], verbose=False,
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )  # fmt: skip
        except OnnxExporterError as error:
            cause = error.__cause__ or error
            reason = next(iter(str(cause).strip().splitlines()), "")[:200]
            raise _unwritable(f"{type(cause).__name__}: {reason}") from error
    assert program is not None
    proto = program.model_proto
    if not proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise _unwritable(f"it would take {len(example)} images at a time, and no other number")
    onnx.helper.set_model_props(proto, {**about, "size": f"{size[0]}x{size[1]}", "layer": model.layer})
    path.write_bytes(proto.SerializeToString())


def _unwritable(reason: str) -> ConfigError:
    return ConfigError(
        f"--output: torch cannot write this network as ONNX ({reason}); let its forward have no steps that depend on "
        "values or on the number of images, such as len(images), or write .safetensors"
    )


@contextmanager
def _without_messages() -> Iterator[None]:
    """Silence the exporter about its own code, and about the ways that it tries."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def network_of(
    content: Mapping[str, Any], config: Path, tensors: Mapping[str, Tensor]
) -> tuple[ReIDModel, Layer, tuple[int, int]]:
    """Build the network with the weights ``tensors``; :func:`fedsim.inference.tensors.chosen_tensors` has their names.

    ``content``: that of the run's ``config``, which messages name. Clients may have different backbones: the one with
    these names and shapes is taken. Returns the network, the layer that the run compares, and the size of its images.

    Raises:
        ConfigError: if no network of the config fits, or the config describes none.
    """
    outer_names = ("neck.", "pooling.")
    state = {(name if name.startswith(outer_names) else f"backbone.{name}"): t for name, t in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in state.items()}
    has_neck = any(name.startswith("neck.") for name in state)
    size = size_in(content, config)
    try:
        settings = content["model"]
        layer: Layer = settings["evaluation"]["layer"] if has_neck else "pool"
        neck = Neck(**settings["neck"])
        networks = [
            ReIDModel(backbone, neck if has_neck else replace(neck, kind="none", dropout=0.0))
            for backbone in _backbones(settings)
        ]
    except (ArgumentError, AttributeError, KeyError, TypeError, ValueError) as error:  # an edited config
        raise _undescribed(config, error) from error
    for network in networks:
        if shapes == {name: t.shape for name, t in network.state_dict().items() if t.is_floating_point()}:
            network.load_state_dict(state, strict=False)  # all but counters of batches
            return network, layer, size
    raise ConfigError(f"no backbone of {config} has the weights of this model; fedsim export writes .safetensors")


def size_in(content: Mapping[str, Any], config: Path) -> tuple[int, int]:
    """Return height and width of the images that the run of a config scores; raise ConfigError if it has none."""
    try:
        height, width = SIZE.check(content["data"].get("test_size") or content["data"]["size"], "data.size")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # an edited config
        raise _undescribed(config, error) from error
    return height, width


def _undescribed(config: Path, error: Exception) -> ConfigError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ConfigError(f"{config} does not describe a network ({reason}); was it edited?")


def _backbones(settings: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yield the networks that the clients can have, with random weights."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--backbone", type=nn.Module)
    overrides = [(client or {}).get("backbone") for client in (settings.get("clients") or {}).values()]
    for spec in [settings["backbone"], *overrides]:
        if spec is not None:
            arguments = dict(spec.get("init_args") or {})
            if "weights" in arguments:
                arguments["weights"] = None  # those of the checkpoint follow
            chosen = {"backbone": {**spec, "init_args": arguments}}
            yield parser.instantiate_classes(parser.parse_object(chosen)).backbone
