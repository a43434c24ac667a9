"""Random splits of small test sets: what is drawn, that a file gives the same ones to everybody, GRID's own ones."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.images import GallerySplit
from fedsim.data.market import MarketFolders, write_market_splits
from fedsim.data.splits import official_grid_splits, read_splits, sample_splits, write_splits


def pool(seed=0, people=30, cameras=3, images=200):
    """Identities and cameras of a pool with junk (-1), distractors (0), single images and single cameras."""
    rng = np.random.default_rng(seed)
    pids = np.sort(rng.integers(-1, people + 1, images))
    camids = rng.integers(0, cameras, images)
    camids[pids == 1] = 0  # seen by one camera, and twice at least
    pids = np.append(pids, [1, 1, people + 1])  # the last one has one image
    return pids, np.append(camids, [0, 0, 0])


def can_match(pids, camids, cross_camera=True):
    """Identities of which one image can be found with another."""
    found = set()
    for pid in set(pids.tolist()) - {-1, 0}:
        own = camids[pids == pid]
        if len(own) > 1 and (not cross_camera or len(set(own.tolist())) > 1):
            found.add(pid)
    return found


def as_lists(splits):
    return [[part.tolist() for part in split] for split in splits]


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("style", ["one_query", "pairs"])
@pytest.mark.parametrize("cross_camera", [True, False])
def test_what_every_split_is(seed, style, cross_camera):
    pids, camids = pool(seed, people=40, images=150)
    possible = can_match(pids, camids, cross_camera)
    others = np.flatnonzero(~np.isin(pids, list(possible)))
    assert {-1, 0, 41} <= set(pids[others].tolist())  # junk, distractors, a single image
    assert (1 in pids[others]) == cross_camera  # seen by one camera
    for query, gallery in sample_splits(pids, camids, num=5, style=style, cross_camera=cross_camera):
        assert query.dtype == gallery.dtype == np.int64
        tested = pids[query]
        assert len(query) == round(0.5 * len(possible))
        assert len(set(tested.tolist())) == len(query)
        assert set(tested.tolist()) <= possible
        assert not set(query.tolist()) & set(gallery.tolist())
        assert (np.diff(gallery) > 0).all()  # sorted, and nobody twice: the order of the gallery breaks ties
        # of those who could be tested and are not, nothing is left; of those who cannot, everything
        assert set(pids[gallery].tolist()) & possible == set(tested.tolist())
        assert set(others.tolist()) <= set(gallery.tolist())
        for q in query:
            matches = gallery[pids[gallery] == pids[q]]
            if style == "pairs":
                assert len(matches) == 1
            else:
                assert len(matches) == (pids == pids[q]).sum() - 1
            if cross_camera:
                assert (camids[matches] != camids[q]).any()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.73, 1.0])
def test_the_fraction_is_of_the_identities_that_can_be_found(fraction):
    pids, camids = pool()
    possible = can_match(pids, camids)
    for query, _ in sample_splits(pids, camids, num=2, fraction=fraction):
        assert len(query) == round(fraction * len(possible))
    if fraction == 1:
        assert set(pids[query].tolist()) == possible


def test_ten_splits_differ_and_their_number_does_not_matter():
    pids, camids = pool()
    ten = as_lists(sample_splits(pids, camids))
    assert len(ten) == 10
    assert len({str(query) for query, _ in ten}) == 10
    assert len({str(sorted(pids[query])) for query, _ in ten}) == 10  # of different people, too
    assert as_lists(sample_splits(pids, camids, num=3)) == ten[:3]
    assert as_lists(sample_splits(pids, camids, num=12))[:10] == ten


def test_no_global_generator_has_a_say():
    pids, camids = pool()
    np.random.seed(1)  # noqa: NPY002 - the one that is meant
    before = as_lists(sample_splits(pids, camids))
    np.random.seed(2)  # noqa: NPY002 - as above
    assert as_lists(sample_splits(pids, camids)) == before


def test_every_identity_and_image_gets_its_turn():
    pids, camids = np.repeat(np.arange(1, 9), 4), np.tile([0, 1, 2, 3], 8)
    queries = np.concatenate([query for query, _ in sample_splits(pids, camids, num=200)])
    counts = np.bincount(queries, minlength=32)
    assert counts.sum() == 200 * 4
    assert counts.min() > 8  # 25 are expected
    assert counts.max() < 50
    found = np.concatenate([gallery for _, gallery in sample_splits(pids, camids, num=200, style="pairs")])
    assert np.bincount(found, minlength=32).min() > 8


def test_the_order_of_people_in_the_list_does_not_matter_that_of_their_images_does():
    """What holds: tested people follow from the sorted identities alone; the images of each from their order."""
    pids, camids = pool()
    rng = np.random.default_rng(9)
    # people in another order, the images of each in the order they had
    blocks = [np.flatnonzero(pids == pid) for pid in rng.permutation(np.unique(pids))]
    moved = np.concatenate(blocks)
    for before, after in zip(sample_splits(pids, camids), sample_splits(pids[moved], camids[moved]), strict=True):
        np.testing.assert_array_equal(before.query, moved[after.query])
        np.testing.assert_array_equal(before.gallery, np.sort(moved[after.gallery]))
    # everything in another order: the same people
    shuffled = rng.permutation(len(pids))
    for before, after in zip(sample_splits(pids, camids), sample_splits(pids[shuffled], camids[shuffled]), strict=True):
        assert pids[before.query].tolist() == pids[shuffled][after.query].tolist()
    # and so they are with other names in the same order
    other = np.where(pids > 0, 10 * pids + 3, pids)
    assert as_lists(sample_splits(other, camids)) == as_lists(sample_splits(pids, camids))


def test_a_camera_that_asks():
    """PRID: all queries from camera 0. VIPeR: the same people twice, one way and the other."""
    pids, camids = np.repeat(np.arange(1, 41), 2), np.tile([1, 0], 40)
    for query, gallery in sample_splits(pids, camids, style="pairs", asking=(0,)):
        assert set(camids[query].tolist()) == {0}
        assert set(camids[gallery].tolist()) == {1}
    there_and_back = sample_splits(pids, camids, style="pairs", asking=(0, 1))
    assert [set(camids[split.query].tolist()) for split in there_and_back] == [{0}, {1}] * 5
    people = [tuple(pids[split.query].tolist()) for split in there_and_back]
    assert people[::2] == people[1::2]
    assert len(set(people)) == 5
    plain = sample_splits(pids, camids, style="pairs", num=5)
    assert people[::2] == [tuple(pids[split.query].tolist()) for split in plain]  # of the people that are drawn anyway


def test_golden_splits():
    # published numbers refer to these: a change of the drawing is a change of everybody's results
    pids = np.array([-1, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6])
    camids = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 1])  # 5 is seen by one camera, 6 once
    assert as_lists(sample_splits(pids, camids, num=2)) == GOLDEN["one_query"]
    assert as_lists(sample_splits(pids, camids, num=2, style="pairs")) == GOLDEN["pairs"]
    ten = sample_splits(np.repeat(np.arange(1, 41), 5), np.tile([0, 0, 1, 2, 2], 40))
    assert hashlib.sha256(json.dumps(as_lists(ten)).encode()).hexdigest() == GOLDEN["ten"]


GOLDEN = {
    "one_query": [[[6, 10], [0, 1, 4, 5, 9, 11, 12, 13]], [[8, 10], [0, 1, 7, 9, 11, 12, 13]]],
    "pairs": [[[6, 10], [0, 1, 5, 9, 11, 12, 13]], [[8, 10], [0, 1, 7, 9, 11, 12, 13]]],
    "ten": "4257f8ca90897157b377ba9ce4141e28da8a136c9fea5af906b756abcbfdfdfd",
}


@pytest.mark.parametrize("fraction", [0.0, 0.001, -1.0, 1.5])
def test_a_fraction_of_nobody(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        sample_splits(*pool(), fraction=fraction)


def test_a_pool_in_which_nobody_can_be_found():
    pids, camids = np.array([1, 1, 2, 2, 3]), np.zeros(5, dtype=np.int64)
    with pytest.raises(ConfigError, match="cross_camera to false"):
        sample_splits(pids, camids)
    (split,) = sample_splits(pids, camids, num=1, cross_camera=False)
    assert len(split.query) == 1
    with pytest.raises(ConfigError):
        sample_splits(np.array([], dtype=np.int64), np.array([], dtype=np.int64))


# -- the file ----------------------------------------------------------------------------------------------------------


def names_of(pids):
    return [f"{pid:04d}_c1_{i}.png" for i, pid in enumerate(pids)]


@pytest.fixture
def written(tmp_path):
    """A file of three splits, and the names of the images."""
    pids, camids = pool()
    path = tmp_path / "splits.json"
    write_splits(path, sample_splits(pids, camids, num=3), names_of(pids))
    return path, names_of(pids)


def refused(path, names):
    with pytest.raises(DataError) as caught:
        read_splits(path, names)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_what_was_written_is_read(written):
    path, names = written
    splits = read_splits(path, names)
    assert isinstance(splits, tuple)
    assert all(isinstance(split, GallerySplit) for split in splits)
    assert all(part.dtype == np.int64 for split in splits for part in split)
    assert as_lists(splits) == as_lists(sample_splits(*pool(), num=3))


def test_the_file_is_the_same_every_time(written, tmp_path):
    path, names = written
    write_splits(tmp_path / "again.json", sample_splits(*pool(), num=3), names)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    content = json.loads(path.read_text())
    assert content["num_images"] == len(names)
    assert content["images_sha256"] == hashlib.sha256("\n".join(names).encode()).hexdigest()


def test_a_reformatted_file_is_the_same(written):
    path, names = written
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4).replace("\n", "\r\n"))
    assert as_lists(read_splits(path, names)) == as_lists(sample_splits(*pool(), num=3))


@pytest.mark.parametrize("part", ["query", "gallery"])
def test_a_changed_split(written, part):
    path, names = written
    content = json.loads(path.read_text())
    content["splits"][1][part][0] += 1
    path.write_text(json.dumps(content))
    assert "checksum" in refused(path, names)


def test_a_missing_split(written):
    path, names = written
    content = json.loads(path.read_text())
    del content["splits"][2]
    path.write_text(json.dumps(content))
    assert "checksum" in refused(path, names)


def test_other_images(written):
    path, names = written
    renamed = [*names[:-1], "9999_c1_0.png"]
    assert "another list of images" in refused(path, renamed)
    message = refused(path, [*names, "zzzz.png"])
    assert f"{len(names)} files, here {len(names) + 1}" in message
    assert "another list of images" in refused(path, names[:-1])
    assert "another list of images" in refused(path, names[::-1])  # positions are of sorted names


NO_SPLITS = {
    "empty": "",
    "no JSON": "query: 1",
    "cut": '{"num_images": 3, "images_sha256": "x", "spl',
    "a list": "[1, 2]",
    "a number": "3",
    "null": "null",
    "another object": '{"splits": []}',
    "no checksums": '{"num_images": 3, "splits": [{"query": [1], "gallery": [2]}]}',
    "no gallery": '{"images_sha256": "x", "splits_sha256": "x", "splits": [{"query": [1]}]}',
    "text": '{"images_sha256": "x", "splits_sha256": "x", "splits": [{"query": ["a"], "gallery": [1]}]}',
    "ragged": '{"images_sha256": "x", "splits_sha256": "x", "splits": [{"query": [1, [2]], "gallery": [1]}]}',
    "null splits": '{"images_sha256": "x", "splits_sha256": "x", "splits": null}',
    "too large": json.dumps(
        {"images_sha256": "x", "splits_sha256": "x", "splits": [{"query": [1], "gallery": [10**30]}]}
    ),
}


@pytest.mark.parametrize("content", NO_SPLITS)
def test_a_file_that_holds_no_splits(tmp_path, content):
    path = tmp_path / "splits.json"
    path.write_text(NO_SPLITS[content])
    assert "fedsim data splits" in refused(path, ["a"])


def test_a_file_that_cannot_be_read(tmp_path):
    assert "fedsim data splits" in refused(tmp_path / "nowhere.json", ["a"])
    assert "fedsim data splits" in refused(tmp_path, ["a"])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "fedsim data splits" in refused(tmp_path / "binary.json", ["a"])


# -- the command, and the data set that has the file -------------------------------------------------------------------


@pytest.fixture
def viper(tmp_path):
    """A small test set in Market-1501 layout without queries: eight people, two cameras, a distractor and junk."""
    folder = tmp_path / "viper"
    (folder / "bounding_box_test").mkdir(parents=True)
    names = [f"{pid:04d}_c{cam}s1_{shot:06d}_00.png" for pid in range(1, 9) for cam in (1, 2) for shot in range(2)]
    for name in [*names, "0000_c1s1_000000_00.png", "-1_c1s1_000000_00.png"]:
        Image.new("RGB", (4, 8)).save(folder / "bounding_box_test" / name)
    return folder


def refused_command(capsys, *args):
    code = main(["data", "splits", *map(str, args)])
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert code == 2, captured
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fedsim: error: ")
    return lines[0]


def test_the_command_writes_what_the_data_set_reads(viper, capsys):
    assert main(["data", "splits", "--folder", str(viper), "--num", "4"]) == 0
    assert capsys.readouterr().out == f"wrote {viper / 'splits.json'}: 4 splits of 4 queries, 14 gallery images\n"
    (domain,) = MarketFolders(str(viper)).domains()
    assert domain.name == "viper"
    assert domain.train is None
    assert len(domain.query) == 0
    assert len(domain.gallery) == 34
    assert as_lists(domain.splits) == as_lists(sample_splits(domain.gallery.pids, domain.gallery.camids, num=4))


def test_options_of_the_command(viper, capsys):
    assert main(["data", "splits", f"--folder={viper}", "--num=2", "--style=pairs", "--asking=[2]"]) == 0
    (domain,) = MarketFolders(str(viper)).domains()
    assert all(set(domain.gallery.camids[split.query].tolist()) == {1} for split in domain.splits)
    capsys.readouterr()
    options = ["--num=2", "--fraction=0.25", "--style=pairs", "--cross_camera=false"]
    assert main(["data", "splits", f"--folder={viper}", *options]) == 0
    assert "2 splits of 2 queries, 4 gallery images" in capsys.readouterr().out
    (domain,) = MarketFolders(str(viper)).domains()
    expected = sample_splits(
        domain.gallery.pids, domain.gallery.camids, num=2, fraction=0.25, style="pairs", cross_camera=False
    )
    assert as_lists(domain.splits) == as_lists(expected)


def test_with_the_file_a_query_folder_is_not_looked_at(viper):
    (viper / "query").mkdir()
    path, splits = write_market_splits(viper, num=2)
    assert path == viper / "splits.json"
    (domain,) = MarketFolders(str(viper)).domains()
    assert as_lists(domain.splits) == as_lists(splits)
    path.unlink()
    with pytest.raises(DataError, match="holds no images"):
        MarketFolders(str(viper)).domains()


def test_a_data_set_that_changed_after_the_splits_were_written(viper):
    write_market_splits(viper)
    one = viper / "bounding_box_test" / "0001_c1s1_000000_00.png"
    one.rename(one.with_name("0001_c2s1_000007_00.png"))
    with pytest.raises(DataError, match="another list of images"):
        MarketFolders(str(viper)).domains()
    write_market_splits(viper)  # the remedy
    MarketFolders(str(viper)).domains()


def test_mistakes_are_one_line(viper, capsys, tmp_path):
    folder = f"--folder={viper}"
    assert "nowhere is not there" in refused_command(capsys, f"--folder={tmp_path / 'nowhere'}")
    assert "'one_query', 'pairs'" in refused_command(capsys, folder, "--style=triples")
    assert "fraction: 0.01" in refused_command(capsys, folder, "--fraction=0.01")
    assert "folder" in refused_command(capsys)
    assert not (viper / "splits.json").exists()


@pytest.mark.parametrize("num", [0, -1, 10_001, 10**20])
def test_numbers_of_splits_that_nothing_needs_are_refused(viper, capsys, num):
    assert "num" in refused_command(capsys, f"--folder={viper}", f"--num={num}")
    assert not (viper / "splits.json").exists()


# -- GRID --------------------------------------------------------------------------------------------------------------


def grid_pool():
    """250 people in the probe folder and in the gallery folder, and 775 images of nobody."""
    pids = np.concatenate([np.arange(1, 251), np.zeros(775, dtype=np.int64), np.arange(1, 251)])
    is_probe = np.arange(len(pids)) < 250
    return pids, is_probe


def grid_file(path, people=125, partitions=10, compressed=True, **changes):
    """A file like features_and_partitions.mat, as its ``sample.m`` and torchreid's grid.py read it.

    ``trainIdxAll`` and ``testIdxAll`` are rows of ten cells. A cell holds a structure with the fields ``probeImIdx``,
    ``galleryImIdx`` and ``personIdx``, rows of numbers in this order; ``ftrset`` is a table of features of all images.
    """
    rng = np.random.default_rng(0)
    content = {name: np.empty((1, partitions), dtype=object) for name in ("testIdxAll", "trainIdxAll")}
    for i in range(partitions):
        order = rng.permutation(np.arange(1, 251))
        for cells, chosen in zip(content.values(), (order[people:], order[:people]), strict=True):
            numbers = np.sort(chosen)[None].astype(np.float64)
            cells[0, i] = {"probeImIdx": 2 * numbers, "galleryImIdx": 2 * numbers - 1, "personIdx": numbers}
    savemat(path, {"ftrset": np.zeros((1275, 3))} | content | changes, do_compression=compressed)
    return [set(cell["personIdx"].ravel().astype(int).tolist()) for cell in content["trainIdxAll"][0]]


def test_torchreids_path_into_grids_file_leads_to_the_same_people(tmp_path):
    """torchreid's grid.py, which works on the real file, takes ``trainIdxAll[0][split][0][0][2][0]``, 125 people."""
    path = tmp_path / "features_and_partitions.mat"
    for compressed in (True, False):  # MATLAB's -v7 and -v6
        grid_file(path, compressed=compressed)
        pids, is_probe = grid_pool()
        theirs = [set(cell[0][0][2][0].tolist()) for cell in loadmat(path)["trainIdxAll"][0]]
        assert [len(people) for people in theirs] == [125] * 10
        for people, (query, _) in zip(theirs, official_grid_splits(path, pids, is_probe), strict=True):
            assert set(pids[query].tolist()) == set(range(1, 251)) - people


