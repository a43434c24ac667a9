"""Omniglot: an alphabet is a data set, a character an identity, a drawer a camera."""

import shutil

import numpy as np
import pytest
from PIL import Image

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.check import find_data
from fedsim.data.datasets import Counts, Omniglot

# characters per alphabet, as in the original
BACKGROUND = (20, 29, 26, 41, 40, 24, 46, 14, 26, 34, 33, 22, 26, 43, 24,
              48, 22, 16, 52, 47, 40, 26, 40, 41, 33, 14, 42, 23, 17, 55)  # fmt: skip
EVALUATION = (20, 26, 26, 26, 26, 26, 45, 45, 41, 26, 47, 40, 30, 45, 46, 28, 23, 25, 42, 26)

CHARACTERS = {"images_background/Latin": 5, "images_background/Japanese_(katakana)": 4, "images_evaluation/Angelic": 3}


def grey_of(character, drawer):
    return 40 * character + drawer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Every image has one shade, which says whose it is."""
    root = tmp_path_factory.mktemp("data")
    for alphabet, count in CHARACTERS.items():
        for character in range(1, count + 1):
            folder = root / "omniglot-py" / alphabet / f"character{character:02d}"
            folder.mkdir(parents=True)
            for drawer in range(1, 21):
                path = folder / f"{700 + character:04d}_{drawer:02d}.png"
                Image.new("L", (6, 6), grey_of(character, drawer)).save(path)
    return root


@pytest.fixture
def copied(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy" / "omniglot-py"


def listed(split):
    """(character, camera, shade) of each image."""
    shades = split.images.decode((2, 2))
    assert (shades == shades[:, :1, :1, :1]).all()
    return sorted(zip(split.pids.tolist(), split.camids.tolist(), shades[:, 0, 0, 0].tolist(), strict=True))


def test_characters_and_drawers_are_parted_as_documented(root):
    domains = Omniglot(str(root)).domains()
    assert [domain.name for domain in domains] == ["Japanese_katakana", "Latin", "Angelic"]
    for domain, count, num_train in zip(domains, (4, 5, 3), (2, 2, 0), strict=True):
        expected = {"train": [], "query": [], "gallery": []}
        for character in range(1, count + 1):
            for drawer in range(1, 21):
                asks = drawer in (1, 5, 9, 13, 17)
                part = "train" if character <= num_train else "query" if asks else "gallery"
                # black ink becomes white
                expected[part].append((character, drawer - 1, 255 - grey_of(character, drawer)))
        assert (domain.train is None) == (num_train == 0)
        for part, images in expected.items():
            assert images == [] if getattr(domain, part) is None else listed(getattr(domain, part)) == images


def test_neighbouring_drawers_can_share_a_camera(root):
    (domain,) = Omniglot(str(root), alphabets=["Latin"], drawers_per_camera=4).domains()
    for split in (domain.train, domain.query, domain.gallery):
        for character, camera, shade in listed(split):
            drawer = 255 - shade - 40 * character
            assert camera == (drawer - 1) // 4
    assert sorted(set(domain.query.camids.tolist())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("share", "num_train"), [(0.0, 0), (0.2, 1), (0.5, 2), (0.8, 4), (0.99, 4)])
def test_the_share_of_characters_that_trains_is_rounded_down(root, share, num_train):
    (domain,) = Omniglot(str(root), alphabets=["Latin"], train_share=share).domains()
    trained = [] if domain.train is None else domain.train.identities.tolist()
    assert trained == list(range(1, num_train + 1))
    assert domain.query.identities.tolist() == list(range(num_train + 1, 6))


def test_alphabets_are_chosen_in_order_with_or_without_parentheses(root):
    for name in ("Japanese_(katakana)", "Japanese_katakana"):
        domains = Omniglot(str(root), alphabets=["Angelic", name]).domains()
        assert [domain.name for domain in domains] == ["Angelic", "Japanese_katakana"]
    with pytest.raises(DataError, match=r"omniglot-py: holds no alphabet Klingon; there are Japanese_katakana, Latin"):
        Omniglot(str(root), alphabets=["Klingon"]).domains()


def test_background_alphabets_are_enough(copied):
    shutil.rmtree(copied / "images_evaluation")
    assert [domain.name for domain in Omniglot(str(copied)).domains()] == ["Japanese_katakana", "Latin"]


def test_an_alphabet_cannot_be_trained_on_and_unseen(copied):
    shutil.copytree(copied / "images_background" / "Latin", copied / "images_evaluation" / "Latin")
    with pytest.raises(
        DataError, match=r"images_evaluation/Latin: this alphabet is also in .*images_background; unseen"
    ):
        Omniglot(str(copied)).domains()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("character01", "letter01", r"letter01: the name is not like character01"),
     ("character01", "character00", r"character00: the name is not like character01"),
     ("character01/0701_01.png", "character01/first.png", r"first\.png: the name does not begin like 0709_01\.png"),
     ("character01/0701_01.png", "character01/0701_21.png", r"0701_21\.png: drawers are numbered from 1 to 20"),
     ("character01/0701_01.png", "character01/0701_00.png", r"0701_00\.png: cameras are numbered from 1")],
)  # fmt: skip
def test_wrong_names_are_named(copied, old, new, message):
    folder = copied / "images_background" / "Latin"
    (folder / old).rename(folder / new)
    with pytest.raises(DataError, match=message) as error:
        Omniglot(str(copied)).domains()
    assert "\n" not in str(error.value)


def test_an_alphabet_without_characters_is_named(copied):
    (copied / "images_background" / "Empty").mkdir()
    with pytest.raises(DataError, match=r"images_background/Empty: holds no folders like character01"):
        Omniglot(str(copied)).domains()


@pytest.mark.parametrize(
    ("options", "field"),
    [({"train_share": 1.0}, "train_share"), ({"train_share": -0.1}, "train_share"),
     ({"drawers_per_camera": 0}, "drawers_per_camera"), ({"drawers_per_camera": 20}, "drawers_per_camera")],
)  # fmt: skip
def test_wrong_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=rf"data\.source\.{field}: .* is not"):
        Omniglot("data", **options)


def test_omniglot_of_official_size_is_complete(tmp_path):
    assert (sum(BACKGROUND), sum(EVALUATION)) == (964, 659)
    image = tmp_path / "pixel.png"
    Image.new("L", (1, 1)).save(image)
    for part, sizes in (("images_background", BACKGROUND), ("images_evaluation", EVALUATION)):
        for alphabet, count in enumerate(sizes):
            for character in range(1, count + 1):
                folder = tmp_path / "omniglot-py" / part / f"{part[7:]}{alphabet:02d}" / f"character{character:02d}"
                folder.mkdir(parents=True)
                for drawer in range(1, 21):
                    (folder / f"{character:04d}_{drawer:02d}.png").hardlink_to(image)
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "omniglot")
    assert finding.found == Counts(477, 9_540, 5_730, 17_190)
    assert finding.problem == ""
    assert sum(n or 0 for n in finding.found[1:]) == 19_280 + 13_180


def test_images_are_inverted_after_taking_some(root):
    (domain,) = Omniglot(str(root), alphabets=["Latin"]).domains()
    images = domain.gallery.images
    everything = images.decode((4, 4))
    chosen = np.array([3, 0, 7])
    assert images.take(chosen).decode((4, 4)).equal(everything[chosen])
    assert len(images.take(chosen)) == 3
