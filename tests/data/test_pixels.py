"""Decoded images on their way to the device."""

import torch

from fedsim.data.pixels import HeldPixels


def test_images_that_ranks_share_move_to_the_device_with_the_first_batch():
    pixels = torch.arange(3 * 3 * 2 * 2, dtype=torch.uint8).view(3, 3, 2, 2)
    elsewhere = torch.device("meta")  # a device without memory
    moved, held = HeldPixels(pixels, elsewhere, moved=True), HeldPixels(pixels, elsewhere)
    for images in (moved, held):
        assert images.pixels is pixels
        [batch] = images.batches([torch.tensor([2, 0])])
        assert (batch.device, batch.shape) == (elsewhere, (2, 3, 2, 2))
    assert moved.pixels.device == elsewhere
    assert held.pixels is pixels
