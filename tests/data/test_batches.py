"""The order of a client's images within a local epoch."""

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.data.batches import identity_batches, people_batches, shuffled_batches
from fedsim.training.settings import LocalTraining


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def flat(batches):
    return [i for batch in batches for i in batch.tolist()]


# -- shuffled_batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "size", "lengths"),
    [
        (12, 4, [4, 4, 4]),
        (10, 4, [4, 4, 2]),
        (11, 4, [4, 4, 3]),
        (9, 4, [4, 4]),  # one image is left over: batch normalisation cannot train on it
        (2, 4, [2]),
        (1, 4, []),
        (0, 4, []),
        (3, 1, [1, 1, 1]),  # batches of one image were asked for
    ],
)
def test_lengths_of_batches(images, size, lengths):
    assert [len(batch) for batch in shuffled_batches(images, size, seeded())] == lengths


@pytest.mark.parametrize(
    ("images", "size", "lengths"),
    [(12, 4, [4, 4, 4]), (10, 4, [4, 4]), (11, 4, [4, 4]), (9, 4, [4, 4]), (3, 4, []), (3, 1, [1, 1, 1]), (0, 1, [])],
)
def test_lengths_of_batches_without_partial_ones(images, size, lengths):
    assert [len(batch) for batch in shuffled_batches(images, size, seeded(), drop_partial=True)] == lengths


@pytest.mark.parametrize(("images", "size"), [(12, 4), (10, 4), (51, 7)])
def test_every_image_comes_once(images, size):
    batches = shuffled_batches(images, size, seeded())
    assert sorted(flat(batches)) == list(range(images))
    assert all(batch.dtype == torch.int64 for batch in batches)


@pytest.mark.parametrize("drop_partial", [False, True])
def test_dropping_loses_only_the_left_over_images(drop_partial):
    order = flat(shuffled_batches(33, 8, seeded(3), drop_partial))
    assert len(order) == len(set(order)) == 32
    assert set(order) < set(range(33))


def test_the_order_is_random_and_reproducible():
    first = flat(shuffled_batches(40, 8, seeded(1)))
    assert first != sorted(first)
    assert flat(shuffled_batches(40, 8, seeded(1))) == first
    assert flat(shuffled_batches(40, 8, seeded(2))) != first
    generator = seeded(1)
    assert flat(shuffled_batches(40, 8, generator)) == first
    assert flat(shuffled_batches(40, 8, generator)) != first  # the next epoch


def test_every_position_gets_every_image():
    # 2000 shuffles of four images: each of the 4 x 4 cells is hit 500 times, standard deviation 19
    counts = torch.zeros(4, 4)
    generator = seeded(0)
    for _ in range(2000):
        for position, image in enumerate(flat(shuffled_batches(4, 2, generator))):
            counts[position, image] += 1
    assert (counts - 500).abs().max() < 80


# -- identity_batches --------------------------------------------------------------------------------------------------


