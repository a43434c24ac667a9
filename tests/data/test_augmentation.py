"""Training augmentation: one decision per image, and each operation against an obvious version of itself."""

import math

import pytest
import torch
from torchvision import transforms

from fedsim.core.errors import ConfigError
from fedsim.data import augmentation as module
from fedsim.data.augmentation import Augmentation
from fedsim.functional.normalise import normalise_images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(batch, height, width, seed=0):
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=seeded(seed))


def copies(image, count):
    return image.expand(count, -1, -1, -1).clone()


def brightness(x):
    """Normalised images back to uint8's scale, channel 0."""
    return (x[:, 0] * STD[0] + MEAN[0]) * 255


def cropped(picture, mirror, top, left, size):
    """The obvious version: pixel (r, c) shows (r + top, c + left) of the picture, mirrored or not; else black."""
    _, in_height, in_width = picture.shape
    height, width = size
    out = torch.zeros(3, height, width, dtype=picture.dtype)
    for r in range(height):
        for c in range(width):
            y, x = r + top, (width - 1 - c if mirror else c) + left
            if 0 <= y < in_height and 0 <= x < in_width:
                out[:, r, c] = picture[:, y, x]
    return out


def moved(picture, mirror, rows, columns):
    """As large as it was, from elsewhere."""
    return cropped(picture, mirror, rows, columns, picture.shape[1:])


def test_normalisation_is_imagenets():
    images = noise(2, 3, 5)
    x = normalise_images(images)
    assert x.dtype == torch.float32
    for channel in range(3):
        expected = (images[:, channel].double() / 255 - MEAN[channel]) / STD[channel]
        assert torch.allclose(x[:, channel].double(), expected, atol=1e-6)


def test_without_any_operation_it_is_plain_normalisation():
    images = noise(9, 8, 6)
    assert torch.equal(Augmentation(pad=0, flip=0.0)(images, seeded()), normalise_images(images))


def test_flip_1_is_the_exact_mirror_image():
    images = noise(9, 8, 5)
    assert torch.equal(Augmentation(pad=0, flip=1.0)(images, seeded()), normalise_images(images.flip(-1)))


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(pad=3, flip=0.5, rotate=10.0, scale=0.1, erase=0.5),
        Augmentation(pad=0, flip=0.0, erase=1.0),
    ],
)
def test_shape_type_and_input(augmentation):
    images = noise(6, 24, 12)
    before = images.clone()
    for batch in (images, images[:1]):  # a batch of one as well
        x = augmentation(batch, seeded())
        assert x.shape == batch.shape
        assert x.dtype == torch.float32
        assert x.isfinite().all()
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("augmentation", "fewest"),
    [
        (Augmentation(pad=3, flip=0.0), 30),  # 49 shifts, 64 images
        (Augmentation(pad=0, flip=0.5), 2),
        (Augmentation(pad=0, flip=0.0, rotate=10.0), 64),
        (Augmentation(pad=0, flip=0.0, scale=0.2), 64),
        (Augmentation(pad=0, flip=0.0, erase=1.0), 60),
        (Augmentation(pad=0, flip=0.0, erase=0.5), 20),
    ],
    ids=["shift", "flip", "rotate", "scale", "erase", "erase some"],
)
def test_every_image_of_a_batch_has_its_own_decisions(augmentation, fewest):
    x = augmentation(copies(noise(1, 24, 12), 64), seeded())
    assert len(x.flatten(1).unique(dim=0)) >= fewest


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(pad=2, rotate=5.0, scale=0.1, erase=0.5)])
def test_reproducible_from_the_generator_alone(augmentation):
    images = noise(16, 24, 12)
    torch.manual_seed(1)
    first = augmentation(images, seeded(5))
    torch.manual_seed(2)
    generator = seeded(5)
    assert torch.equal(augmentation(images, generator), first)
    assert not torch.equal(augmentation(images, generator), first)  # the next batch
    assert not torch.equal(augmentation(images, seeded(6)), first)


