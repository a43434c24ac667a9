"""The batch that a user's ``training_step`` gets."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor


class LabelledImages(tuple[Tensor, Tensor]):
    """A batch as a Lightning module expects it: ``images, labels = batch``, with cameras as an attribute."""

    cameras: Tensor | None
    """[B] int64, the camera of each image; None where a method trains on images that it has changed"""

    def __new__(cls, images: Tensor, labels: Tensor, cameras: Tensor | None = None) -> Self:
        """Join images [B, 3, H, W] float32, augmented and normalised, and labels [B] int64, 0 .. num_classes - 1."""
        batch = super().__new__(cls, (images, labels))
        batch.cameras = cameras
        return batch

    def __getnewargs__(self) -> Any:
        """Return the arguments by which copies are made."""
        return *self, self.cameras

    def to(self, *args: Any, **options: Any) -> Self:
        """Return the batch on another device: Lightning moves what has this method."""
        cameras = None if self.cameras is None else self.cameras.to(*args, **options)
        return type(self)(self[0].to(*args, **options), self[1].to(*args, **options), cameras)

    @property
    def images(self) -> Tensor:
        """[B, 3, H, W] float32, augmented and normalised."""
        return self[0]

    @property
    def labels(self) -> Tensor:
        """[B] int64, 0 .. num_classes - 1."""
        return self[1]
