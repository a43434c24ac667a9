"""Assembled normalisation against plain loops, forward and backward, and its place in backbones."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedsim.cli.export import export
from fedsim.core.errors import ConfigError
from fedsim.methods import FedPav
from fedsim.models import AssembledNorm2d, Group, MobileNetV2, Neck, ReIDModel, ResNet, SmallCNN, group_names
from small import fit, make_data, make_model, named

BACKBONES = {
    "resnet": lambda **options: ResNet(18, **options),
    "mobilenet": lambda **options: MobileNetV2(0.25, **options),
    "smallcnn": lambda **options: SmallCNN(8, **options),
}


def layer_of(channels, seed=0):
    """A layer whose tensors are all different."""
    torch.manual_seed(seed)
    layer = AssembledNorm2d(channels).double()
    for tensor in (*layer.parameters(), layer.batch.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.batch.running_var, 0.5, 2.0)
    return layer


def by_loops(x, layer, training):
    """The layer's output, channel by channel and image by image, from the equations."""
    a, b = (score.exp() for score in layer.scores)
    w_batch, w_instance = a / (a + b), b / (a + b)
    rows = []
    for image in x:
        maps = []
        for c, channel in enumerate(image):
            mean, variance = layer.batch.running_mean[c], layer.batch.running_var[c]
            if training:
                values = [pixel for other in x for pixel in other[c].flatten()]
                mean = sum(values) / len(values)
                variance = sum((value - mean) ** 2 for value in values) / len(values)
            own = [*channel.flatten()]
            own_mean = sum(own) / len(own)
            own_variance = sum((value - own_mean) ** 2 for value in own) / len(own)
            by_batch = layer.batch.weight[c] * (channel - mean) / (variance + 1e-5).sqrt() + layer.batch.bias[c]
            by_image = (channel - own_mean) / (own_variance + 1e-5).sqrt()
            by_image = layer.instance_weight[c] * by_image + layer.instance_bias[c]
            maps.append(w_batch * by_batch + w_instance * by_image)
        rows.append(torch.stack(maps))
    return torch.stack(rows)


@pytest.mark.parametrize("training", [True, False])
def test_the_layer_and_its_gradients_are_those_of_loops(training):
    layer = layer_of(3).train(training)
    x = (torch.randn(4, 3, 3, 2, dtype=torch.float64) * 2 + 1).requires_grad_()
    weights, inputs = torch.randn_like(x), [x, *layer.parameters()]
    expected = by_loops(x, layer, training)  # before the layer moves its statistics
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((y * weights).sum(), inputs) for y in (output, expected))
    for gradient, by_loop in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, by_loop, rtol=0, atol=1e-11)


def test_running_statistics_are_those_of_its_batch_normalisation():
    layer, plain, x = AssembledNorm2d(3), nn.BatchNorm2d(3), torch.randn(4, 3, 3, 2)
    layer(x)
    plain(x)
    assert torch.equal(layer.batch.running_var, plain.running_var)


def test_scores_decide_between_the_two_normalisations():
    layer, x = layer_of(3), torch.randn(4, 3, 3, 2, dtype=torch.float64)
    for scores, norm in (([math.inf, 0.0], nn.BatchNorm2d), ([0.0, math.inf], nn.InstanceNorm2d)):
        layer.scores.data = torch.tensor(scores, dtype=torch.float64).nan_to_num(posinf=800)
        plain = norm(3, affine=True).double()
        is_batch = norm is nn.BatchNorm2d
        plain.weight.data, plain.bias.data = (
            (layer.batch.weight, layer.batch.bias) if is_batch else (layer.instance_weight, layer.instance_bias)
        )
        torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-12)


