"""MixStyle, CrossStyle and SNR: the authors' numbers, plain loops, special cases, and their places in backbones."""

import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from fedsim.cli.export import export
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.functional.style import mix_styles, style_of, swap_styles
from fedsim.methods import FedPav
from fedsim.models import (
    SNR,
    CrossStyle,
    Group,
    MixStyle,
    MobileNetV2,
    Neck,
    OSNet,
    ReIDModel,
    ResNet,
    SmallCNN,
    Standardise,
    StyleLayers,
    group_names,
)
from fedsim.models import style as layers
from small import fit, make_data, make_model, named

VECTORS = json.loads((Path(__file__).parent / "style_vectors.json").read_text())
BACKBONES = {
    "resnet18": partial(ResNet, 18),
    "mobilenet": partial(MobileNetV2, width=0.35),
    "smallcnn": partial(SmallCNN, width=8),
    "osnet": partial(OSNet, 0.25),
}
LAYERS = {
    "mix": partial(MixStyle, 1.0),
    "cross": partial(CrossStyle, 1.0),
    "cross both": partial(CrossStyle, 1.0, "both"),
}


def tensors_of(name):
    """The lists of an entry of the vectors, as tensors."""
    lists = {key: value for key, value in VECTORS[name].items() if isinstance(value, list)}
    return {key: torch.tensor(value, dtype=torch.float64 if key != "perm" else None) for key, value in lists.items()}


def maps(*shape, seed=0, dtype=torch.float64):
    """Maps whose channels have means and deviations of their own."""
    stream = torch.Generator().manual_seed(seed)
    x, scale, shift = (torch.randn(size, dtype=dtype, generator=stream) for size in (shape, *[(*shape[:2], 1, 1)] * 2))
    return x * (scale.abs() + 0.5) + shift


def box_of(bounds, height, width):
    top, left, bottom, right = (int(bound) for bound in bounds)
    box = torch.zeros(height, width, dtype=torch.bool)
    box[top:bottom, left:right] = True
    return box


def seeded(build, *args, seed=0, **options):
    torch.manual_seed(seed)
    return build(*args, **options)


def assert_near(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- the authors' numbers ----------------------------------------------------------------------------------------------


def test_mix_styles_gives_the_authors_numbers_and_gradient():
    v = tensors_of("mixstyle")
    x = v["x"].requires_grad_()
    y = mix_styles(x, v["lam"], v["perm"], VECTORS["mixstyle"]["eps"])
    assert_near(y, v["y"])
    (y * v["w"]).sum().backward()
    assert_near(x.grad, v["grad_x_of_sum_wy"])


def test_swap_styles_gives_the_authors_numbers():
    v = tensors_of("crossstyle")
    swap = partial(swap_styles, v["x"], v["perm"], eps=VECTORS["crossstyle"]["eps"])
    assert_near(swap(), v["neither"])
    size = v["x"].shape[2:]
    boxes = {"style_box": box_of(v["style_box"], *size), "content_box": box_of(v["content_box"], *size)}
    assert_near(swap(**boxes), v["both"])


def snr_of_vectors(v):
    layer = SNR(4, reduction=2).double()
    for tensor, name in [
        (layer.norm.weight, "in_w"), (layer.norm.bias, "in_b"), (layer.reduce.weight, "fc1_w"),
        (layer.reduce.bias, "fc1_b"), (layer.expand.weight, "fc2_w"), (layer.expand.bias, "fc2_b"),
    ]:  # fmt: skip
        tensor.data = v[name]
    return layer


def test_snr_gives_the_authors_numbers():
    v = tensors_of("snr")
    layer = snr_of_vectors(v)
    normalised, plus, minus = layer.separate(v["x"])
    assert_near(normalised, v["normalised"])
    assert_near(layer.gate(v["x"] - normalised)[..., 0, 0], v["gate"])
    assert_near(plus, v["plus"])
    assert_near(minus, v["minus"])
    assert_near(layer(v["x"]), v["plus"])


# -- plain loops, written from the equations ---------------------------------------------------------------------------


def loop_style(channel, eps, pixels):
    values = [channel[h, w] for h, w in pixels]
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) + eps)


def every_pixel(x):
    return [(h, w) for h in range(x.shape[2]) for w in range(x.shape[3])]


