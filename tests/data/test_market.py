"""Folders in Market-1501's layout: what is listed, in which order, and what is refused in one line."""

import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.__main__ import main
from fedsim.cli.describe import describe_federation
from fedsim.core.errors import DataError
from fedsim.data import FederatedDataModule, SyntheticReID
from fedsim.data.check import findings_in, table_of
from fedsim.data.images import ImageFiles
from fedsim.data.market import MarketFolders
from fedsim.federation.checks.requirements import check_batches
from fedsim.methods import FedAvg
from fedsim.training.settings import LocalTraining
from small import make_data, make_model

TRAIN, QUERY, GALLERY = "bounding_box_train", "query", "bounding_box_test"

TREE = {
    TRAIN: ["-1_c2s1_000004_00.jpg", "0002_c12s1_000002_00.jpg", "0002_c1s1_000001_00.jpg", "0007_c3s2_000003_00.jpg"],
    QUERY: ["0001_c1s1_000001_00.jpg", "0010_c2s1_000002_00.jpg"],
    GALLERY: [
        "-1_c1s1_000001_00.jpg",
        "0000_c2s1_000002_00.jpg",
        "0001_c2s1_000003_00.jpg",
        "0001_c6s3_000004_00.jpg",
        "0010_c12s1_000005_00.jpg",
    ],
}


def write_image(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 8), colour).save(path)


def write_tree(folder, tree):
    for sub, names in tree.items():
        for name in names:
            write_image(folder / sub / name)
    return folder


@pytest.fixture
def market(tmp_path):
    return write_tree(tmp_path / "market", TREE)


def refused(root, names=None, **options):
    """The message of the DataError that listing ``root`` raises."""
    with pytest.raises(DataError) as caught:
        MarketFolders(str(root), names, **options).domains()
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- what is listed ----------------------------------------------------------------------------------------------------


def test_counts_identities_and_cameras(market):
    (domain,) = MarketFolders(str(market)).domains()
    assert domain.name == "market"
    assert domain.query.pids.tolist() == [1, 10]
    assert domain.query.camids.tolist() == [0, 1]
    assert domain.gallery.camids.tolist() == [0, 1, 1, 5, 11]  # c12s1 is the twelfth camera
    assert domain.train.camids.tolist() == [11, 0, 2]
    for split in (domain.train, domain.query, domain.gallery):
        assert len(split) == len(split.images) == len(split.pids) == len(split.camids)
        assert split.pids.dtype == split.camids.dtype == np.int64


def test_junk_does_not_train_but_stays_in_the_gallery(market):
    (domain,) = MarketFolders(str(market)).domains()
    assert domain.train.pids.tolist() == [2, 2, 7]
    assert [path.name for path in domain.train.images.paths] == TREE[TRAIN][1:]  # images and identities stay together
    assert domain.gallery.pids.tolist() == [-1, 0, 1, 1, 10]  # and the distractor 0 stays, too


def test_a_distractor_in_the_training_folder_is_kept(market):
    write_image(market / TRAIN / "0000_c1s1_000009_00.jpg")
    (domain,) = MarketFolders(str(market)).domains()
    assert domain.train.pids.tolist() == [0, 2, 2, 7]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_order_is_by_name_whatever_the_order_of_creation(tmp_path, seed):
    rng = np.random.default_rng(seed)
    tree = {sub: [names[i] for i in rng.permutation(len(names))] for sub, names in TREE.items()}
    (domain,) = MarketFolders(str(write_tree(tmp_path / "market", tree))).domains()
    assert [path.name for path in domain.gallery.images.paths] == TREE[GALLERY]
    assert [path.name for path in domain.query.images.paths] == TREE[QUERY]
    assert domain.train.pids.tolist() == [2, 2, 7]


def test_other_files_are_ignored_and_other_suffixes_read(market):
    (market / GALLERY / "Thumbs.db").write_bytes(b"no image")
    (market / GALLERY / "list.txt").write_text("0001_c1s1")
    (market / "readme.txt").write_text("about")
    write_image(market / GALLERY / "0011_c1s1_000001_00.PNG")
    (domain,) = MarketFolders(str(market)).domains()
    assert domain.gallery.pids.tolist() == [-1, 0, 1, 1, 10, 11]


