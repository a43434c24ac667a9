"""Whom a step of a generator's training sees, and who is swapped with whom."""

from collections import Counter

import numpy as np
import pytest

from fedsim.core.errors import DataError
from fedsim.generation.sampling import Sampler
from fedsim.generation.swaps import sample_pairs


def some_labels(seed, absent=True):
    """Labels in any order, of identities with 1 to 6 images; some of those in between have none."""
    rng = np.random.default_rng(seed)
    present = rng.permutation(12)[: int(rng.integers(2, 10))] if absent else np.arange(int(rng.integers(2, 10)))
    return rng.permutation(np.repeat(present, rng.integers(1, 7, len(present)))).astype(np.int64)


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("seed", range(12))
def test_batches_are_of_as_many_persons_as_possible(seed, batch_size):
    labels = some_labels(seed)
    sampler = Sampler("north", labels, batch_size, seed)
    identities = set(labels.tolist())
    for step in range(8):
        draw = sampler.sample(step)
        images, others, lenders = (rows.tolist() for rows in draw)
        assert len(images) == len(others) == len(lenders) == batch_size
        times = Counter(labels[images].tolist())
        assert max(times.values()) - min(times[identity] for identity in identities) <= 1
        for n in range(batch_size):
            assert labels[images[n]] == labels[others[n]]
            is_single = (labels == labels[images[n]]).sum() == 1
            assert (images[n] == others[n]) == is_single
            assert labels[images[n]] != labels[images[lenders[n]]]


def test_two_persons_always_lend_each_other_their_structures():
    labels = np.array([1, 0, 1, 1])
    for batch_size in range(2, 9):
        draw = Sampler("north", labels, batch_size, 0).sample(3)
        images = labels[draw.images.numpy()]
        assert (images != images[draw.lenders.numpy()]).all()


def test_steps_do_not_depend_on_those_before():
    labels = some_labels(3)
    sampler, fresh = (Sampler("north", labels, 6, 1) for _ in range(2))
    for step in range(5):
        sampler.sample(step)
    again, first = sampler.sample(5), fresh.sample(5)
    assert [rows.tolist() for rows in again] == [rows.tolist() for rows in first]
    assert sampler.sample(5).images.tolist() != sampler.sample(6).images.tolist()


@pytest.mark.parametrize(("client", "seed"), [("south", 1), ("north", 2)])
def test_steps_depend_on_client_and_seed(client, seed):
    labels = some_labels(3)
    ours, theirs = Sampler("north", labels, 16, 1).sample(0), Sampler(client, labels, 16, seed).sample(0)
    assert ours.images.tolist() != theirs.images.tolist()


def test_all_persons_and_all_their_images_come_equally_often():
    labels = np.array([5, 2, 5, 0, 5, 2, 5, 2, 0, 7])
    sampler, steps = Sampler("north", labels, 2, 0), 6000
    persons, pairs = Counter(), Counter()
    for step in range(steps):
        draw = sampler.sample(step)
        persons.update(labels[draw.images.numpy()].tolist())
        pairs.update(zip(draw.images.tolist(), draw.others.tolist(), strict=True))
    for identity in (0, 2, 5, 7):
        assert persons[identity] == pytest.approx(steps / 2, rel=0.1)
        rows = np.flatnonzero(labels == identity).tolist()
        expected = [(i, t) for i in rows for t in rows if i != t or len(rows) == 1]
        for pair in expected:  # at least 250 each; 0.3 is more than four standard deviations
            assert pairs.pop(pair) == pytest.approx(steps / 2 / len(expected), rel=0.3)
    assert not pairs


@pytest.mark.parametrize("labels", [[0, 0, 0], [3], []])
def test_clients_of_one_person_are_refused(labels):
    with pytest.raises(DataError, match=r"^client lone: .* at least 2 identities; leave the client out"):
        Sampler("lone", np.array(labels, dtype=np.int64), 4, 0)


# -- swaps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_swapped_with_himself(seed, absent):
    labels = some_labels(seed, absent)
    for count in (1, len(labels) // 2 + 1, len(labels), 3 * len(labels) + 2, 200):
        structure, appearance = sample_pairs("north", labels, count, seed)
        assert structure.shape == appearance.shape == (count,)
        assert structure.dtype == appearance.dtype == np.int64
        assert (labels[structure] != labels[appearance]).all()


@pytest.mark.parametrize("count", [1, 7, 10, 25, 100])
def test_every_image_lends_its_structure_equally_often_up_to_one(count):
    labels = np.array([5, 2, 5, 0, 5, 2, 5, 2, 0, 7])
    times = np.bincount(sample_pairs("north", labels, count, 3).structure, minlength=10)
    assert times.max() - times.min() <= 1


def test_all_images_of_others_lend_their_appearance_equally_often():
    labels = np.array([5, 2, 5, 0, 5, 2, 5, 2, 0, 7])
    structure, appearance = sample_pairs("north", labels, 40_000, 3)
    times = np.zeros((10, 10))
    np.add.at(times, (structure, appearance), 1)
    for row in range(10):
        others = labels != labels[row]
        expected = 4000 / others.sum()
        assert times[row].sum() == 4000
        assert times[row][~others].sum() == 0
        chi_square = ((times[row][others] - expected) ** 2 / expected).sum()
        assert chi_square < 35  # of at most 8 degrees of freedom: p < 3e-5


def test_pairs_depend_on_client_and_seed_alone():
    labels = some_labels(3)
    ours = np.stack(sample_pairs("north", labels, 40, 1))
    sample_pairs("north", labels, 5, 1)
    assert np.array_equal(ours, np.stack(sample_pairs("north", labels, 40, 1)))
    for client, seed in (("south", 1), ("north", 2)):
        assert not np.array_equal(ours, np.stack(sample_pairs(client, labels, 40, seed)))
