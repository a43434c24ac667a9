"""The batch that a user's ``training_step`` gets, and its forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.training.batch import Batch


class _Pair(NamedTuple):
    images: Tensor
    """[B, 3, H, W] float32, augmented and normalised"""
    labels: Tensor
    """[B] int64, 0 .. num_classes - 1"""


class LabelledImages(_Pair):
    """A batch as a Lightning module expects it: ``images, labels = batch``, with cameras as an attribute."""

    cameras: Tensor | None = None
    """[B] int64, the camera of each image; None where a method trains on images that it has changed"""

    def to(self, *args: Any, **options: Any) -> Self:
        """Return the batch on another device: Lightning moves what has this method."""
        moved = type(self)(*(part.to(*args, **options) for part in self))
        moved.cameras = None if self.cameras is None else self.cameras.to(*args, **options)
        return moved


def described(formed: Any, batch: Batch) -> str:
    """Return a batch of a form in words, such as (images, labels)."""
    parts = {id(part): name for name, part in batch._asdict().items()} | {id(view): "view" for view in batch.views}
    if isinstance(formed, Mapping):
        return f"{{{', '.join(f'{name}: {described(part, batch)}' for name, part in formed.items())}}}"
    if isinstance(formed, tuple | list):
        inner = ", ".join(described(part, batch) for part in formed)
        return f"({inner})" if isinstance(formed, tuple) else f"[{inner}]"
    return parts.get(id(formed), type(formed).__name__)


class BatchForm(KeepsArguments, ABC, option="model.module_batch"):
    """The form of the batches of ``training_step``; subclass it for one of your own."""

    key: ClassVar[str] = "module_batch"

    num_views: int = 1
    """versions of each image, augmented independently"""

    @abstractmethod
    def __call__(self, batch: Batch) -> Any:
        """Return a batch in this form.

        ``cameras`` and ``rows`` are None where a method trains on other images than the client's.
        """

    def views(self, batch: Batch) -> list[Tensor]:
        """Return all versions of the images, each [B, 3, H, W]; images without augmentation have one, repeated."""
        views = [batch.images, *batch.views][: self.num_views]
        return views + [batch.images] * (self.num_views - len(views))


class PairBatch(BatchForm):
    """``images, labels = batch``; also by name, and ``batch.cameras``."""

    def __call__(self, batch: Batch) -> LabelledImages:
        """Return images, labels."""
        pair = LabelledImages(batch.images, batch.labels)
        pair.cameras = batch.cameras
        return pair


class TripleBatch(BatchForm):
    """``images, labels, cameras = batch``."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return images, labels, cameras."""
        return batch.images, batch.labels, batch.cameras


@dataclass(frozen=True)
class DictBatch(BatchForm):
    """A dict with the names that the module asks for, such as OML's ``input_tensors`` and ``labels``."""

    images: str = "images"
    """name of the images"""
    labels: str = "labels"
    """name of the labels"""
    cameras: str | None = None
    """name of the cameras; null: without them"""

    def __post_init__(self) -> None:
        if len({self.images, self.labels, self.cameras}) < 3:
            raise ConfigError(
                "model.module_batch: two of images, labels and cameras have one name; give them different ones"
            )

    def __call__(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return images, labels and cameras by name."""
        cameras = {} if self.cameras is None else {self.cameras: batch.cameras}
        return {self.images: batch.images, self.labels: batch.labels, **cameras}


@dataclass(frozen=True)
class ViewsBatch(BatchForm):
    """``views, labels, cameras = batch``, where ``views`` is a list of versions of the images, as lightly's modules."""

    num_views: int = 2
    """versions of each image, augmented independently"""

    def __post_init__(self) -> None:
        at_least("model.module_batch", 2, num_views=self.num_views)

    def __call__(self, batch: Batch) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return views, labels, cameras."""
        return self.views(batch), batch.labels, batch.cameras
