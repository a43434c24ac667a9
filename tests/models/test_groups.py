"""Parameter groups: every tensor in exactly one, decided by module type."""

from collections import Counter

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.models import BACKBONE, BODY, ConvNeXt, Group, MobileNetV2, Neck, ReIDModel, ResNet, SmallCNN, group_names
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
    """Check the backbone's groups against the modules themselves."""
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
    assert counts[Group.COUNTER] == 54  # one per norm of backbone and neck
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


@pytest.mark.parametrize(
    "backbone", [lambda: MobileNetV2(width=0.35), lambda: SmallCNN(width=8), lambda: ConvNeXt("micro")]
)
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


def test_convnext_has_layer_normalisation_and_no_statistics():
    groups = group_names(ReIDModel(ConvNeXt("micro"), Neck(kind="none")))
    assert set(groups.values()) == {Group.CONV, Group.NORM}
    norms = {name for name, group in groups.items() if group is Group.NORM}
    # of the stem, in four blocks, before three downsamplings
    assert len(norms) == 2 * (1 + 4 + 3)
    assert groups["backbone.features.1.0.layer_scale"] == Group.CONV


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
    backbone = {"conv", "norm", "stat", "attn"}
    assert backbone == BACKBONE
    assert backbone | {"neck", "necknorm", "neckstat"} == BODY
    assert body_groups(False, False) == BACKBONE
    assert body_groups(True, False) == BODY
    assert body_groups(True, True) == BODY | {"head"}
    with pytest.raises(ConfigError, match=r"model\.method\.share_neck"):
        body_groups(False, True)
    assert {"stat", "neckstat"} == STATISTICS


# -- attention ---------------------------------------------------------------------------------------------------------

PLAIN_CONV = 23_508_032 - 53_120
LAST_MIXTURES = 3 * 10 + 4 * 10 + 6 * 20 + 3 * 20  # of ResNet-50, over its blocks


def attended(norm):
    with torch.device("meta"):
        return ReIDModel(ResNet(50, norm=norm), Neck())


def test_attentive_normalisation_is_all_normalisation():
    model = attended("attentive")
    groups, counts = group_names(model), elements(model)
    assert list(groups) == list(model.state_dict())
    assert counts[Group.CONV] == PLAIN_CONV
    assert counts[Group.NORM] == 251_508  # what paper 000 keeps local: 53,120 + 198,388
    assert counts[Group.STAT] == 53_120 + 2 * LAST_MIXTURES
    assert Group.ATTN not in counts
    own = {name.rpartition("bn2.")[2]: group for name, group in groups.items() if ".layer4.2.bn2." in name}
    assert own == {
        "gamma": Group.NORM,
        "beta": Group.NORM,
        "norm.running_mean": Group.STAT,
        "norm.running_var": Group.STAT,
        "norm.num_batches_tracked": Group.COUNTER,
        "attention.weight": Group.NORM,
        "attention_norm.weight": Group.NORM,
        "attention_norm.bias": Group.NORM,
        "attention_norm.running_mean": Group.STAT,
        "attention_norm.running_var": Group.STAT,
        "attention_norm.num_batches_tracked": Group.COUNTER,
    }


@pytest.mark.parametrize(("norm", "added"), [("se", 2_514_944), ("cbam", 2_514_944 + 16 * 98)])
def test_attention_blocks_have_a_group_of_their_own(norm, added):
    model = attended(norm)
    groups, counts = group_names(model), elements(model)
    assert list(groups) == list(model.state_dict())
    assert counts[Group.CONV] == PLAIN_CONV
    assert counts[Group.NORM] == counts[Group.STAT] == 53_120
    assert counts[Group.ATTN] == added
    assert groups["backbone.layer4.2.bn3.norm.weight"] == Group.NORM
    assert groups["backbone.layer4.2.bn3.attention.excite.reduce.weight"] == Group.ATTN


@pytest.mark.parametrize("norm", ["bn", "attentive", "se", "cbam"])
def test_masks_of_selective_aggregation_part_the_backbone(norm):
    """Paper 000: convolutions come from the specific models, normalisation and attention from the generalised ones."""
    model = attended(norm)
    groups = {name: group for name, group in group_names(model).items() if name.startswith("backbone.")}
    shared = {n for n, g in groups.items() if g is Group.CONV}
    local = {n for n, g in groups.items() if g in {Group.NORM, Group.STAT, Group.ATTN}}
    plain = attended("bn").state_dict()
    convolutions = {n for n in plain if n.startswith("backbone.") and plain[n].dim() == 4}
    assert shared == convolutions
    assert local == {n for n in groups if not n.endswith("num_batches_tracked")} - convolutions
