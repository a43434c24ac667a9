"""A backbone of your own: any module of images [B, 3, H, W] with the attribute out_channels."""

from itertools import pairwise

from torch import Tensor, nn


class Stripes(nn.Module):
    """Four convolutions, with attention on horizontal stripes of the body.

    Args:
        width: channels of the first map; the last one has four times as many.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [3, width, width, 2 * width, 4 * width]
        layers = [
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride=2 if number else 1, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            )
            for number, (inputs, outputs) in enumerate(pairwise(sizes))
        ]
        self.layers = nn.Sequential(*layers)
        self.attention = nn.Conv2d(4 * width, 1, 1)
        self.out_channels = 4 * width  # C of the map that forward returns

    def forward(self, images: Tensor) -> Tensor:
        """Return a map [B, C, h, w]; fedsim pools it."""
        maps = self.layers(images)
        stripes = self.attention(maps.mean(3, keepdim=True)).sigmoid()  # [B, 1, h, 1]
        return maps * stripes