def test_at_first_both_parts_count_equally_with_the_affine_parameters_of_the_old_norm():
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 3, 2)
    for tensor in norm.parameters():
        nn.init.normal_(tensor)
    norm(torch.randn(4, 3, 3, 2) + 1)
    layer = AssembledNorm2d.from_batch_norm(norm).eval()
    instance = nn.functional.instance_norm(x, weight=norm.weight, bias=norm.bias)
    torch.testing.assert_close(layer(x), (norm.eval()(x) + instance) / 2)


@pytest.mark.parametrize("name", BACKBONES)
def test_each_batch_normalisation_is_replaced(name):
    plain, assembled = BACKBONES[name](), BACKBONES[name](norm="xan")
    places = [n for n, module in plain.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert places == [n for n, module in assembled.named_modules() if isinstance(module, AssembledNorm2d)]
    inside = [n for n, module in assembled.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert inside == [f"{place}.batch" for place in places]


def test_groups():
    groups = group_names(ReIDModel(SmallCNN(8, norm="xan"), Neck(kind="none")))
    of_layer = {name.removeprefix("backbone.bn2."): group for name, group in groups.items() if ".bn2." in name}
    assert of_layer == {
        "instance_weight": Group.ATTN, "instance_bias": Group.ATTN, "scores": Group.ATTN,
        "batch.weight": Group.NORM, "batch.bias": Group.NORM,
        "batch.running_mean": Group.STAT, "batch.running_var": Group.STAT, "batch.num_batches_tracked": Group.COUNTER,
    }  # fmt: skip


def test_pretrained_weights_load_into_both_parts_and_files_of_the_layers_as_they_are(tmp_path):
    torch.manual_seed(0)
    plain = ResNet(18)
    nn.init.normal_(plain.layer1[0].bn1.weight)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    assembled = ResNet(18, weights=str(tmp_path / "plain.pth"), norm="xan")
    norm = assembled.layer1[0].bn1
    assert torch.equal(norm.instance_weight, plain.layer1[0].bn1.weight)
    assert torch.equal(norm.batch.weight, plain.layer1[0].bn1.weight)
    nn.init.normal_(norm.scores)
    torch.save(assembled.state_dict(), tmp_path / "assembled.pth")
    again = ResNet(18, weights=str(tmp_path / "assembled.pth"), norm="xan").state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in assembled.state_dict().items())
    with pytest.raises(ConfigError, match=r"^backbone\.weights: .* lacks .* norm and style$"):
        ResNet(18, weights=str(tmp_path / "assembled.pth"))


def test_export_says_that_torchvision_lacks_the_layers(tmp_path):
    model, path = fit(make_model(FedPav(), backbone=SmallCNN(8, norm="xan")), rounds=1), tmp_path / "model.safetensors"
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "holds assembled normalisation, which" in export(str(tmp_path / "last.ckpt"), str(path))
    loaded = SmallCNN(8, norm="xan")
    loaded.load_state_dict(load_file(path), strict=False)
    assert torch.equal(loaded.bn1.scores, named(model)["backbone.bn1.scores"])


@pytest.mark.parametrize("norm", ["xan", "attentive"])
def test_residuals_are_fused_behind_any_norm(norm):
    """The second norm of a small block is its last one."""
    maps = ResNet(18, norm=norm, fam="aff_residual")(torch.randn(2, 3, 64, 32))
    assert maps.shape == (2, 512, 2, 1)


def test_maps_of_one_pixel_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"^backbone\.norm: xan normalises each image, and a map has 1 x 1 pixels"):
        AssembledNorm2d(3)(torch.randn(2, 3, 1, 1))
    model = make_model(FedPav(), backbone=SmallCNN(8, norm="xan"))
    with pytest.raises(ConfigError, match=r"^data\.size: smallcnn cannot process .* choose another norm, or larger"):
        model.assemble(make_data(size=(8, 8)), 0, 1, torch.device("cpu"))


def test_outputs_keep_the_type_of_the_maps():
    layer = AssembledNorm2d(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 3, 4, 2).bfloat16()).dtype == torch.bfloat16
