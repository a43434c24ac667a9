"""Feature attention of paper 002 against plain operations: MS-CAM, fusion of maps, stages, residual blocks."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.methods import WeightedPav
from fedsim.models import AFF, MSCAM, ConvNeXt, Group, Neck, ReIDModel, ResNet, SmallCNN, group_names
from fedsim.models.fusion import StageFusion
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, named, sgd

KINDS = ["mscam", "aff34", "aff_residual"]


def scatter(module):
    """Random values for everything, so that nothing cancels."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
            elif name.endswith("running_mean"):
                buffer.normal_()
    return module


# -- plain operations --------------------------------------------------------------------------------------------------


def pointwise(conv, x):
    """A 1 x 1 convolution: the same matrix for each pixel."""
    weight, bias = conv.weight[:, :, 0, 0], conv.bias
    out = torch.zeros(len(x), len(weight), *x.shape[2:], dtype=x.dtype)
    for b in range(len(x)):
        for h in range(x.shape[2]):
            for w in range(x.shape[3]):
                out[b, :, h, w] = weight @ x[b, :, h, w] + (0 if bias is None else bias)
    return out


def normalised(norm, x, training):
    """Batch normalisation, channel by channel."""
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.sum() / values.numel() if training else norm.running_mean[c]
        variance = ((values - mean) ** 2).sum() / values.numel() if training else norm.running_var[c]
        out[:, c] = (values - mean) / (variance + norm.eps) ** 0.5 * norm.weight[c] + norm.bias[c]
    return out


def branch(layers, x, training):
    """PWConv1, B, ReLU, PWConv2, B."""
    hidden = normalised(layers[1], pointwise(layers[0], x), training)
    return normalised(layers[4], pointwise(layers[3], hidden * (hidden > 0)), training)


def gate_of(mscam, x, training):
    """sigmoid(L(X) + g(X)), the second the same for all pixels of an image."""
    pooled = torch.stack([torch.stack([channel.sum() / channel.numel() for channel in image]) for image in x])
    local, whole = branch(mscam.local, x, training), branch(mscam.whole, pooled[..., None, None], training)
    return 1 / (1 + torch.exp(-(local + whole)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(3, 2), (1, 1)])
