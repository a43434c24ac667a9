"""Backbones: shapes, torchvision's names, and weights from files, with errors that name what is wrong."""

import hashlib
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torchvision.models as tv
from safetensors.torch import save_file
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import normalise_images
from fedsim.models import ConvNeXt, MobileNetV2, Neck, ReIDModel, ResNet, SmallCNN
from fedsim.models.known_weights import NEEDED

SHARED_WEIGHTS = Path(__file__).parents[3] / "shared" / "data" / "weights" / "mobilenet_v2_w035_features.pth"


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet18():
    """torchvision's network with random weights and running statistics, the fc included."""
    torch.manual_seed(1)
    network = tv.resnet18()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.fixture(scope="module")
def resnet18_map(resnet18, images):
    """Its last map, before the pooling."""
    with torch.no_grad():
        return nn.Sequential(*list(resnet18.children())[:-2])(images)


def refused(build, *named):
    """Assert that ``build`` raises a ConfigError of one line that holds all of ``named``."""
    with pytest.raises(ConfigError) as caught:
        build()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("backbone.weights: ")
    for text in named:
        assert str(text) in message


# -- shapes ------------------------------------------------------------------------------------------------------------


def map_of(build):
    """The backbone, and the shape of its map for two images of 64 x 32 (on the meta device: nothing is computed)."""
    with torch.device("meta"):
        backbone = build().eval()
        return backbone, tuple(backbone(torch.empty(2, 3, 64, 32)).shape)


@pytest.mark.parametrize(("depth", "channels"), [(18, 512), (34, 512), (50, 2048)])
@pytest.mark.parametrize(("last_stride", "size"), [(2, (2, 1)), (1, (4, 2))])
def test_resnet_maps(depth, channels, last_stride, size):
    backbone, shape = map_of(lambda: ResNet(depth, last_stride=last_stride))
    assert shape == (2, channels, *size)
    assert backbone.out_channels == channels


