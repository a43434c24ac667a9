"""Diversified norms against plain loops, forward and backward, their special cases, and whose statistics they mix."""

import copy
import math
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.functional.style import mix_styles_with, normalise_with_mixture
from fedsim.methods import SKA, FedBN, FedPav, Local
from fedsim.models import DiversifiedNorm2d, MobileNetV2, Neck, OSNet, ReIDModel, ResNet, SmallCNN, StyleLayers
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, named

STYLE = StyleLayers(kind="diversify", p=1.0)
LAYER1 = StyleLayers(kind="diversify", p=1.0, after=("layer1",))
PLACES = {
    "resnet18": (partial(ResNet, 18), ("layer1.1.bn2", "layer2.1.bn2")),
    "resnet50": (partial(ResNet, 50), ("layer1.2.bn3", "layer2.3.bn3")),
    "mobilenet": (partial(MobileNetV2, 0.25), ("features.3.conv.3", "features.6.conv.3")),
    "osnet": (partial(OSNet, 0.25), ("conv2.2.0.bn", "conv3.2.0.bn")),
    "smallcnn": (partial(SmallCNN, 8), ("bn1", "bn2")),
}


def seeded(**options):
    torch.manual_seed(0)
    return SmallCNN(8, **options)


def maps(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def layer_of(channels, **options):
    """A layer whose tensors are all different, with statistics that it has received."""
    torch.manual_seed(0)
    layer = DiversifiedNorm2d(channels, **options).double()
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    layer.begin_session()
    return layer


def style_by_loops(channel):
    """Mean and deviation as plain numbers: no gradient flows through them."""
    values = channel.flatten().tolist()
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-5)


def mixed_by_loops(x, shares, means, deviations):
    rows = []
    for image, share in zip(x, shares, strict=True):
        channels = []
        for channel, other_mean, other_std in zip(image, means, deviations, strict=True):
            mean, std = style_by_loops(channel)
            new_mean, new_std = share * mean + (1 - share) * other_mean, share * std + (1 - share) * other_std
            channels.append((channel - mean) / std * new_std + new_mean)
        rows.append(torch.stack(channels))
    return torch.stack(rows)


def test_training_mixes_with_the_received_statistics_and_normalises_by_the_batch():
    layer, x = layer_of(3, p=1.0), maps(4, 3, 3, 2).requires_grad_()
    means = layer.running_mean.tolist()
    deviations = [math.sqrt(variance + 1e-5) for variance in layer.running_var.tolist()]
    layer.running_mean.fill_(100.0)  # moved by batches since the download
    torch.manual_seed(3)
    assert torch.rand(()) < 1.0
    shares = torch.rand(4).tolist()
    mixed = mixed_by_loops(x, shares, means, deviations)
    plain = nn.BatchNorm2d(3).double()
    plain.load_state_dict(layer.state_dict())
    expected, weights = plain(mixed), maps(4, 3, 3, 2, seed=1)
    torch.manual_seed(3)
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)  # shares are float32
    assert torch.equal(layer.running_mean, plain.running_mean) or torch.allclose(
        layer.running_mean, plain.running_mean, atol=1e-6
    )
    inputs = [x, layer.weight, layer.bias], [x, plain.weight, plain.bias]
    gradients = (torch.autograd.grad((y * weights).sum(), of) for y, of in zip((output, expected), inputs, strict=True))
    for gradient, by_loop in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, by_loop, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapt", [0.0, 0.25, 1.0])
def test_evaluation_normalises_by_a_mixture(adapt):
    layer, x = layer_of(3, adapt=adapt).eval(), maps(4, 3, 3, 2).requires_grad_()
    expected = []
    for image in x:
        for c, channel in enumerate(image):
            values = channel.flatten()
            mean = sum(values) / len(values)
            std = (sum((value - mean) ** 2 for value in values) / len(values) + 1e-5).sqrt()
            mean = adapt * mean + (1 - adapt) * layer.running_mean[c]
            std = adapt * std + (1 - adapt) * (layer.running_var[c] + 1e-5).sqrt()
            expected.append(layer.weight[c] * (channel - mean) / std + layer.bias[c])
    expected, weights = torch.stack(expected).view_as(x), maps(4, 3, 3, 2, seed=1)
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    gradient, by_loop = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (output, expected))
    torch.testing.assert_close(gradient, by_loop, rtol=0, atol=1e-11)


