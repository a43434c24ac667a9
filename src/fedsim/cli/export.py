"""``fedsim export``: the global model of a checkpoint, or a client's personalised one, as safetensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedsim._version import __version__
from fedsim.cli.commands import call
from fedsim.cli.run_directory import checkpoint_at, describe_checkpoint
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import follow_umask, replacing
from fedsim.core.sparse_file import write_sparse
from fedsim.models.attention import holds_attention
from fedsim.models.onnx_file import Layer, PixelsToFeatures, check_onnx, network_of, write_onnx
from fedsim.models.reid import ReIDModel
from fedsim.models.style import holds_style
from fedsim.parsing.config_files import read_config
from fedsim.strategy.checkpoint_content import INITIAL_KEY
from fedsim.strategy.checkpoint_files import CONTENT_KEY, SERVER_KEY, find_version, read_checkpoint, read_states

log = logging.getLogger(__name__)


def run(args: list[str]) -> str:
    """Run ``fedsim export [options]``; the options are those of :func:`export`."""
    return call(export, args, "export")


def export(
    ckpt_path: str, output: str, arch: str | None = None, client: str | None = None, sparse: bool = False,
    mean: bool = False,
) -> str:  # fmt: skip
    """Write a model of a checkpoint as a safetensors file, or as ONNX where ``output`` ends with ``.onnx``.

    The backbone's tensors carry torchvision's names (``layer1.0.conv1.weight``), the neck's start with ``neck.``, so
    ``torchvision.models.resnet18().load_state_dict(load_file(output), strict=False)`` loads the backbone; only the
    classifier ``fc`` is missing. The tensors of a ``TimmBackbone`` carry timm's names; the file of ``LoRA`` holds the
    adapters alone. A method with private necks gives the backbone alone. Where a backbone whose ``norm`` is not ``bn``
    has attention, its tensors have other names. Torchvision's network lacks them; fedsim's network with the same
    ``norm`` has them. An ONNX file takes RGB pixels [B, 3, H, W] uint8, of the run's size, as ``images``, and returns
    ``features`` [B, D] float32 (``pip install 'fedsim[onnx]'``).

    Args:
        ckpt_path: a run directory of fedsim fit, whose best checkpoint is taken, or the last if none is best; or a
            checkpoint.
        output: the file to write.
        arch: the architecture, if the federation has several.
        client: the client whose personalised model is written: its private and the shared tensors, with zeros for
            pruned elements; default: the global model.
        sparse: also write a pruned model to a second file, OUTPUT with the ending .sparse.safetensors: a bit per
            element, and the remaining values.
        mean: write the unweighted mean of the clients' own models of one architecture: models that are trained
            separately and averaged once (paper 001, Parameter-Average, of a run of Local). Shared tensors are those of
            the global model.
    """
    source, path = checkpoint_at(Path(ckpt_path)), Path(output)
    is_onnx = path.suffix == ".onnx"
    if is_onnx:
        if sparse:
            raise ConfigError("--sparse: is for .safetensors files; leave it out, or change --output")
        check_onnx()
    checkpoint = read_checkpoint(source)
    if mean and (client is not None or sparse):
        raise ConfigError("--mean: averages the whole models of all clients; leave --client and --sparse out")
    tensors, masks = _chosen_tensors(checkpoint, source, arch, client, mean)
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give --output the name of a file")
    masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    if sparse and not masks:
        raise ConfigError("--sparse: the model is not pruned; leave it out, or give --client a client that prunes")
    about = _metadata(checkpoint, "mean of all clients" if mean else f"client {client}" if client else "global")
    if is_onnx:
        network, layer, size = _network(find_version(source) / "config.yaml", tensors)
        _write(path, lambda partial: write_onnx(partial, PixelsToFeatures(network, layer), size, about))
    else:
        _write(path, lambda partial: save_file(tensors, partial, about))
    lines = [
        f"wrote {path}: {about['model']} model of {about['method']}, round {about['round']}; {len(tensors)} tensors"
    ]
    if sparse:
        sparse_path = path.with_name(f"{path.name.removesuffix('.safetensors')}.sparse.safetensors")
        _write(sparse_path, lambda partial: write_sparse(tensors, masks.keys(), partial))
        lines.append(_sizes(path, sparse_path, tensors, masks))
    log.info(describe_checkpoint(source, checkpoint))
    if holds_attention(tensors) and not is_onnx:
        lack = "holds attention, which torchvision's networks lack"
        lines.append(f"{path}: {lack}; load it into fedsim's own backbone with the same norm")
    if holds_style(tensors) and not is_onnx:
        lack = "holds style layers (snr), which torchvision's networks lack"
        lines.append(f"{path}: {lack}; load it into fedsim's own backbone with the same style")
    return "\n".join(lines)


def _network(config: Path, tensors: dict[str, Tensor]) -> tuple[ReIDModel, Layer, tuple[int, int]]:
    """Return the network of a checkpoint with a ``config``; see :func:`network_of`."""
    if not config.is_file():
        raise ConfigError(f"--output: {config} is missing, so the network is unknown; ONNX needs a run of fedsim fit")
    return network_of(read_config(str(config)), config, tensors)


def _chosen_tensors(
    checkpoint: dict[str, Any], source: Path, arch: str | None, client: str | None, mean: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the chosen model by name, and its masks; no masks if it is not pruned."""
    if mean:
        return _mean_tensors(checkpoint, source, arch), {}
    if client is None:
        return global_tensors(checkpoint, arch), _global_masks(checkpoint, arch)
    return _client_tensors(checkpoint, source, arch, client)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        with replacing(path) as partial:
            write(partial)
            follow_umask(partial)  # the library makes files that only their owner can read
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be written ({error}); choose another --output") from error


