"""From images to retrieval features."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.data.augmentation import normalise_images
from fedsim.models.reid import Features, ReIDModel
from fedsim.settings import Evaluation

__all__ = ["extract_features"]


@torch.no_grad()
def extract_features(model: ReIDModel, images: Tensor, settings: Evaluation, device: torch.device) -> Tensor:
    """Run a model in evaluation mode, in float32.

    Batch boundaries depend on the number of images only: matrix products with another number of rows may differ in
    their last bits.

    Args:
        model: on ``device``.
        images: uint8 [n, 3, H, W] in host memory.
        settings: which layer, mirror images, batch size.
        device: where the model is.

    Returns:
        float32 [n, D] on the CPU, not normalised.
    """
    model.eval()
    features = []
    with torch.autocast(device.type, enabled=False):
        for batch in images.split(settings.batch_size):
            x = normalise_images(batch.to(device, non_blocking=True))
            feature = _layer(model(x), settings)
            if settings.flip:
                feature = feature + _layer(model(x.flip(-1)), settings)
            features.append(feature.cpu())
    return torch.cat(features)


def _layer(features: Features, settings: Evaluation) -> Tensor:
    return features.neck if settings.layer == "neck" else features.pool