def test_the_ends_of_the_mixtures():
    x, style = maps(4, 3, 3, 2), (maps(1, 3, 1, 1), maps(1, 3, 1, 1, seed=1).abs() + 0.5)
    assert torch.equal(mix_styles_with(x, torch.ones(4), style), x)
    swapped = mix_styles_with(x, torch.zeros(4), style, eps=0.0)
    torch.testing.assert_close(swapped.mean((2, 3), keepdim=True), style[0].expand(4, -1, -1, -1))
    torch.testing.assert_close(swapped.std((2, 3), correction=0, keepdim=True), style[1].expand(4, -1, -1, -1))
    affine = maps(3, seed=2), maps(3, seed=3)
    instance = nn.functional.instance_norm(x, weight=affine[0], bias=affine[1])
    torch.testing.assert_close(normalise_with_mixture(x, 1.0, style, affine), instance)


def test_with_p_0_and_adapt_0_it_is_batch_normalisation_to_the_bit():
    layer, plain, x = DiversifiedNorm2d(3, 0.0, 0.0), nn.BatchNorm2d(3), maps(4, 3, 3, 2).float()
    layer.running_mean.add_(1.0)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert [*layer.state_dict()] == [*plain.state_dict()]


def test_a_share_of_the_batches_is_changed_and_each_image_by_its_own_share():
    torch.manual_seed(0)
    layer, x = layer_of(2, p=0.25), maps(4, 2, 3, 2)
    changed = [(layer._diversified(x) != x).any() for _ in range(1000)]
    assert sum(changed) == pytest.approx(250, abs=4 * math.sqrt(1000 * 0.25 * 0.75))
    layer.p = 1.0
    same = layer._diversified(x[:1].expand(4, -1, -1, -1))
    assert len({tuple(image.flatten().tolist()) for image in same}) == 4


@pytest.mark.parametrize("name", PLACES)
def test_the_last_norm_of_a_stage_is_replaced_and_all_else_stays(name):
    build, places = PLACES[name]
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    styled = build(style=StyleLayers(kind="diversify", p=0.0, adapt=0.0))
    assert tuple(n for n, layer in styled.named_modules() if isinstance(layer, DiversifiedNorm2d)) == places
    assert [*styled.state_dict()] == [*plain.state_dict()]
    x = maps(4, 3, 64, 32).float()
    with torch.no_grad():
        assert torch.equal(styled(x), plain(x))
        assert torch.equal(styled.eval()(x), plain.eval()(x))


def test_a_file_of_it_loads_into_torchvisions_network_and_back(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "plain.pth")
    styled = ResNet(18, weights=str(tmp_path / "plain.pth"), style=STYLE)
    torch.save(styled.state_dict(), tmp_path / "styled.pth")
    network = torchvision.models.resnet18()
    missing, unexpected = network.load_state_dict(torch.load(tmp_path / "styled.pth"), strict=False)
    assert (missing, unexpected) == (["fc.weight", "fc.bias"], [])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_places_without_a_plain_batch_normalisation_are_refused():
    with pytest.raises(ConfigError, match=r"^backbone\.style\.after: SmallCNN has no place input ahead .* layer1, lay"):
        SmallCNN(8, style=StyleLayers(kind="diversify", after=("input",)))
    with pytest.raises(ConfigError, match=r"^backbone\.style\.kind: .* at layer2, and bn2 is a AttentiveNorm2d; set"):
        SmallCNN(8, norm="attentive", style=STYLE)
    with pytest.raises(ConfigError, match=r"^backbone\.style\.kind: .* and bn1 is a AssembledNorm2d; set backbone\.no"):
        SmallCNN(8, norm="xan", style=STYLE)
    with pytest.raises(ConfigError, match=r"^backbone\.style\.adapt: 1\.5 is not in \[0, 1\]"):
        StyleLayers(kind="diversify", adapt=1.5)
    with pytest.raises(ConfigError, match=r"^backbone\.style\.after: the map at layer1 has 1 x 1 pixels"):
        DiversifiedNorm2d(3)(torch.randn(2, 3, 1, 1))