def mix_by_loops(x, shares, partners, eps):
    y = np.empty_like(x)
    for b in range(len(x)):
        for c in range(x.shape[1]):
            mean, std = loop_style(x[b, c], eps, every_pixel(x))
            other_mean, other_std = loop_style(x[partners[b], c], eps, every_pixel(x))
            new_std = shares[b] * std + (1 - shares[b]) * other_std
            new_mean = shares[b] * mean + (1 - shares[b]) * other_mean
            for h, w in every_pixel(x):
                y[b, c, h, w] = (x[b, c, h, w] - mean) / std * new_std + new_mean
    return y


def swap_by_loops(x, partners, eps, style_pixels, content_pixels):
    y = x.copy()
    for b in range(len(x)):
        for c in range(x.shape[1]):
            mean, std = loop_style(x[b, c], eps, content_pixels)
            other_mean, other_std = loop_style(x[partners[b], c], eps, style_pixels)
            for h, w in content_pixels:
                y[b, c, h, w] = (x[b, c, h, w] - mean) / std * other_std + other_mean
    return y


@pytest.mark.parametrize("seed", range(5))
def test_mix_styles_against_loops(seed):
    rng = np.random.default_rng(seed)
    x = maps(*rng.integers(2, 5, size=4).tolist(), seed=seed)
    shares, partners = rng.random(len(x)), rng.permutation(len(x))
    y = mix_styles(x, torch.from_numpy(shares), torch.from_numpy(partners))
    assert_near(y, torch.from_numpy(mix_by_loops(x.numpy(), shares, partners, 1e-6)), 1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_swap_styles_against_loops(seed):
    rng = np.random.default_rng(seed)
    x = maps(*rng.integers(2, 5, size=4).tolist(), seed=seed)
    partners, pixels = rng.permutation(len(x)), every_pixel(x)
    boxes = [torch.zeros(x.shape[2:], dtype=torch.bool) for _ in range(2)]
    for box in boxes:  # any two or more pixels, not only rectangles
        for i in rng.permutation(len(pixels))[: rng.integers(2, len(pixels) + 1)]:
            box[pixels[i]] = True
    style_box, content_box = (random.Random(seed + i).choice([None, box]) for i, box in enumerate(boxes))
    y = swap_styles(x, torch.from_numpy(partners), style_box=style_box, content_box=content_box)
    chosen = [pixels if box is None else [p for p in pixels if box[p]] for box in (style_box, content_box)]
    assert_near(y, torch.from_numpy(swap_by_loops(x.numpy(), partners, 1e-5, *chosen)), 1e-10)


def test_snr_against_loops():
    x, layer = maps(2, 4, 3, 2), seeded(SNR, 4, 2).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    reduce, expand = ((m.weight.tolist(), m.bias.tolist()) for m in (layer.reduce, layer.expand))
    plus = torch.empty_like(x)
    for b in range(2):
        normalised = torch.empty_like(x[b])
        for c in range(4):
            values = x[b, c].flatten().tolist()
            mean = sum(values) / 6
            std = math.sqrt(sum((value - mean) ** 2 for value in values) / 6 + 1e-5)
            normalised[c] = layer.norm.weight[c].item() * (x[b, c] - mean) / std + layer.norm.bias[c].item()
        residual = x[b] - normalised
        pooled = [channel.sum().item() / 6 for channel in residual]
        hidden = [max(0.0, sum(map(float.__mul__, row, pooled)) + bias) for row, bias in zip(*reduce, strict=True)]
        for c, (row, bias) in enumerate(zip(*expand, strict=True)):
            gate = 1 / (1 + math.exp(-sum(map(float.__mul__, row, hidden)) - bias))
            plus[b, c] = normalised[c] + gate * residual[c]
    assert_near(layer(x), plus)


# -- special cases -----------------------------------------------------------------------------------------------------


def test_a_share_of_one_keeps_the_bits():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = maps(4, 3, 5, 2, dtype=torch.float32).to(dtype)
        x[0, 0] = 7.0  # without deviation
        assert torch.equal(mix_styles(x, torch.ones(4), torch.tensor([1, 2, 3, 0])), x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_keep_the_bits_in_evaluation_and_with_p_0(name):
    x, layer = maps(4, 3, 6, 4, dtype=torch.float32), LAYERS[name]()
    torch.manual_seed(0)
    assert not torch.equal(layer(x), x)
    assert torch.equal(layer.eval()(x), x)
    layer.train().p = 0.0
    assert all(torch.equal(layer(x), x) for _ in range(20))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_an_unchanged_batch_are_plain(name):
    x, weights = maps(4, 3, 6, 4).requires_grad_(), maps(4, 3, 6, 4, seed=1)
    layer = LAYERS[name]()
    layer.p = 0.0
    (layer(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_images_that_are_their_own_partners_stay():
    x, same = maps(4, 3, 5, 2), torch.arange(4)
    assert_near(mix_styles(x, torch.rand(4), same), x, 1e-6)
    assert_near(swap_styles(x, same), x, 1e-6)


def test_shares_of_zero_are_a_swap():
    x, partners = maps(4, 3, 5, 2), torch.tensor([2, 0, 3, 1])
    assert_near(mix_styles(x, torch.zeros(4), partners, eps=1e-5), swap_styles(x, partners))


def test_two_images_that_swap_twice_are_what_they_were():
    x, partners = maps(2, 3, 5, 2), torch.tensor([1, 0])
    assert_near(swap_styles(swap_styles(x, partners), partners), x, 1e-4)


def test_swapped_images_have_each_others_statistics():
    x, partners = maps(4, 3, 5, 2), torch.tensor([2, 0, 3, 1])
    for before, after in zip(style_of(x, 0.0), style_of(swap_styles(x, partners), 0.0), strict=True):
        assert_near(after, before[partners], 1e-4)


def test_no_gradient_flows_through_the_statistics_of_mixstyle():
    """dL/dx = w (lambda sigma + (1 - lambda) sigma_partner) / sigma; CrossNorm has no such rule."""
    x, partners, weights = maps(2, 3, 5, 2).requires_grad_(), torch.tensor([1, 0]), maps(2, 3, 5, 2, seed=1)
    _, std = style_of(x.detach(), 1e-6)
    (mix_styles(x, torch.zeros(2), partners) * weights).sum().backward()
    assert_near(x.grad, weights * std[partners] / std)
    detached, x.grad = x.grad, None
    (swap_styles(x, partners, eps=1e-6) * weights).sum().backward()
    assert not torch.allclose(x.grad, detached, rtol=0.01)


def test_snr_with_open_gates_is_the_plain_stage_and_with_closed_ones_is_normalisation():
    x, layer = maps(2, 4, 3, 2), seeded(SNR, 4).double()
    nn.init.zeros_(layer.expand.weight)
    nn.init.constant_(layer.expand.bias, math.inf)
    assert_near(layer(x), x)
    nn.init.constant_(layer.expand.bias, -math.inf)
    assert_near(layer(x), layer.norm(x))


def test_snr_removes_affine_changes_of_channels_before_it_returns_a_part():
    x, layer = maps(2, 4, 6, 5), seeded(SNR, 4).double()
    scale, shift = torch.rand(2, 4, 1, 1) + 0.5, torch.randn(2, 4, 1, 1)
    assert_near(layer.separate(x * scale + shift)[0], layer.separate(x)[0], 1e-4)
    normalised, plus, minus = layer.separate(x)
    assert_near(plus + minus, normalised + x)
    assert not torch.allclose(layer(x), x, rtol=0.01), "at the start it is not the identity"


@torch.no_grad()
def test_normalised_images_are_the_same_in_any_light():
    """With closed gates at the images, features do not depend on contrast and light of the colours; else they do."""
    x, scale, shift = maps(4, 3, 64, 32), torch.rand(4, 3, 1, 1) + 0.5, 3 * torch.randn(4, 3, 1, 1)
    styled = seeded(SmallCNN, 8, style=StyleLayers(kind="snr", after=("input",))).double().eval()
    nn.init.zeros_(styled.style_input.expand.weight)
    nn.init.constant_(styled.style_input.expand.bias, -math.inf)
    assert_near(styled(x * scale + shift), styled(x), 1e-4)
    plain = seeded(SmallCNN, 8).double().eval()
    assert (plain(x * scale + shift) - plain(x)).abs().max() > 0.1 * plain(x).abs().max()


@torch.no_grad()
def test_standardised_images_have_mean_0_and_deviation_1():
    """Image by image and channel by channel; a channel of one value becomes 0; training and evaluation are alike."""
    x = maps(3, 4, 5, 7)
    x[1, 2] = 0.25
    layer = Standardise()
    found = layer(x)
    for image in range(3):
        for channel in range(4):
            pixels = x[image, channel].flatten().tolist()
            mean = sum(pixels) / len(pixels)
            variance = sum((pixel - mean) ** 2 for pixel in pixels) / len(pixels)
            expected = [(pixel - mean) / math.sqrt(variance + 1e-5) for pixel in pixels]
            assert_near(found[image, channel].flatten(), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(layer.eval()(x), found)
    assert torch.equal(layer(x[:1]), found[:1]), "an image does not depend on others"
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert_near(layer(x.float()), nn.functional.instance_norm(x.float()), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", BACKBONES)
def test_standardised_images_are_the_same_in_any_light(name):
    x, scale, shift = maps(4, 3, 64, 32), torch.rand(4, 3, 1, 1) + 0.5, 3 * torch.randn(4, 3, 1, 1)
    styled = seeded(BACKBONES[name], style=StyleLayers(kind="standardise", after=("input",))).double().eval()
    plain = seeded(BACKBONES[name]).double().eval()
    assert [*styled.state_dict()] == [*plain.state_dict()]
    assert_near(styled(x * scale + shift), styled(x), 1e-4)
    assert (plain(x * scale + shift) - plain(x)).abs().max() > 0.1 * plain(x).abs().max()


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 3.0])
def test_shares_are_beta(alpha):
    torch.manual_seed(0)
    shares = layers._sample_beta(alpha, 40_000, torch.device("cpu")).double()
    assert ((shares >= 0) & (shares <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert shares.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(variance / 40_000))
    assert shares.var().item() == pytest.approx(variance, rel=0.05)


def test_small_alphas_give_shares_of_zero_or_one():
    torch.manual_seed(0)
    shares = layers._sample_beta(1e-6, 1000, torch.device("cpu"))
    assert set(shares.tolist()) == {0.0, 1.0}
    assert 0.4 < shares.mean() < 0.6


def test_boxes_are_rectangles_of_more_than_a_tenth():
    torch.manual_seed(0)
    areas = []
    for _ in range(300):
        box = layers._sample_box(torch.empty(1, 1, 16, 8), 0.5)
        rows, columns = box.any(dim=1).nonzero(), box.any(dim=0).nonzero()
        assert box[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
        areas.append(int(box.sum()))
        assert areas[-1] == len(rows) * len(columns) > 0.1 * box.numel()
    assert len(set(areas)) > 20
    for size in ((1, 2), (2, 2), (3, 1)):  # no box is large enough
        assert layers._sample_box(torch.empty(1, 1, *size), 0.5).sum() >= 2


def test_partners_are_a_permutation_and_p_a_share_of_the_batches():
    torch.manual_seed(0)
    x = maps(4, 3, 6, 4, dtype=torch.float32)
    assert all(sorted(layers._sample_partners(x).tolist()) == [0, 1, 2, 3] for _ in range(50))
    layer = CrossStyle(0.25)
    changed = sum(not torch.equal(layer(x), x) for _ in range(1000))
    # 4 standard deviations; one of 24 permutations changes nothing
    assert changed == pytest.approx(1000 * 0.25 * 23 / 24, abs=4 * math.sqrt(1000 * 0.25 * 0.75))


def test_crops_change_what_they_say():
    x = maps(4, 3, 16, 8)
    torch.manual_seed(0)
    for crop in ("content", "both"):
        kept = [(CrossStyle(1.0, crop)(x) == x).all(dim=(0, 1)).sum().item() for _ in range(50)]
        assert len(set(kept)) > 5
        assert max(kept) < 0.9 * 16 * 8
    for crop in ("none", "style"):
        means = style_of(CrossStyle(1.0, crop)(x), 0.0)[0]
        is_permuted = any(torch.allclose(means[0], mean) for mean in style_of(x, 0.0)[0])
        assert is_permuted == (crop == "none")


def test_statistics_are_float32_under_bfloat16():
    x = maps(4, 3, 16, 8, dtype=torch.float32).bfloat16()
    y = swap_styles(x, torch.tensor([1, 2, 3, 0]))
    assert y.dtype == torch.bfloat16
    exact = swap_styles(x.double(), torch.tensor([1, 2, 3, 0]))
    assert (y - exact).abs().max() < 0.01 * exact.abs().max()


# -- places in backbones -----------------------------------------------------------------------------------------------


def test_layers_stand_behind_their_stages():
    style = StyleLayers(kind="snr", after=("input", "layer1", "layer2"))
    names = {name: [n for n, m in build(style=style).named_modules()] for name, build in BACKBONES.items()}
    for name, (first, second) in {
        "resnet18": ("layer1", "layer2"), "smallcnn": ("relu1", "relu2"), "osnet": ("conv2", "conv3"),
    }.items():  # fmt: skip
        children = [n for n in names[name] if n and "." not in n]
        assert children[0] == "style_input"
        assert children[children.index(first) + 1] == "style_layer1"
        assert children[children.index(second) + 1] == "style_layer2"
    blocks = [n for n in names["mobilenet"] if n.startswith("features.") and n.count(".") == 1]
    assert blocks[4:6] == ["features.style_layer1", "features.4"]
    assert blocks[blocks.index("features.6") + 1] == "features.style_layer2"
    assert names["mobilenet"][1] == "style_input"


def test_strides_at_the_places_of_mobilenet():
    sizes = {}
    backbone = MobileNetV2(0.35, style=StyleLayers(kind="snr", after=("layer1", "layer2", "layer3"))).eval()
    for name, module in backbone.features.named_children():
        module.register_forward_hook(lambda _, inputs, output, name=name: sizes.update({name: output.shape[2]}))
    backbone(torch.zeros(1, 3, 64, 32))
    assert [sizes[f"style_layer{i}"] for i in (1, 2, 3)] == [16, 8, 4]
    assert [sizes[str(i)] for i in (4, 7, 14)] == [8, 4, 2], "the next block is of another stride"


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("kind", ["none", "mix", "cross"])
def test_backbones_with_layers_without_parameters(name, kind):
    """Names and values of tensors, evaluation, and training with p 0 are those of the plain network, to the bit."""
    plain = seeded(BACKBONES[name])
    styled = seeded(
        BACKBONES[name], style=StyleLayers(kind=kind, p=1.0, crop="both", after=("input", "layer1", "layer2"))
    )
    assert [*plain.state_dict()] == [*styled.state_dict()]
    x = maps(4, 3, 64, 32, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), styled.eval()(x))
        expected = plain.train()(x)
        torch.manual_seed(0)
        assert torch.equal(styled.train()(x), expected) == (kind == "none")
    silent = seeded(BACKBONES[name], style=StyleLayers(kind=kind, p=0.0, after=("input", "layer1", "layer2")))
    with torch.no_grad():
        assert torch.equal(silent.train()(x), expected)


def test_an_export_of_mixed_styles_loads_into_torchvisions_network(tmp_path):
    style = StyleLayers(kind="mix", after=("input", "layer1", "layer3"))
    torch.save(seeded(ResNet, 18, style=style).state_dict(), tmp_path / "styled.pth")
    network = torchvision.models.resnet18()
    missing, unexpected = network.load_state_dict(torch.load(tmp_path / "styled.pth"), strict=False)
    assert (missing, unexpected) == (["fc.weight", "fc.bias"], [])


@pytest.mark.parametrize("name", ["resnet18", "osnet"])
def test_pretrained_weights_load_around_snr(name, tmp_path):
    plain, style = seeded(BACKBONES[name]), StyleLayers(kind="snr", after=("layer1",))
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    styled = BACKBONES[name](weights=str(tmp_path / "plain.pth"), style=style)
    loaded = styled.state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in plain.state_dict().items())
    nn.init.normal_(styled.style_layer1.expand.bias)
    torch.save(styled.state_dict(), tmp_path / "styled.pth")
    again = BACKBONES[name](weights=str(tmp_path / "styled.pth"), style=style).state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in styled.state_dict().items())
    with pytest.raises(ConfigError, match=r"^backbone\.weights: .* style_layer1.norm.weight, which .* norm and style$"):
        BACKBONES[name](weights=str(tmp_path / "styled.pth"))
    with pytest.raises(ConfigError, match=r"^backbone\.weights: .* lacks .* style_layer2.norm.weight; .* and style$"):
        BACKBONES[name](weights=str(tmp_path / "styled.pth"), style=StyleLayers(kind="snr"))


def test_groups_of_snr():
    groups = group_names(ReIDModel(SmallCNN(8, style=StyleLayers(kind="snr")), Neck(kind="none")))
    of_layer = {name: group for name, group in groups.items() if "style_layer1" in name}
    assert set(of_layer.values()) == {Group.NORM, Group.ATTN}
    assert {name for name, group in of_layer.items() if group is Group.NORM} == {
        "backbone.style_layer1.norm.weight", "backbone.style_layer1.norm.bias",
    }  # fmt: skip


def test_the_numbers_of_a_fourth_layer_are_the_authors():
    assert sum(p.numel() for p in SNR(2048).parameters()) == 530_560


def test_fused_stages_see_the_styled_map():
    backbone = ResNet(18, fam="aff34", style=StyleLayers(kind="snr", after=("layer3",))).eval()
    seen = []
    backbone.fusion.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    backbone.style_layer3.register_forward_hook(lambda _, inputs, output: seen.append(output))
    backbone(torch.randn(2, 3, 64, 32))
    assert seen[0] is seen[1]


# -- vision transformers -----------------------------------------------------------------------------------------------

TINY = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def vit(**options):
    pytest.importorskip("timm", reason="needs fedsim-reid[models]")
    from fedsim.models import TimmBackbone

    torch.manual_seed(0)
    return TimmBackbone("vit_small_patch16_224", image_size=(64, 32), options=TINY, **options)


@pytest.mark.parametrize("kind", ["mix", "cross"])
def test_patches_of_a_transformer(kind):
    plain, styled = vit(), vit(style=StyleLayers(kind=kind, p=1.0, alpha=1e-6, after=("patches", "input")))
    assert [*plain.state_dict()] == [*styled.state_dict()]
    x = maps(4, 3, 64, 32, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), styled.eval()(x))
        torch.manual_seed(0)
        assert not torch.equal(plain.train()(x), styled.train()(x))


def test_patches_are_a_map_and_the_class_token_stays():
    styled = vit(style=StyleLayers(kind="cross", p=1.0, after=("patches",)))
    layer = styled.timm.patch_drop[0]
    tokens = maps(2, 9, 32, 1)[..., 0].float()  # the class token and 4 x 2 patches
    torch.manual_seed(1)
    changed = layer(tokens)
    assert torch.equal(changed[:, 0], tokens[:, 0])
    grid = tokens[:, 1:].reshape(2, 4, 2, 32).permute(0, 3, 1, 2)
    torch.manual_seed(1)
    assert_near(changed[:, 1:], styled.timm.patch_drop[0].layer(grid).permute(0, 2, 3, 1).reshape(2, 8, 32), 1e-6)
    changes = {torch.equal(layer(tokens), tokens) for _ in range(20)}
    assert changes == {True, False}, "two images are sometimes their own partners"


def test_what_transformers_lack_is_named():
    with pytest.raises(
        ConfigError, match=r"^backbone\.style\.after: vit_small_patch16_224 has no place layer1 .* input, p"
    ):
        vit(style=StyleLayers(kind="mix"))
    with pytest.raises(ConfigError, match=r"^backbone\.style\.kind: TimmBackbone has no snr; choose another kind"):
        vit(style=StyleLayers(kind="snr", after=("input",)))
    from fedsim.models import TimmBackbone

    with pytest.raises(ConfigError, match=r"resnet18 has no place patches ahead of its last stage; choose from input$"):
        TimmBackbone("resnet18", style=StyleLayers(kind="mix", after=("patches",)))


# -- wrong settings ----------------------------------------------------------------------------------------------------


def draw_wrong(rng):
    """Random settings, of which one is wrong, and that one's name."""
    settings = {
        "kind": rng.choice(["mix", "cross", "snr"]), "p": rng.random(), "alpha": rng.choice([0.1, 1.0]),
        "beta": rng.choice([0.5, 1.0]), "reduction": rng.choice([1, 16]),
        "after": tuple(rng.sample(["input", "layer1", "layer2"], rng.randint(1, 3))),
    }  # fmt: skip
    wrong = {
        "p": [-rng.random() - 1e-9, 1 + rng.random() + 1e-9, math.nan, math.inf],
        "alpha": [0.0, -rng.random(), math.nan, math.inf, 1e-9],
        "beta": [0.0, -rng.random(), math.nan, math.inf],
        "reduction": [0, -rng.randint(1, 9)],
        "after": [
            (),
            ("layer1", "input", "layer1"),
            ("layer4",),
            ("layer1", "layer5"),
            ("relu1",),
            ("",),
            ("patches",),
        ],
    }
    field = rng.choice([*wrong])
    return settings | {field: rng.choice(wrong[field])}, field


def test_wrong_settings_are_one_line_that_names_the_field():
    rng = random.Random(0)
    for _ in range(300):
        settings, field = draw_wrong(rng)
        with pytest.raises(ConfigError, match=rf"^(model\.)?backbone\.style\.{field}: .*\Z"):
            BACKBONES[rng.choice(["smallcnn", "osnet"])](style=StyleLayers(**settings))


def test_the_choices_are_named():
    for name, last in {"resnet18": "layer4", "smallcnn": "layer4", "mobilenet": "layer4", "osnet": "layer3"}.items():
        stages = ", ".join(f"layer{i}" for i in range(1, int(last[-1])))
        with pytest.raises(
            ConfigError, match=rf"has no place {last} ahead of its last stage; choose from input, {stages}$"
        ):
            BACKBONES[name](style=StyleLayers(kind="mix", after=(last,)))


@pytest.mark.parametrize("kind", ["mix", "cross", "standardise", "snr"])
def test_maps_of_one_pixel_are_refused_before_training(kind):
    """Their deviation is 0 / 0; two pixels are enough."""
    assert StyleLayers(kind=kind, p=1.0).build("input", 3)(torch.randn(2, 3, 2, 1)).isfinite().all()
    backbone = SmallCNN(8, style=StyleLayers(kind=kind, after=("layer3",)))
    for mode in (True, False):
        backbone.train(mode)
        assert backbone(torch.randn(2, 3, 8, 8)).isfinite().all()
        with pytest.raises(ConfigError, match=r"^backbone\.style\.after: the map at layer3 has 1 x 1 pixels, "):
            backbone(torch.randn(2, 3, 4, 4))
    model = make_model(FedPav(), backbone=SmallCNN(8, style=StyleLayers(kind=kind, after=("layer3",))))
    with pytest.raises(
        ConfigError, match=r"^data\.size: smallcnn cannot .* \[6, 6\] pixels \(.* map at layer3 has 1 x 1"
    ):
        fit(model, make_data(SyntheticReID(clients=2, unseen=0, scale=0.2), size=(6, 6)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_one_image_is_refused_in_training(name):
    layer, x = LAYERS[name](), maps(1, 3, 6, 4)
    with pytest.raises(ConfigError, match=r"^model\.client\.batch_size: \w+Style exchanges .* to at least 2$"):
        layer(x)
    assert torch.equal(layer.eval()(x), x)


# -- in a federation ---------------------------------------------------------------------------------------------------


def federation(**style):
    return fit(make_model(FedPav(), backbone=seeded(SmallCNN, 8, style=StyleLayers(**style))))


def test_a_federation_with_p_0_is_the_plain_one():
    plain, silent = named(federation()), named(federation(kind="mix", p=0.0))
    assert all(torch.equal(tensor, silent[name]) for name, tensor in plain.items())
    changed = named(federation(kind="mix", p=1.0))
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in plain.items())


def test_export_of_snr(tmp_path):
    model, path = federation(kind="snr"), tmp_path / "model.safetensors"
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "holds style layers (snr)" in export(str(tmp_path / "last.ckpt"), str(path))
    loaded = SmallCNN(8, style=StyleLayers(kind="snr"))
    missing, unexpected = loaded.load_state_dict(load_file(path), strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing)
    assert all(name.startswith("neck.") for name in unexpected)
    assert torch.equal(loaded.style_layer1.expand.weight, named(model)["backbone.style_layer1.expand.weight"])


def test_the_order_of_places_has_no_meaning():
    states = []
    for places in (("layer1", "layer2"), ("layer2", "layer1")):
        torch.manual_seed(0)
        states.append(SmallCNN(width=8, style=StyleLayers(kind="snr", after=places)).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