def test_short_names_are_enough(tmp_path):
    names = ["0001_c1.jpg", "12_c3_f0001.jpg", "1501_c10s6_x.png"]
    tree = {QUERY: names, GALLERY: names}
    (domain,) = MarketFolders(str(write_tree(tmp_path / "a", tree))).domains()
    assert domain.query.pids.tolist() == [1, 12, 1501]
    assert domain.query.camids.tolist() == [0, 2, 9]


def test_a_root_with_several_data_sets(tmp_path):
    for name in ("duke", "cuhk", "prid"):
        write_tree(tmp_path / name, TREE)
    (tmp_path / "notes").mkdir()
    (tmp_path / "list.txt").write_text("x")
    assert [d.name for d in MarketFolders(str(tmp_path)).domains()] == ["cuhk", "duke", "prid"]


def test_names_choose_and_order(tmp_path):
    for name in ("duke", "cuhk", "prid"):
        write_tree(tmp_path / name, TREE)
    domains = MarketFolders(str(tmp_path), ["prid", "cuhk"]).domains()
    assert [d.name for d in domains] == ["prid", "cuhk"]
    assert all(str(tmp_path / d.name) in str(d.query.images.paths[0]) for d in domains)


def test_a_folder_without_training_images_is_tested_on_only(tmp_path):
    tree = {QUERY: TREE[QUERY], GALLERY: TREE[GALLERY]}
    (domain,) = MarketFolders(str(write_tree(tmp_path / "viper", tree))).domains()
    assert domain.train is None
    assert len(domain.query) == 2
    assert len(domain.gallery) == 5


def test_the_current_folder_has_a_name(market, monkeypatch):
    monkeypatch.chdir(market)
    (domain,) = MarketFolders(".").domains()
    assert domain.name == "market"


def test_the_home_folder_is_expanded(market, monkeypatch):
    monkeypatch.setenv("HOME", str(market.parent))
    (domain,) = MarketFolders("~/market").domains()
    assert len(domain.query) == 2


def test_listing_reads_no_image(market):
    for path in market.rglob("*.jpg"):
        path.write_bytes(b"damaged")
    (domain,) = MarketFolders(str(market)).domains()
    assert len(domain.gallery) == 5


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_missing_root(tmp_path):
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(tmp_path / "file")


def test_a_root_without_data_sets(tmp_path):
    (tmp_path / "something").mkdir()
    message = refused(tmp_path)
    assert str(tmp_path) in message
    assert all(name in message for name in (TRAIN, QUERY, GALLERY))


def test_a_name_without_a_folder(market):
    assert str(market.parent / "duke") in refused(market.parent, ["market", "duke"])


@pytest.mark.parametrize("missing", [QUERY, GALLERY])
def test_half_a_test_set(tmp_path, missing):
    folder = write_tree(tmp_path / "market", {sub: names for sub, names in TREE.items() if sub != missing})
    assert str(folder / missing) in refused(folder)


@pytest.mark.parametrize("empty", [TRAIN, QUERY, GALLERY])
def test_an_empty_folder(tmp_path, empty):
    folder = write_tree(tmp_path / "market", {sub: names for sub, names in TREE.items() if sub != empty})
    (folder / empty).mkdir()
    assert str(folder / empty) in refused(folder)


def test_a_training_folder_with_junk_only(tmp_path):
    folder = write_tree(tmp_path / "market", {**TREE, TRAIN: ["-1_c1s1_000001_00.jpg"]})
    assert str(folder / TRAIN) in refused(folder)


@pytest.mark.parametrize(
    "name", ["person.jpg", "0001.jpg", "0001c1s1.jpg", "-2_c1s1.jpg", "0001_s1.jpg", "x0001_c1.jpg"]
)
@pytest.mark.parametrize("sub", [TRAIN, QUERY, GALLERY])
def test_a_name_that_does_not_parse(market, sub, name):
    write_image(market / sub / name)
    message = refused(market)
    assert str(market / sub / name) in message
    assert "0001_c1s1_001051_00.jpg" in message  # what a name should look like


def test_a_query_identity_without_gallery_images(market):
    write_image(market / QUERY / "0042_c1s1_000001_00.jpg")
    message = refused(market, unmatched="refuse")
    assert str(market / QUERY) in message
    assert "0042" in message
    assert "more" not in message