@pytest.mark.parametrize("pad", [1, 2, 7])
def test_shifts_are_whole_pixels_with_black_from_outside(pad):
    images = noise(24, 6, 5)
    x = Augmentation(pad=pad, flip=0.5)(images, seeded(3))
    steps = range(-pad, pad + 1)
    for before, after in zip(images, x, strict=True):
        versions = (moved(before, mirror, r, c) for mirror in (False, True) for r in steps for c in steps)
        assert any(torch.equal(after, normalise_images(version[None])[0]) for version in versions)


def test_flips_and_shifts_have_the_right_frequencies():
    # Channel 0 holds the row, channel 1 the column: the centre and its neighbours tell where they come from.
    pad, flip, count = 2, 0.3, 4000
    image = torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
    image[0, 0] = 20 * torch.arange(9, dtype=torch.uint8)[:, None]
    image[0, 1] = 20 * torch.arange(9, dtype=torch.uint8)[None, :]
    x = Augmentation(pad=pad, flip=flip)(copies(image, count), seeded(0))
    row = ((x[:, 0, 4, 4] * STD[0] + MEAN[0]) * 255 / 20).round().long() - 4
    column = ((x[:, 1, 4, 4] * STD[1] + MEAN[1]) * 255 / 20).round().long() - 4
    mirrored = (x[:, 1, 4, 5] < x[:, 1, 4, 3]).long()
    cell = (mirrored * 5 + row + pad) * 5 + column + pad
    assert row.abs().max() == column.abs().max() == pad
    observed = torch.bincount(cell, minlength=50).double()
    expected = torch.tensor([1 - flip] * 25 + [flip] * 25, dtype=torch.float64) * count / 25
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 95  # 49 degrees of freedom: exceeded with probability 1e-4
    assert abs(mirrored.double().mean() - flip) < 4 * math.sqrt(flip * (1 - flip) / count)


# -- rotation and scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [{"rotate": 1e-5}, {"scale": 1e-7}])
@pytest.mark.parametrize(("height", "width"), [(12, 7), (16, 8)])
def test_resampling_by_nothing_equals_the_exact_path(tiny, height, width):
    images = noise(32, height, width)
    exact = Augmentation(pad=3, flip=0.5)(images, seeded(2))
    resampled = Augmentation(pad=3, flip=0.5, **tiny)(images, seeded(2))
    assert torch.allclose(exact, resampled, atol=1e-4)


HEIGHT, WIDTH = 64, 48


def blob(sigma_rows, sigma_columns):
    """A bright spot in the middle of a dark picture."""
    r = torch.arange(HEIGHT)[:, None] - (HEIGHT - 1) / 2
    c = torch.arange(WIDTH)[None, :] - (WIDTH - 1) / 2
    spot = 255 * torch.exp(-0.5 * ((r / sigma_rows) ** 2 + (c / sigma_columns) ** 2))
    return spot.round().to(torch.uint8).expand(1, 3, -1, -1)


def moments(x, radius):
    """Second moments (rows, columns, mixed) of the brightness within a disc that no border reaches."""
    r = (torch.arange(HEIGHT)[:, None] - (HEIGHT - 1) / 2).expand(HEIGHT, WIDTH)
    c = (torch.arange(WIDTH)[None, :] - (WIDTH - 1) / 2).expand(HEIGHT, WIDTH)
    weight = brightness(x) * (r * r + c * c <= radius * radius)
    total = weight.sum(dim=(1, 2))
    return [(weight * product).sum(dim=(1, 2)) / total for product in (r * r, c * c, r * c)]


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_rotation_turns_by_up_to_the_given_angle_to_both_sides(flip):
    x = Augmentation(pad=0, flip=flip, rotate=20.0)(copies(blob(10.0, 3.0), 300), seeded(0))
    rows, columns, mixed = moments(x, 20)
    angle = torch.rad2deg(0.5 * torch.atan2(2 * mixed, rows - columns))
    assert angle.abs().max() < 20.3
    assert angle.max() > 18
    assert angle.min() < -18
    assert abs(angle.mean()) < 4 * 20 / math.sqrt(3 * 300)
    assert abs(angle.abs().mean() - 10) < 1.5  # uniform


