"""CifarResNet against He et al. (CVPR 2016), Section 4.2: counts by arithmetic, a block by plain loops."""

import pytest
import torch
import torch.nn.functional as F

from fedsim.models import CifarResNet, Group, Neck, ReIDModel, group_names


def parameters_of(depth, classes):
    """Weights without bias and two numbers per normalised channel, from the paper's table."""
    n = (depth - 2) // 6
    convolutions = [(3, 16), *[(16, 16)] * 2 * n, (16, 32), *[(32, 32)] * (2 * n - 1), (32, 64)]
    convolutions += [(64, 64)] * (2 * n - 1)
    assert len(convolutions) + 1 == depth  # with the classifier
    return sum(9 * c_in * c_out + 2 * c_out for c_in, c_out in convolutions) + 64 * classes + classes


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_parameters_are_as_many_as_in_table_6_of_the_paper(depth, millions):
    model = ReIDModel(CifarResNet(depth), Neck(kind="none", dropout=0.0), num_classes=10)
    count = sum(p.numel() for p in model.parameters())
    assert count == parameters_of(depth, 10)
    assert round(count / 1e6, 2) == pytest.approx(millions)
    assert depth != 32 or count == 464_154


def test_maps_are_those_of_the_paper():
    backbone = CifarResNet(20).eval()
    assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)
    assert backbone.out_channels == 64
    groups = group_names(backbone).values()
    assert set(groups) == {Group.CONV, Group.NORM, Group.STAT, Group.COUNTER}
    assert list(groups).count(Group.NORM) == 2 * 19  # FedBN keeps these at clients


@pytest.mark.parametrize("block", ["layer1.0", "layer2.0"])
def test_a_block_adds_what_comes_in_without_parameters(block):
    torch.manual_seed(0)
    module = CifarResNet(20).eval().get_submodule(block)
    c_in, stride = module.conv1.in_channels, module.conv1.stride[0]
    x = torch.randn(2, c_in, 6, 6)
    with torch.no_grad():
        branch = module.bn2(module.conv2(F.relu(module.bn1(module.conv1(x)))))
        out = module(x)
    expected = branch.clone()
    for channel in range(c_in):  # the others get zeros
        for row in range(out.shape[2]):
            for column in range(out.shape[3]):
                expected[:, channel, row, column] += x[:, channel, stride * row, stride * column]
    assert out.shape[1] == (c_in if stride == 1 else 2 * c_in)
    assert torch.equal(out, expected.clamp(min=0))
    assert {name.split(".")[0] for name in module.state_dict()} == {"conv1", "bn1", "conv2", "bn2"}
