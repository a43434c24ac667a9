"""Images of a trained generator: which comes from which source, and what it is labelled with."""

import copy
import csv

import numpy as np
import pytest
import torch

from fedsim.data.generated import write_generated
from fedsim.generation.quality import SwapMeter
from fedsim.generation.swaps import Pairs, make_swaps, measure_swaps, sample_pairs, soft_labels, swap_grid
from fedsim.generation.training import to_pixels, to_symmetric
from small_generators import CLASSES, LABELS, equal, new, noise, train

TINY = float(np.finfo(np.float32).tiny)


@pytest.fixture(scope="module")
def trained():
    """A generator and a teacher whose running statistics are not those of a batch."""
    module = train(new(steps=6, appearance_rate=1e-2))
    return module.generator.eval(), module.teacher.eval()


def close(a, b):
    """Pixels, but for those that rounding moves by one."""
    difference = (a.int() - b.int()).abs()
    return difference.max() <= 1 and (difference > 0).float().mean() < 0.01


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_all_values_of_pixels_come_back():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    images = to_symmetric(pixels)
    assert images.dtype == torch.float32
    assert images.min() == -1
    assert images.max() == 1
    assert torch.equal(to_pixels(images), pixels)


def test_pixels_are_rounded_and_do_not_wrap():
    values = torch.tensor([-1.5, -1.0, 0.49 / 127.5 - 1, 0.51 / 127.5 - 1, 1.0, 1.2]).view(1, 1, 1, 6)
    assert to_pixels(values).flatten().tolist() == [0, 0, 0, 1, 255, 255]
    assert to_pixels(values).dtype == torch.uint8


# -- swaps -------------------------------------------------------------------------------------------------------------


def test_swaps_are_what_the_generator_makes_of_each_pair(trained):
    generator, teacher = trained
    pixels = noise(10)
    pairs = sample_pairs("north", LABELS, 70, seed=0)  # more than a batch
    before = copy.deepcopy(generator), copy.deepcopy(teacher)
    batches = list(make_swaps(generator, teacher, pixels, pairs))
    assert [len(batch.images) for batch in batches] == [64, 6]
    row = 0
    for batch in batches:
        for structure, appearance, image, belief in zip(*batch, strict=True):
            assert torch.equal(structure, pixels[pairs.structure[row]])
            assert torch.equal(appearance, pixels[pairs.appearance[row]])
            expected = to_pixels(generator(to_symmetric(structure[None]), to_symmetric(appearance[None])))[0]
            assert close(image, expected)
            logits = teacher.head(teacher.norm(teacher(to_symmetric(image[None]))))[0].tolist()
            weights = np.exp(np.array(logits) - max(logits))
            assert belief.tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=1e-5)
            row += 1
    assert row == 70
    assert equal(generator, before[0])
    assert equal(teacher, before[1])
    assert not batches[0].beliefs.requires_grad
    assert batches[0].beliefs.dtype == torch.float32


def test_probabilities_of_many_identities_sum_to_1(trained):
    generator, teacher = trained[0], copy.deepcopy(trained[1])
    torch.manual_seed(0)
    teacher.head = torch.nn.Linear(teacher.code_size, 20_000)
    torch.nn.init.normal_(teacher.head.weight, std=3.0)
    batch = next(make_swaps(generator, teacher, noise(10), sample_pairs("north", LABELS, 20, seed=0)))
    assert (batch.beliefs.double().sum(1) - 1).abs().max() < 2e-7


def test_a_grid_has_every_structure_with_every_appearance(trained):
    generator, _ = trained
    structure, appearance = noise(3, seed=1), noise(2, seed=2)
    grid = swap_grid(generator, structure, appearance)
    assert grid.shape == (3, 2, 3, 16, 20)
    assert grid.dtype == torch.uint8
    for row in range(3):
        for column in range(2):
            pair = (to_symmetric(x[None]) for x in (structure[row], appearance[column]))
            assert close(grid[row, column], to_pixels(generator(*pair))[0])
    assert not close(grid[0, 0], grid[0, 1])
    assert not close(grid[0, 0], grid[1, 0])


