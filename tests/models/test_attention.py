"""Attentive normalisation, squeeze-and-excitation and CBAM against plain loops; how backbones get them."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from fedsim.cli.export import export
from fedsim.core.errors import ConfigError
from fedsim.methods import FedPav
from fedsim.models import CBAM, AttentiveNorm2d, MobileNetV2, ResNet, SmallCNN, SqueezeExcitation
from fedsim.training.settings import LocalTraining
from small import fit, make_model, named, sgd

BACKBONES = {
    "resnet18": partial(ResNet, 18),
    "resnet34": partial(ResNet, 34),
    "resnet50": partial(ResNet, 50),
    "mobilenet": partial(MobileNetV2, width=0.35),
    "smallcnn": partial(SmallCNN, width=8),
}
NORMS = ("attentive", "se", "cbam")


def num_parameters(build):
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def scatter_parameters(module):
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    return module


def scatter(module):
    """Give a module's parameters and statistics values that no initialisation has."""
    for name, tensor in module.named_buffers():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.5)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
    return scatter_parameters(module)


def images_of(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


# -- attentive normalisation -------------------------------------------------------------------------------------------


def moments(values, correction):
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / (len(values) - correction)


def batch_norm(samples, norm, channel, training):
    """Normalise the numbers of one channel; return them with the next running mean and variance."""
    running = float(norm.running_mean[channel]), float(norm.running_var[channel])
    mean, variance = moments(samples, 0) if training else running
    if training:
        batch = moments(samples, 1)
        running = tuple(0.9 * old + 0.1 * new for old, new in zip(running, batch, strict=True))
    return [(v - mean) / math.sqrt(variance + 1e-5) for v in samples], running


def attentive_by_loops(layer, x, training):
    """Spec of attentive normalisation, number by number; also the next running statistics of both its norms."""
    num_images, num_channels, height, width = x.shape
    num_mixtures = len(layer.gamma)
    pixels = [(h, w) for h in range(height) for w in range(width)]
    s = torch.empty(num_images, num_channels, dtype=torch.float64)
    for b in range(num_images):
        for c in range(num_channels):
            mean, variance = moments([float(x[b, c, h, w]) for h, w in pixels], 1 if len(pixels) > 1 else 0)
            s[b, c] = mean / math.sqrt(variance + 1e-3)
    weights, inner, outer = torch.empty(num_images, num_mixtures, dtype=torch.float64), [], []
    for i in range(num_mixtures):
        attention = layer.attention.weight[i]
        logits = [sum(float(attention[c] * s[b, c]) for c in range(num_channels)) for b in range(num_images)]
        logits, running = batch_norm(logits, layer.attention_norm, i, training)
        inner.append(running)
        for b, logit in enumerate(logits):
            z = float(layer.attention_norm.weight[i]) * logit + float(layer.attention_norm.bias[i])
            weights[b, i] = min(max(z + 3, 0), 6) / 6
    out = torch.zeros_like(x)
    for c in range(num_channels):
        places = [(b, h, w) for b in range(num_images) for h, w in pixels]
        normed, running = batch_norm([float(x[b, c, h, w]) for b, h, w in places], layer.norm, c, training)
        outer.append(running)
        for (b, h, w), value in zip(places, normed, strict=True):
            for i in range(num_mixtures):
                out[b, c, h, w] += weights[b, i] * (layer.gamma[i, c] * value + layer.beta[i, c])  # Eq. (2)
    return out, outer, inner


def assert_statistics(norm, expected):
    assert norm.running_mean.tolist() == pytest.approx([mean for mean, _ in expected])
    assert norm.running_var.tolist() == pytest.approx([variance for _, variance in expected])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(3, 2), (1, 2), (1, 1)])
def test_attentive_norm_against_loops(size, training):
    torch.manual_seed(0)
    layer = scatter(AttentiveNorm2d(4, 3).double()).train(training)
    x = 2 * images_of(3, 4, *size) + 1
    with torch.no_grad():
        expected, outer, inner = attentive_by_loops(layer, x, training)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert_statistics(layer.norm, outer)
    assert_statistics(layer.attention_norm, inner)


