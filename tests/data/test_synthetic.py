"""The embedded data set: frozen pixels, disjoint identities, the advertised sizes, and not solved by raw pixels."""

import numpy as np
import pytest
import torch

import once
from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.people import CAMERA, IDENTITY, SHOT, draw_people
from fedsim.data.synthetic import GENERATOR_VERSION, SyntheticImages, SyntheticReID, content_hash
from fedsim.evaluation.ranker import rank_features
from fedsim.evaluation.ranking import RetrievalLabels

SIZE = (64, 32)

# What GENERATOR_VERSION 1 draws with default arguments at SIZE. The generator is frozen: this literal may change only
# together with GENERATOR_VERSION, because published scores refer to these very pixels.
FROZEN_VERSION = 1
FROZEN_HASH = "4312eff704339ab0adc24132a0980b5d2551ff294ed6e94ae78098877180319a"


@pytest.fixture(scope="module")
def default():
    return SyntheticReID().domains()


def test_these_tests_draw():
    """Others take pictures that were drawn before."""
    assert SyntheticImages.decode is once._draw


def pairs(split):
    """The (identity, camera) of every picture."""
    return list(zip(split.pids.tolist(), split.camids.tolist(), strict=True))


def test_the_generator_is_frozen():
    assert GENERATOR_VERSION == FROZEN_VERSION
    assert content_hash(SyntheticReID()) == FROZEN_HASH


def test_content_hash_sees_seed_size_and_names():
    def tiny(**changes):
        return SyntheticReID(**{"clients": 1, "unseen": 1, "scale": 0.1, **changes})

    base = content_hash(tiny(), (16, 8))
    assert content_hash(tiny(), (16, 8)) == base
    others = [
        content_hash(tiny(seed=1), (16, 8)),
        content_hash(tiny(), (32, 16)),
        content_hash(tiny(clients=2), (16, 8)),
        content_hash(tiny(scale=0.2), (16, 8)),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, "a"])
def test_a_seed_that_other_seeds_could_not_be_is_refused(seed):
    with pytest.raises(ConfigError, match=r"^data\.source\.seed: "):
        SyntheticReID(seed=seed)


def test_the_seed_decides_the_pixels():
    def pixels(seed):
        return SyntheticReID(clients=1, unseen=0, scale=0.1, seed=seed).domains()[0].train.images.decode(SIZE)

    assert torch.equal(pixels(3), pixels(3))
    differs = (pixels(3) != pixels(4)).flatten(1).any(dim=1)
    assert differs.all()


def test_pictures_are_uint8_of_the_requested_size(default):
    few = default[0].train.images.take(np.arange(3))
    for size in ((64, 32), (16, 8), (18, 30)):
        pictures = few.decode(size)
        assert pictures.dtype == torch.uint8
        assert pictures.shape == (3, 3, *size)
    assert few.take(np.array([], dtype=np.int64)).decode((16, 8)).shape == (0, 3, 16, 8)


@pytest.mark.parametrize("domain", [0, 1, 7])
def test_each_picture_depends_on_its_own_key_only(default, domain):
    images = default[domain].gallery.images  # longer than the generator's internal batches
    everything = images.decode((32, 16))
    assert len(everything) > 40
    order = np.random.default_rng(0).permutation(len(images))
    assert torch.equal(images.take(order).decode((32, 16)), everything[order])
    some = np.array([37, 2, 2, 19])
    assert torch.equal(images.take(some).decode((32, 16)), everything[some])
    assert torch.equal(images.take(np.array([21])).decode((32, 16))[0], everything[21])


def test_every_picture_of_a_domain_is_different(default):
    pictures = default[5].train.images.decode((32, 16)).flatten(1)
    assert len(pictures.unique(dim=0)) == len(pictures) == 48


def test_domains_have_pictures_of_their_own(default):
    keys = [(split.identities[0], split.cameras[0], split.shots[0]) for split in (d.train.images for d in default[:6])]
    assert set(keys) == {(0, 0, 0)}  # the same numbers, so only the domain's name differs
    firsts = [domain.train.images.take(np.array([0])).decode(SIZE) for domain in default[:6]]
    firsts += [domain.query.images.take(np.array([0])).decode(SIZE) for domain in default[6:]]
    assert len(torch.cat(firsts).flatten(1).unique(dim=0)) == 8