def labels_of(counts, seed=0):
    """Labels 0, 1, ... with ``counts[z]`` images each, in a random order."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=seeded(seed))]


def appearances(labels, batches):
    """Identity -> its images in the order in which they come."""
    images = {}
    for i in flat(batches):
        images.setdefault(int(labels[i]), []).append(i)
    return images


UNEVEN = [8, 12, 5, 4, 2, 1, 9, 7, 16, 3]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "k"), [(16, 4), (8, 4), (6, 2), (12, 3), (3, 1)])
def test_a_batch_has_p_identities_with_k_images(size, k, seed):
    labels = labels_of(UNEVEN, seed)
    batches = identity_batches(labels, size, k, seeded(seed))
    assert batches
    for batch in batches:
        assert batch.dtype == torch.int64
        assert len(batch) == size
        present, counts = labels[batch].unique(return_counts=True)
        assert len(present) == size // k
        assert set(counts.tolist()) == {k}


@pytest.mark.parametrize("seed", range(5))
def test_images_of_an_identity_stand_together(seed):
    labels = labels_of(UNEVEN, seed)
    for batch in identity_batches(labels, 16, 4, seeded(seed)):
        groups = labels[batch].view(4, 4)
        assert (groups == groups[:, :1]).all()


@pytest.mark.parametrize("seed", range(5))
def test_no_image_comes_twice_when_k_divides_the_counts(seed):
    labels = labels_of([8, 12, 4, 4, 16, 8, 20], seed)
    order = flat(identity_batches(labels, 12, 4, seeded(seed)))
    assert len(order) == len(set(order))


def test_an_image_comes_again_only_after_all_others_of_its_identity():
    counts = [5, 9, 6, 13, 7, 4]  # at least four each, but not multiples of four
    for seed in range(10):
        labels = labels_of(counts, seed)
        for identity, images in appearances(labels, identity_batches(labels, 12, 4, seeded(seed))).items():
            firsts = images[: counts[identity]]
            assert len(firsts) == len(set(firsts)), (seed, identity)


@pytest.mark.parametrize("seed", range(5))
def test_short_identities_repeat_their_images(seed):
    labels = labels_of([1, 2, 3, 3], seed)
    (batch,) = identity_batches(labels, 16, 4, seeded(seed))  # one group of four each
    for identity, count in enumerate([1, 2, 3, 3]):
        images = batch[labels[batch] == identity]
        assert len(images) == 4
        assert len(images.unique()) == count  # all of them come before one is repeated


def test_the_epoch_ends_when_too_few_identities_have_images_left():
    for seed in range(10):
        labels = labels_of(UNEVEN, seed)
        batches = identity_batches(labels, 12, 4, seeded(seed))
        left = {z: -(-count // 4) for z, count in enumerate(UNEVEN)}  # groups of four, the last one filled up
        for batch in batches:
            for identity in labels[batch].unique().tolist():
                left[identity] -= 1
        assert min(left.values()) >= 0
        assert sum(groups > 0 for groups in left.values()) < 3


def test_with_exactly_p_identities_every_image_is_used():
    labels = labels_of([8, 8, 8])
    batches = identity_batches(labels, 12, 4, seeded())
    assert len(batches) == 2
    assert sorted(flat(batches)) == list(range(24))


def test_with_fewer_than_p_identities_a_batch_holds_all_of_them():
    labels = labels_of([4, 8])
    batches = identity_batches(labels, 16, 4, seeded())
    assert [len(batch) for batch in batches] == [8]  # the first identity has one group
    assert set(labels[batches[0]].tolist()) == {0, 1}


def test_labels_need_not_be_consecutive():
    labels = torch.tensor([70, 30, 70, 30, 5, 5])
    batches = identity_batches(labels, 6, 2, seeded())
    assert [sorted(labels[batch].tolist()) for batch in batches] == [[5, 5, 30, 30, 70, 70]]


def test_identity_batches_are_reproducible_and_random():
    labels = labels_of(UNEVEN)
    first = identity_batches(labels, 16, 4, seeded(1))
    again = identity_batches(labels, 16, 4, seeded(1))
    assert len(first) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert flat(identity_batches(labels, 16, 4, seeded(2))) != flat(first)
    meetings = {tuple(labels[identity_batches(labels, 8, 4, seeded(s))[0]].unique().tolist()) for s in range(40)}
    assert len(meetings) > 15  # of 45 pairs of identities


def test_images_of_an_identity_meet_in_other_groups_every_epoch():
    labels = torch.zeros(8, dtype=torch.int64)
    groups = {frozenset(identity_batches(labels, 4, 4, seeded(seed))[0].tolist()) for seed in range(40)}
    assert len(groups) > 20  # of 70


# -- images of other cameras -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "k"), [(16, 4), (6, 2), (12, 3)])
def test_positives_of_other_cameras(size, k, seed):
    """Each group against a plain rule: a first image, then those that it may have, all of them before one repeats."""
    labels = labels_of(UNEVEN, seed)
    cameras = torch.randint(0, 3, (len(labels),), generator=seeded(seed + 1))
    batches = identity_batches(labels, size, k, seeded(seed), cameras=cameras)
    plain = identity_batches(labels, size, k, seeded(seed))
    assert max(map(len, batches)) == max(map(len, plain)) == size
    firsts = []
    for group in torch.cat(batches).view(-1, k).tolist():
        first, *positives = group
        firsts.append(first)
        mates = [i for i in range(len(labels)) if labels[i] == labels[first]]
        allowed = [i for i in mates if cameras[i] != cameras[first]] or [i for i in mates if i != first] or mates
        assert set(positives) <= set(allowed)
        assert len(set(positives)) == min(k - 1, len(allowed))
    assert len(firsts) == len(set(firsts)), "no image is the first one twice"


def test_as_many_groups_of_other_cameras_as_of_any():
    labels = labels_of([8, 12, 5, 1])
    cameras = torch.zeros(len(labels), dtype=torch.int64)
    groups = dict.fromkeys(range(4), 0)
    for batch in identity_batches(labels, 4, 4, seeded(), cameras=cameras):
        groups[int(labels[batch[0]])] += 1
    assert groups == {0: 2, 1: 3, 2: 2, 3: 1}


def test_other_cameras_change_with_the_stream_only():
    labels, cameras = labels_of(UNEVEN), torch.arange(sum(UNEVEN)) % 2
    orders = [flat(identity_batches(labels, 16, 4, seeded(seed), cameras=cameras)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_other_cameras_need_batches_of_identities():
    with pytest.raises(
        ConfigError, match=r"^c\.positives: other_cameras needs sampler: people or identity; set one, or positives"
    ):
        LocalTraining(positives="other_cameras").check("c")
    for sampler in ("identity", "people"):
        LocalTraining(positives="other_cameras", sampler=sampler, batch_size=8).check("c")


# -- people_batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_cameras", [False, True])
@pytest.mark.parametrize(("size", "k"), [(16, 4), (6, 2), (12, 3)])
def test_each_person_comes_once_in_a_pass(size, k, with_cameras, seed):
    """The pass against a plain rule, image by image; a lone image is a group of its own."""
    labels = labels_of(UNEVEN, seed)
    cameras = torch.randint(0, 3, (len(labels),), generator=seeded(seed + 1)) if with_cameras else None
    batches = people_batches(labels, size, k, seeded(seed), cameras=cameras)
    assert {len(batch) for batch in batches} == {size}
    order, people = flat(batches), []
    whole = 1 + k * (len(UNEVEN) - 1)  # one person has one image
    assert whole - size < len(order) <= whole, "only what does not fill a batch is left out"
    while order:
        first = order.pop(0)
        people.append(int(labels[first]))
        mates = [i for i in range(len(labels)) if labels[i] == labels[first] and i != first]
        elsewhere = [i for i in mates if cameras is not None and cameras[i] != cameras[first]]
        allowed = elsewhere or mates
        positives = [order.pop(0) for _ in range(min(k - 1 if mates else 0, len(order)))]
        assert set(positives) <= set(allowed)
        if len(allowed) >= k:
            assert len(set(positives)) == len(positives), "nothing repeats where there are K to choose from"
    assert len(people) == len(set(people))


def test_people_come_equally_often_however_many_images_they_have():
    labels = labels_of([2, 3, 40, 72] * 4)
    for draw, ratio in ((people_batches, 1.0), (identity_batches, 18.0)):
        counts = torch.zeros(16)
        for seed in range(200):
            for batch in draw(labels, 16, 4, seeded(seed)):
                counts += torch.bincount(labels[batch], minlength=16)
        assert counts[3::4].sum() / counts[0::4].sum() == pytest.approx(ratio, rel=0.2), draw.__name__


def test_few_people_are_one_batch():
    [batch] = people_batches(torch.tensor([0, 0, 1]), 16, 4, seeded())
    assert len(batch) == 5  # 0 and its other image three times, and a lone image
