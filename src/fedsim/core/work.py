"""The work of training, counted where it is done: images of training passes, and steps of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch.optim.optimizer import register_optimizer_step_post_hook

Role = Literal["client", "second", "personal", "server"]
"""The client's model; a second model beside it; a personal model that trains in its place; a model on the server"""
ROLES: tuple[Role, ...] = ("client", "second", "personal", "server")
Counts = tuple[int, int]
"""images and steps"""


class Work:
    """The work of one role on one rank since the last :meth:`take`."""

    __slots__ = ("counts_images", "images", "steps")

    def __init__(self) -> None:
        self.images = 0
        """of training passes: an image counts in each of them"""
        self.steps = 0
        self.counts_images = True
        """False while another rank counts the same passes"""

    def add_images(self, number: int) -> None:
        """Count a training pass."""
        if self.counts_images:
            self.images += number

    def add(self, counts: Counts) -> None:
        """Add images and steps."""
        self.images, self.steps = self.images + counts[0], self.steps + counts[1]

    def take(self) -> Counts:
        """Return images and steps, and begin again."""
        counts = self.images, self.steps
        self.images = self.steps = 0
        return counts


@contextmanager
def counted_steps(work: Work) -> Iterator[None]:
    """Count the steps of all of torch's optimizers for a while."""

    def count(*_: object) -> None:
        work.steps += 1

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()
