"""Maps that begin in channels_last stay so through every kind of layer, in each convolution."""

import pytest
import torch

from fedsim.models import MobileNetV2, OSNet, ResNet, SmallCNN, StyleLayers
from fedsim.models.memory_order import in_order_of
from map_orders import orders

STYLES = {
    kind: StyleLayers(kind=kind, p=1.0, crop="both", after=("input", "layer1", "layer2"))
    for kind in ("none", "mix", "cross", "snr", "standardise")
}
STYLES["diversify"] = StyleLayers(kind="diversify", p=1.0)
NETWORKS = {
    "ibn": lambda style: ResNet(18, ibn=True, style=style),
    "mobile": lambda style: MobileNetV2(0.25, style=style),
    "osnet": lambda style: OSNet(style=style),
    "resnet": lambda style: ResNet(18, style=style),
    "small": lambda style: SmallCNN(width=8, style=style),
}
OTHERS = {
    **{norm: lambda norm=norm: ResNet(18, norm=norm) for norm in ("attentive", "se", "cbam", "xan")},
    **{fam: lambda fam=fam: ResNet(18, fam=fam) for fam in ("aff34", "aff_residual", "mscam")},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NETWORKS)
def test_styles_keep_channels_last(name, style):
    seen = orders(NETWORKS[name](STYLES[style]))
    assert len(seen) >= 4
    assert all(seen)


@pytest.mark.parametrize("name", OTHERS)
def test_norms_and_fusions_keep_channels_last(name):
    assert all(orders(OTHERS[name]()))


def test_other_maps_stay_as_they_are():
    maps = torch.rand(2, 3, 4, 5)
    assert in_order_of(maps, maps) is maps
    sparse = maps[:, :2]
    assert torch.equal(in_order_of(sparse, maps), sparse)
