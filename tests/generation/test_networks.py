"""The networks of a generator: shapes, what each can see, and sizes that will not do."""

import copy
from dataclasses import fields

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import normalise_images
from fedsim.generation.networks import (
    AppearanceEncoder,
    Decoder,
    Discriminator,
    Generator,
    Networks,
    StructureEncoder,
    check_backbone,
    check_size,
)
from fedsim.generation.training import to_symmetric
from fedsim.models import ResNet, SmallCNN
from small_generators import SMALL, new, noise, train

SAME_LUMA = torch.tensor([-11, -1, 34]).view(1, 3, 1, 1)
"""299 * -11 - 587 + 114 * 34 = 0: what changes a colour, and no luma"""


def images(count=3, size=(16, 20), seed=0):
    return to_symmetric(noise(count, size, seed))


def patches(pixels):
    """Along an axis, three convolutions of kernel 4, stride 2 and padding 1."""
    for _ in range(3):
        pixels = (pixels + 2 - 4) // 2 + 1
    return pixels


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 16), (64, 32), (20, 28), (36, 16)])
@pytest.mark.parametrize("networks", [SMALL, Networks(width=3, structure_blocks=2, decoder_blocks=1, parts=3)])
def test_shapes(size, networks):
    torch.manual_seed(0)
    generator, given = Generator(SmallCNN(4), networks, 7), images(size=size)
    height, width = size
    maps, codes = generator.structure(given), generator.appearance(given)
    assert maps.shape == (3, 4 * networks.width, height // 4, width // 4)
    assert codes.shape == (3, networks.parts * 16) == (3, generator.appearance.code_size)
    assert generator.appearance.logits(codes).shape == (3, 7)
    made = generator(given, given)
    assert made.shape == given.shape
    assert made.abs().max() <= 1
    assert not torch.equal(made[0], made[1])
    scores = Discriminator(networks.width, networks.scales)(given)
    for _ in range(networks.scales):
        of_scale = scores.pop(0)
        assert of_scale.shape == (3, 1, patches(height), patches(width))
        height, width = -(-height // 2), -(-width // 2)
    assert not scores


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_the_smallest_size_is_the_smallest_that_the_discriminator_can_judge(scales):
    smallest, networks = {1: 8, 2: 16, 3: 32}[scales], Networks(width=2, scales=scales)
    check_size((smallest, smallest), networks)
    scores = Discriminator(2, scales)(images(size=(smallest, smallest)))
    assert [of_scale.numel() for of_scale in scores][-1] == 3
    for size in ((smallest - 4, smallest), (smallest, smallest - 4)):
        with pytest.raises(
            ConfigError, match=rf"^size: \[{size[0]}, {size[1]}\] .* multiples of 4, at least {smallest},"
        ):
            check_size(size, networks)
        with pytest.raises(RuntimeError, match="size"):
            Discriminator(2, scales)(images(size=size))


@pytest.mark.parametrize("size", [(8, 8), (12, 8), (16, 16), (20, 28), (100, 52)])
@pytest.mark.parametrize("scales", [1, 2, 3])
def test_sizes_that_pass_the_check_train(size, scales):
    networks = Networks(width=2, structure_blocks=1, decoder_blocks=1, hidden=4, scales=scales)
    if min(size) < 8 * 2 ** (scales - 1):
        with pytest.raises(ConfigError, match=r"^size: "):
            check_size(size, networks)
        return
    check_size(size, networks)
    assert len(train(new(size=size, networks=networks, steps=1)).history) == 1


@pytest.mark.parametrize("size", [(30, 16), (32, 18), (33, 17)])
def test_sizes_are_multiples_of_4(size):
    with pytest.raises(ConfigError, match=rf"^size: \[{size[0]}, {size[1]}\] is not supported; give multiples of 4"):
        check_size(size, Networks())


@pytest.mark.parametrize("field", [field.name for field in fields(Networks)])
def test_settings_out_of_range_are_named(field):
    with pytest.raises(ConfigError, match=rf"^networks\.{field}: 0 is less than 1"):
        Networks(**{field: 0})


@pytest.mark.parametrize("last_stride", [1, 2])
def test_other_backbones_will_do(last_stride):
    module = new(make_backbone=lambda: ResNet(18, last_stride), size=(64, 32), steps=1, batch_size=2)
    assert module.generator.appearance.code_size == 2 * 512
    train(module)
    made = module.generator.eval()(*(to_symmetric(module.pixels[rows]) for rows in ([0, 1], [2, 3])))
    assert made.shape == (2, 3, 64, 32)
    assert made.isfinite().all()


# -- what each can see -------------------------------------------------------------------------------------------------


def recoloured(pixels, seed=5):
    """The same with other colours of the same luma, pixel by pixel."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(-3, 4, (len(pixels), 1, *pixels.shape[2:]), generator=generator)
    return pixels + step * SAME_LUMA


def test_structure_is_blind_to_colours():
    torch.manual_seed(0)
    encoder = StructureEncoder(4, 2)
    pixels = 110 + noise(3).long() // 7  # leaves room for other colours
    others = recoloured(pixels)
    assert ((pixels - others).abs().amax(1) > 30).float().mean() > 0.5
    assert others.amin() >= 0
    assert others.amax() <= 255
    maps, same = encoder(to_symmetric(pixels)), encoder(to_symmetric(others))
    assert torch.allclose(maps, same, atol=1e-4)
    for channel in range(3):
        changed = pixels.clone()
        changed[:, channel] = others[:, channel]
        if (changed != pixels).any():
            assert (encoder(to_symmetric(changed)) - maps).abs().max() > 0.01


def test_structure_is_blind_to_contrast():
    torch.manual_seed(0)
    encoder, given = StructureEncoder(4, 2), images()
    assert torch.allclose(encoder(given), encoder(0.5 * given), atol=0.02)


def test_appearance_is_of_colours_and_images_are_normalised_as_backbones_expect():
    torch.manual_seed(0)
    encoder = AppearanceEncoder(SmallCNN(4), 2, 5).eval()
    pixels = 110 + noise(3).long() // 7
    assert (encoder(to_symmetric(pixels)) - encoder(to_symmetric(recoloured(pixels)))).abs().max() > 0.01
    maps = encoder.backbone(normalise_images(pixels.byte()))
    height = maps.shape[2]
    assert height == 2
    parts = [maps[:, :, part].amax(2) for part in range(2)]
    expected = torch.stack(parts, 2).flatten(1)  # channel by channel, its parts
    assert torch.allclose(encoder(to_symmetric(pixels)), expected, atol=1e-5)


def test_logits_are_of_codes_standardised_over_the_batch():
    torch.manual_seed(0)
    encoder, codes = AppearanceEncoder(SmallCNN(4), 1, 5).double(), torch.randn(6, 16).double()
    standard = (codes - codes.mean(0)) / (((codes - codes.mean(0)) ** 2).mean(0) + 1e-5).sqrt()
    expected = [[sum(w * c for w, c in zip(of_class, code, strict=True)) for of_class in encoder.head.weight.tolist()]
                for code in standard.tolist()]  # fmt: skip
    assert torch.allclose(encoder.logits(codes), torch.tensor(expected).double(), atol=1e-6)


def test_what_is_decoded_depends_on_structure_and_on_the_code():
    torch.manual_seed(0)
    decoder = Decoder(2, 2, 6, 5)
    maps, codes = torch.randn(2, 8, 4, 5), torch.randn(2, 6)
    made = decoder(maps, codes)
    for other in (decoder(maps, codes.flip(0)), decoder(maps.flip(0), codes)):
        assert ((made - other).abs().amax((1, 2, 3)) > 1e-4).all()
    assert torch.allclose(decoder(maps[:1], codes[:1]), made[:1], atol=1e-6)  # one by one


@pytest.mark.parametrize("place", range(2 * 4))
def test_every_setting_of_the_decoder_has_a_channel_of_its_own(place):
    """AdaIN: scale and offset after each of the two norms of each block."""
    torch.manual_seed(0)
    decoder = Decoder(2, 2, 6, 5)
    maps, codes = torch.randn(1, 8, 4, 5), torch.randn(1, 6)
    with torch.no_grad():
        before = decoder(maps, codes)
        decoder.settings[-1].bias[8 * place] += 1.0
        assert not torch.allclose(decoder(maps, codes), before, atol=1e-6)


def test_a_block_of_the_decoder_is_a_residual_block_with_scaled_norms():
    torch.manual_seed(0)
    block = Decoder(2, 1, 6, 5).blocks[0].double()
    x, settings = torch.randn(2, 8, 4, 5).double(), torch.randn(2, 32).double()
    expected = []
    for image, given in zip(x, settings, strict=True):
        scale, offset, scale_2, offset_2 = (given[8 * part : 8 * part + 8] for part in range(4))
        inner = standardised(block.first(image[None])[0])
        inner = torch.stack([inner[c] * (1 + scale[c]) + offset[c] for c in range(8)])
        inner = torch.where(inner > 0, inner, 0.2 * inner)
        outer = standardised(block.second(inner[None])[0])
        expected.append(torch.stack([image[c] + outer[c] * (1 + scale_2[c]) + offset_2[c] for c in range(8)]))
    assert torch.allclose(block(x, settings), torch.stack(expected), atol=1e-10)


def standardised(maps):
    """Each channel less its mean, over its deviation."""
    return torch.stack([(m - m.mean()) / (((m - m.mean()) ** 2).mean() + 1e-5).sqrt() for m in maps])


def test_the_discriminators_scales_see_ever_smaller_images():
    torch.manual_seed(0)
    network, given = Discriminator(2, 2), images(size=(32, 16))
    smaller = torch.zeros(3, 3, 16, 8)
    for y in range(16):
        for x in range(8):
            smaller[:, :, y, x] = given[:, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].mean((2, 3))
    first, second = network(given)
    assert torch.allclose(first, network.scales[0](given))
    assert torch.allclose(second, network.scales[1](smaller), atol=1e-6)


@pytest.mark.parametrize(
    ("backbone", "parts", "size", "message"),
    [
        (
            SmallCNN(4),
            5,
            (32, 16),
            r"SmallCNN returns \[1, 16, 4, 2\] .* networks.parts: 5 needs",
        ),
        (nn.Sequential(nn.Flatten()), 1, (16, 16), r"Sequential returns \[1, 768\]"),
        (SmallCNN(4), 1, (4, 4), r"SmallCNN cannot process images of \[4, 4\] pixels"),
    ],
)
def test_backbones_that_make_no_fitting_maps_are_refused(backbone, parts, size, message):
    with pytest.raises(ConfigError, match=message):
        check_backbone(backbone, parts, size)
    assert backbone.training


def test_a_check_leaves_a_backbone_as_it_is():
    backbone = SmallCNN(4)
    before = copy.deepcopy(backbone.state_dict())
    check_backbone(backbone, 4, (32, 16))
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
