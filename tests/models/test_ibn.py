"""ResNet-IBN-a: the layout of the authors' files, and the layer against plain loops."""

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.models import Group, Neck, ReIDModel, ResNet, group_names
from fedsim.models.ibn import IBN


def norm(name, channels):
    sizes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (channels,))
    return {f"{name}.{part}": size for part, size in sizes.items()} | {f"{name}.num_batches_tracked": ()}


def ibn(name, channels):
    half = dict.fromkeys((f"{name}.IN.weight", f"{name}.IN.bias"), (channels // 2,))
    return half | norm(f"{name}.BN", channels - channels // 2)


def layout():
    """Names and shapes of resnet50_ibn_a-d9d0bb7b.pth, as ibnnet/resnet_ibn.py (XingangPan/IBN-Net) makes them."""
    found = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    inner = 64
    for stage, (blocks, planes) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for i in range(blocks):
            at = f"layer{stage}.{i}"
            found |= {f"{at}.conv1.weight": (planes, inner, 1, 1)}
            found |= (ibn if stage < 4 else norm)(f"{at}.bn1", planes)
            found |= {f"{at}.conv2.weight": (planes, planes, 3, 3), **norm(f"{at}.bn2", planes)}
            found |= {f"{at}.conv3.weight": (4 * planes, planes, 1, 1), **norm(f"{at}.bn3", 4 * planes)}
            if i == 0:
                found |= {f"{at}.downsample.0.weight": (4 * planes, inner, 1, 1)}
                found |= norm(f"{at}.downsample.1", 4 * planes)
            inner = 4 * planes
    return found | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def test_the_authors_file_loads(tmp_path):
    torch.manual_seed(0)
    state = {name: torch.rand(shape).half() for name, shape in layout().items()}  # half: a smaller file
    torch.save(state, tmp_path / "resnet50_ibn_a.pth")
    backbone = ResNet(50, weights=str(tmp_path / "resnet50_ibn_a.pth"), ibn=True)
    loaded = backbone.state_dict()
    assert set(loaded) == {name for name in state if not name.startswith("fc.")}
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in loaded.items())


def test_half_of_the_channels_are_normalised_by_image():
    torch.manual_seed(0)
    layer = IBN(4)
    nn.init.normal_(layer.IN.weight)
    nn.init.normal_(layer.BN.bias)
    x = torch.randn(3, 4, 5, 2)
    expected = torch.empty_like(x)
    for channel in range(4):
        for image in range(3):
            of = x[image, channel] if channel < 2 else x[:, channel]
            unit = (x[image, channel] - of.mean()) / (of.var(unbiased=False) + 1e-5).sqrt()
            half, place = (layer.IN, channel) if channel < 2 else (layer.BN, channel - 2)
            expected[image, channel] = half.weight[place] * unit + half.bias[place]
    torch.testing.assert_close(layer(x), expected)


def test_both_halves_are_norms():
    groups = group_names(ReIDModel(ResNet(18, ibn=True), Neck(kind="none")))
    assert groups["backbone.layer3.1.bn1.IN.weight"] == groups["backbone.layer1.0.bn1.BN.bias"] == Group.NORM
    assert groups["backbone.layer1.0.bn1.BN.running_mean"] == Group.STAT
    assert "backbone.layer4.0.bn1.weight" in groups


@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "nonsense"])
def test_torchvision_has_no_weights_of_it(weights):
    with pytest.raises(
        ConfigError, match=r"^backbone.weights: .* torchvision has no resnet18_ibn_a; give a file, or null$"
    ):
        ResNet(18, weights=weights, ibn=True)