def test_grids_own_partitions(tmp_path):
    path = tmp_path / "features_and_partitions.mat"
    trained = grid_file(path)
    pids, is_probe = grid_pool()
    splits = official_grid_splits(path, pids, is_probe)
    assert len(splits) == 10
    for (query, gallery), identities in zip(splits, trained, strict=True):
        assert len(query) == 125
        assert len(gallery) == 900
        assert is_probe[query].all()
        assert not is_probe[gallery].any()
        assert set(pids[query].tolist()) == set(range(1, 251)) - identities
        assert set(pids[gallery].tolist()) == (set(range(251)) - identities)
        assert (pids[gallery] == 0).sum() == 775
        assert (np.diff(query) > 0).all()
        assert (np.diff(gallery) > 0).all()
    write_splits(tmp_path / "splits.json", splits, [str(i) for i in range(len(pids))])
    assert as_lists(read_splits(tmp_path / "splits.json", [str(i) for i in range(len(pids))])) == as_lists(splits)


def test_the_order_of_grids_images_is_ours(tmp_path):
    path = tmp_path / "grid.mat"
    trained = grid_file(path)
    pids, is_probe = grid_pool()
    order = np.random.default_rng(1).permutation(len(pids))
    query, gallery = official_grid_splits(path, pids[order], is_probe[order])[0]
    assert set(pids[order][query].tolist()) == set(range(1, 251)) - trained[0]
    assert (len(query), len(gallery)) == (125, 900)