def test_a_generator_is_measured_on_its_images_and_swaps(trained):
    generator, teacher = trained
    pixels, count = noise(10), 70
    pairs = sample_pairs("north", LABELS, count, seed=0)
    meter, hits = SwapMeter(), 0
    for image in pixels:
        again = to_pixels(generator(to_symmetric(image[None]), to_symmetric(image[None])))
        meter.add_reconstructions(image[None] / 255, again / 255)
    for s, a in zip(pairs.structure, pairs.appearance, strict=True):
        made = to_pixels(generator(to_symmetric(pixels[s][None]), to_symmetric(pixels[a][None])))
        hit = teacher.logits(teacher(to_symmetric(made))).argmax() == LABELS[a]
        hits += int(hit)
        meter.add_swaps(made / 255, pixels[s][None] / 255, pixels[a][None] / 255, hit[None])
    found, expected = measure_swaps(generator, teacher, pixels, pairs, LABELS), meter.result()
    for name in ("reconstruction", "edges", "edges_before", "colours", "colours_before"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=0.005), name
    assert found.identity == pytest.approx(hits / count, abs=1.5 / count)  # rounding may decide one


def test_a_pair_of_the_same_image_is_its_reconstruction(trained):
    generator, teacher = trained
    pixels, rows = noise(4), np.arange(4)
    batch = next(make_swaps(generator, teacher, pixels, Pairs(rows, rows)))
    measured = measure_swaps(generator, teacher, pixels, Pairs(rows, rows), LABELS[:4])
    error = (batch.images.double() - pixels.double()).abs().mean().item() / 255
    assert measured.reconstruction == pytest.approx(error, abs=1e-3)
    assert measured.edges_before == measured.colours_before == pytest.approx(1)


# -- soft labels -------------------------------------------------------------------------------------------------------

PIDS = np.array([30, 7, 900, -1, 12])
BELIEFS = torch.tensor([
    [0.125, 0.0, 0.25, 0.5, 0.125],
    [0.0, 1.0, 0.0, 0.0, 0.0],
    [0.5, 0.0625, 0.375, 0.03125, 0.03125],
])  # fmt: skip


def test_soft_labels_begin_with_the_wearer_and_go_on_with_the_likeliest():
    found = soft_labels(BELIEFS, np.array([4, 1, 2]), PIDS, least=0.0625)
    assert [list(label.items()) for label in found] == [
        [(12, 0.125), (900, 0.25), (30, 0.125)],  # label 3 has no images here
        [(7, 1.0)],
        [(900, 0.375), (30, 0.5), (7, 0.0625)],
    ]


def test_the_wearer_stays_however_unlikely():
    found = soft_labels(BELIEFS, np.array([1, 4, 1]), PIDS, least=0.4)
    assert [list(label.items()) for label in found] == [[(7, TINY)], [(12, TINY), (7, 1.0)], [(7, 0.0625), (30, 0.5)]]


def test_without_a_bound_all_have_a_place_but_those_of_probability_0():
    found = soft_labels(BELIEFS, np.array([0, 1, 0]), PIDS, least=0.0)
    assert [list(label) for label in found] == [[30, 900, 12], [7], [30, 900, 7, 12]]


def test_certain_labels_name_the_wearer_alone():
    certain = torch.eye(CLASSES)[[4, 0]]
    assert soft_labels(certain, np.array([4, 0]), PIDS, least=1.0) == [{12: 1.0}, {30: 1.0}]


def test_soft_labels_can_be_written(tmp_path):
    random = torch.Generator().manual_seed(0)
    beliefs = (8 * torch.randn(50, 5, generator=random)).softmax(1)
    beliefs[0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    wearers = np.array([1] + [0, 1, 2, 4, 0, 1, 2] * 7)
    soft = soft_labels(beliefs, wearers, PIDS, least=0.0)
    write_generated(tmp_path / "north", noise(50), soft)
    with (tmp_path / "north" / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = {}
    for row in rows:
        assert int(row["pid"]) > 0
        assert np.float32(row["weight"]) > 0
        first.setdefault(row["file"], int(row["pid"]))
    assert list(first.values()) == PIDS[wearers].tolist()