def test_rotation_keeps_a_round_spot_in_a_picture_that_is_not_square():
    round_spot = blob(5.0, 5.0)
    x = Augmentation(pad=0, flip=0.5, rotate=40.0)(copies(round_spot, 50), seeded(0))
    plain = normalise_images(round_spot)
    inner = slice(HEIGHT // 2 - 14, HEIGHT // 2 + 14), slice(WIDTH // 2 - 14, WIDTH // 2 + 14)
    difference = (brightness(x) - brightness(plain))[:, inner[0], inner[1]]
    assert difference.abs().max() < 3


def test_scale_changes_the_size_equally_along_both_axes():
    x = Augmentation(pad=0, flip=0.0, scale=0.3)(copies(blob(3.0, 3.0), 300), seeded(0))
    rows, columns, mixed = moments(x, 16)
    height, width = rows.sqrt() / 3, columns.sqrt() / 3
    assert torch.allclose(height, width, rtol=0.01)
    assert mixed.abs().max() < 0.5
    assert 0.68 < height.min() < 0.75
    assert 1.25 < height.max() < 1.32


# -- erasing -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def erased():
    """(plain, erased, hole, top, bottom, left, right) of 400 pictures of 100 x 100."""
    images = copies(noise(1, 100, 100), 400)
    plain = normalise_images(images)
    x = Augmentation(pad=0, flip=0.0, erase=1.0)(images, seeded(0))
    hole = (x == 0).all(dim=1)
    sides = []
    for along_rows in (hole.any(dim=2), hole.any(dim=1)):
        first = along_rows.int().argmax(dim=1)
        last = 99 - along_rows.flip(1).int().argmax(dim=1)
        sides += [first, last]
    return plain, x, hole, *sides


def test_erasing_leaves_a_rectangle_of_zeros(erased):
    plain, x, hole, top, bottom, left, right = erased
    assert (plain != 0).all()  # so that every zero is a hole
    assert torch.equal(hole.sum(dim=(1, 2)), (bottom - top + 1) * (right - left + 1))
    assert torch.equal(x, torch.where(hole[:, None], torch.zeros(()), plain))


def test_the_rectangle_has_2_to_40_percent_of_the_area(erased):
    share = erased[2].double().mean(dim=(1, 2))
    assert share.min() > 0.018  # sides are rounded to pixels
    assert share.max() < 0.41
    assert share.min() < 0.04
    assert share.max() > 0.36
    assert abs(share.mean() - 0.21) < 0.03  # uniform, a little less where the sides do not fit


def test_the_rectangle_has_a_moderate_shape(erased):
    _, _, _, top, bottom, left, right = erased
    height, width = (bottom - top + 1).double(), (right - left + 1).double()
    inside = (height < 100) & (width < 100)
    shape = (height / width)[inside]
    assert shape.min() > 0.27
    assert shape.max() < 3.7
    assert (shape < 1).double().mean() == pytest.approx(0.5, abs=0.1)  # as often wide as tall


def test_the_rectangle_can_be_anywhere(erased):
    _, _, hole, top, bottom, left, right = erased
    assert hole.any(dim=0)[10:90, 10:90].all()
    inside = (bottom - top < 99) & (right - left < 99)  # those over the whole height or width touch both sides anyway
    assert top[inside].min() == left[inside].min() == 0
    assert bottom[inside].max() == right[inside].max() == 99
    assert abs((top + bottom).double().mean() / 2 - 49.5) < 4
    assert abs((left + right).double().mean() / 2 - 49.5) < 4


def test_erasing_happens_with_the_given_probability():
    images = copies(noise(1, 16, 8), 2000)
    x = Augmentation(pad=0, flip=0.0, erase=0.25)(images, seeded(0))
    share = (x != normalise_images(images)).flatten(1).any(dim=1).double().mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)


def test_erasing_is_independent_of_flipping():
    images = copies(noise(1, 16, 8), 1000)
    plain, mirrored = normalise_images(images), normalise_images(images.flip(-1))
    x = Augmentation(pad=0, flip=0.5, erase=0.5)(images, seeded(0))
    erased = (x == 0).flatten(1).any(dim=1)
    flipped = (x == mirrored).flatten(1).sum(dim=1) > (x == plain).flatten(1).sum(dim=1)
    for decision in (erased, flipped):
        assert abs(decision.double().mean() - 0.5) < 4 * math.sqrt(0.25 / 1000)
    assert abs((erased & flipped).double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)