def test_mscam_is_the_plain_operations(size, training):
    torch.manual_seed(0)
    mscam = scatter(MSCAM(8, 4).double()).train(training)
    x = torch.randn(3, 8, *size, dtype=torch.float64)
    with torch.no_grad():
        expected = x * gate_of(mscam, x, training)
        torch.testing.assert_close(mscam(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_fusion_is_the_plain_operations(training):
    torch.manual_seed(0)
    fuse = scatter(AFF(8).double()).train(training)
    x, y = torch.randn(2, 3, 8, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        m = gate_of(fuse.attention, x + y, training)
        torch.testing.assert_close(fuse(x, y), 2 * (m * x + (1 - m) * y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("factor", [1, 2])
def test_fusion_of_stages_is_the_plain_operations(factor):
    torch.manual_seed(0)
    fusion = scatter(StageFusion(4).double()).eval()
    earlier = torch.randn(2, 4, 4, 2, dtype=torch.float64)
    later = torch.randn(2, 8, 4 // factor, 2 // factor, dtype=torch.float64)
    with torch.no_grad():
        projected = normalised(fusion.project[1], pointwise(fusion.project[0], later), training=False)
        magnified = torch.zeros_like(earlier)
        for h in range(4):
            for w in range(2):
                magnified[:, :, h, w] = projected[:, :, h // factor, w // factor]
        m = gate_of(fusion.fuse.attention, earlier + magnified, training=False)
        expected = 2 * (m * earlier + (1 - m) * magnified)
        torch.testing.assert_close(fusion(earlier, later), expected, rtol=1e-10, atol=1e-10)


def test_gates_start_at_one_half_and_train():
    torch.manual_seed(0)
    mscam, x = MSCAM(8), torch.randn(4, 8, 3, 2)
    assert torch.equal(mscam(x), x / 2)
    optimizer = torch.optim.SGD(mscam.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (mscam(x) * torch.linspace(-1, 1, 8)[:, None, None]).sum().backward()
        optimizer.step()
    assert all(
        p.grad.abs().sum() > 0 for name, p in mscam.named_parameters() if name.endswith(("1.weight", "4.weight"))
    )
    assert not torch.equal(mscam.gate(x), torch.full_like(x, 0.5))
    assert not torch.equal(MSCAM(8, init="random")(x), x / 2)


def test_one_image_is_too_few():
    mscam, x = MSCAM(8), torch.randn(1, 8, 3, 2)
    with pytest.raises(ConfigError, match=r"model\.client\.batch_size: .* batch of one image"):
        mscam(x)
    assert mscam.eval()(x).shape == x.shape


# -- in backbones ------------------------------------------------------------------------------------------------------


def test_documented_counts():
    """C = 2048, r = 4: two branches of C C/4 + C/4, 2 C/4, C/4 C + C, 2 C."""
    with torch.device("meta"):
        plain = sum(p.numel() for p in ResNet(50).parameters())
        counts = {kind: sum(p.numel() for p in ResNet(50, fam=kind).parameters()) - plain for kind in KINDS}
    assert plain == 23_508_032
    hidden = 512
    assert counts["mscam"] == 2 * (2048 * hidden + hidden + 2 * hidden + hidden * 2048 + 2048 + 2 * 2048) == 4_209_664
    assert counts["aff34"] == 2048 * 1024 + 2 * 1024 + 2 * (2 * 1024 * 256 + 3 * 256 + 3 * 1024)
    blocks = {256: 3, 512: 4, 1024: 6, 2048: 3}
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    for kind, count in counts.items():
        assert re.search(rf"^\| `{kind}` .*\| {count:,} \|$", text, re.MULTILINE)
    assert counts["aff_residual"] == sum(n * 2 * (2 * c * c // 4 + 3 * c // 4 + 3 * c) for c, n in blocks.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last_stride", [1, 2])
def test_maps(kind, last_stride):
    with torch.device("meta"):
        backbone = ResNet(50, last_stride, fam=kind).eval()
        shape = tuple(backbone(torch.empty(2, 3, 64, 32)).shape)
    assert shape == ((2, 1024, 4, 2) if kind == "aff34" else (2, 2048, 4 // last_stride, 2 // last_stride))
    assert backbone.out_channels == shape[1]


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A file of a network whose parameters and statistics are no initial ones."""
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    torch.manual_seed(3)
    network = ResNet(18)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    save_file(network.state_dict(), path)
    return str(path)


@pytest.mark.parametrize("training", [False, True])
def test_converted_networks_compute_what_they_did(pretrained, images, training):
    plain = ResNet(18, weights=pretrained).double().train(training)
    residual, mscam = (ResNet(18, weights=pretrained, fam=kind).double().train(training) for kind in KINDS[::-2])
    with torch.no_grad():
        expected = plain(images.double())
        torch.testing.assert_close(residual(images.double()), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mscam(images.double()), expected / 2, rtol=1e-10, atol=1e-10)


def test_attention_in_residual_blocks_is_used(pretrained, images):
    backbone = ResNet(18, weights=pretrained, fam="aff_residual", norm_init="random").eval()
    plain = ResNet(18, weights=pretrained).eval()
    fused = [name for name, module in backbone.named_modules() if isinstance(module, AFF)]
    assert fused == [f"layer{stage}.{block}.fuse" for stage in (1, 2, 3, 4) for block in (0, 1)]
    with torch.no_grad():
        assert not torch.allclose(backbone(images), plain(images))


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_attention_are_loaded_as_they_are(kind, tmp_path):
    torch.manual_seed(0)
    trained = ResNet(18, fam=kind)
    for parameter in trained.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    loaded = ResNet(18, weights=str(tmp_path / "trained.safetensors"), fam=kind)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in trained.state_dict().items())
    with pytest.raises(ConfigError, match=r"^backbone\.weights: "):
        ResNet(18, weights=str(tmp_path / "trained.safetensors"))


@pytest.mark.parametrize("init", ["convert", "random"])
def test_attention_weighs_the_last_map_of_a_small_network(init):
    networks = []
    for fam in ("none", "mscam"):
        torch.manual_seed(0)
        networks.append(SmallCNN(4, fam=fam, norm_init=init).eval())
    plain, weighed = networks
    maps = plain(images := torch.randn(3, 3, 32, 16))
    gate = weighed.get_submodule("attention").gate(maps)
    assert torch.equal(weighed(images), maps * gate)
    assert bool((gate == 0.5).all()) is (init == "convert")


@pytest.mark.parametrize(
    "backbone",
    [
        *(lambda k=k: ResNet(18, fam=k) for k in KINDS),
        lambda: ConvNeXt("micro", fam="mscam"),
        lambda: SmallCNN(4, fam="mscam"),
    ],
)
def test_groups(backbone):
    model = ReIDModel(backbone(), Neck(kind="none"))
    groups = group_names(model)
    attention = {name: group for name, group in groups.items() if ".attention." in name}
    assert attention
    for path, module in model.named_modules():
        if ".attention." in f"{path}." and isinstance(module, nn.Conv2d):
            assert groups[f"{path}.weight"] == groups[f"{path}.bias"] == Group.ATTN
        elif ".attention." in f"{path}." and isinstance(module, nn.BatchNorm2d):
            assert groups[f"{path}.weight"] == groups[f"{path}.bias"] == Group.NORM
            assert groups[f"{path}.running_mean"] == groups[f"{path}.running_var"] == Group.STAT
    assert {group for name, group in groups.items() if name not in attention} <= {*Group} - {Group.ATTN}


@pytest.mark.parametrize("kind", ["mscam", "aff34"])
def test_attention_is_part_of_the_feature_extractor(kind):
    model = make_model(WeightedPav(), backbone=ResNet(18, fam=kind))
    model.assemble(make_data(size=(64, 32)), 0, 1, torch.device("cpu"))
    shared = {entry.name for entry in model.parts.models["resnet"].flat.shared_entries}
    wanted = {n for n, group in model.parts.models["resnet"].groups.items() if group is Group.ATTN}
    assert wanted
    assert wanted <= shared


def test_a_round_with_attention():
    torch.manual_seed(1)
    client = LocalTraining(batch_size=8, optimizer=sgd)
    model = make_model(WeightedPav(), backbone=ConvNeXt("micro", fam="mscam"), client=client)
    fit(model, make_data(size=(64, 32)), rounds=2)
    gates = named(model, "convnext")["backbone.attention.local.4.weight"]
    assert gates.abs().min() > 0