def test_counts_of_the_default_configuration(default):
    # identities, cameras, pictures per identity and camera of each training set
    trains = [(40, 4, 3), (32, 4, 3), (30, 3, 3), (24, 2, 3), (16, 2, 2), (12, 2, 2)]
    assert [d.name for d in default] == ["town0", "town1", "town2", "town3", "town4", "town5", "new0", "new1"]
    for domain, (identities, cameras, shots) in zip(default, trains, strict=False):
        assert len(domain.train) == identities * cameras * shots
        assert len(domain.train.images) == len(domain.train.pids) == len(domain.train.camids)
        counts = {pair: pairs(domain.train).count(pair) for pair in set(pairs(domain.train))}
        assert len(counts) == identities * cameras
        assert set(counts.values()) == {shots}
    assert [len(d.train) for d in default[:6]] == [480, 384, 270, 144, 64, 48]
    assert [d.train for d in default[6:]] == [None, None]
    for domain, cameras in zip(default, [4, 4, 3, 2, 2, 2, 4, 4], strict=True):
        assert len(domain.query.identities) == len(domain.gallery.identities) == 24
        assert len(domain.query) == len(domain.gallery) == 24 * cameras
        assert sorted(set(domain.query.camids.tolist())) == list(range(cameras))


def test_clients_and_unseen_choose_the_domains():
    domains = SyntheticReID(clients=11, unseen=3, scale=0.1).domains()
    assert [d.name for d in domains] == [*(f"town{i}" for i in range(11)), "new0", "new1", "new2"]
    assert [d.train is None for d in domains] == [False] * 11 + [True] * 3
    sizes = [len(d.train) for d in domains[:11]]
    assert sizes == sorted(sizes, reverse=True)
    assert [d.name for d in SyntheticReID(clients=1, unseen=0).domains()] == ["town0"]


def test_test_identities_never_train(default):
    for domain in default:
        assert set(domain.query.identities) == set(domain.gallery.identities)
        if domain.train is not None:
            assert not set(domain.train.identities) & set(domain.query.identities)
            assert not set(domain.train.images.identities) & set(domain.query.images.identities)
        assert domain.query.identities.min() > 0  # 0 and -1 would be distractors and junk


def test_every_query_has_a_match_in_another_camera(default):
    for domain in [*default, *SyntheticReID(scale=0.01).domains()]:
        gallery = pairs(domain.gallery)
        for pid, camera in pairs(domain.query):
            assert any(p == pid and c != camera for p, c in gallery)
        assert len(set(pairs(domain.query))) == len(domain.query)  # one query per identity and camera


def test_query_and_gallery_pictures_differ(default):
    query = default[4].query.images.decode((32, 16)).flatten(1)
    gallery = default[4].gallery.images.decode((32, 16)).flatten(1)
    assert len(torch.cat([query, gallery]).unique(dim=0)) == len(query) + len(gallery)


@pytest.mark.parametrize(("scale", "train", "test"), [(0.25, [10, 8], 6), (2.0, [80, 64], 48), (1e-6, [2, 2], 2)])
def test_scale_multiplies_identities(scale, train, test):
    domains = SyntheticReID(clients=2, unseen=1, scale=scale).domains()
    assert [len(d.train.identities) for d in domains[:2]] == train
    assert [len(d.query.identities) for d in domains] == [test] * 3
    assert [len(d.train) for d in domains[:2]] == [12 * n for n in train]  # cameras and shots stay


def test_raw_pixels_do_not_solve_it(default):
    for domain in default:
        query, gallery = (
            split.images.decode(SIZE).flatten(1).float() - 127 for split in (domain.query, domain.gallery)
        )
        labels = RetrievalLabels(domain.query.pids, domain.query.camids, domain.gallery.pids, domain.gallery.camids)
        scores = rank_features(query, gallery, labels)
        assert scores.num_valid == len(domain.query)
        assert scores.rank1 < 0.6, domain.name


@pytest.mark.parametrize("size", [(63, 32), (64, 31), (1, 1)])
def test_an_odd_size_is_refused(default, size):
    with pytest.raises(ConfigError, match=r"data\.size: .*even"):
        default[0].train.images.take(np.arange(2)).decode(size)


