"""Each data set is read from a small tree in its own layout."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.check import find_data, findings_in, table_of
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.datasets import (
    CAVIAR4REID,
    CIFAR10,
    CUHK01,
    CUHK02,
    CUHK03,
    CUHK03NP,
    CUHKSYSU,
    GRID,
    ILIDS,
    MSMT17,
    PRID2011,
    Counts,
    DukeMTMC,
    Market1501,
    Omniglot,
    ThreeDPeS,
    VIPeR,
)
from fedsim.data.images import ReIDSource
from fedsim.data.market import MarketFolders
from fedsim.data.standins import STANDINS, write_standin
from fedsim.data.synthetic import SyntheticReID

SMALL = (CUHK01, PRID2011, VIPeR, ThreeDPeS, ILIDS, GRID, CAVIAR4REID)
KINDS = (Market1501, CUHK03NP, CUHK03, MSMT17, CUHK02, CUHKSYSU, *SMALL)
PEOPLE = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standins")
    for name in STANDINS:
        write_standin(name, folder, PEOPLE, size=(16, 8))
    return folder


def only(data_set):
    (domain,) = data_set.domains()
    return domain


def sizes(domain):
    train = (None, None) if domain.train is None else (len(domain.train.identities), len(domain.train))
    return (*train, len(domain.query), len(domain.gallery))


def expected_of(name, people=PEOPLE):
    """Training identities, training images, queries, gallery; counted by hand from the layouts."""
    half = people // 2
    return {
        # six cameras: two shots train, one asks, two answer; one junk image and one distractor
        "market1501": (people, 12 * people, 6 * people, 12 * people + 2),
        "dukemtmc": (people, 16 * people, 8 * people, 16 * people),
        "cuhk03np": (people, 4 * people, 2 * people, 4 * people),
        "cuhk03": (people, 6 * people, 2 * people, 4 * people),  # of three images, the last asks
        "msmt17": (people, 5 * people, 3 * people, 3 * people),  # of six, one validates
        "cuhk01": (half, 4 * half, 2 * half, 2 * half),
        "cuhk02": (4 * people, 16 * people, 2 * people, 2 * people),
        "prid2011": (half, 2 * half, half, half + half),  # half of the people in camera b alone, always in the gallery
        "viper": (half, 2 * half, half, half),
        "3dpes": (half, 4 * half, 2 * half, 2 * half),
        "ilids": (half, 4 * half, 2 * half, 2 * half),
        "grid": (half, 2 * half, half, half + 4),  # four distractors
        "caviar4reid": (half, 20 * half, 10 * half, 10 * half),
        "cuhksysu": (people, 3 * people, people, 2 * people),
    }[name]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_data_set_is_read_from_its_layout(root, kind):
    domain = only(kind(str(root)))
    assert domain.name == kind.name
    assert sizes(domain) == expected_of(kind.name)
    assert not np.intersect1d(domain.train.pids, domain.query.pids).size
    assert min(domain.train.pids.min(), domain.query.pids.min()) > 0  # 0 means a distractor
    # each query has a match in another camera
    for pid, camera in zip(domain.query.pids, domain.query.camids, strict=True):
        assert (domain.gallery.camids[domain.gallery.pids == pid] != camera).any()
    assert domain.train.images.take(np.array([0])).decode((16, 8)).shape == (1, 3, 16, 8)


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.__name__)
def test_a_small_data_set_can_be_scored_on_ten_random_splits(root, kind):
    domain = only(kind(str(root), protocol="splits"))
    assert domain.train is None
    assert len(domain.query) == 0
    assert len(domain.splits) == 10
    for query, gallery in domain.splits:
        assert not np.intersect1d(query, gallery).size
        assert len(query) == PEOPLE // 2
        for image in query:
            matches = gallery[domain.gallery.pids[gallery] == domain.gallery.pids[image]]
            assert (domain.gallery.camids[matches] != domain.gallery.camids[image]).any()


def test_who_asks_in_the_splits_of_small_data_sets(root):
    """As torchreid's prid.py, viper.py and ilids.py, which the code of papers 000 and 001 holds copies of.

    PRID: camera a asks. VIPeR: every half twice, camera a asks first. Elsewhere any two images of a person are paired.
    """

    def asked(kind):
        domain = only(kind(str(root), protocol="splits"))
        return [set(domain.gallery.camids[split.query].tolist()) for split in domain.splits]

    assert asked(PRID2011) == [{0}] * 10
    assert asked(VIPeR) == [{0}, {1}] * 5
    for kind, images in ((ILIDS, 4), (ThreeDPeS, 4), (CAVIAR4REID, 20)):
        domain = only(kind(str(root), protocol="splits"))
        assert set(domain.gallery.camids.tolist()) == set(range(images))  # each a camera of its own: none is junk
        assert {(len(split.query), len(split.gallery)) for split in domain.splits} == {(PEOPLE // 2, PEOPLE // 2)}


def test_people_of_one_camera_are_paired_in_caviars_splits(tmp_path):
    """Paper 001, Table 1: 36 of 72 people and 72 images, though only 50 people are seen by two cameras."""
    fill(tmp_path / "CAVIAR4REID", [f"{pid:04d}{i:03d}.jpg" for pid in range(1, 73)
                                    for i in range(1, 21 if pid <= 50 else 11)])  # fmt: skip
    for query, gallery in only(CAVIAR4REID(str(tmp_path), protocol="splits")).splits:
        assert (len(query), len(gallery)) == (36, 36)


@pytest.mark.parametrize("kind", [VIPeR, CUHK01], ids=lambda kind: kind.__name__)
def test_half_splits_depend_on_the_seed_alone(root, kind):
    first, again, other = (only(kind(str(root), seed=seed)) for seed in (0, 0, 1))
    assert first.train.pids.tolist() == again.train.pids.tolist()
    assert sorted(first.train.identities) != sorted(other.train.identities)


def test_the_folder_itself_can_be_given(root):
    assert sizes(only(VIPeR(str(root / "VIPeR")))) == expected_of("viper")
    assert sizes(only(CAVIAR4REID(str(root / "CAVIAR4REID")))) == expected_of("caviar4reid")


def test_market1501_keeps_distractors_and_junk_in_the_gallery(root):
    domain = only(Market1501(str(root)))
    assert {-1, 0} <= set(domain.gallery.pids.tolist())
    assert domain.train.pids.min() > 0


def test_duke_needs_a_word_that_it_is_withdrawn(root):
    with pytest.raises(ConfigError, match="i_know_duke_is_withdrawn"):
        DukeMTMC(str(root)).domains()
    assert sizes(only(DukeMTMC(str(root), i_know_duke_is_withdrawn=True))) == expected_of("dukemtmc")


def test_msmt17_has_cameras_of_two_digits_and_a_list_to_validate(root):
    train = only(MSMT17(str(root))).train
    both = only(MSMT17(str(root), train="train+val")).train
    assert sorted(set(both.camids.tolist())) == [0, 9, 14]
    assert len(both) == 6 * PEOPLE > len(train)
    assert both.images.paths == tuple(sorted(both.images.paths))


def test_msmt17_version_1_has_other_folders(root, tmp_path):
    shutil.copytree(root / "MSMT17_V2", tmp_path / "MSMT17_V1")
    for old, new in (("mask_train_v2", "train"), ("mask_test_v2", "test")):
        (tmp_path / "MSMT17_V1" / old).rename(tmp_path / "MSMT17_V1" / new)
    assert sizes(only(MSMT17(str(tmp_path)))) == expected_of("msmt17")


def test_cuhk03_names_of_the_mat_file_are_read(root, tmp_path):
    shutil.copytree(root / "cuhk03-np" / "labeled", tmp_path / "cuhk03-np" / "labeled")
    for path in (tmp_path / "cuhk03-np" / "labeled").rglob("*.png"):
        pid, camera, image = path.stem.split("_")
        path.rename(path.with_name(f"1_{int(pid):03d}_{camera[1]}_{int(image):02d}.png"))
    domain = only(CUHK03NP(str(tmp_path), variant="labeled"))
    assert sizes(domain) == expected_of("cuhk03np")
    assert set(domain.train.camids.tolist()) == {0, 1}


def test_cuhk02_can_leave_out_the_people_of_cuhk01(root):
    train = only(CUHK02(str(root), exclude_p1=True)).train
    assert len(train.identities) == 3 * PEOPLE
    assert train.camids.min() == 2


def test_prid_multi_shot_trains_on_ten_frames_also_of_people_in_one_camera(root):
    domain = only(PRID2011(str(root), shots="multi"))
    shared, alone = PEOPLE // 2, PEOPLE // 2
    assert len(domain.train.identities) == shared + alone
    assert len(domain.train) == 10 * (2 * shared + alone)
    assert sizes(domain)[2:] == expected_of("prid2011")[2:]
    assert not np.intersect1d(domain.train.pids, domain.query.pids).size


def test_cuhk_sysu_without_training_images_is_only_tested_on(root, tmp_path):
    shutil.copytree(root / "cuhksysu4reid", tmp_path / "CUHK-SYSU")
    shutil.rmtree(tmp_path / "CUHK-SYSU" / "train")
    domain = only(CUHKSYSU(str(tmp_path)))
    assert sizes(domain) == (None, None, *expected_of("cuhksysu")[2:])
    assert set(domain.query.camids.tolist()) == {0}
    assert set(domain.gallery.camids.tolist()) == {1}


def test_cuhk_sysu_has_one_gallery_for_all_queries_whatever_splits_lie_beside_it(root, tmp_path):
    shutil.copytree(root / "cuhksysu4reid", tmp_path / "CUHK-SYSU")
    (tmp_path / "CUHK-SYSU" / "splits.json").write_text("{}")
    domain = only(CUHKSYSU(str(tmp_path)))
    assert (sizes(domain), domain.splits) == (expected_of("cuhksysu"), ())


def test_cuhk_sysu_may_leave_out_the_letter_of_an_identity(root, tmp_path):
    shutil.copytree(root / "cuhksysu4reid", tmp_path / "cuhksysu4reid")
    for path in (tmp_path / "cuhksysu4reid").rglob("p*.jpg"):
        pid, rest = path.name[1:].split("_", 1)
        path.rename(path.with_name(f"{int(pid):05d}_{rest}"))
    ours, theirs = only(CUHKSYSU(str(tmp_path))), only(CUHKSYSU(str(root)))
    assert sorted(ours.gallery.pids) == sorted(theirs.gallery.pids)
    assert sizes(ours) == sizes(theirs)


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [("train", "p9_s900_3.jpg", r"cuhksysu4reid: identity 0009 is both in train and in query; test identities must be"),
     ("query", "p99_s1_1.jpg", r"cuhksysu4reid/query: identity 0099 has no image in gallery"),
     ("gallery", "p0_s1_1.jpg", r"gallery/p0_s1_1\.jpg: the name does not begin like p11422_s16929")],
)  # fmt: skip
def test_rules_of_cuhk_sysu_are_named(root, tmp_path, part, name, message):
    shutil.copytree(root / "cuhksysu4reid", tmp_path / "cuhksysu4reid")
    Image.new("RGB", (8, 16)).save(tmp_path / "cuhksysu4reid" / part / name)
    with pytest.raises(DataError, match=message) as error:
        CUHKSYSU(str(tmp_path)).domains()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["iLIDS-VID", "i-LIDS-VID"])
def test_ilids_under_the_papers_name_is_read_with_a_warning(root, tmp_path, caplog, name):
    assert sizes(only(ILIDS(str(root)))) == expected_of("ilids")
    assert not caplog.records
    shutil.copytree(root / "i-LIDS_Pedestrian", tmp_path / name)
    for given in (tmp_path, tmp_path / name):
        caplog.clear()
        assert sizes(only(ILIDS(str(given)))) == expected_of("ilids")
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"{tmp_path / name} holds images of QMUL i-LIDS" in record.getMessage()


def test_the_videos_of_ilids_vid_are_refused(root, tmp_path):
    (tmp_path / "i-LIDS-VID" / "sequences" / "cam1").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "i-LIDS-VID"):
        with pytest.raises(DataError, match=r"i-LIDS-VID: holds the videos of iLIDS-VID .* mean QMUL i-LIDS"):
            ILIDS(str(given)).domains()
    shutil.copytree(root / "i-LIDS_Pedestrian", tmp_path / "i-LIDS_Pedestrian")  # beside it, the right one is found
    assert sizes(only(ILIDS(str(tmp_path)))) == expected_of("ilids")


def test_official_splits_of_grid_need_their_file(root, tmp_path):
    shutil.copytree(root / "underground_reid", tmp_path / "grid")
    (tmp_path / "grid" / "features_and_partitions.mat").unlink()
    with pytest.raises(DataError, match=r"features_and_partitions\.mat"):
        only(GRID(str(tmp_path), protocol="splits"))


@pytest.mark.parametrize("kind", [*KINDS, Omniglot, CIFAR10], ids=lambda kind: kind.__name__)
def test_a_missing_data_set_is_one_line_that_says_whom_to_ask(tmp_path, kind):
    data_set = kind(str(tmp_path / "nothing"))
    with pytest.raises(DataError) as error:
        data_set.domains()
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert kind.ask in str(error.value)


@pytest.mark.parametrize(
    ("kind", "folder"),
    [(VIPeR, "VIPeR/cam_a"), (CUHK01, "CUHK01/campus"), (ILIDS, "i-LIDS_Pedestrian/Persons"),
     (GRID, "underground_reid/probe"), (Market1501, "Market-1501-v15.09.15/query"),
     (PRID2011, "prid_2011/single_shot/cam_a"), (CUHKSYSU, "cuhksysu4reid/query"),
     (Omniglot, "omniglot-py/images_background/Latin/character02")],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_name_that_does_not_fit_is_named(root, tmp_path, kind, folder):
    shutil.copytree(root, tmp_path / "copy")
    path = tmp_path / "copy" / folder / "nonsense.png"
    Image.new("RGB", (8, 16)).save(path)
    with pytest.raises(DataError, match=r"nonsense\.png: the name does not begin like"):
        kind(str(tmp_path / "copy")).domains()


def test_a_broken_list_is_named_with_its_line(root, tmp_path):
    shutil.copytree(root / "MSMT17_V2", tmp_path / "MSMT17_V2")
    path = tmp_path / "MSMT17_V2" / "list_query.txt"
    path.write_text(path.read_text() + "no identity\n\n")
    with pytest.raises(DataError, match=rf"list_query\.txt: line {3 * PEOPLE + 1} is not"):
        MSMT17(str(tmp_path)).domains()


@pytest.mark.parametrize("kind", [*KINDS, DukeMTMC, CIFAR10], ids=lambda kind: kind.__name__)
def test_a_dry_run_needs_no_data_and_no_word_about_duke(tmp_path, kind):
    source = kind(str(tmp_path / "nowhere"))
    data = FederatedDataModule(source, val="none", size=(32, 16), dry_run=True)
    (client,) = data.federated.clients
    assert client.name == kind.name
    assert client.num_images >= 12  # those of a small set are one batch
    assert data.decode(client.train.images.take(np.arange(2)), "two").shape == (2, 3, 32, 16)
    assert source.root == tmp_path / "nowhere"  # the source itself stays what it was


def test_a_dry_run_has_the_alphabets_that_were_asked_for():
    some = Omniglot("nowhere", alphabets=["Tengwar", "Japanese_(katakana)"])
    more = Omniglot("nowhere", alphabets=["Korean"])
    data = FederatedDataModule([some, more], val="none", size=(32, 32), dry_run=True)
    assert [client.name for client in data.federated.clients] == ["Korean", "Japanese_katakana"]
    assert data.federated.unseen == ("Tengwar",)
    assert min(client.num_images for client in data.federated.clients) >= 32
    assert some.alphabets == ["Tengwar", "Japanese_(katakana)"]
    few = FederatedDataModule(Omniglot("nowhere"), val="none", dry_run=True).federated
    assert ([client.name for client in few.clients], few.unseen) == (["Latin", "Greek"], ("Angelic",))


def test_a_dry_run_leaves_nothing_behind():
    data = FederatedDataModule(VIPeR("nowhere"), val="none", dry_run=True)
    folder = data.federated.clients[0].train.images.parts[0].paths[0].parents[2]
    assert folder.is_dir()
    data._standins.cleanup()
    assert not folder.exists()


class OwnSource(ReIDSource):
    """A data set of a user."""

    def domains(self):
        return SyntheticReID(clients=1, unseen=0, scale=0.2, seed=9).domains()


def test_a_dry_run_keeps_drawn_people_and_sources_of_ones_own(caplog, market_tree):
    synthetic = SyntheticReID(clients=2, unseen=1, scale=0.2)
    domains = FederatedDataModule(synthetic, size=(32, 16), dry_run=True).list_domains()
    assert [domain.name for domain in domains] == ["town0", "town1", "new0"]
    caplog.set_level("INFO")
    own = [OwnSource(), MarketFolders(str(market_tree)), VIPeR("nowhere")]
    found = FederatedDataModule(own, val="none", dry_run=True).list_domains()
    kept = FederatedDataModule(own[:2], val="none").list_domains()
    assert [domain.name for domain in found] == [*(domain.name for domain in kept), "viper"]
    assert [len(domain.gallery) for domain in found[:-1]] == [len(domain.gallery) for domain in kept]
    said = " ".join(caplog.messages)
    for name in ("OwnSource", "MarketFolders"):
        assert f"data.dry_run: {name} has no stand-in, so its own images are read" in said
    assert "SyntheticReID" not in said


def test_an_unknown_standin_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no stand-in for nobody"):
        write_standin("nobody", tmp_path)


# -- fedsim data check -------------------------------------------------------------------------------------------------


def test_check_compares_with_official_counts(root):
    findings = {finding.name: finding for finding in find_data(root)}
    assert findings["viper"].found == Counts(*expected_of("viper"))
    assert findings["viper"].official == Counts(316, 632, 316, 316)
    assert findings["viper"].problem == "not complete: compare the numbers"
    assert findings["ilids"].problem == ""  # no official counts of the half split
    assert "dukemtmc" not in findings  # nobody is told to look for it


def test_check_says_what_it_recognised_and_how_many_images_are_read(root, tmp_path):
    shutil.copytree(root / "underground_reid", tmp_path / "grid" / "underground_reid")  # where torchreid has it
    shutil.copytree(root / "cuhk03-np" / "labeled", tmp_path / "cuhk03-np" / "labeled")
    Image.new("RGB", (8, 16)).save(tmp_path / "grid" / "underground_reid" / "cover.png")
    findings = {finding.name: finding for finding in find_data(tmp_path)}
    assert findings["grid"].layout == "underground_reid: probe, gallery; 20 of 21 images"
    assert findings["grid"].problem == "not complete: compare the numbers"
    assert findings["cuhk03np"].problem.startswith("not there")
    assert findings["cuhk03np, labeled"].layout == "cuhk03-np: labeled; 80 of 80 images"
    (tmp_path / "grid" / "underground_reid" / "features_and_partitions.mat").write_bytes(b"something else")
    findings = {finding.name: finding for finding in find_data(tmp_path)}
    assert "protocol splits: " in findings["grid"].problem
    assert "is not GRID's file of partitions" in findings["grid"].problem


def test_check_names_what_is_missing_or_broken(root, tmp_path):
    shutil.copytree(root / "VIPeR", tmp_path / "VIPeR")
    shutil.rmtree(tmp_path / "VIPeR" / "cam_b")
    (tmp_path / "VIPeR" / "cam_b").mkdir()
    text = table_of(findings_in(tmp_path, everything=True))
    assert "not there; ask its authors, Liang Zheng et al." in text
    assert "holds no images" in " ".join(text.split())
    assert "caviar4reid" in text
    with pytest.raises(DataError, match="no such folder"):
        table_of(findings_in(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("kind", "identities"),
    [(VIPeR, 632), (CUHK01, 971), (GRID, 250)],
    ids=["viper", "cuhk01", "grid"],
)
def test_a_complete_small_data_set_has_its_official_counts(tmp_path, kind, identities):
    folder, layout, _ = STANDINS[kind.name]
    image = tmp_path / "pixel.png"
    Image.new("RGB", (1, 1)).save(image)
    for picture in layout(identities):
        path = tmp_path / folder / picture.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(image)
    if kind is GRID:  # 775 distractors, of which the layout has four
        for number in range(771):
            (tmp_path / folder / "gallery" / f"0000_1_{number}_9.jpeg").hardlink_to(image)
    assert sizes(only(kind(str(tmp_path)))) == tuple(kind.official)


def fill(folder, names):
    """Files of one pixel; all are the same file."""
    folder.mkdir(parents=True)
    first = folder / "first"
    Image.new("RGB", (1, 1)).save(first, format="png")
    for name in names:
        (folder / name).hardlink_to(first)
    first.unlink()


def market_names(count, people, first):
    """People take turns, and so do cameras."""
    return [f"{first + i % people:04d}_c{i // people % 6 + 1}s1_{i:06d}_00.jpg" for i in range(count)]


def test_market1501_of_official_size_is_complete(tmp_path):
    root = tmp_path / "Market-1501-v15.09.15"
    fill(root / "bounding_box_train", market_names(12_936, 751, 1))
    fill(root / "query", market_names(3_368, 750, 752))
    distractors = [f"0000_c1s1_{i:06d}_00.jpg" for i in range(2_798)]
    junk = [f"-1_c1s1_{i:06d}_00.jpg" for i in range(3_819)]
    fill(root / "bounding_box_test", market_names(13_115, 750, 752) + distractors + junk)
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "market1501")
    assert finding.found == Counts(751, 12_936, 3_368, 19_732)
    assert finding.problem == ""
    counts = "751 / 12,936 / 3,368 / 19,732"
    layout = "Market-1501-v15.09.15:"  # the parts are in the next lines of the column
    (line,) = (line for line in table_of(findings_in(tmp_path)).splitlines() if line.startswith("market1501"))
    assert " ".join(line.split()) == f"market1501 {counts} {counts} {layout} complete"
    assert finding.layout == f"{layout} bounding_box_train, query, bounding_box_test; 36,036 of 36,036 images"
    next((root / "query").iterdir()).unlink()
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "market1501")
    assert finding.problem == "not complete: compare the numbers"


@pytest.mark.parametrize("trains", [False, True])
def test_cuhk_sysu_of_official_size_is_complete(tmp_path, trains):
    """How many training images there are is left open."""
    root = tmp_path / "cuhksysu4reid"
    fill(root / "query", [f"p{pid}_s{pid}_1.jpg" for pid in range(1, 2_901)])
    fill(root / "gallery", [f"p{i % 2_900 + 1}_s{i}_1.jpg" for i in range(5_447)])
    if trains:
        fill(root / "train", [f"p{pid}_s{pid}_1.jpg" for pid in range(3_000, 3_010)])
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "cuhksysu")
    assert finding.found == Counts(*((10, 10) if trains else (None, None)), 2_900, 5_447)
    assert finding.problem == ""
    next((root / "query").iterdir()).unlink()
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "cuhksysu")
    assert finding.problem == "not complete: compare the numbers"


def msmt17_lines(count, people):
    """Cameras 1 to 15, two digits."""
    return "".join(
        f"{i % people:04d}/{i % people:04d}_{i:05d}_{i // people % 15 + 1:02d}_0303morning_0015_0.jpg {i % people}\n"
        for i in range(count)
    )


@pytest.mark.parametrize(("train", "count"), [("train", 30_248), ("train+val", 32_621)])
def test_msmt17_of_official_size_is_complete(tmp_path, train, count):
    root = tmp_path / "MSMT17_V2"
    for part in ("mask_train_v2", "mask_test_v2"):
        (root / part).mkdir(parents=True)
    lists = {"train": (30_248, 1_041), "val": (2_373, 1_041), "query": (11_659, 3_060), "gallery": (82_161, 3_060)}
    for name, (size, people) in lists.items():
        (root / f"list_{name}.txt").write_text(msmt17_lines(size, people))
    domain = only(MSMT17(str(tmp_path), train=train))
    assert sizes(domain) == (1_041, count, 11_659, 82_161) == tuple(MSMT17(str(tmp_path), train=train).official)
    assert sorted(set(domain.gallery.camids.tolist())) == list(range(15))
    assert len(domain.query.identities) == 3_060


def test_an_own_folder_with_the_name_of_a_part_is_no_data_set_of_a_paper(market_tree, tmp_path):
    for name in ("campus", "other"):
        (tmp_path / name).symlink_to(market_tree / "north")
    assert [finding.name for finding in findings_in(tmp_path)] == ["campus", "other"]
    assert all(finding.is_usable for finding in findings_in(tmp_path))


def test_an_own_folder_in_market_1501s_layout_is_not_called_market_1501(market_tree, tmp_path, monkeypatch):
    """Also if it is the folder that is looked at; under one of its usual names it is that set, and not complete."""
    folder = shutil.copytree(market_tree / "north", tmp_path / "mine")
    monkeypatch.chdir(folder)
    for root in (folder, Path()):
        [finding] = findings_in(root)
        assert (finding.name, finding.official, finding.is_usable) == ("mine", None, True)
        assert finding.problem == "your own; can be used"
    folder = folder.rename(tmp_path / "DukeMTMC-reID")
    assert "its owners withdrew it: leave it out" in findings_in(folder)[0].notes
    folder = folder.rename(tmp_path / "Market-1501")
    [finding] = findings_in(folder)
    assert (finding.name, finding.problem) == ("market1501", "not complete: compare the numbers")
