"""Networks of timm: the layouts of public files, position embeddings of other sizes, and the pixels they want."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedPav
from fedsim.models import BODY, Group, Neck, ReIDModel, TimmBackbone, group_names
from small import fit, make_model

timm = pytest.importorskip("timm", reason="needs fedsim-reid[models]")

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT, CLIP = "vit_small_patch16_224", "vit_base_patch16_clip_224"


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def shapes(module, prefix=""):
    return {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(("name", "width"), [(VIT, 384), ("vit_base_patch16_224", 768), (CLIP, 768)])
def test_names_and_shapes_are_timms(name, width):
    with torch.device("meta"):
        backbone, public = TimmBackbone(name, image_size=(256, 128)), timm.create_model(name, num_classes=1000)
    assert backbone.out_channels == width
    found, theirs = shapes(backbone), shapes(public, "timm.")
    assert found.pop("timm.pos_embed") == (1, 1 + 16 * 8, width)
    assert theirs.pop("timm.pos_embed") == (1, 1 + 14 * 14, width)
    assert found == {key: shape for key, shape in theirs.items() if not key.startswith("timm.head.")}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_timms_file_loads_and_computes_the_same(suffix, pixels, tmp_path):
    torch.manual_seed(0)
    public = timm.create_model(VIT, num_classes=10, **TINY).eval()
    (save_file if suffix == ".safetensors" else torch.save)(public.state_dict(), tmp_path / f"vit{suffix}")
    backbone = TimmBackbone(VIT, weights=str(tmp_path / f"vit{suffix}"), options=TINY).eval()
    with torch.no_grad():
        expected = public.forward_features(pixels / 255 * 2 - 1)[:, 0]  # these weights want pixels from -1 to 1
        torch.testing.assert_close(backbone(normalise_images(pixels)), expected, rtol=1e-4, atol=1e-5)


def test_position_embeddings_are_interpolated(tmp_path):
    torch.manual_seed(0)
    public = timm.create_model(VIT, num_classes=10, **TINY)
    torch.save(public.state_dict(), tmp_path / "vit.pth")
    backbone = TimmBackbone(VIT, weights=str(tmp_path / "vit.pth"), image_size=(64, 32), options=TINY)
    found, given = backbone.state_dict(), public.state_dict()
    embedding = found.pop("timm.pos_embed")
    grid = given["pos_embed"][:, 1:].reshape(1, 14, 14, 32).permute(0, 3, 1, 2)
    smaller = torch.nn.functional.interpolate(grid, (4, 2), mode="bicubic", antialias=True)
    torch.testing.assert_close(embedding[:, 0], given["pos_embed"][:, 0])
    torch.testing.assert_close(embedding[:, 1:], smaller.permute(0, 2, 3, 1).reshape(1, 8, 32))
    assert all(torch.equal(tensor, given[name.removeprefix("timm.")]) for name, tensor in found.items())


def test_overlapping_patches_are_convolved_and_positions_interpolated_once(tmp_path):
    """Patches of 16 pixels every 12 on 64 x 40: 5 x 3 of them, cut out one by one."""
    torch.manual_seed(0)
    public = timm.create_model(VIT, num_classes=10, **TINY)
    torch.save(public.state_dict(), tmp_path / "vit.pth")
    options = {"image_size": (64, 40), "patch_stride": 12, "options": TINY}
    backbone = TimmBackbone(VIT, weights=str(tmp_path / "vit.pth"), **options)
    network, given = backbone.get_submodule("timm"), public.state_dict()
    assert network.patch_embed.grid_size == (5, 3)
    grid = given["pos_embed"][:, 1:].reshape(1, 14, 14, 32).permute(0, 3, 1, 2)
    smaller = torch.nn.functional.interpolate(grid, (5, 3), mode="bicubic", antialias=True)
    embedding = backbone.state_dict()["timm.pos_embed"]
    torch.testing.assert_close(embedding[:, 0], given["pos_embed"][:, 0])
    torch.testing.assert_close(embedding[:, 1:], smaller.permute(0, 2, 3, 1).reshape(1, 15, 32))
    images = torch.randn(2, 3, 64, 40, generator=torch.Generator().manual_seed(0))
    weight, bias = network.patch_embed.proj.weight, network.patch_embed.proj.bias
    with torch.no_grad():
        cut = [
            (images[:, None, :, 12 * r : 12 * r + 16, 12 * c : 12 * c + 16] * weight).sum((2, 3, 4)) + bias
            for r in range(5)
            for c in range(3)
        ]
        torch.testing.assert_close(network.patch_embed(images), torch.stack(cut, dim=1), rtol=1e-4, atol=1e-5)
        features = backbone.eval()(images)
    # a file of such a network has its positions already
    torch.save(network.state_dict(), tmp_path / "trained.pth")
    again = TimmBackbone(VIT, weights=str(tmp_path / "trained.pth"), **options).eval()
    with torch.no_grad():
        assert torch.equal(again(images), features)


def test_a_stride_of_a_patch_is_the_plain_network():
    images = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    features = []
    for stride in (None, 16):
        torch.manual_seed(0)
        backbone = TimmBackbone(VIT, image_size=(64, 32), patch_stride=stride, options=TINY).eval()
        state = backbone.get_submodule("timm").state_dict()
        with torch.no_grad():
            state["pos_embed"].fill_(0.1)  # the random ones are of different grids
            state["cls_token"].fill_(0.2)
            for name in sorted(state):
                if "weight" in name and state[name].dim() > 1:
                    torch.nn.init.normal_(state[name], std=0.1, generator=torch.Generator().manual_seed(len(name)))
            features.append(backbone(images))
    assert torch.equal(*features)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet18", "image_size": (64, 32)}, "resnet18 is no vision transformer; leave it out"),
        ({"name": VIT, "options": TINY}, "it needs image_size; set it to the height and width of data.size"),
        ({"name": VIT, "options": TINY, "image_size": (64, 32)}, r"17 is not in \[1, 16\]"),
    ],
)
def test_wrong_strides_are_named(arguments, message):
    with pytest.raises(ConfigError, match=rf"^backbone\.patch_stride: {message}"):
        TimmBackbone(**arguments, patch_stride=17)


def test_open_clips_file_loads_and_computes_the_same(pixels, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="the owner of this layout")
    torch.manual_seed(0)
    public = open_clip.transformer.VisionTransformer(224, 16, 32, 2, 2, 4, output_dim=16).eval()
    state = {f"visual.{name}": tensor for name, tensor in public.state_dict().items()}
    state |= {"logit_scale": torch.tensor(1.0), "token_embedding.weight": torch.zeros(4, 16)}  # of texts
    torch.save(state, tmp_path / "clip.pth")
    backbone = TimmBackbone(CLIP, weights=str(tmp_path / "clip.pth"), options=TINY).eval()
    mean, std = (torch.tensor(c)[:, None, None] for c in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    public.proj = None  # into the space of texts
    with torch.no_grad():
        expected = public((pixels / 255 - mean) / std)
        torch.testing.assert_close(backbone(normalise_images(pixels)), expected, rtol=1e-4, atol=1e-4)


def test_open_clips_layout_of_vit_b_16_is_complete():
    open_clip = pytest.importorskip("open_clip", reason="the owner of this layout")
    with torch.device("meta"):
        public = open_clip.transformer.VisionTransformer(224, 16, 768, 12, 12, 4, output_dim=512)
        backbone = TimmBackbone(CLIP)
        state = {f"visual.{name}": tensor for name, tensor in public.state_dict().items()}
        network = backbone.get_submodule("timm")
        converted = timm.models.vision_transformer.checkpoint_filter_fn(state, network)
    assert {k: tuple(t.shape) for k, t in converted.items() if not k.startswith("head.")} == shapes(network)


def test_pixels_of_other_weights_can_be_told(pixels):
    torch.manual_seed(0)
    plain = TimmBackbone(VIT, options=TINY, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)).eval()
    x = normalise_images(pixels)
    with torch.no_grad():
        assert torch.equal(plain(x), plain.get_submodule("timm").forward_features(x)[:, 0])


def test_convolutional_networks_return_maps():
    with torch.device("meta"):
        backbone = TimmBackbone("resnet18")
        assert backbone(torch.empty(2, 3, 64, 32)).shape == (2, 512, 2, 1)
    assert backbone.out_channels == 512


def test_embeddings_are_parameters_of_the_backbone():
    groups = group_names(ReIDModel(TimmBackbone(VIT, options=TINY), Neck(kind="bnneck")))
    assert groups["backbone.timm.cls_token"] == groups["backbone.timm.pos_embed"] == Group.CONV
    assert groups["backbone.timm.blocks.1.norm2.weight"] == groups["backbone.timm.norm.bias"] == Group.NORM
    assert set(groups.values()) <= BODY | {Group.COUNTER}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vit_smal_patch16_224"}, r"^backbone.name: timm has no .*did you mean vit_small_patch16_224"),
        (
            {"name": VIT, "weights": "agreg"},
            r"^backbone.weights: timm has no weights agreg of .*; choose augreg_in1k, ",
        ),
        (
            {"name": VIT, "options": {"depht": 2}},
            r"^model.backbone: timm cannot build vit_small_.* \(TypeError",
        ),
        ({"name": VIT, "weights": "nowhere.pth"}, r"^backbone.weights: .*nowhere.pth is not there: no such file; "),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TimmBackbone(**{"options": TINY} | arguments)
    assert "\n" not in str(caught.value)


def test_images_of_another_size_are_refused():
    backbone = TimmBackbone(VIT, image_size=(64, 32), options=TINY)
    with pytest.raises(
        ConfigError, match=r"^data.size: timmbackbone cannot process images of \[32, 16\] pixels \(Input "
    ):
        fit(make_model(FedPav(), backbone=backbone))


def test_a_file_of_another_network_is_refused(tmp_path):
    torch.save(timm.create_model(VIT, num_classes=0, **TINY | {"depth": 1}).state_dict(), tmp_path / "short.pth")
    with pytest.raises(ConfigError, match=r"lacks 12 tensors of vit_small_patch16_224, first blocks.1.norm1.weight"):
        TimmBackbone(VIT, weights=str(tmp_path / "short.pth"), options=TINY)


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    line = r"^model.backbone: TimmBackbone needs timm; pip install 'fedsim-reid\[models\]'$"
    with pytest.raises(ConfigError, match=line):
        TimmBackbone(VIT)
