"""A ResNet-50 of which 70 % is pruned: seconds of a forward pass, bytes of its files, seconds to make a mask.

Pruned weights are zeros among others, which convolutions multiply by as well: the pruned model should take as long as
the dense one. Both are timed in turns, medians over all turns.

    python benchmarks/pruned_model.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tabulate import tabulate
from torch import nn

from fedsim.core.sparse_file import write_sparse
from fedsim.functional.pruning import global_magnitude_mask, layerwise_magnitude_mask, zero_pruned_
from fedsim.methods.pruned import full_mask, prunable_layers
from fedsim.models import BODY, Neck, ReIDModel, ResNet, group_names
from fedsim.training.flat_model import FlatModel
from fedsim.training.statistics import shared_names

TURNS, IMAGES, SIZE = 15, 4, (256, 128)


def make_flat_model() -> FlatModel:
    """A ResNet-50 with random weights."""
    torch.manual_seed(0)
    model = ReIDModel(ResNet(depth=50), Neck(kind="bnneck"))
    groups = group_names(model)
    return FlatModel("resnet", model, shared_names(groups, BODY, "mean"), groups, max_classes=1)


@torch.no_grad()
def seconds_of(models: list[nn.Module], images: torch.Tensor) -> list[float]:
    """Return the median seconds of a forward pass of each model."""
    taken: list[list[float]] = [[] for _ in models]
    for turn in range(TURNS + 1):
        for model, seconds in zip(models, taken, strict=True):
            start = time.perf_counter()
            model(images)
            if turn:  # the first one warms up
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


def main() -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    dense, pruned = make_flat_model(), make_flat_model()
    layers, mask = prunable_layers(pruned), full_mask(pruned)
    vector = pruned.shared[: len(mask)]
    rows: list[list[object]] = []
    for name, make in (
        ("global mask to 70 %, 5 % floor", lambda: global_magnitude_mask(vector, mask, layers, 0.7, 0.05)),
        ("layer-wise mask of 70 %", lambda: layerwise_magnitude_mask(vector, mask, layers, 0.7)),
    ):
        start = time.perf_counter()
        pruning_mask = make()
        rows.append([f"seconds: {name}", f"{time.perf_counter() - start:.2f}"])
    taken = []
    for _ in range(TURNS):
        start = time.perf_counter()
        zero_pruned_(vector, pruning_mask)
        taken.append(time.perf_counter() - start)
    rows.append(["milliseconds: mask applied after a step", f"{1e3 * statistics.median(taken):.1f}"])
    models: list[nn.Module] = [dense.network.eval(), pruned.network.eval()]
    for name, seconds in zip(("dense", "pruned"), seconds_of(models, torch.rand(IMAGES, 3, *SIZE)), strict=True):
        rows.append([f"milliseconds: forward pass of {IMAGES} images, {name}", f"{1e3 * seconds:.0f}"])
    entries = pruned.flat.shared_entries
    tensors = {e.name: pruned.flat.buffer[e.span].view(e.shape).clone() for e in entries}
    names = {e.name for e in pruned.flat.shared_parameters if not pruning_mask[e.span].all()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "dense")
        write_sparse(tensors, names, Path(folder) / "sparse")
        sizes = {name: (Path(folder) / name).stat().st_size for name in ("dense", "sparse")}
    rows += [[f"bytes on disk: {name} file", f"{size:,}"] for name, size in sizes.items()]
    sys.stdout.write(tabulate(rows, tablefmt="plain", disable_numparse=True) + "\n")


if __name__ == "__main__":
    main()
