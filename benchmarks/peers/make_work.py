"""Write a model's work file with fedsim's own functions, so that fedsim runs it by itself and the others replay it.

python make_work.py work-cnn.npz cnn
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import BATCH, CLASSES, CLIENTS, IMAGES, ROUNDS, SELECTED, body
from fedsim_engine import SEED, Pictures, make_data, make_model, name_of, named_weights
from numpy.typing import NDArray
from torch import nn

from fedsim.core.seeding import derive_seed, torch_generator
from fedsim.data.batches import shuffled_batches
from fedsim.federation.components.selection import RandomFraction


def draw_images(clients: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw images [N, 3, 32, 32] of ten noisy patterns, each client with as many of each, and their labels [N]."""
    rng = np.random.default_rng(SEED)
    labels = np.tile(np.arange(IMAGES) % CLASSES, clients)
    patterns = np.kron(rng.normal(size=(CLASSES, 3, 8, 8)), np.ones((4, 4)))
    pixels = np.empty((len(labels), 3, 32, 32), dtype=np.uint8)
    for span in np.split(np.arange(len(labels)), clients // 100):
        noise = rng.normal(size=(len(span), 3, 32, 32))
        values = 116 + 15 * patterns[labels[span]] + 25 * noise  # 116: about ImageNet's mean
        pixels[span] = values.clip(0, 255)
    return pixels, labels


def draw_orders(model: str) -> dict[str, NDArray[Any]]:
    """Return the selected clients and the seeds of their dropout [R, S], and the order of their images [R, S, n]."""
    names = [name_of(client) for client in range(CLIENTS[model])]
    selection = RandomFraction(SELECTED[model] / CLIENTS[model])
    chosen = [selection.select(r, names, SEED) for r in range(ROUNDS[model])]  # as fedsim draws them in its run
    orders = [[order_of(r, name) for name in chosen[r]] for r in range(len(chosen))]
    seeds = [[derive_seed(SEED, r, name, "modules") for name in chosen[r]] for r in range(len(chosen))]
    selected = [[names.index(name) for name in who] for who in chosen]
    return {
        "selected": np.array(selected, dtype=np.int16),
        "orders": np.array(orders, dtype=np.int16),
        "seeds": np.array(seeds, dtype=np.int64),
    }


def order_of(round_: int, client: str) -> NDArray[np.int64]:
    """Return the order [n] of a client's images in its only local epoch."""
    generator = torch_generator(SEED, round_, client, "batches")
    order: NDArray[np.int64] = torch.cat(shuffled_batches(IMAGES, BATCH, generator)).numpy()
    return order


def draw_body(model: str) -> nn.Sequential:
    """Return layers with He's initial weights: with torch's own, three rounds would hardly move the loss."""
    torch.manual_seed(SEED)
    layers = body(model)
    for parameter in layers.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    return layers


def main() -> None:
    """Write the file for a model; both are named on the command line."""
    path, model = sys.argv[1:]
    images, labels = draw_images(CLIENTS[model])
    federation = make_model(draw_body(model), model)
    federation.assemble(make_data(Pictures(images, labels)), 0, 1, torch.device("cpu"))
    weights = named_weights(federation)
    arrays: dict[str, Any] = {"images": images, "labels": labels, **draw_orders(model)}
    arrays |= {f"weights/{name}": tensor.numpy() for name, tensor in weights.items()}
    print(f"{model}: {sum(tensor.numel() for tensor in weights.values()):,} parameters")
    np.savez(Path(path), **arrays)


if __name__ == "__main__":
    main()
