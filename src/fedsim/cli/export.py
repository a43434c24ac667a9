"""``fedsim export``: the global model of a checkpoint, or a client's personalised one, as a file or a folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim._version import __version__
from fedsim.cli.commands import call
from fedsim.cli.run_directory import describe_checkpoint
from fedsim.core.checked import checked
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import follow_umask, replacing
from fedsim.core.names import one_line
from fedsim.core.paths import MODEL, Model, OutputFolder, SavedRun, suffix_of
from fedsim.core.readable import has_file
from fedsim.core.replaced_run import run_around
from fedsim.core.sparse_file import write_sparse
from fedsim.core.tensor_file import write_tensors
from fedsim.core.versions import holding
from fedsim.inference.model_card import model_card
from fedsim.inference.model_folder import write_model_folder
from fedsim.inference.networks import Network, OfScript, holds_module, saved_network
from fedsim.inference.tensors import chosen_tensors
from fedsim.models.assembled import holds_assembled
from fedsim.models.attention import holds_attention
from fedsim.models.onnx_file import PREPROCESSING, PixelsToFeatures, check_onnx, write_onnx
from fedsim.models.style import holds_style
from fedsim.parsing.config_files import read_config
from fedsim.report.runs import read_run
from fedsim.strategy.checkpoint_files import CONTENT_KEY, find_version, read_checkpoint
from fedsim.strategy.run_checkpoints import checkpoint_at

log = logging.getLogger(__name__)


def run(args: list[str]) -> str:
    """Run ``fedsim export [options]``; the options are those of :func:`export`."""
    with holding():
        return call(export, args, "export")


@checked("--")
def export(
    ckpt_path: SavedRun, output: Model | None = None, folder: OutputFolder | None = None, arch: str | None = None,
    client: str | None = None, sparse: bool = False, mean: bool = False, licence: str | None = None,
) -> str:  # fmt: skip
    """Write a model of a checkpoint: as safetensors, as ONNX where ``output`` ends with ``.onnx``, or as a folder.

    The backbone's tensors carry torchvision's names (``layer1.0.conv1.weight``), the neck's start with ``neck.``, so
    ``torchvision.models.resnet18().load_state_dict(load_file(output), strict=False)`` loads the backbone; only the
    classifier ``fc`` is missing. The tensors of a ``TimmBackbone`` carry timm's names; the file of ``LoRA`` holds the
    adapters alone, that of ``VisualPrompts`` the prompts. A method with private necks gives the backbone alone. Where a
    backbone whose ``norm`` is not ``bn`` has attention, its tensors have other names. Torchvision's network lacks them;
    fedsim's network with the same ``norm`` has them. The file of a LightningModule of your own has the tensors by its
    own names, without those whose size depends on ``num_classes``. An ONNX file takes RGB pixels [B, 3, H, W] uint8, of
    the run's size, as ``images``, and returns ``features`` [B, D] float32 (``pip install 'fedsim-reid[onnx]'``).

    Args:
        ckpt_path: a run directory of fedsim fit, whose best checkpoint is taken, or the last if none is best; or a
            checkpoint.
        output: the file to write.
        folder: in place of output: a new or empty folder, or a fresh clone of a repository, for all that others need:
            the model as model.safetensors, config.json, preprocessor_config.json, and a model card with data, scores
            and limits, README.md, named as on the Hugging Face hub. fedsim.load_model(FOLDER) loads it without the run.
        arch: the architecture, if the federation has several.
        client: the client whose personalised model is written: its private and the shared tensors, with zeros for
            pruned elements; default: the global model.
        sparse: also write a pruned model to a second file, OUTPUT with the ending .sparse.safetensors: a bit per
            element, and the remaining values.
        mean: write the unweighted mean of the clients' own models of one architecture: models that are trained
            separately and averaged once (paper 001, Parameter-Average, of a run of Local). Shared tensors are those of
            the global model.
        licence: of the model in the folder, by the hub's word for it, such as cc-by-nc-4.0; default: not given.
    """
    path = _place(output, folder, sparse, licence)
    if sparse:
        sparse_path = path.with_suffix(".sparse.safetensors")
        MODEL.check(sparse_path, "--sparse", "name another --output")
    source, is_onnx = checkpoint_at(Path(ckpt_path)), folder is None and suffix_of(path) == ".onnx"
    checkpoint = read_checkpoint(source)
    if mean and (client is not None or sparse):
        raise ConfigError("--mean: averages the whole models of all clients; leave --client and --sparse out")
    tensors, masks = chosen_tensors(checkpoint, source, arch, client, mean)
    masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    if sparse and not masks:
        raise ConfigError("--sparse: the model is not pruned; leave it out, or give --client a client that prunes")
    about = PREPROCESSING | _metadata(
        checkpoint, "mean of all clients" if mean else f"client {client}" if client else "global"
    )
    if folder is not None:
        _write_folder(path, source, checkpoint, tensors, about, licence)
    elif is_onnx:
        network = _network(source, checkpoint, tensors, client)
        model = PixelsToFeatures(network.model, network.layer)
        _write(path, lambda partial: write_onnx(partial, model, network.size, about))
    else:
        _write(path, lambda partial: write_tensors(partial, tensors, about))
    lines = [
        f"wrote {path}: {about['model']} model of {about['method']}, round {about['round']}; {len(tensors)} tensors"
    ]
    if sparse:
        _write(sparse_path, lambda partial: write_sparse(tensors, masks.keys(), partial))
        lines.append(_sizes(path, sparse_path, tensors, masks))
    log.info(describe_checkpoint(source, checkpoint))
    if not is_onnx and folder is None and not holds_module(checkpoint):
        lines += _what_torchvision_lacks(path, tensors)
    return "\n".join(lines)


def _place(output: str | None, folder: str | None, sparse: bool, licence: str | None) -> Path:
    """Return the file or folder to write; raise ConfigError if options do not fit together."""
    if output is None or folder is not None:
        if output is not None or folder is None:
            raise ConfigError("--output: name a file to write, or, in its place, --folder")
        if sparse:
            raise ConfigError("--sparse: is for .safetensors files; leave it out, or give --output")
        if licence is not None and not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", licence):
            raise ConfigError(
                f"--licence: {one_line(repr(licence), 40)} is no word of the hub, such as mit or cc-by-4.0"
            )
        return Path(folder)
    if licence is not None:
        raise ConfigError("--licence: stands in the card of --folder; leave it out, or name a folder")
    path = Path(output)
    if suffix_of(path) == ".onnx":
        if sparse:
            raise ConfigError("--sparse: is for .safetensors files; leave it out, or change --output")
        check_onnx()
    return path


def _write_folder(
    folder: Path, source: Path, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor], text: Mapping[str, str],
    licence: str | None,
) -> None:  # fmt: skip
    if holds_module(checkpoint):
        raise ConfigError("--folder: other machines lack the class of your own LightningModule; write --output")
    path, run = find_version(source) / "config.yaml", run_around(source)
    if not has_file(path):
        raise ConfigError(f"--folder: {path} is missing, so the network is unknown; write --output")
    config, about = (
        read_config(str(path)),
        {**{name: text[name] for name in ("method", "model")}, "round": int(text["round"])},
    )
    has_summary = run is not None and has_file(run / "summary.json")
    card = model_card(read_run(run) if run is not None and has_summary else None, about, config, licence)
    write_model_folder(folder, tensors, config, about, card)


def _network(source: Path, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor], client: str | None) -> Network:
    """Return the network of a checkpoint, without which there is no ONNX file."""
    try:
        return saved_network(source, checkpoint, tensors, client, OfScript())
    except ConfigError as error:
        raise ConfigError(f"--output: {error}") from error


def _what_torchvision_lacks(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    kinds = (
        (holds_attention, "attention", "norm"), (holds_assembled, "assembled normalisation", "norm"),
        (holds_style, "style layers (snr)", "style"),
    )  # fmt: skip
    return [
        f"{path}: holds {layers}, which torchvision's networks lack; load it into fedsim's own backbone with the same "
        f"{setting}"
        for holds, layers, setting in kinds
        if holds(tensors)
    ]


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        with replacing(path) as partial:
            write(partial)
            follow_umask(partial)  # the library makes files that only their owner can read
    except OSError as error:
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
