"""From data sets to clients: label spaces, unseen and public sets, and what is held out for validation."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.federations import build_federation, split_validation
from fedsim.data.images import Domain, Images, ImagesInParts, Split

SIZE = (2, 3)


@dataclass(frozen=True)
class Numbered(Images):
    """Pictures that show their own number, so that a test sees where each went."""

    numbers: np.ndarray

    def __len__(self):
        return len(self.numbers)

    def take(self, index):
        return Numbered(self.numbers[index])

    def decode(self, size):
        return torch.tensor(self.numbers, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, *size)


def shown(split):
    """The numbers on the pictures of a split."""
    return split.images.decode(SIZE)[:, 0, 0, 0].tolist()


def split_of(pids, camids, first=0):
    """Pictures ``first``, ``first`` + 1, ... with these identities and cameras."""
    pids, camids = np.array(pids, dtype=np.int64), np.array(camids, dtype=np.int64)
    return Split(Numbered(np.arange(first, first + len(pids))), pids, camids)


def regular(identities, cameras=2, shots=2, first=0):
    """A split with ``shots`` pictures of each identity in each camera."""
    grid = np.array([(i, c) for i in identities for c in range(cameras) for _ in range(shots)])
    return split_of(grid[:, 0], grid[:, 1], first)


def domain(name, identities=range(10, 30, 2), cameras=2, first=0, trains=True):
    test = [1, 3]
    query, gallery = regular(test, cameras, 1, first + 200), regular(test, cameras, 1, first + 220)
    return Domain(name, regular(identities, cameras, 2, first) if trains else None, query, gallery)


@pytest.fixture
def three():
    """Two training sets with the same identity numbers and one test-only set."""
    return [domain("a"), domain("b", range(10, 40, 3), cameras=3, first=100), domain("c", trains=False)]


# -- build_federation --------------------------------------------------------------------------------------------------


def test_by_dataset_makes_each_data_set_a_client(three):
    federated = build_federation(three)
    assert [client.name for client in federated.clients] == ["a", "b"]
    assert [client.tests for client in federated.clients] == [("a",), ("b",)]
    assert list(federated.tests) == ["a", "b", "c"]
    assert federated.unseen == ("c",)
    assert federated.public is None
    for data in three:
        assert federated.tests[data.name].query is data.query
        assert federated.tests[data.name].gallery is data.gallery


@pytest.mark.parametrize("val", ["identities", "first_image", "none"])
def test_labels_are_0_to_z_minus_1_in_the_order_of_identities(three, val):
    for client in build_federation(three, val=val).clients:
        assert sorted(set(client.labels.tolist())) == list(range(client.num_classes))
        assert client.labels.dtype == np.int64
        assert client.num_images == len(client.train) == len(client.labels)
        expected = [sorted(set(client.train.pids.tolist())).index(pid) for pid in client.train.pids]
        assert client.labels.tolist() == expected


def test_without_validation_everything_trains(three):
    a, b = build_federation(three, val="none").clients
    assert (a.num_images, a.num_classes, a.num_cameras, a.val) == (40, 10, 2, None)
    assert (b.num_images, b.num_classes, b.num_cameras, b.val) == (60, 10, 3, None)
    assert shown(a.train) == list(range(40))


def test_union_is_one_client_with_all_images(three):
    (union,) = build_federation(three, partition="union", val="none").clients
    assert union.name == "union"
    assert union.tests == ("a", "b")
    assert union.num_images == 100
    assert union.num_classes == 10 + 10  # the same numbers in a and b are different people
    assert union.num_cameras == 2 + 3
    assert union.val is None
    assert shown(union.train) == [*range(40), *range(100, 160)]


def test_union_keeps_labels_and_cameras_of_members_apart(three):
    (union,) = build_federation(three, partition="union", val="none").clients
    source = np.repeat([0, 1], [40, 60])
    true_person = list(zip(source, np.concatenate([d.train.pids for d in three[:2]]), strict=True))
    true_camera = list(zip(source, np.concatenate([d.train.camids for d in three[:2]]), strict=True))
    for given, truth in ((union.labels, true_person), (union.train.camids, true_camera)):
        assert len(set(given.tolist())) == len(set(truth)) == len(set(zip(given.tolist(), truth, strict=True)))
    assert sorted(set(union.labels.tolist())) == list(range(20))


@pytest.mark.parametrize("val", ["identities", "first_image"])
def test_union_holds_out_what_its_members_hold_out(three, val):
    members = build_federation(three, val=val).clients
    (union,) = build_federation(three, partition="union", val=val).clients
    assert shown(union.train) == [n for client in members for n in shown(client.train)]
    assert union.num_classes == sum(client.num_classes for client in members)
    assert shown(union.val.query) == [n for client in members for n in shown(client.val.query)]
    assert shown(union.val.gallery) == [n for client in members for n in shown(client.val.gallery)]


@pytest.mark.parametrize("val", ["identities", "first_image"])
def test_union_validation_set_is_consistent(three, val):
    members = build_federation(three, val=val).clients
    held_out = build_federation(three, partition="union", val=val).clients[0].val
    assert set(held_out.query.pids) <= set(held_out.gallery.pids)
    # the same person gets the same number in query and gallery, other people and other members another number
    truth, given = [], []
    for name in ("query", "gallery"):
        for i, client in enumerate(members):
            truth += [(i, pid) for pid in getattr(client.val, name).pids.tolist()]
        given += getattr(held_out, name).pids.tolist()
    assert len(truth) == len(given)
    assert len(set(truth)) == len(set(given)) == len(set(zip(truth, given, strict=True)))


def test_union_validation_cameras_of_members_stay_apart():
    # first images come from camera 2, which is in no gallery: it must not become a camera of the next member
    def member(name, first):
        train = split_of([1, 1, 2, 2, 3, 3], [2, 0, 2, 1, 2, 0], first)
        return Domain(name, train, regular([8], first=first), regular([8], first=first))

    held_out = build_federation([member("a", 0), member("b", 50)], partition="union", val="first_image").clients[0].val
    cameras = {}
    for split in (held_out.query, held_out.gallery):
        for number, camera in zip(shown(split), split.camids.tolist(), strict=True):
            cameras.setdefault(number >= 50, set()).add(camera)
    assert len(cameras[False]) == len(cameras[True]) == 3
    assert not cameras[False] & cameras[True]


def test_unseen_data_sets_do_not_train(three):
    federated = build_federation(three, unseen=["a"])
    assert [client.name for client in federated.clients] == ["b"]
    assert federated.unseen == ("a", "c")
    assert list(federated.tests) == ["a", "b", "c"]
    (union,) = build_federation(three, unseen=["a"], partition="union", val="none").clients
    assert union.tests == ("b",)
    assert shown(union.train) == list(range(100, 160))


def test_naming_a_test_only_data_set_unseen_changes_nothing(three):
    assert build_federation(three, unseen=["c"]).unseen == build_federation(three).unseen == ("c",)


def test_the_public_data_set_is_neither_a_client_nor_tested(three):
    federated = build_federation(three, public="b")
    assert [client.name for client in federated.clients] == ["a"]
    assert list(federated.tests) == ["a", "c"]
    assert federated.unseen == ("c",)
    b = three[1]
    assert shown(federated.public) == [*shown(b.train), *shown(b.query), *shown(b.gallery)]


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_public_data_set_that_is_named_as_unseen_is_refused(three, name):
    with pytest.raises(ConfigError, match=rf"^data\.public: {name} is named in data\.unseen, too"):
        build_federation(three, unseen=["b", "c"], public=name)


def test_a_test_only_data_set_can_be_public(three):
    federated = build_federation(three, public="c")
    assert [client.name for client in federated.clients] == ["a", "b"]
    assert federated.unseen == ()
    assert shown(federated.public) == [*shown(three[2].query), *shown(three[2].gallery)]


@pytest.mark.parametrize("arguments", [{"unseen": ["d"]}, {"unseen": ["a", "d"]}, {"public": "d"}])
def test_an_unknown_name_is_refused(three, arguments):
    field = next(iter(arguments))
    with pytest.raises(ConfigError, match=rf"data\.{field}: .* d; choose from a, b, c"):
        build_federation(three, **arguments)


def test_two_data_sets_of_one_name_are_refused(three):
    with pytest.raises(ConfigError, match="two data sets are called a"):
        build_federation([*three, domain("a")])


@pytest.mark.parametrize("arguments", [{"unseen": ["a", "b"]}, {"unseen": ["b"], "public": "a"}])
def test_nobody_left_to_train_is_refused(three, arguments):
    with pytest.raises(ConfigError, match="no data set with training images is left"):
        build_federation(three, **arguments)


def test_test_only_data_sets_alone_are_refused(three):
    with pytest.raises(ConfigError, match="no data set with training images is left"):
        build_federation([three[2]])


# -- split_validation --------------------------------------------------------------------------------------------------


def test_held_out_identities_never_train():
    train = regular(range(50, 70), cameras=3)
    rest, held_out = split_validation("town", train, "identities", 0.2)
    assert len(held_out.gallery.identities) == 4  # a fifth of twenty
    assert len(rest.identities) == 16
    assert not set(rest.pids) & set(held_out.gallery.pids)
    assert sorted(shown(rest) + shown(held_out.gallery)) == list(range(len(train)))  # nothing is lost
    assert set(held_out.query.pids) == set(held_out.gallery.pids)


def test_pictures_keep_their_identity_and_camera():
    train = regular(range(50, 60), cameras=3)
    for how in ("identities", "first_image"):
        rest, held_out = split_validation("town", train, how, 0.3)
        for split in (rest, held_out.query, held_out.gallery):
            assert split.pids.tolist() == train.pids[shown(split)].tolist()
            assert split.camids.tolist() == train.camids[shown(split)].tolist()


def test_queries_are_the_first_picture_of_each_identity_and_camera():
    pids = [4, 4, 5, 5, 4, 5, 6, 6, 7, 7, 7]
    camids = [1, 0, 2, 2, 1, 0, 3, 3, 0, 1, 0]
    _, held_out = split_validation("town", split_of(pids, camids), "identities", 0.5)
    firsts = {4: [0, 1], 5: [2, 5], 6: [6], 7: [8, 9]}
    expected = sorted(n for pid in held_out.gallery.identities.tolist() for n in firsts[pid])
    assert shown(held_out.query) == expected
    everything = [n for n, pid in enumerate(pids) if pid in held_out.gallery.identities]
    assert shown(held_out.gallery) == everything  # the queries included


def test_the_same_identities_are_held_out_on_every_call():
    train = regular(range(30))
    first = split_validation("town", train, "identities", 0.2)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 - the draw must not depend on the global generator
    second = split_validation("town", train, "identities", 0.2)
    assert shown(first[0]) == shown(second[0])
    assert shown(first[1].query) == shown(second[1].query)
    held = {name: tuple(split_validation(name, train, "identities", 0.2)[1].gallery.identities) for name in "abcd"}
    assert len(set(held.values())) == 4  # every client draws for itself


def test_a_member_holds_out_the_same_whoever_else_takes_part(three):
    alone = build_federation(three[:1]).clients[0]
    together = build_federation(three).clients[0]
    assert shown(alone.train) == shown(together.train)


@pytest.mark.parametrize(
    ("identities", "fraction", "held"), [(4, 0.2, 2), (5, 0.1, 2), (10, 0.5, 5), (40, 0.25, 10), (10, 0.8, 8)]
)
def test_the_share_of_identities(identities, fraction, held):
    rest, held_out = split_validation("town", regular(range(identities)), "identities", fraction)
    assert len(held_out.gallery.identities) == held
    assert len(rest.identities) == identities - held


@pytest.mark.parametrize(
    ("identities", "fraction", "text"),
    [
        (1, 0.2, r"client town: only one training identity; .* data\.unseen"),  # without validation, too
        (3, 0.2, r"client town: 3 identities .*data\.val .*first_image"),
        (10, 0.9, r"client town: 10 identities .*data\.val .*first_image"),
    ],
)
def test_too_few_identities_are_refused(identities, fraction, text):
    with pytest.raises(DataError, match=text):
        split_validation("town", regular(range(identities)), "identities", fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_a_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction"):
        split_validation("town", regular(range(10)), "identities", fraction)


def test_first_image_holds_out_one_image_per_identity():
    pids = [9, 4, 4, 9, 9, 4, 2, 2]
    rest, held_out = split_validation("town", split_of(pids, [0] * 8), "first_image", 0.2)
    assert held_out.query.pids.tolist() == [2, 4, 9]
    assert shown(held_out.query) == [6, 1, 0]
    assert shown(rest) == [2, 3, 4, 5, 7]
    assert shown(held_out.gallery) == [2, 3, 4, 5, 7]


def test_first_image_needs_two_images_of_everybody():
    with pytest.raises(DataError, match=r"client town: identity 7 .*one image.* set data\.val to identities or none"):
        split_validation("town", split_of([5, 5, 7, 9, 9], [0, 1, 0, 0, 1]), "first_image", 0.2)


def test_none_holds_out_nothing():
    train = split_of([5, 7, 7], [0, 0, 0])
    rest, held_out = split_validation("town", train, "none", 0.2)
    assert rest is train
    assert held_out is None


# -- splits and lists of images ----------------------------------------------------------------------------------------


def test_split_take_keeps_the_columns_together():
    split = split_of([3, 3, 1, 2], [0, 1, 2, 3], first=40)
    taken = split.take(np.array([3, 0, 0]))
    assert len(taken) == 3
    assert shown(taken) == [43, 40, 40]
    assert taken.pids.tolist() == [2, 3, 3]
    assert taken.camids.tolist() == [3, 0, 0]
    assert split.identities.tolist() == [1, 2, 3]
    assert len(split.take(np.array([], dtype=np.int64))) == 0


def test_split_join_keeps_identities_and_cameras_apart():
    joined = Split.join(
        [split_of([7, 3, 7], [0, 2, 0]), split_of([3, 9], [1, 0], first=10), split_of([3], [0], first=20)]
    )
    assert shown(joined) == [0, 1, 2, 10, 11, 20]
    assert joined.pids.tolist() == [1, 0, 1, 2, 3, 4]
    assert joined.camids.tolist() == [0, 2, 0, 4, 3, 5]


def test_split_join_of_one_relabels_only():
    joined = Split.join([split_of([7, 3, 7], [0, 2, 0])])
    assert joined.pids.tolist() == [1, 0, 1]
    assert joined.camids.tolist() == [0, 2, 0]


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 0, 6, 1), (0, 3), (4, 0)])
def test_parts_taken_in_any_order_are_the_same_pictures(sizes):
    rng = np.random.default_rng(0)
    whole = ImagesInParts([Numbered(rng.integers(0, 256, size)) for size in sizes])
    everything = whole.decode(SIZE)
    assert len(whole) == len(everything) == sum(sizes)
    for _ in range(10):
        index = rng.permutation(len(whole))
        assert torch.equal(whole.take(index).decode(SIZE), everything[index])
        repeats = rng.integers(0, len(whole), 2 * len(whole))
        taken = whole.take(repeats)
        assert len(taken) == len(repeats)
        assert torch.equal(taken.decode(SIZE), everything[repeats])
        twice = rng.permutation(len(repeats))[:3]  # lists taken from lists
        assert torch.equal(taken.take(twice).decode(SIZE), everything[repeats[twice]])


def test_an_empty_selection_of_parts():
    nothing = ImagesInParts([Numbered(np.arange(3))]).take(np.array([], dtype=np.int64))
    assert len(nothing) == 0
    assert nothing.decode(SIZE).shape == (0, 3, *SIZE)
    assert nothing.decode(SIZE).dtype == torch.uint8