@pytest.mark.parametrize(
    "arguments", [{"clients": 0}, {"clients": -3}, {"unseen": -1}, {"scale": 0.0}, {"scale": -1.0}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(
        ConfigError, match=r"data\.source\.(clients|unseen|scale): -?[\d.]+ is not in [\[(][01], 100000\]$"
    ):
        SyntheticReID(**arguments)


# -- the drawing itself ------------------------------------------------------------------------------------------------

PEOPLE, HEIGHT, WIDTH = 64, 32, 16


def uniforms(names, seed, count=PEOPLE):
    rng = np.random.default_rng(seed)
    return {name: rng.random(count, dtype=np.float32) for name in names}


@pytest.fixture(scope="module")
def numbers():
    noise = np.random.default_rng(4).random((PEOPLE, HEIGHT, WIDTH), dtype=np.float32)
    return {"identity": uniforms(IDENTITY, 1), "camera": uniforms(CAMERA, 2), "shot": uniforms(SHOT, 3), "noise": noise}


@pytest.fixture(scope="module")
def drawn(numbers):
    return draw_people(**numbers, factor=1)


def test_drawing_gives_uint8_pictures(drawn):
    assert drawn.dtype == np.uint8
    assert drawn.shape == (PEOPLE, 3, HEIGHT, WIDTH)
    assert drawn.std(axis=(1, 2, 3)).min() > 5  # nothing is empty


def test_coarse_pictures_are_enlarged(numbers):
    coarse = draw_people(**numbers, factor=2)
    assert coarse.shape == (PEOPLE, 3, 2 * HEIGHT, 2 * WIDTH)


def test_a_row_of_a_batch_is_drawn_by_itself(numbers, drawn):
    one = slice(5, 6)
    alone = draw_people(
        *({name: values[one] for name, values in numbers[kind].items()} for kind in ("identity", "camera", "shot")),
        numbers["noise"][one],
        factor=1,
    )
    assert np.array_equal(alone[0], drawn[5])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("identity", name) for name in IDENTITY]
    + [("camera", name) for name in CAMERA]
    + [("shot", name) for name in SHOT],
)
def test_every_number_shows(numbers, drawn, kind, name):
    # a number without effect on any of the pictures would make people, cameras or shots less different than promised
    other = np.random.default_rng(9).random(PEOPLE, dtype=np.float32)
    changed = draw_people(**{**numbers, kind: {**numbers[kind], name: other}}, factor=1)
    assert (changed != drawn).any()


def test_noise_shows(numbers, drawn):
    changed = draw_people(**{**numbers, "noise": 1 - numbers["noise"]}, factor=1)
    assert (changed != drawn).any(axis=(1, 2, 3)).all()


def test_clients_that_are_alike_have_four_images_of_each_identity_and_no_test_sets():
    """They are other pictures for each client, and the same in a federation of another size."""
    source = SyntheticReID(clients=3, unseen=1, scale=0.1, identities=5)
    few, many = source.domains(), SyntheticReID(clients=40, unseen=0, identities=5).domains()
    assert [d.name for d in few] == ["town0", "town1", "town2", "new0"]
    for one, same in zip(few[:3], many, strict=False):
        assert len(one.train) == 20
        assert [len(one.query), len(one.gallery)] == [0, 0]
        pairs = list(zip(one.train.pids.tolist(), one.train.camids.tolist(), strict=True))
        assert pairs == [(i, c) for i in range(1, 6) for c in range(2) for _ in range(2)]
        assert torch.equal(one.train.images.decode((16, 8)), same.train.images.decode((16, 8)))
    assert not torch.equal(few[0].train.images.decode((16, 8)), few[1].train.images.decode((16, 8)))
    assert many[0].train.pids is many[39].train.pids
    federated = FederatedDataModule(source, val="none").federated
    assert list(federated.tests) == ["new0"]
    assert [client.tests for client in federated.clients] == [(), (), ()]


@pytest.mark.parametrize("settings", [{"identities": 1}, {"identities": 0}, {"clients": 10**8, "identities": 4}])
def test_federations_of_impossible_sizes_are_refused(settings):
    with pytest.raises(ConfigError, match=r"data\.source"):
        SyntheticReID(**settings)
