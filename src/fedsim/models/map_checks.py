"""Checks of the maps and batches that style layers get: each refuses with one line."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.errors import ConfigError


def check_pixels(x: Tensor, place: str) -> None:
    """Raise ConfigError if maps [B, C, H, W] at a place of ``backbone.style.after`` have one pixel."""
    if x.shape[2] * x.shape[3] < 2:
        raise ConfigError(
            f"backbone.style.after: the map at {place} has 1 x 1 pixels, which have no deviation; choose an earlier "
            "place, or larger images"
        )


def check_images(x: Tensor, layer: str) -> None:
    """Raise ConfigError if a batch [B, ...] has one image, where a ``layer`` exchanges styles."""
    if len(x) < 2:
        raise ConfigError(
            f"model.client.batch_size: {layer} exchanges the styles of a batch's images, and this batch has one; "
            "set it, and micro_batch, to at least 2"
        )