def test_several_query_identities_without_gallery_images(market):
    for pid in (42, 43, 44):
        write_image(market / QUERY / f"00{pid}_c1s1_000001_00.jpg")
    message = refused(market, unmatched="refuse")
    assert "0042" in message
    assert "2 more" in message


def test_an_identity_in_training_and_query(market):
    write_image(market / TRAIN / "0010_c1s1_000001_00.jpg")
    message = refused(market)
    assert str(market) in message
    assert "0010" in message


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_pixels_arrive_as_rgb_in_the_order_of_the_files(tmp_path):
    colours = {"a.png": (255, 0, 0), "b.png": (0, 200, 10), "c.png": (3, 4, 250)}
    for name, colour in colours.items():
        write_image(tmp_path / name, colour)
    files = ImageFiles([tmp_path / name for name in ("c.png", "a.png", "b.png")])
    pictures = files.decode((6, 2))
    assert pictures.dtype == torch.uint8
    assert pictures.shape == (3, 3, 6, 2)
    expected = torch.tensor([colours["c.png"], colours["a.png"], colours["b.png"]], dtype=torch.uint8)
    assert torch.equal(pictures, expected[:, :, None, None].expand(3, 3, 6, 2))


def test_a_picture_of_the_right_size_is_not_changed(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (picture,) = ImageFiles([tmp_path / "a.png"]).decode((8, 4))
    assert torch.equal(picture, torch.from_numpy(pixels).permute(2, 0, 1))


def test_height_comes_first(tmp_path):
    upper_white = np.zeros((20, 10, 3), dtype=np.uint8)
    upper_white[:10] = 255
    Image.fromarray(upper_white).save(tmp_path / "a.png")
    (picture,) = ImageFiles([tmp_path / "a.png"]).decode((8, 4))
    assert picture.shape == (3, 8, 4)
    assert (picture[:, :3] == 255).all()
    assert (picture[:, 5:] == 0).all()


def test_shrinking_averages(tmp_path):
    # fine stripes become grey; without antialiasing they would stay black or white
    stripes = np.zeros((64, 64), dtype=np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    (picture,) = ImageFiles([tmp_path / "a.png"]).decode((8, 8))
    assert (picture.float() - 127.5).abs().max() < 20


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "CMYK", "LA"])
def test_other_colour_modes_become_rgb(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    left_white = Image.new("L", (8, 8), 0)
    left_white.paste(255, (0, 0, 4, 8))
    rgb = left_white.convert("RGB")
    (rgb.convert(mode) if mode != "LA" else left_white.convert("LA")).save(path)
    with Image.open(path) as image:
        assert image.mode == mode
    (picture,) = ImageFiles([path]).decode((8, 8))
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 8, 8)
    assert (picture[:, :, :4] == 255).all()
    assert (picture[:, :, 4:] == 0).all()