def test_last_stride_changes_the_last_stage_only(resnet18):
    strided = {n: m.stride for n, m in resnet18.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    backbone = ResNet(18, last_stride=1)
    kept = {n: m.stride for n, m in backbone.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    assert kept == {n: stride for n, stride in strided.items() if not n.startswith("layer4.")}
    assert len(strided) - len(kept) == 2


def test_a_stem_without_relu(resnet18, images):
    backbone = ResNet(18, relu_after_stem=False).eval()
    assert list(backbone.state_dict()) == list(ResNet(18).state_dict())
    backbone.load_state_dict(resnet18.state_dict(), strict=False)
    plain = resnet18.eval()
    with torch.no_grad():
        stem = plain.maxpool(plain.bn1(plain.conv1(images)))
        expected = plain.layer4(plain.layer3(plain.layer2(plain.layer1(stem))))
        assert torch.equal(backbone(images), expected)


@pytest.mark.parametrize("width", [0.35, 1.0])
def test_mobilenet_map(width):
    backbone, shape = map_of(lambda: MobileNetV2(width=width))
    assert shape == (2, 1280, 2, 1)
    assert backbone.out_channels == 1280


@pytest.mark.parametrize(
    ("size", "channels", "num_parameters"),
    [("tiny", 768, 27_818_592), ("small", 768, 49_453_152), ("base", 1024, 87_564_416), ("large", 1536, 196_227_264)],
)
def test_convnext_map_and_count(size, channels, num_parameters):
    """Published models without classifier: 768 x 1000 + 1000 of the linear layer, and 2 x 768 of its normalisation."""
    backbone, shape = map_of(lambda: ConvNeXt(size))
    assert shape == (2, channels, 2, 1)
    assert backbone.out_channels == channels
    found = sum(p.numel() for p in backbone.parameters())
    assert found == num_parameters
    with torch.device("meta"):
        whole = sum(p.numel() for p in tv.get_model(f"convnext_{size}").parameters())
    assert found == whole - (1000 * channels + 1000) - 2 * channels


def test_micro_convnext_computes():
    backbone = ConvNeXt("micro")
    maps = backbone(torch.randn(2, 3, 64, 32))
    assert maps.shape == (2, 64, 2, 1)
    assert backbone.out_channels == 64
    assert sum(p.numel() for p in backbone.parameters()) < 100_000


def test_small_cnn_map():
    backbone, shape = map_of(lambda: SmallCNN(width=8))
    assert shape == (2, 32, 8, 4)
    assert backbone.out_channels == 32
    assert [m.out_channels for m in backbone if isinstance(m, nn.Conv2d)] == [8, 16, 32, 32]


def test_mobilenet_norm_eps():
    eps = {m.eps for m in MobileNetV2(width=0.35, norm_eps=1e-3).modules() if isinstance(m, nn.BatchNorm2d)}
    assert eps == {1e-3}


def test_mobilenet_takes_pixels_from_minus_one_to_one():
    torch.manual_seed(2)
    network = tv.mobilenet_v2(width_mult=0.35).eval()
    pixels = torch.randint(0, 256, (2, 3, 64, 32), dtype=torch.uint8)
    for kind, images in (("symmetric", pixels / 255 * 2 - 1), ("imagenet", normalise_images(pixels))):
        backbone = MobileNetV2(width=0.35, pixels=kind).eval()
        backbone.load_state_dict(network.features.state_dict(prefix="features."))  # strict: no tensors of its own
        with torch.no_grad():
            expected = network.features(images)
            assert torch.allclose(
                backbone(normalise_images(pixels)), expected, rtol=0, atol=1e-5 * expected.abs().max()
            )


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnet_names_are_torchvisions(depth):
    with torch.device("meta"):
        expected = [key for key in tv.get_model(f"resnet{depth}").state_dict() if not key.startswith("fc.")]
        assert list(ResNet(depth, last_stride=1).state_dict()) == expected


def test_mobilenet_names_are_torchvisions():
    with torch.device("meta"):
        expected = [key for key in tv.mobilenet_v2(width_mult=0.35).state_dict() if not key.startswith("classifier.")]
        assert list(MobileNetV2(width=0.35).state_dict()) == expected


def test_convnext_names_are_torchvisions():
    with torch.device("meta"):
        expected = [key for key in tv.convnext_tiny().state_dict() if not key.startswith("classifier.")]
        assert list(ConvNeXt("tiny").state_dict()) == expected


def test_convnext_computes_what_torchvision_computes(images, tmp_path):
    torch.manual_seed(1)
    network = tv.convnext_tiny().eval()
    save_file(network.state_dict(), tmp_path / "convnext.safetensors")
    backbone = ConvNeXt("tiny", weights=str(tmp_path / "convnext.safetensors")).eval()
    with torch.no_grad():
        assert torch.equal(backbone(images), network.features(images))


def test_there_are_no_weights_of_the_micro_convnext():
    refused(lambda: ConvNeXt("micro", weights="IMAGENET1K_V1"), "micro")


def test_resnet_computes_what_torchvision_computes(resnet18, resnet18_map, images):
    backbone = ResNet(18).eval()
    missing, unexpected = backbone.load_state_dict(resnet18.state_dict(), strict=False)
    assert (missing, unexpected) == ([], ["fc.weight", "fc.bias"])
    with torch.no_grad():
        assert torch.equal(backbone(images), resnet18_map)


# -- weights from files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
def test_weights_from_a_file(suffix, resnet18, resnet18_map, images, tmp_path):
    path = tmp_path / f"weights{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save(resnet18.state_dict(), path)
    backbone = ResNet(18, weights=str(path)).eval()
    with torch.no_grad():
        assert torch.equal(backbone(images), resnet18_map)


def test_weights_without_counters(resnet18, tmp_path):
    state = {k: v for k, v in resnet18.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "weights.pth")  # as of torch before 0.4.1
    backbone = ResNet(18, weights=str(tmp_path / "weights.pth"))
    assert torch.equal(backbone.layer4[1].bn2.running_var, resnet18.layer4[1].bn2.running_var)


def test_weights_of_the_features_alone(tmp_path):
    network = tv.mobilenet_v2(width_mult=0.35)
    torch.save(network.features.state_dict(), tmp_path / "features.pth")
    backbone = MobileNetV2(width=0.35, weights=str(tmp_path / "features.pth"))
    assert torch.equal(backbone.features[0][0].weight, network.features[0][0].weight)
    assert torch.equal(backbone.features[18][1].weight, network.features[18][1].weight)


def test_weights_saved_on_a_gpu_load_without_one(resnet18, tmp_path):
    state = {name: tensor.half() for name, tensor in resnet18.state_dict().items()}  # half: a smaller file
    cpu, gpu = tmp_path / "cpu.pth", tmp_path / "gpu.pth"
    torch.save(state, cpu)
    # the same file as torch.save writes it for tensors on cuda:0: each tensor's location is a pickled string
    with zipfile.ZipFile(cpu) as source, zipfile.ZipFile(gpu, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
                assert b"cuda:0" in content
            target.writestr(name, content)
    backbone = ResNet(18, weights=str(gpu))
    assert backbone.conv1.weight.device.type == "cpu"
    assert torch.equal(backbone.conv1.weight, state["conv1.weight"].float())


@pytest.mark.skipif(not SHARED_WEIGHTS.is_file(), reason=f"{SHARED_WEIGHTS} is missing")
def test_shared_mobilenet_weights(images):
    backbone = MobileNetV2(width=0.35, weights=str(SHARED_WEIGHTS), norm_eps=1e-3, pixels="symmetric").eval()
    state = torch.load(SHARED_WEIGHTS, weights_only=True)
    assert all(torch.equal(backbone.state_dict()[name], tensor) for name, tensor in state.items())
    with torch.no_grad():
        maps = backbone(images)
    assert maps.shape == (2, 1280, 2, 1)
    assert maps.isfinite().all()
    assert 0.0 < maps.mean() < 6.0  # ReLU6, not dead


@pytest.mark.skipif(not SHARED_WEIGHTS.is_file(), reason=f"{SHARED_WEIGHTS} is missing")
@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, "norm_eps 0.001"),
        ({"norm_eps": 1e-3}, "pixels symmetric"),
        ({"pixels": "symmetric"}, "norm_eps 0.001"),
    ],
)
def test_shared_mobilenet_weights_refuse_other_settings(settings, needed):
    with pytest.raises(ConfigError, match=f"w035.*was trained with; give --model.backbone.{needed}"):
        MobileNetV2(width=0.35, weights=str(SHARED_WEIGHTS), **settings)


