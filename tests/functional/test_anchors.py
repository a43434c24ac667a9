"""Losses of images and texts against plain loops."""

import math

import torch
from torch.nn.functional import normalize

from fedsim.functional.anchors import camera_gap, image_to_text, text_to_image


def drawn(*shape):
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])), dim=1)


def loop_losses(images, texts, labels, temperature):
    """Cross entropies of images over texts, and of texts over images, in plain numbers."""
    s = [[math.exp(float(v @ t) / temperature) for t in texts] for v in images]
    i2t = [-math.log(s[b][y] / sum(s[b])) for b, y in enumerate(labels)]
    t2i = []
    for y in sorted(set(labels)):
        own = [b for b, other in enumerate(labels) if other == y]
        t2i.append(sum(-math.log(s[b][y] / sum(row[y] for row in s)) for b in own) / len(own))
    return sum(i2t) / len(i2t), sum(t2i) / len(t2i)


def test_both_directions_are_those_of_plain_loops():
    images, texts, labels = drawn(7, 5), drawn(4, 5), [0, 2, 2, 1, 0, 0, 2]  # nobody has text 3
    expected = loop_losses(images.double(), texts.double(), labels, 0.07)
    for loss, value in zip((image_to_text, text_to_image), expected, strict=True):
        assert abs(float(loss(images, texts, torch.tensor(labels), 0.07)) - value) < 1e-5


def test_the_camera_gap_is_that_of_plain_loops_and_zero_with_one_camera():
    means, texts, owners = drawn(6, 5), drawn(3, 5), [0, 1, 0, 2, 0, 1]
    total = 0.0
    for i in range(6):
        for j in range(i):
            if owners[i] == owners[j]:
                total += float(means[i] @ texts[owners[i]] - means[j] @ texts[owners[j]]) ** 2
    assert abs(float(camera_gap(means, texts, torch.tensor(owners))) - total / 3) < 1e-6
    assert float(camera_gap(means[:3], texts, torch.arange(3))) == 0