def test_attention_saturates_at_0_and_1():
    torch.manual_seed(0)
    layer = AttentiveNorm2d(4, 3).double().eval()
    nn.init.constant_(layer.attention.weight, 1.0)
    nn.init.ones_(layer.gamma)
    nn.init.zeros_(layer.beta)
    x = images_of(1, 4, 3, 2)
    for shift, weight in ((-100, 0.0), (100, 1.0)):
        expected = 3 * weight * layer.norm(x + shift)
        torch.testing.assert_close(layer(x + shift), expected, rtol=1e-12, atol=1e-12)


def test_attentive_norm_of_single_pixels_trains():
    torch.manual_seed(0)
    layer = AttentiveNorm2d(4, 3)
    x = torch.randn(3, 4, 1, 1, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()))


def test_attentive_norm_needs_two_images():
    layer = AttentiveNorm2d(4, 3)
    with pytest.raises(ConfigError, match=r"^model\.client\.batch_size: .* one image; set it to at least 2$"):
        layer(torch.randn(1, 4, 3, 2))
    assert layer.eval()(torch.randn(1, 4, 3, 2)).shape == (1, 4, 3, 2)


def test_attentive_norm_starts_as_published():
    torch.manual_seed(0)
    layer = AttentiveNorm2d(400, 20)
    assert layer.gamma.mean().item() == pytest.approx(1, abs=0.01)
    assert layer.beta.mean().item() == pytest.approx(0, abs=0.01)
    for affine in (layer.gamma, layer.beta):
        assert affine.std().item() == pytest.approx(0.1, rel=0.05)
    assert layer.attention.weight.std().item() == pytest.approx(math.sqrt(2 / 20), rel=0.05)  # Kaiming, fan-out K
    assert layer.attention_norm.weight.unique().tolist() == [1.0]
    assert layer.attention_norm.bias.unique().tolist() == [0.0]


# -- conversion --------------------------------------------------------------------------------------------------------


def test_converted_layer_starts_with_the_affine_transformation():
    torch.manual_seed(0)
    norm = scatter(nn.BatchNorm2d(4, eps=1e-3, momentum=0.2).double())
    layer = AttentiveNorm2d.from_batch_norm(norm, 3)
    assert layer.gamma.dtype == torch.float64
    assert (layer.norm.eps, layer.norm.momentum) == (1e-3, 0.2)
    x = images_of(3, 4, 3, 2)
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x), norm.train(training)(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.norm.running_var, norm.running_var)
    assert layer.norm.num_batches_tracked == norm.num_batches_tracked == 1