def test_a_probe_image_of_nobody_is_no_query(tmp_path):
    path = tmp_path / "grid.mat"
    grid_file(path)
    pids, is_probe = grid_pool()
    query, gallery = official_grid_splits(path, np.append(pids, 0), np.append(is_probe, True))[0]
    assert (len(query), len(gallery)) == (125, 900)


def test_partitions_of_other_images_are_refused(tmp_path):
    path = tmp_path / "grid.mat"
    pids, is_probe = grid_pool()
    for people in (0, 250):  # nobody is trained on, or tested on
        grid_file(path, people=people)
        with pytest.raises(DataError, match=f"{path}: partition 0 does not fit"):
            official_grid_splits(path, pids, is_probe)
    grid_file(path)
    with pytest.raises(DataError, match="partition 0 does not fit"):
        official_grid_splits(path, np.where(pids > 200, 0, pids), is_probe)


def test_other_mat_files_are_refused(tmp_path):
    path = tmp_path / "grid.mat"
    for content in ({"somethingElse": np.zeros(3)}, {"trainIdxAll": "text"}, {"trainIdxAll": np.array([[{"a": 1}]])}):
        savemat(path, content)
        with pytest.raises(DataError, match=f"{path}: is not GRID's file"):
            official_grid_splits(path, *grid_pool())


NO_MAT_FILES = {
    "empty": b"",
    "text": b"no MATLAB file at all" * 20,
    "version 7.3": b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF" * 100,
}


@pytest.mark.parametrize("content", NO_MAT_FILES)
def test_files_that_are_no_mat_files_are_refused(tmp_path, content):
    path = tmp_path / "grid.mat"
    path.write_bytes(NO_MAT_FILES[content])
    with pytest.raises(DataError, match=f"{path}: is not GRID's file"):
        official_grid_splits(path, *grid_pool())


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_truncated_mat_file_is_refused(tmp_path, share):
    path = tmp_path / "grid.mat"
    grid_file(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match=f"{path}: is not GRID's file"):
        official_grid_splits(path, *grid_pool())


def test_a_missing_mat_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        official_grid_splits(tmp_path / "nowhere.mat", *grid_pool())
