"""Random parts of a client's training images."""

import itertools

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federations import build_federation
from fedsim.data.images import ImageFiles, Split
from fedsim.data.partitions import cap_training
from fedsim.data.synthetic import SyntheticReID

# identity 7 has ten images, 2 has one, 5 has three, ...
PIDS = np.repeat([7, 2, 5, 9, 4], [10, 1, 3, 6, 2])
TRAIN = Split(ImageFiles([f"{i}.png" for i in range(len(PIDS))]), PIDS, np.arange(len(PIDS)) % 3)


def numbers(split):
    return [int(path.removesuffix(".png")) for path in split.images.paths]


def test_without_caps_everything_stays():
    assert cap_training("town", TRAIN, None, None) is TRAIN
    assert cap_training("town", TRAIN, 5, len(PIDS)) is TRAIN
    assert cap_training("town", TRAIN, 99, 999) is TRAIN


@pytest.mark.parametrize("cap", [1, 2, 4])
def test_identities_keep_all_their_images_or_none(cap):
    kept = cap_training("town", TRAIN, cap, None)
    assert len(kept.identities) == cap
    assert numbers(kept) == [i for i, pid in enumerate(PIDS) if pid in kept.identities]  # in their order
    assert kept.pids.tolist() == PIDS[numbers(kept)].tolist()
    assert kept.camids.tolist() == [i % 3 for i in numbers(kept)]


@pytest.mark.parametrize("cap", range(5, len(PIDS)))
def test_images_are_dealt_out_in_turn(cap):
    kept = cap_training("town", TRAIN, None, cap)
    # in each turn everybody who still has an image gives one; who gives in the last turn is left to chance
    left = {pid: int(np.sum(pid == PIDS)) for pid in set(PIDS.tolist())}
    given = dict.fromkeys(left, 0)
    while sum(given.values()) + sum(count > 0 for count in left.values()) <= cap:
        for pid, count in left.items():
            if count:
                left[pid], given[pid] = count - 1, given[pid] + 1
    counts = {pid: int(np.sum(kept.pids == pid)) for pid in left}
    assert len(kept) == cap
    assert all(counts[pid] - given[pid] in ((0, 1) if left[pid] else (0,)) for pid in left)
    assert numbers(kept) == sorted(set(numbers(kept)))


def test_identities_come_first():
    people = cap_training("town", TRAIN, 3, None)
    both = cap_training("town", TRAIN, 3, 4)
    assert both.identities.tolist() == people.identities.tolist()
    assert len(both) == 4
    assert set(numbers(both)) < set(numbers(people))


def test_a_larger_cap_keeps_what_a_smaller_one_keeps():
    for name, caps in (("max_images", range(5, 22)), ("max_identities", range(1, 6))):
        kept = [cap_training("town", TRAIN, **{"max_images": None, "max_identities": None, name: cap}) for cap in caps]
        for smaller, larger in itertools.pairwise(kept):
            assert set(numbers(smaller)) < set(numbers(larger))


def test_the_draw_is_keyed_by_the_client_s_name():
    draws = {name: tuple(numbers(cap_training(name, TRAIN, None, 8))) for name in "abcdef"}
    assert len(set(draws.values())) > 3
    np.random.seed(3)  # noqa: NPY002 - the draw must not depend on the global generator
    assert numbers(cap_training("a", TRAIN, None, 8)) == list(draws["a"])
    people = {name: tuple(cap_training(name, TRAIN, 2, None).identities) for name in "abcdef"}
    assert len(set(people.values())) > 2


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({"max_images": 0}, r"data\.max_images: 0 is less than 1"),
        ({"max_identities": -3}, r"data\.max_identities: -3 is less than 1"),
        ({"max_images": 4}, r"data\.max_images: 4 is less than the 5 identities of client town.*max_identities to at"),
    ],
)
def test_silly_caps_are_refused(caps, message):
    with pytest.raises(ConfigError, match=message):
        cap_training("town", TRAIN, **{"max_images": None, "max_identities": None, **caps})


def test_caps_apply_to_each_client_before_validation_is_held_out():
    source = SyntheticReID(clients=2, unseen=1, scale=0.5)
    federated = FederatedDataModule(source, max_identities=10, max_images=50).federated
    for client in federated.clients:
        held = client.val.gallery
        assert len(np.union1d(client.train.pids, held.pids)) == 10
        assert client.num_images + len(held) == 50
        assert client.num_classes == 8  # a fifth is held out
        assert sorted(set(client.labels.tolist())) == list(range(8))
    whole = FederatedDataModule(source).federated
    for name, test in whole.tests.items():  # test sets stay whole
        assert federated.tests[name].query.pids.tolist() == test.query.pids.tolist()


def test_caps_apply_to_the_parts_of_a_data_set_and_to_the_members_of_a_union():
    domains = SyntheticReID(clients=2, unseen=0, scale=0.5).domains()
    parts = build_federation(domains, partition="by_identity", parts=2, val="none", max_images=12)
    assert [client.num_images for client in parts.clients] == [12] * 4
    options = {"val": "none", "max_identities": 6}
    members = build_federation(domains, **options).clients
    (union,) = build_federation(domains, partition="union", **options).clients
    assert union.num_images == sum(client.num_images for client in members)
    assert union.num_classes == 12