@pytest.mark.parametrize(
    ("method", "options"),
    [(FedBN(), {}), (Local(), {}), (SKA(dual=False, unseen="avg"), {}), (FedPav(), {"bn_stats": "local"})],
    ids=["FedBN", "Local", "SKA", "local"],
)
def test_statistics_that_stay_with_clients_are_refused(method, options):
    model = make_model(method, backbone=SmallCNN(8, style=STYLE), **options)
    with pytest.raises(ConfigError, match=r"^model\.backbone\.style\.kind: diversify needs .* clients keep them with "):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))


# -- in a session ------------------------------------------------------------------------------------------------------


def test_the_first_pass_of_a_session_remembers_what_was_downloaded():
    network = ReIDModel(SmallCNN(8, style=STYLE), Neck(kind="none"))
    norm, x = network.backbone.bn1, maps(4, 3, 32, 16).float()
    network.begin_training()
    norm.running_mean.fill_(3.0)  # the download comes after
    network(x)
    received = norm.received.clone()
    assert torch.equal(received[0], torch.full((8,), 3.0))
    network(x)
    assert torch.equal(norm.received, received)
    assert not torch.equal(norm.running_mean, received[0])
    twin = copy.deepcopy(network)
    twin.end_session()
    assert twin.backbone.bn1.received is None, "a copy has layers of its own"
    assert norm.received is not None
    network.end_session()
    assert norm.received is None
    network(x)
    assert norm.received is None, "a pass outside of sessions takes the running statistics"


def test_a_layer_of_a_user_is_told_of_a_session_too():
    class OwnLayer(nn.Identity):
        told = ()

        def begin_session(self):
            self.told += ("begin",)

        def end_session(self):
            self.told += ("end",)

    backbone = nn.Sequential(layer := OwnLayer())
    backbone.out_channels = 3
    network = ReIDModel(backbone, Neck(kind="none"))
    network.begin_training()
    for _ in range(2):
        network(torch.ones(2, 3, 4, 4))
    network.end_session()
    assert layer.told == ("begin", "end")


def test_federations_mix_with_the_statistics_of_the_global_model(monkeypatch):
    """In every session, whichever client came before it on the rank."""
    held, hold = [], DiversifiedNorm2d.begin_session

    def look(layer):
        hold(layer)
        held.append(layer.received.clone())

    monkeypatch.setattr(DiversifiedNorm2d, "begin_session", look)
    one, two = (fit(make_model(FedPav(), backbone=seeded(style=LAYER1)), rounds=n) for n in (1, 2))
    after_one = torch.stack([named(one)[f"backbone.bn1.running_{part}"] for part in ("mean", "var")])
    initial = torch.stack([torch.zeros(8), torch.ones(8)])
    assert len(held) == 9, "three clients in a round, then in two"
    assert all(torch.equal(received, initial) for received in held[:6])
    assert all(torch.equal(received, after_one) for received in held[6:])
    assert two.parts.models["smallcnn"].network.backbone.bn1.received is None


def test_no_byte_more_is_sent():
    plain, styled = (fit(make_model(FedPav(), backbone=seeded(style=style)), rounds=1) for style in (None, STYLE))
    assert styled.round_metrics["comm/total_bytes"] == plain.round_metrics["comm/total_bytes"]
    assert any(not torch.equal(tensor, named(styled)[name]) for name, tensor in named(plain).items())


def test_micro_batches_of_a_batch_mix_with_the_same_statistics():
    training = LocalTraining(batch_size=8, micro_batch=4)
    model = fit(make_model(FedPav(), backbone=SmallCNN(8, style=STYLE), client=training))
    assert all(tensor.isfinite().all() for tensor in named(model).values())