def test_attention_of_a_converted_layer_starts_to_train_through_its_norm():
    torch.manual_seed(0)
    layer = AttentiveNorm2d.from_batch_norm(scatter(nn.BatchNorm2d(4).double()), 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, target = images_of(5, 4, 3, 2), images_of(5, 4, 3, 2, seed=1)

    def gradients():
        optimizer.zero_grad()
        (layer(x) * target).sum().backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    first = gradients()
    assert not first["attention.weight"].any()
    for name in ("gamma", "beta", "attention_norm.weight"):
        assert first[name].all()
    assert torch.equal(first["gamma"][0], first["gamma"][1])  # mixtures are alike ...
    optimizer.step()
    second = gradients()
    assert second["attention.weight"].any()
    optimizer.step()
    assert not torch.allclose(layer.gamma[0], layer.gamma[1], rtol=1e-6)  # ... for one step


def relative_difference(plain, attended, training):
    """Of two backbones' maps, by their largest elements; in float64, for training amplifies the rounding of float32."""
    x = images_of(4, 3, 64, 32)
    with torch.no_grad():
        expected, actual = (network.double().train(training)(x) for network in (plain, attended))
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def seeded(build, **options):
    torch.manual_seed(0)
    return build(**options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet", "smallcnn"])
def test_converted_backbones_compute_what_they_did(name, norm):
    plain, attended = seeded(BACKBONES[name]), seeded(BACKBONES[name], norm=norm)
    for training in (True, False):  # the second time with statistics of the first
        assert relative_difference(plain, attended, training) < (1e-6 if norm == "attentive" else 1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["resnet18", "mobilenet", "smallcnn"])
def test_random_attention_changes_what_backbones_compute(name, norm):
    plain, attended = seeded(BACKBONES[name]), seeded(BACKBONES[name], norm=norm, norm_init="random")
    assert relative_difference(plain, attended, training=True) > 0.05


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """torchvision's ResNet-18 without its fc as a file, with affine transformations and statistics of its own."""
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    network = seeded(BACKBONES["resnet18"])
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    torch.save(network.state_dict(), path)
    return str(path)


@pytest.mark.parametrize("norm", NORMS)
def test_pretrained_weights_are_converted(pretrained, norm):
    plain, attended = ResNet(18, weights=pretrained), ResNet(18, weights=pretrained, norm=norm)
    for training in (False, True):
        assert relative_difference(plain, attended, training) < (1e-6 if norm == "attentive" else 1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_weights_with_attention_are_loaded_as_they_are(pretrained, norm, tmp_path):
    trained = scatter_parameters(ResNet(18, weights=pretrained, norm=norm))
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    loaded = ResNet(18, weights=str(tmp_path / "trained.pth"), norm=norm)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in trained.state_dict().items())
    for other in {"bn", *NORMS} - {norm}:
        with pytest.raises(ConfigError, match=r"^backbone\.weights: .*, width, norm and style$"):
            ResNet(18, weights=str(tmp_path / "trained.pth"), norm=other)


# -- squeeze-and-excitation and CBAM -----------------------------------------------------------------------------------


def excite_by_loops(excite, z):
    """``W_2 relu(W_1 z)`` of one image."""
    first, second = excite.reduce.weight.tolist(), excite.expand.weight.tolist()
    hidden = [max(0.0, sum(w * v for w, v in zip(row, z, strict=True))) for row in first]
    return [sum(w * v for w, v in zip(row, hidden, strict=True)) for row in second]


def pool_channels(image):
    """Mean and maximum of each channel of one image [C][H][W]."""
    flat = [[v for row in channel for v in row] for channel in image]
    return [sum(c) / len(c) for c in flat], [max(c) for c in flat]


def scale_channels(image, logits):
    return [[[v * sigmoid(z) for v in row] for row in channel] for channel, z in zip(image, logits, strict=True)]


def scale_pixels(image, kernel):
    """CBAM's spatial attention on one image [C][H][W], with a kernel [2][7][7] on (mean, maximum) over channels."""
    height, width = len(image[0]), len(image[0][0])
    column = [[[channel[h][w] for channel in image] for w in range(width)] for h in range(height)]
    maps = [[[sum(v) / len(v) for v in row] for row in column], [[max(v) for v in row] for row in column]]

    def gate(h, w):
        return sigmoid(sum(
            kernel[m][i][j] * maps[m][h + i - 3][w + j - 3]
            for m in range(2) for i in range(7) for j in range(7)
            if 0 <= h + i - 3 < height and 0 <= w + j - 3 < width
        ))  # fmt: skip

    return [[[channel[h][w] * gate(h, w) for w in range(width)] for h in range(height)] for channel in image]


@pytest.mark.parametrize("size", [(5, 3), (1, 1)])
def test_squeeze_and_excitation_against_loops(size):
    torch.manual_seed(0)
    block, x = SqueezeExcitation(6, reduction=2).double(), images_of(2, 6, *size)
    expected = [scale_channels(image, excite_by_loops(block.excite, pool_channels(image)[0])) for image in x.tolist()]
    torch.testing.assert_close(block(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(5, 3), (1, 1)])
def test_cbam_against_loops(size):
    torch.manual_seed(0)
    block, x = CBAM(6, reduction=2).double(), images_of(2, 6, *size)
    expected = []
    for image in x.tolist():
        average, maximum = (excite_by_loops(block.excite, pooled) for pooled in pool_channels(image))
        scaled = scale_channels(image, [a + m for a, m in zip(average, maximum, strict=True)])
        expected.append(scale_pixels(scaled, block.spatial.weight[0].tolist()))
    torch.testing.assert_close(block(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_converted_gates_start_to_train():
    torch.manual_seed(0)
    network = SmallCNN(width=8, norm="cbam")
    network(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    for gate in network.bn4.attention.gates:
        assert not gate.any()
        assert gate.grad.any()


def test_few_channels_keep_a_hidden_unit():
    assert SqueezeExcitation(8, reduction=16).excite.reduce.out_features == 1


# -- where they stand --------------------------------------------------------------------------------------------------


def test_resnet50_counts():
    plain = num_parameters(BACKBONES["resnet50"])
    added = {norm: num_parameters(partial(BACKBONES["resnet50"], norm=norm)) - plain for norm in NORMS}
    assert added["attentive"] == 198_388
    assert plain + 2_049_000 + added["attentive"] == 25_755_420  # with torchvision's fc: 25.76 M
    assert added["se"] == 2_514_944  # (2 / 16) sum of C^2: the "2.5 million" of Hu et al.
    assert added["cbam"] == added["se"] + 16 * 2 * 7 * 7


def test_documented_counts():
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    documented = {
        cells[0].strip(): [int(cell.replace(",", "")) for cell in cells[1:]]
        for cells in (line.strip("|").split("|") for line in text.splitlines())
        if len(cells) == 3 + len(NORMS) and "," in cells[1] and cells[1].strip()[0].isdigit()
    }
    builds = {"ResNet-18": partial(ResNet, 18), "ResNet-50": ResNet, "MobileNetV2": MobileNetV2, "SmallCNN": SmallCNN}
    norms = ("bn", *NORMS, "xan")
    assert documented == {
        name: [num_parameters(partial(build, norm=norm)) for norm in norms] for name, build in builds.items()
    }


def places_of(name, norm, kind):
    with torch.device("meta"):
        modules = BACKBONES[name](norm=norm).named_modules()
        return {path: module for path, module in modules if isinstance(module, kind)}


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 2222), ("resnet34", 3463), ("resnet50", 3463)])
def test_places_in_resnets(name, blocks):
    mixtures = (10, 10, 20, 20)
    expected = {
        f"layer{stage}.{i}.bn2": mixtures[stage - 1]
        for stage, num in enumerate(map(int, str(blocks)), start=1) for i in range(num)
    }  # fmt: skip
    found = places_of(name, "attentive", AttentiveNorm2d)
    assert {path: len(layer.gamma) for path, layer in found.items()} == expected
    last = "bn3" if name == "resnet50" else "bn2"
    assert {p.replace("bn2", f"{last}.attention") for p in expected} == set(places_of(name, "se", SqueezeExcitation))


def test_places_in_mobilenet():
    found = places_of("mobilenet", "attentive", AttentiveNorm2d)
    depthwise = {f"features.{i}.conv.{0 if i == 1 else 1}.1": 10 if i < 7 else 20 for i in range(1, 18)}
    assert {path: len(layer.gamma) for path, layer in found.items()} == depthwise
    with torch.device("meta"):
        network = MobileNetV2(width=0.35)
    for path in depthwise:
        assert network.get_submodule(path.removesuffix("1") + "0").groups > 1
    last = {f"features.{i}.conv.{2 if i == 1 else 3}.attention" for i in range(1, 18)}
    assert set(places_of("mobilenet", "cbam", CBAM)) == last


def test_places_in_small_cnn():
    found = places_of("smallcnn", "attentive", AttentiveNorm2d)
    assert {path: len(layer.gamma) for path, layer in found.items()} == {"bn2": 10, "bn4": 20}
    assert set(places_of("smallcnn", "se", SqueezeExcitation)) == {"bn2.attention", "bn4.attention"}


# -- in a federation ---------------------------------------------------------------------------------------------------


def federation(norm):
    torch.manual_seed(0)
    training = LocalTraining(batch_size=8, optimizer=sgd)
    return fit(make_model(FedPav(), backbone=SmallCNN(width=8, norm=norm), client=training))


@pytest.mark.parametrize("norm", NORMS)
def test_attention_is_trained_and_averaged(norm):
    trained = named(federation(norm))
    start = SmallCNN(width=8, norm=norm).state_dict()
    moved = {name for name, t in start.items() if not torch.equal(t, trained.get(f"backbone.{name}", t))}
    assert {name for name in start if ".attention" in name and not name.endswith("tracked")} <= moved


def test_export_of_attention(tmp_path):
    model, path = federation("attentive"), tmp_path / "model.safetensors"
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "attention" in export(str(tmp_path / "last.ckpt"), str(path))
    loaded = SmallCNN(width=8, norm="attentive")
    missing, unexpected = loaded.load_state_dict(load_file(path), strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing)
    assert all(name.startswith("neck.") for name in unexpected)
    assert torch.equal(loaded.bn4.gamma, named(model)["backbone.bn4.gamma"])


def test_torchvision_misses_what_attention_replaces():
    """Even a load that is not strict cannot take the network for torchvision's."""
    with torch.device("meta"):
        attended, network = ResNet(18, norm="attentive"), torchvision.models.resnet18()
        missing, _ = network.load_state_dict(attended.state_dict(), strict=False, assign=True)
    assert {"layer1.0.bn2.weight", "layer4.1.bn2.running_var"} <= set(missing)
