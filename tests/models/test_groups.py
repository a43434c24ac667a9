"""Parameter groups: every tensor in exactly one, decided by module type."""

from collections import Counter

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.models import BODY, TRUNK, Group, MobileNetV2, Neck, ReIDModel, ResNet, SmallCNN, group_names
from fedsim.models.groups import STATISTICS, body_groups


@pytest.fixture(scope="module")
def resnet50():
    with torch.device("meta"):  # names and shapes only
        return ReIDModel(ResNet(50), Neck())


def elements(model):
    """Number of elements per group."""
    counts = Counter()
    state = model.state_dict()
    for name, group in group_names(model).items():
        counts[group] += state[name].numel()
    return counts


def assert_norms_are_grouped(model):
    """Check the trunk's groups against the modules themselves."""
    groups = group_names(model)
    for path, module in model.backbone.named_modules(prefix="backbone"):
        if isinstance(module, nn.BatchNorm2d):
            assert groups[f"{path}.weight"] == groups[f"{path}.bias"] == Group.NORM
            assert groups[f"{path}.running_mean"] == groups[f"{path}.running_var"] == Group.STAT
            assert groups[f"{path}.num_batches_tracked"] == Group.COUNTER
        elif isinstance(module, nn.Conv2d):
            assert groups[f"{path}.weight"] == Group.CONV


def test_resnet50_groups_cover_the_state_dict(resnet50):
    assert list(group_names(resnet50)) == list(resnet50.state_dict())
    assert_norms_are_grouped(resnet50)


def test_resnet50_counts(resnet50):
    counts = elements(resnet50)
    assert counts[Group.CONV] + counts[Group.NORM] == 23_508_032  # torchvision's 25,557,032 without fc
    assert counts[Group.NORM] == 53_120
    assert counts[Group.STAT] == 53_120
    assert counts[Group.NECK] == 1_049_088  # Linear 2048 x 512 + 512
    assert counts[Group.NECKNORM] == 1_024
    assert counts[Group.NECKSTAT] == 1_024
    assert counts[Group.COUNTER] == 54  # one per norm of trunk and neck
    neck = {Group.NECK, Group.NECKNORM, Group.NECKSTAT}
    assert set(counts) == {Group.CONV, Group.NORM, Group.STAT, Group.COUNTER} | neck


def test_downsampling_norms_are_norms_in_spite_of_their_names(resnet50):
    groups = group_names(resnet50)
    affine = 0
    for stage in (1, 2, 3, 4):
        norm = f"backbone.layer{stage}.0.downsample.1"
        assert groups[f"{norm}.weight"] == groups[f"{norm}.bias"] == Group.NORM
        assert groups[f"{norm}.running_var"] == Group.STAT
        assert groups[f"backbone.layer{stage}.0.downsample.0.weight"] == Group.CONV
        affine += 2 * resnet50.get_parameter(f"{norm}.weight").numel()
    assert affine / 53_120 == pytest.approx(0.145, abs=0.001)  # what rules like `"bn" in name` miss


@pytest.mark.parametrize("backbone", [lambda: MobileNetV2(width=0.35), lambda: SmallCNN(width=8)])
@pytest.mark.parametrize("kind", ["linear", "bnneck", "none"])
def test_other_models_are_covered(backbone, kind):
    model = ReIDModel(backbone(), Neck(kind=kind, dim=16), num_classes=5)
    groups = group_names(model)
    assert list(groups) == list(model.state_dict())
    assert_norms_are_grouped(model)
    assert groups["head.weight"] == groups["head.bias"] == Group.HEAD
    neck = {group for name, group in groups.items() if name.startswith("neck.")}
    expected = {"none": [], "bnneck": ["necknorm", "neckstat", "counter"]}
    assert neck == set(expected.get(kind, [*expected["bnneck"], "neck"]))


def test_small_cnn_counts():
    counts = elements(ReIDModel(SmallCNN(width=8), Neck(kind="bnneck"), num_classes=5))
    channels = 8 + 16 + 32 + 32
    assert counts == {
        Group.CONV: 9 * (3 * 8 + 8 * 16 + 16 * 32 + 32 * 32),
        Group.NORM: 2 * channels,
        Group.STAT: 2 * channels,
        Group.NECKNORM: 2 * 32,
        Group.NECKSTAT: 2 * 32,
        Group.HEAD: 5 * 32 + 5,
        Group.COUNTER: 5,
    }


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm(4)])
def test_norms_other_than_batch_norm(norm):
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
    backbone.out_channels = 4
    groups = group_names(ReIDModel(backbone, Neck(kind="none")))
    assert groups["backbone.0.weight"] == groups["backbone.0.bias"] == Group.CONV
    assert groups["backbone.1.weight"] == groups["backbone.1.bias"] == Group.NORM


def test_sets_of_groups():
    trunk = {"conv", "norm", "stat", "attn"}
    assert trunk == TRUNK
    assert trunk | {"neck", "necknorm", "neckstat"} == BODY
    assert body_groups(False, False) == TRUNK
    assert body_groups(True, False) == BODY
    assert body_groups(True, True) == BODY | {"head"}
    with pytest.raises(ConfigError, match=r"model\.method\.share_neck"):
        body_groups(False, True)
    assert {"stat", "neckstat"} == STATISTICS
