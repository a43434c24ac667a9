"""Images and texts of people: the losses of CLIP-ReID (arXiv:2211.13977), and CO-EVO's camera term (arXiv:2604.26363).

B images, Z people, M cameras of people, D features. All features are float32 of length 1, so products are cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def image_to_text(images: Tensor, texts: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean cross entropy of images [B, D] over the texts [Z, D], a scalar; ``labels`` [B] int64 are rows.

    >>> image_to_text(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), 1.0)
    tensor(0.3133)
    """
    return cross_entropy(images @ texts.T / temperature, labels)


def text_to_image(images: Tensor, texts: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean over texts [Z, D] of their cross entropy over images [B, D], a scalar.

    That of a text is the mean over its images, which have its row in ``labels`` [B] int64. Texts without images count
    as 0, and not in the mean.

    >>> text_to_image(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), 1.0)
    tensor(0.3133)
    """
    logs = (texts @ images.T / temperature).log_softmax(dim=1)
    members = labels == torch.arange(len(texts), device=labels.device)[:, None]
    counts = members.sum(1)
    return -(logs * members).sum(1).div(counts.clamp_min(1)).sum() / (counts > 0).sum()


def camera_gap(means: Tensor, texts: Tensor, owners: Tensor) -> Tensor:
    """Return the mean over texts [Z, D] of a sum over pairs of the person's cameras, a scalar.

    The sum is of (s_i - s_j)^2, each pair once, with the cosine s_i of the text and the mean feature at camera i:
    ``means`` [M, D], a row for each camera of each person, whose rows in the texts are ``owners`` [M] int64. It is 0 of
    a person with one camera.

    >>> one, two = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> camera_gap(two, one, torch.tensor([0, 0])), camera_gap(one, one, torch.tensor([0]))
    (tensor(1.), tensor(0.))
    """
    cosines = (means * texts[owners]).sum(1)
    pairs = (owners[:, None] == owners).triu(1)
    return ((cosines[:, None] - cosines).square() * pairs).sum() / len(texts)
