"""Comparisons of small fits: checkpoints bit by bit, on other ranks, after a pause, and on a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedsim.core.devices import has_gpu
from fedsim.strategy.checkpoint_files import SERVER_KEY, read_checkpoint, read_states
from fedsim.testing.pythons import REMEDY_OF_HASHES
from fedsim.testing.trials import ROUNDS, Fit

_BY_CHANCE = "it differs from try to try, as time, threads or files do: two further tries had no findings"


def difference(first: Path, second: Path) -> str:
    """Return the first difference between two checkpoints, in tensors; empty if all bits are equal."""
    a, b = _tensors(first), _tensors(second)
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            return f"only one of them has {name}"
        if a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
            return f"{name} has another shape or dtype"
        if not torch.equal(_bits(a[name]), _bits(b[name])):
            return f"{int((_bits(a[name]) != _bits(b[name])).sum())} of {a[name].numel()} values of {name} differ"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """Return the numbers, with those that are not finite replaced: NaN is not equal to itself."""
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def _tensors(path: Path) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(path)
    content = checkpoint["fedsim"]
    tensors = {name.replace("server.vectors.", "the global model "): t for name, t in checkpoint["state_dict"].items()}
    for arch, kept in checkpoint[SERVER_KEY].items():
        tensors |= {f"the server's tensor {name} ({arch})": tensor for name, tensor in kept.items()}
    for client, state in sorted(read_states(path, content, [*content["clients"]]).items()):
        for name, tensor in state.items():
            label = f"tensor {name.removeprefix('kept.')}" if name.startswith("kept.") else "private part of the model"
            tensors[f"client {client}'s {label}"] = tensor
    return tensors


def compare(
    whole: Fit, fit: Fit, problem: str, noted: Sequence[str] = (), rounds: Sequence[int] = (ROUNDS,)
) -> list[str]:
    """Run a fit, and return its findings that are not ``noted`` yet.

    The last one is its first difference from another fit in the checkpoints after ``rounds``, put into the text
    ``problem`` at {round} and {difference}. If a fit with equal hashes of texts has no findings, and another one with
    other hashes has some again, the hashes are the cause.
    """

    def tried(fit: Fit) -> list[str]:
        sentences = [sentence for sentence in fit.run() if sentence not in noted]
        if fit.has_ended and whole.has_ended:
            for round_ in rounds:
                if first := difference(whole.checkpoint(round_), fit.checkpoint(round_)):
                    return [*sentences, problem.format(round=round_, difference=first)]
        return sentences

    sentences = tried(fit)
    if not sentences or not fit.has_other_hashes or fit.is_late:
        return sentences
    if tried(replace(fit, has_other_hashes=False, folder=fit.folder.with_name(f"{fit.folder.name}, equal hashes"))):
        return sentences
    again = tried(replace(fit, folder=fit.folder.with_name(f"{fit.folder.name}, again")))
    return [f"{sentence}; the cause: {REMEDY_OF_HASHES if again else _BY_CHANCE}" for sentence in sentences]


def findings_on_a_gpu(whole: Fit) -> list[str]:
    """Return the findings of the same fit on a GPU, where tensors on the CPU fail beside others."""
    fit = replace(whole, folder=whole.folder.with_name("gpu"), accelerator="gpu")
    return [f"on a GPU: {sentence}" for sentence in fit.run()] if has_gpu() else []


def scores_of(fit: Fit) -> dict[str, float]:
    """Return the scores after the last round."""
    scores: dict[str, float] = json.loads((fit.folder / "scores.json").read_text())
    return scores