def _metadata(checkpoint: Mapping[str, Any], model: str) -> dict[str, str]:
    """Return the file's metadata, all as text: ``safetensors.safe_open(file, "pt").metadata()`` reads it."""
    content, progress = checkpoint[CONTENT_KEY], checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    about = {"fedsim": __version__, "method": content["method"], "model": model, "round": progress["started"]}
    return {"format": "pt", **{name: str(value) for name, value in about.items()}}


def _sizes(dense: Path, sparse: Path, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> str:
    """Return the file sizes as text. A pruned network is not faster: its convolutions multiply by zeros, too."""
    total, pruned = sum(t.numel() for t in tensors.values()), sum(int((~m).count_nonzero()) for m in masks.values())
    return (
        f"{dense}: {dense.stat().st_size:,} bytes; {sparse}: {sparse.stat().st_size:,} bytes, {pruned / total:.1%} of "
        "all elements pruned. Zeros within a tensor make files and messages smaller, not the network faster."
    )


# -- tensors of a checkpoint -------------------------------------------------------------------------------------------


def global_tensors(checkpoint: dict[str, Any], arch: str | None) -> dict[str, Tensor]:
    """Cut the global vector of one architecture into named tensors; the identity head is left out."""
    content, arch = checkpoint[CONTENT_KEY], _chosen(checkpoint, arch)
    if not content["complete"][arch]:
        raise ConfigError(
            f"ckpt_path: {content['method']} keeps part of the backbone on the clients, so there is no global model to "
            f"export; give --client one of {', '.join(content['clients'])}"
        )
    return _cut(checkpoint["state_dict"][f"server.vectors.{arch}"], content["layouts"][arch])


def _global_masks(checkpoint: dict[str, Any], arch: str | None) -> dict[str, Tensor]:
    """Cut the server's mask into named ones; empty if the server does not prune."""
    arch = _chosen(checkpoint, arch)
    mask = checkpoint.get(SERVER_KEY, {}).get(arch, {}).get("mask")
    return {} if mask is None else _cut(mask, checkpoint[CONTENT_KEY]["layouts"][arch])


_ASSEMBLED = frozenset(f"kept.{n}" for n in ("alpha", "backbone", "cluster", "norms", "tuned", "weights"))
"""kept tensors from which APFL, SKA, IFCA, FedBABU and FedALA assemble a client's model"""


def _client_tensors(
    checkpoint: dict[str, Any], path: Path, arch: str | None, client: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a client's personalised model by name, and its masks if it prunes."""
    content = checkpoint[CONTENT_KEY]
    if client not in content["clients"]:
        raise ConfigError(f"--client: there is no client {client}; choose from {', '.join(content['clients'])}")
    state = _private_states(checkpoint, path, arch, [client])[client]
    if _ASSEMBLED & state.keys():
        raise ConfigError(
            f"--client: {content['method']} assembles a client's model in a way of its own; score it with fedsim "
            "test, or leave --client out for the global model"
        )
    arch = _chosen(checkpoint, arch)
    vector, layout = checkpoint["state_dict"][f"server.vectors.{arch}"], content["layouts"][arch]
    whole, mask = [*layout, *content["private_layouts"][arch]], state.get("kept.mask")
    if mask is None:
        personal = state.get("kept.personal", torch.cat([vector, state["state"]]))
        return _cut(personal, whole), {}
    if len(mask) not in {len(vector), *(entry["offset"] for entry in layout)}:
        raise ConfigError(f"--arch: client {client} does not have the architecture {arch}; choose its own one")
    model = torch.cat([vector[: len(mask)].masked_fill(~mask, 0.0), vector[len(mask) :], state["state"]])
    return _cut(model, whole), _cut(mask, layout)


def _mean_tensors(checkpoint: dict[str, Any], path: Path, arch: str | None) -> dict[str, Tensor]:
    """Return the mean of the models of all clients of one architecture by name."""
    content, arch = checkpoint[CONTENT_KEY], _chosen(checkpoint, arch)
    shared, private = content["layouts"][arch], content["private_layouts"][arch]
    if len(content["layouts"]) > 1:
        raise ConfigError("--mean: the clients have several architectures, which cannot be averaged")
    vector = checkpoint["state_dict"][f"server.vectors.{arch}"]
    end = max((entry["offset"] + math.prod(entry["shape"]) for entry in private), default=len(vector))
    states = _private_states(checkpoint, path, arch, list(content["clients"])).values()
    private_states = [state["state"][: end - len(vector)] for state in states]  # the client's head follows
    mean = torch.stack(private_states).to(torch.float64).mean(dim=0).to(vector.dtype)
    return _cut(torch.cat([vector, mean]), [*shared, *private])


def _private_states(
    checkpoint: dict[str, Any], path: Path, arch: str | None, clients: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Return client -> its private state; without the head, which no export has, if the client has not trained."""
    states = read_states(path, checkpoint[CONTENT_KEY], clients)
    return {name: states.get(name) or checkpoint[INITIAL_KEY][_chosen(checkpoint, arch)] for name in clients}


def _chosen(checkpoint: dict[str, Any], arch: str | None) -> str:
    """Return the architecture ``arch``; None: the only one of the checkpoint."""
    layouts = checkpoint[CONTENT_KEY]["layouts"]
    if arch is None and len(layouts) == 1:
        arch = next(iter(layouts))
    if arch is None or arch not in layouts:
        raise ConfigError(f"--arch: choose one of the checkpoint's architectures: {', '.join(layouts)}")
    return arch


def _cut(vector: Tensor, layout: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Cut a vector of the buffer's layout into the named tensors that it contains; the identity head is left out."""
    tensors = {}
    for entry in layout:
        name, shape = entry["name"].removeprefix("backbone.").removeprefix("timm."), torch.Size(entry["shape"])
        part = vector[entry["offset"] : entry["offset"] + shape.numel()]
        if not name.startswith("head.") and len(part) == shape.numel():
            tensors[name] = part.view(shape).clone()  # of a view, the whole vector would be written
    return tensors
