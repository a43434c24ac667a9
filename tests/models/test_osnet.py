"""OSNet: torchreid's layout, and the network from its equations on named tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.models import OSNet


def norm(name, channels):
    sizes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (channels,))
    return {f"{name}.{part}": size for part, size in sizes.items()} | {f"{name}.num_batches_tracked": ()}


def convolution(name, c_in, c_out, size=1):
    return {f"{name}.conv.weight": (c_out, c_in, size, size), **norm(f"{name}.bn", c_out)}


def lite(name, channels):
    weights = {f"{name}.conv1.weight": (channels, channels, 1, 1), f"{name}.conv2.weight": (channels, 1, 3, 3)}
    return weights | norm(f"{name}.bn", channels)


def block(name, c_in, c_out):
    mid = c_out // 4
    found = convolution(f"{name}.conv1", c_in, mid) | lite(f"{name}.conv2a", mid)
    for letter, depth in (("b", 2), ("c", 3), ("d", 4)):
        for i in range(depth):
            found |= lite(f"{name}.conv2{letter}.{i}", mid)
    found |= {f"{name}.gate.fc1.weight": (mid // 16, mid, 1, 1), f"{name}.gate.fc1.bias": (mid // 16,)}
    found |= {f"{name}.gate.fc2.weight": (mid, mid // 16, 1, 1), f"{name}.gate.fc2.bias": (mid,)}
    found |= convolution(f"{name}.conv3", mid, c_out)
    return found | (convolution(f"{name}.downsample", c_in, c_out) if c_in != c_out else {})


def layout(channels=(64, 256, 384, 512)):
    """Names and shapes of osnet_x1_0_imagenet.pth, as torchreid/models/osnet.py makes them."""
    found = convolution("conv1", 3, channels[0], 7)
    for stage, (c_in, c_out) in enumerate(itertools.pairwise(channels), start=2):
        found |= block(f"conv{stage}.0", c_in, c_out) | block(f"conv{stage}.1", c_out, c_out)
        if stage < 4:
            found |= convolution(f"conv{stage}.2.0", c_out, c_out)
    found |= convolution("conv5", channels[-1], channels[-1])
    found |= {"fc.0.weight": (512, channels[-1]), "fc.0.bias": (512,), **norm("fc.1", 512)}
    return found | {"classifier.weight": (1000, 512), "classifier.bias": (1000,)}


def drawn(shapes):
    """Tensors of these shapes, whose statistics make a network of moderate numbers."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        scale = (2 / max(1, torch.Size(shape[1:]).numel())) ** 0.5 if len(shape) > 1 else 0.1
        values = scale * torch.randn(shape, generator=generator)
        state[name] = values.abs() + 0.5 if name.endswith(("running_var", "bn.weight")) else values
        if not shape:
            state[name] = torch.tensor(7)
    return state


@pytest.mark.parametrize("wrapped", [False, True])
def test_torchreids_file_loads(wrapped, tmp_path):
    """The ImageNet file is plain; torchreid's own checkpoints have ranks, epochs, and names of parallel training."""
    state = drawn(layout())
    content = {"state_dict": {f"module.{n}": t for n, t in state.items()}, "epoch": 60, "rank1": 0.9}
    torch.save(content if wrapped else state, tmp_path / "osnet_x1_0_imagenet.pth")
    loaded = OSNet(weights=str(tmp_path / "osnet_x1_0_imagenet.pth")).state_dict()
    assert set(loaded) == {name for name in state if not name.startswith(("fc.", "classifier."))}
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())


def test_eq3_sums_gated_streams_of_four_depths(tmp_path):
    state = drawn(layout((16, 64, 96, 128)))
    torch.save(state, tmp_path / "osnet.pth")
    backbone = OSNet(0.25, weights=str(tmp_path / "osnet.pth")).eval()
    assert backbone.out_channels == 128

    def normalised(x, name):
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        mean, var, weight, bias = (part[:, None, None] for part in parts)
        return weight * (x - mean) / (var + 1e-5).sqrt() + bias

    def convolved(x, name, **how):
        return normalised(F.conv2d(x, state[f"{name}.conv.weight"], **how), f"{name}.bn")

    def light(x, name):
        x = F.conv2d(
            F.conv2d(x, state[f"{name}.conv1.weight"]), state[f"{name}.conv2.weight"], padding=1, groups=x.shape[1]
        )
        return normalised(x, f"{name}.bn").relu()

    def gated(x, name):
        pooled = x.mean((2, 3))
        hidden = (pooled @ state[f"{name}.fc1.weight"][..., 0, 0].T + state[f"{name}.fc1.bias"]).relu()
        gate = (hidden @ state[f"{name}.fc2.weight"][..., 0, 0].T + state[f"{name}.fc2.bias"]).sigmoid()
        return gate[:, :, None, None] * x

    def omni_scale(x, name):
        narrow, total = convolved(x, f"{name}.conv1").relu(), 0
        for letter, depth in zip("abcd", (1, 2, 3, 4), strict=True):
            stream = narrow
            for i in range(depth):
                stream = light(stream, f"{name}.conv2{letter}" + (f".{i}" if depth > 1 else ""))
            total = total + gated(stream, f"{name}.gate")
        shortcut = convolved(x, f"{name}.downsample") if f"{name}.downsample.conv.weight" in state else x
        return (convolved(total, f"{name}.conv3") + shortcut).relu()

    images = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x = F.max_pool2d(convolved(images, "conv1", stride=2, padding=3).relu(), 3, stride=2, padding=1)
        for stage in (2, 3, 4):
            x = omni_scale(omni_scale(x, f"conv{stage}.0"), f"conv{stage}.1")
            if stage < 4:
                x = F.avg_pool2d(convolved(x, f"conv{stage}.2.0").relu(), 2)
        x = convolved(x, "conv5").relu()
        maps = backbone(images)
    assert maps.shape == (2, 128, 4, 2)
    torch.testing.assert_close(maps, x, rtol=1e-4, atol=1e-4 * float(x.abs().max()))


def test_it_has_the_papers_number_of_weights():
    """Table 1: 2.2 million at width 1, with the embedding layer of 512 x 512 and its norm."""
    count = sum(p.numel() for p in OSNet().parameters()) + 512 * 512 + 512 + 2 * 512
    assert round(count / 1e6, 1) == 2.2


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^backbone.width: 2.0 is not one of 1.0, 0.75, 0.5, 0.25$"):
        OSNet(2.0)
    with pytest.raises(ConfigError, match=r"^backbone.weights: IMAGENET1K_V1 is no file; .*osnet_x0_5_imagenet"):
        OSNet(0.5, weights="IMAGENET1K_V1")
    torch.save(drawn(layout()), tmp_path / "wide.pth")
    with pytest.raises(ConfigError, match=r"osnet_x0_25 needs \[16, 3, 7, 7\]"):
        OSNet(0.25, weights=str(tmp_path / "wide.pth"))