@pytest.mark.parametrize("prefix", ["", "features."])
def test_known_weights_are_recognised_by_their_first_convolution(tmp_path, monkeypatch, prefix):
    state = MobileNetV2(width=0.1).features.state_dict(prefix=prefix)
    first = state[f"{prefix}0.0.weight"]
    checksum = hashlib.sha256(b"".join(struct.pack("<f", x) for x in first.flatten().tolist())).hexdigest()
    torch.save(state, tmp_path / "known.pth")
    monkeypatch.setitem(NEEDED, checksum, {"norm_eps": 1e-3, "pixels": "imagenet"})
    assert MobileNetV2(0.1, str(tmp_path / "known.pth"), 1e-3).features[0][1].eps == 1e-3
    with pytest.raises(ConfigError, match=r"^backbone.norm_eps: 1e-05 is not what .*known.pth was .*norm_eps 0.001$"):
        MobileNetV2(0.1, str(tmp_path / "known.pth"))
    torch.save(dict(MobileNetV2(0.1).named_parameters()), tmp_path / "parameters.pth")  # that require gradients
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors"):
        MobileNetV2(0.1, str(tmp_path / "parameters.pth"))
    torch.save({name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}, tmp_path / "half.pth")
    assert MobileNetV2(0.1, str(tmp_path / "half.pth")).features[0][1].eps == 1e-5
    with torch.no_grad():  # trained further, they are others, and their run has its config
        first.view(-1)[0] += 1
    torch.save(state, tmp_path / "trained.pth")
    assert MobileNetV2(0.1, str(tmp_path / "trained.pth")).features[0][1].eps == 1e-5


# -- weights by torchvision's name, from a cache of the test's own: nothing is downloaded ------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Where torch keeps the download of ResNet-18's IMAGENET1K_V1."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    path = tmp_path / "hub" / "checkpoints" / tv.ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    return path


def test_weights_by_name(cached, resnet18, resnet18_map, images):
    torch.save(resnet18.state_dict(), cached)
    backbone = ResNet(18, weights="IMAGENET1K_V1").eval()
    with torch.no_grad():
        assert torch.equal(backbone(images), resnet18_map)


def test_damaged_download(cached):
    cached.write_bytes(b"half a download")
    refused(lambda: ResNet(18, weights="IMAGENET1K_V1"), cached.name)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_missing_file(suffix, tmp_path):
    path = tmp_path / f"nowhere{suffix}"
    refused(lambda: ResNet(18, weights=str(path)), path)


