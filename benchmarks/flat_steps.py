"""Flat steps against tensor-by-tensor steps, by the size of the parameters.

A model of equal parameters takes steps: a backward pass whose only work is to copy a ready-made gradient for each
parameter, the optimizer's step, and the clearing. Flat and plain steps take turns; they give the same bits. The table
has the medians over repeats of the microseconds per parameter. ``model.client.flat_step: auto`` follows the rule that
comes from here: flat on CPUs, up to 16,384 elements per parameter.

    python benchmarks/flat_steps.py
    python benchmarks/flat_steps.py --tensors 6 --repeats 9
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fedsim.core.flat import FlatParameters
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.settings import LocalTraining

SIZES = [2**power for power in (8, 10, 12, 13, 14, 15, 17, 19)]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "Adam": torch.optim.Adam,
}


class Ready(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> Tensor:
        """Return 0 and keep the ``gradients``: one for each parameter that follows."""
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return new tensors, as every backward pass does: parameters without a gradient take them as they are."""
        return None, *(gradient.clone() for gradient in ctx.gradients)


class Stepping:
    """Parameters with an optimizer, and the gradients that each step gives them."""

    def __init__(self, size: int, tensors: int, settings: LocalTraining) -> None:
        self.parameters = nn.ParameterList(torch.zeros(size) for _ in range(tensors))
        flat = FlatParameters(self.parameters, lambda _: True)
        self.optimizer = LocalOptimizer(settings, flat, [list(self.parameters.named_parameters()), []])
        generator = torch.Generator().manual_seed(0)
        self._gradients = [torch.randn(size, generator=generator) for _ in range(tensors)]

    def step(self) -> None:
        """Take one step, as after the backward pass of a batch."""
        Ready.apply(self._gradients, *self.parameters).backward()
        self.optimizer.step()


def seconds(stepping: Stepping, steps: int) -> float:
    """Return the seconds of ``steps`` steps, each."""
    begin = time.perf_counter()
    for _ in range(steps):
        stepping.step()
    return (time.perf_counter() - begin) / steps


def measure(size: int, tensors: int, repeats: int, optimizer: Callable[..., Any]) -> tuple[float, float]:
    """Return the microseconds per parameter of flat and of plain steps."""
    rivals = [
        Stepping(size, tensors, LocalTraining(optimizer=optimizer, flat_step=flat_step)) for flat_step in (True, False)
    ]
    for rival in rivals:
        rival.step()  # the first step makes the optimizer's state, and the flat gradients
    assert [rival.optimizer.is_flat for rival in rivals] == [True, False]
    steps = max(3, int(0.05 / min(seconds(rival, 3) for rival in rivals)))
    taken = [[seconds(rival, steps) for rival in rivals] for _ in range(repeats)]
    for flat_tensor, plain_tensor in zip(rivals[0].parameters, rivals[1].parameters, strict=True):
        assert torch.equal(flat_tensor, plain_tensor)
    flat, plain = (1e6 * statistics.median(column) / tensors for column in zip(*taken, strict=True))
    return flat, plain


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60, help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        for size in SIZES:
            flat, plain = measure(size, args.tensors, args.repeats, optimizer)
            rows.append([name, f"{size:,}", f"{flat:.2f}", f"{plain:.2f}", f"{flat / plain:.2f}"])
    print(f"{args.tensors} parameters, one thread, microseconds per parameter and step\n")
    print(tabulate(rows, ["optimizer", "elements", "flat", "plain", "ratio"], "github"))


if __name__ == "__main__":
    main()
