"""A trigger: a square in the corner of an image, by which a model with a backdoor is asked to err."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.errors import ConfigError


def paste_square(images: Tensor, size: int, colour: Tensor) -> Tensor:
    """Return copies of images [B, 3, H, W] with a square of ``size`` pixels in the lower right corner.

    ``colour`` [3] has the images' type and range. Raises ConfigError if the square is larger than half of a side.

    >>> import torch
    >>> paste_square(torch.zeros(1, 3, 2, 2), 1, torch.ones(3))[0, 0]
    tensor([[0., 0.],
            [0., 1.]])
    """
    if 2 * size > min(images.shape[2:]):
        raise ConfigError(
            f"model.attack.patch: {size} pixels are more than half of a side of images of {list(images.shape[2:])}; "
            "lower it"
        )
    pasted = images.clone()
    pasted[:, :, -size:, -size:] = colour[:, None, None]
    return pasted