def test_unknown_name():
    refused(lambda: ResNet(18, weights="IMAGENET1K_V9"), "IMAGENET1K_V9", "resnet18", "IMAGENET1K_V1")


def test_name_of_another_network():
    refused(lambda: ResNet(18, weights="IMAGENET1K_V2"), "IMAGENET1K_V2", "resnet18")  # exists for ResNet-50


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_file(suffix, tmp_path):
    path, whole = tmp_path / f"damaged{suffix}", tmp_path / f"whole{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)({"conv1.weight": torch.zeros(64, 3, 7, 7)}, whole)
    path.write_bytes(whole.read_bytes()[:-1000])
    refused(lambda: ResNet(18, weights=str(path)), path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_empty_file(suffix, tmp_path):
    path = tmp_path / f"empty{suffix}"
    path.touch()
    refused(lambda: ResNet(18, weights=str(path)), path)


def test_file_with_code_inside_is_not_run(tmp_path):
    path = tmp_path / "model.pth"
    torch.save(nn.Linear(2, 2), path)  # a pickled module, not a state dict
    refused(lambda: ResNet(18, weights=str(path)), path)


@pytest.mark.parametrize("content", [torch.zeros(3), [torch.zeros(3)], 5, {"conv1.weight": "not a tensor"}])
def test_file_without_a_state_dict(content, tmp_path):
    path = tmp_path / "something.pth"
    torch.save(content, path)
    refused(lambda: ResNet(18, weights=str(path)), path)


def test_weights_of_another_depth(resnet18, tmp_path):
    path = tmp_path / "resnet18.pth"
    torch.save(resnet18.state_dict(), path)
    refused(lambda: ResNet(34, weights=str(path)), path, "resnet34", "layer1.2.conv1.weight")


def test_weights_of_a_deeper_network(tmp_path):
    """ResNet-34 has all tensors of ResNet-18, of the same shapes."""
    path = tmp_path / "resnet34.pth"
    torch.save({key: value.half() for key, value in tv.resnet34().state_dict().items()}, path)
    refused(lambda: ResNet(18, weights=str(path)), path, "resnet18", "layer1.2.conv1.weight", "depth")


def test_weights_of_a_deeper_mobilenet(tmp_path):
    state = tv.mobilenet_v2(width_mult=0.35).state_dict() | {"features.19.conv.0.0.weight": torch.zeros(1)}
    torch.save(state, tmp_path / "deeper.pth")
    refused(lambda: MobileNetV2(0.35, weights=str(tmp_path / "deeper.pth")), "features.19.conv.0.0.weight")


def test_weights_of_another_shape(resnet18, tmp_path):
    path = tmp_path / "wide.pth"
    torch.save(resnet18.state_dict() | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
    refused(lambda: ResNet(18, weights=str(path)), path, "conv1.weight", [64, 1, 7, 7], [64, 3, 7, 7])


def test_weights_of_another_width(tmp_path):
    path = tmp_path / "mobilenet.pth"
    torch.save(tv.mobilenet_v2(width_mult=0.5).state_dict(), path)
    refused(lambda: MobileNetV2(width=0.35, weights=str(path)), path, "mobilenet_v2", "width")


# -- backbones of others -----------------------------------------------------------------------------------------------


def test_foreign_backbone_without_a_width():
    with pytest.raises(ConfigError, match=r"^model\.backbone: Linear has no int attribute out_channels") as caught:
        ReIDModel(nn.Linear(3, 4), Neck())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [None, 4.0, "4"])
def test_foreign_backbone_whose_width_is_no_int(width):
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1))
    backbone.out_channels = width
    with pytest.raises(ConfigError, match="Sequential has no int attribute out_channels"):
        ReIDModel(backbone, Neck())


class WithClassAttribute(nn.Sequential):
    """As good an int attribute as any."""

    out_channels = 4


def test_foreign_backbones_that_tell_their_width():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1))
    backbone.out_channels = 4
    assert ReIDModel(backbone, Neck(kind="none")).num_features == 4


def test_width_may_be_a_class_attribute():
    assert ReIDModel(WithClassAttribute(nn.Conv2d(3, 4, 1)), Neck(kind="none")).num_features == 4