@pytest.mark.parametrize("geometry", [{}, {"rotate": 15.0, "scale": 0.1}])
def test_erasing_comes_after_the_geometry_and_does_not_change_it(geometry):
    images = noise(32, 32, 16)
    whole = Augmentation(pad=3, **geometry)(images, seeded(4))
    x = Augmentation(pad=3, erase=1.0, **geometry)(images, seeded(4))
    changed = (x != whole).any(dim=1)
    assert changed.flatten(1).any(dim=1).sum() > 28
    for picture, mask in zip(x, changed, strict=True):
        if mask.any():
            rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
            # upright even if the picture was turned: the box around all changes is empty
            assert (picture[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 0).all()


@pytest.mark.parametrize("sizes", [[4, 4, 4], [16, 3], [1, 40]])
def test_batches_that_are_augmented_together_get_what_each_would_get_alone(sizes):
    augmentation = Augmentation(pad=3, flip=0.5, rotate=10.0, scale=0.1, erase=0.5)
    images = torch.randint(
        0, 256, (sum(sizes), 3, 16, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    together = augmentation(images, torch.Generator().manual_seed(1), sizes)
    stream = torch.Generator().manual_seed(1)
    alone = torch.cat([augmentation(batch, stream) for batch in images.split(sizes)])
    assert torch.equal(together, alone)


# -- two versions, and another program's -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "size", "pad"),
    [
        (9, 6, (9, 6), 2),
        (6, 9, (6, 9), 12),
        (1, 1, (1, 1), 1),
        (16, 8, (16, 8), 0),
        (9, 7, (6, 5), 1),
        (4, 4, (7, 6), 3),
    ],
)
def test_cropping_together_and_one_by_one_are_equal(height, width, size, pad):
    images = noise(40, height, width)
    mirror = torch.rand(40, generator=seeded(1)) < 0.5
    top = torch.randint(-pad, pad + 4, (40,), generator=seeded(2))
    left = torch.randint(-pad, pad + 4, (40,), generator=seeded(3))
    together = module._crop_together(images, mirror, top, left, size)
    assert torch.equal(module._crop_one_by_one(images, mirror, top, left, size), together)
    for before, after, m, y, x in zip(images, together, mirror, top, left, strict=True):
        assert torch.equal(after, cropped(before, bool(m), int(y), int(x), size))


@pytest.mark.parametrize("tiny", [{}, {"rotate": 1e-5}])
def test_a_crop_is_a_part_of_the_image_that_can_be_anywhere(tiny):
    image, size = noise(1, 7, 5), (4, 3)
    x = Augmentation(pad=0, flip=0.5, crop=size, **tiny)(copies(image, 600), seeded(0))
    parts = [cropped(image[0], m, y, z, size) for m in (False, True) for y in range(4) for z in range(3)]
    versions = normalise_images(torch.stack(parts)).flatten(1)
    distance = (x.flatten(1)[:, None] - versions).abs().amax(2)
    assert distance.amin(1).max() < 1e-4
    counts = torch.bincount(distance.argmin(1), minlength=24).double()
    assert ((counts - 25) ** 2 / 25).sum() < 54  # 23 degrees of freedom: exceeded with probability 3e-4


@pytest.mark.parametrize("tiny", [{}, {"rotate": 1e-5}])
def test_an_image_that_is_smaller_than_the_crop_lies_in_it_anywhere(tiny):
    image, size = noise(1, 4, 3, seed=1), (7, 5)
    x = Augmentation(pad=0, flip=0.0, crop=size, **tiny)(copies(image, 300), seeded(0))
    places = [cropped(image[0], False, -y, -z, size) for y in range(4) for z in range(3)]
    distance = (x.flatten(1)[:, None] - normalise_images(torch.stack(places)).flatten(1)).abs().amax(2)
    assert distance.amin(1).max() < 1e-3
    assert torch.bincount(distance.argmin(1), minlength=12).min() > 5  # 25 expected


def test_nothing_is_erased_where_no_rectangle_is_smaller_than_the_image():
    images = noise(50, 40, 1)
    assert torch.equal(Augmentation(pad=0, flip=0.0, erase=1.0)(images, seeded(0)), normalise_images(images))


def test_colours_are_independent_of_flipping():
    images = copies(noise(1, 8, 4), 2000) // 2
    x = Augmentation(pad=0, flip=0.5, brightness=0.5)(images, seeded(0))
    light = brightness(x).mean((1, 2)) > images[0, 0].double().mean()
    flipped = brightness(x)[:, 0, 0] / brightness(x)[:, 0, 3] > 1
    flipped ^= bool(images[0, 0, 0, 0] > images[0, 0, 0, 3])
    assert abs((light & flipped).double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)


def test_erasing_together_and_one_by_one_are_equal():
    x = torch.rand(50, 3, 12, 7, generator=seeded(0))
    top, left = torch.randint(0, 8, (50,), generator=seeded(1)), torch.randint(0, 5, (50,), generator=seeded(2))
    box = torch.stack([top, top + torch.randint(0, 5, (50,)), left, left + torch.randint(0, 3, (50,))])
    chosen = torch.arange(50) % 3 > 0
    together = module._erase_together(x.clone(), chosen, box)
    assert torch.equal(module._erase_one_by_one(x.clone(), chosen, box), together)
    expected = x.clone()
    for i, (t, b, le, r) in enumerate(box.T.tolist()):
        if chosen[i]:
            for row in range(t, b):
                for column in range(le, r):
                    expected[i, :, row, column] = 0
    assert torch.equal(together, expected)


@pytest.mark.parametrize(
    ("augmentation", "others"),
    [
        (
            Augmentation(pad=3, flip=0.3),
            [
                transforms.RandomCrop((24, 12), padding=3),
                transforms.RandomHorizontalFlip(0.3),
            ],
        ),
        (
            Augmentation(pad=0, flip=0.0, rotate=30.0),
            [transforms.RandomRotation(30, transforms.InterpolationMode.BILINEAR)],
        ),
        (
            Augmentation(pad=0, flip=0.0, erase=0.5),
            [transforms.RandomErasing(0.5, scale=(0.02, 0.4), ratio=(0.3, 1 / 0.3))],
        ),
        (
            Augmentation(pad=0, flip=0.0, brightness=0.4, contrast=0.3),
            [transforms.ColorJitter(brightness=0.4), transforms.ColorJitter(contrast=0.3)],
        ),
        (
            Augmentation(pad=0, flip=0.0, saturation=0.5, hue=0.2),
            [transforms.ColorJitter(saturation=0.5), transforms.ColorJitter(hue=0.2)],
        ),
    ],
    ids=["pad crop flip", "rotate", "erase", "brightness contrast", "saturation hue"],
)  # fmt: skip
def test_distributions_are_those_of_torchvisions_transforms_of_single_images(augmentation, others):
    count = 3000
    image = noise(1, 24, 12, seed=8) // 2 + 60
    ours = augmentation(copies(image, count), seeded(1)).double()
    torch.manual_seed(2)
    normalise = transforms.Normalize(MEAN, STD)
    # erasing comes after normalisation, the rest before it
    late = [other for other in others if isinstance(other, transforms.RandomErasing)]
    early = [other for other in others if other not in late]
    pipeline = transforms.Compose([*early, normalise, *late])
    theirs = torch.stack([pipeline(image[0] / 255) for _ in range(count)]).double()
    if augmentation.rotate:  # torchvision blends with the outside twice where a pixel is partly outside
        ours, theirs = (x[:, :, 8:16, 2:10] for x in (ours, theirs))
    for power in (1, 2):
        a, b = ours**power, theirs**power
        error = ((a.var(0) + b.var(0)) / count).sqrt()
        distance = (a.mean(0) - b.mean(0)).abs() / error.clamp_min(2e-3)
        assert distance.max() < 5.5  # standard errors, for the worst of 864 values
        assert distance.mean() < 1.2


@pytest.mark.parametrize(
    ("name", "value"),
    [("pad", -1), ("flip", 1.5), ("erase", -0.1), ("hue", 0.6), ("contrast", -1.0), ("rotate", 200.0)],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"data\.augmentation\.{name}: {value} is (not in \[0, [\d.]+\]|negative)$"):
        Augmentation(**{name: value})
