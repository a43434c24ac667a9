"""Write the work file with fedsim's own functions, so that fedsim runs it by itself and the others replay it.

python make_work.py work.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import BATCH, CLASSES, CLIENTS, FRACTION, IMAGES, ROUNDS, body
from fedsim_engine import SEED, Pictures, make_data, make_model, name_of, named_weights
from numpy.typing import NDArray
from torch import nn

from fedsim.core.seeding import torch_generator
from fedsim.data.batches import shuffled_batches
from fedsim.federation.components.selection import RandomFraction


def draw_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw images [N, 3, 32, 32] of ten noisy patterns, each client with as many of each, and their labels [N]."""
    rng = np.random.default_rng(SEED)
    labels = np.tile(np.arange(IMAGES) % CLASSES, CLIENTS)
    patterns = np.kron(rng.normal(size=(CLASSES, 3, 8, 8)), np.ones((4, 4)))
    noise = rng.normal(size=(len(labels), 3, 32, 32))
    pixels = 116 + 15 * patterns[labels] + 25 * noise  # 116: about ImageNet's mean
    return pixels.clip(0, 255).astype(np.uint8), labels


def draw_orders(rounds: int) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the selected clients [R, S] and the order of their images [R, S, n], as fedsim draws them."""
    names = [name_of(client) for client in range(CLIENTS)]
    selection = RandomFraction(FRACTION)
    selected = [[names.index(name) for name in selection.select(r, names, SEED)] for r in range(rounds)]
    orders = [[order_of(r, names[client]) for client in selected[r]] for r in range(rounds)]
    return np.array(selected, dtype=np.int16), np.array(orders, dtype=np.int16)


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
    """Write the file named on the command line."""
    images, labels = draw_images()
    selected, orders = draw_orders(max(ROUNDS.values()))
    arrays: dict[str, Any] = {"images": images, "labels": labels, "selected": selected, "orders": orders}
    for model in ROUNDS:
        federation = make_model(draw_body(model), model)
        federation.assemble(make_data(Pictures(images, labels)), 0, 1, torch.device("cpu"))
        weights = named_weights(federation)
        arrays |= {f"{model}/{name}": tensor.numpy() for name, tensor in weights.items()}
        print(f"{model}: {sum(tensor.numel() for tensor in weights.values()):,} parameters")
    np.savez(Path(sys.argv[1]), **arrays)


if __name__ == "__main__":
    main()
