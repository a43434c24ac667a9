"""Random colours against torchvision's operations on single images."""

import pytest
import torch
from torchvision.transforms import functional

from fedsim.data.augmentation import jitter_colours

RANGES = {"brightness": 0.4, "contrast": 0.5, "saturation": 1.5, "hue": 0.3}


def noise(batch):
    images = torch.randint(0, 256, (batch, 3, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[0], images[1] = 77, 0  # grey and black: no hue
    return images


def jitter(images, u, **ranges):
    zero = dict.fromkeys(RANGES, 0.0)
    return jitter_colours(images, u, **{**zero, **ranges})


@pytest.mark.parametrize("name", list(RANGES))
def test_each_operation_is_torchvisions_with_the_drawn_factor(name):
    images, range_ = noise(30), RANGES[name]
    u = torch.rand(30, 4, generator=torch.Generator().manual_seed(1))
    x = jitter(images, u, **{name: range_})
    operation = getattr(functional, f"adjust_{name}")
    column = list(RANGES).index(name)
    for image, mine, draw in zip(images, x, u[:, column].tolist(), strict=True):
        low, high = (-range_, range_) if name == "hue" else (max(0.0, 1 - range_), 1 + range_)
        expected = operation(image / 255, low + (high - low) * draw)
        assert torch.allclose(mine / 255, expected, atol=2e-5)


def test_the_order_is_brightness_contrast_saturation_hue():
    images = noise(8)
    u = torch.rand(8, 4, generator=torch.Generator().manual_seed(2))
    step_by_step = images
    for name, range_ in RANGES.items():
        step_by_step = jitter(step_by_step, u, **{name: range_})
    assert torch.equal(jitter(images, u, **RANGES), step_by_step)


def test_the_input_stays_as_it_is_and_the_output_is_float_of_0_to_255():
    images = noise(8)
    before = images.clone()
    x = jitter(images, torch.rand(8, 4), **RANGES)
    assert torch.equal(images, before)
    assert x.dtype == torch.float32
    assert x.min() >= 0
    assert x.max() <= 255.001