def test_a_colour_palette_is_looked_up(tmp_path):
    image = Image.new("RGB", (4, 4), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    image.save(tmp_path / "a.png")
    (picture,) = ImageFiles([tmp_path / "a.png"]).decode((4, 4))
    assert picture[:, 0, 0].tolist() == [10, 200, 30]


def damage_text(path):
    path.write_text("this is no image")


def damage_empty(path):
    path.write_bytes(b"")


def damage_truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def damage_removed(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_text, damage_empty, damage_truncated, damage_removed])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_damaged_image_is_named(tmp_path, damage, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for name in ("good", "bad"):
        Image.fromarray(noise).save(tmp_path / f"{name}.{suffix}")
    damage(tmp_path / f"bad.{suffix}")
    files = ImageFiles([tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"])
    with pytest.raises(DataError) as caught:
        files.decode((8, 4))
    assert str(tmp_path / f"bad.{suffix}") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_with_an_absurd_size_is_named(tmp_path):
    # Pillow's error for it, DecompressionBombError, is neither an OSError nor a ValueError
    path = tmp_path / "0001_c1s1_000001_00.bmp"
    write_image(path)
    content = bytearray(path.read_bytes())
    content[18:22] = (2**30).to_bytes(4, "little")  # the width
    path.write_bytes(bytes(content))
    with pytest.raises(DataError) as caught:
        ImageFiles([path]).decode((8, 4))
    assert str(path) in str(caught.value)


def test_a_damaged_image_of_a_data_set_is_found_on_decoding(market):
    (market / QUERY / TREE[QUERY][1]).write_bytes(b"damaged")
    (domain,) = MarketFolders(str(market)).domains()
    assert domain.gallery.images.decode((8, 4)).shape == (5, 3, 8, 4)
    with pytest.raises(DataError, match=TREE[QUERY][1]):
        domain.query.images.decode((8, 4))


def test_take_and_chunks_choose_files(tmp_path):
    for i in range(70):
        write_image(tmp_path / f"{i:02d}.png", (i, 2 * i, 3 * i))
    files = ImageFiles(sorted(tmp_path.iterdir()))
    everything = files.decode((2, 1))
    assert everything[:, 1, 0, 0].tolist() == [2 * i for i in range(70)]
    order = np.random.default_rng(0).permutation(70)
    assert torch.equal(files.take(order).decode((2, 1)), everything[order])
    chunks = list(files.chunks())
    assert len(chunks) > 1
    assert torch.equal(torch.cat([chunk.decode((2, 1)) for chunk in chunks]), everything)


def test_a_check_shows_what_is_there_and_no_more(market_tree, tmp_path, capsys):
    text = table_of(findings_in(market_tree))
    names = [line.split()[0] for line in text.splitlines()[2:] if line and not line.startswith((" ", "training"))]
    assert names == ["north", "south", "west"]
    assert "6 / 24 / 6 / 12" in text  # training identities and images, queries, gallery
    assert "not there" in table_of(findings_in(market_tree, everything=True))
    assert main(["data", "check", str(market_tree)]) == 0
    assert capsys.readouterr().out.count("your own; can be used") == 3
    assert main(["data", "check", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "holds no data set; one in Market-1501 layout has bounding_box_train" in err


def test_one_identity_is_said_before_it_trains(market_tree, tmp_path, caplog):
    alone = tmp_path / "alone"
    shutil.copytree(market_tree / "north", alone)
    for path in (alone / "bounding_box_train").iterdir():
        if not path.name.startswith("0001"):
            path.unlink()
    assert "only one training identity" in " ".join(table_of(findings_in(tmp_path)).split())
    data = FederatedDataModule(MarketFolders(str(alone)), val="none")
    settings = {client.name: LocalTraining(batch_size=2) for client in data.federated.clients}
    check_batches(data.federated.clients, settings, logs=True)
    assert "alone: only one identity to train on, so nothing can be distinguished" in caplog.text


def test_drawn_splits_say_that_queries_are_not_used_now(market_tree, tmp_path, capsys):
    shutil.copytree(market_tree / "north", tmp_path / "north")
    assert main(["data", "splits", str(tmp_path / "north"), "--num", "10"]) == 0
    assert "query is not used while this file exists" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "your own; can be used, scored on the 10 splits of" in capsys.readouterr().out
    text = describe_federation(make_model(FedAvg()), make_data(MarketFolders(str(tmp_path))), 1, 1)
    [line] = re.findall(r"^north +(\d+) +(\d+) +10 splits of the gallery$", text, re.MULTILINE)
    assert [int(part) for part in line] == [2, 12]  # two of three people ask in each of them


def test_the_order_of_folders_has_no_meaning_and_that_of_classes_has(tmp_path):
    """Places tell two folders apart, on which no number depends; a configuration has the order of classes."""
    for name in ("beta", "alpha", "gamma"):
        write_tree(tmp_path / name / name, TREE)
    beta, alpha, gamma = (MarketFolders(str(tmp_path / name)) for name in ("beta", "alpha", "gamma"))
    drawn = SyntheticReID(clients=1, unseen=0, scale=0.1)
    for folders in itertools.permutations((beta, alpha, gamma)):
        names = [domain.name for domain in FederatedDataModule([*folders], val="none").list_domains()]
        assert names == ["alpha", "beta", "gamma"]
        first, *others = folders
        mixed = FederatedDataModule([first, drawn, *others], val="none", dry_run=True).list_domains()
        assert [domain.name for domain in mixed] == ["alpha", "town0", "beta", "gamma"]
