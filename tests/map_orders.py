"""The order in memory of the maps that convolutions get."""

import torch
from torch import nn


def orders(network):
    """Whether each convolution gets its maps in channels_last."""
    seen = []

    def look(_, inputs, __):
        seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels > 2:  # CBAM's map of mean and maximum is made for it
            layer.register_forward_hook(look)
    network.train()(torch.randn(2, 3, 64, 32).contiguous(memory_format=torch.channels_last))
    return seen
