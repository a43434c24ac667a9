"""Every file in the folders of a data set is read, or counted and named with the reason; no number is too large."""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.data import FederatedDataModule, datasets
from fedsim.data.check import find_data, findings_in, table_of
from fedsim.data.datasets import MSMT17, FedReIDBench, Omniglot
from fedsim.data.leftovers import BY_PROTOCOL, IGNORABLE, SUFFIXES, LeftOut, images_outside, left_out_in, summary
from fedsim.data.listing import label_images
from fedsim.data.market import PARTS, MarketFolders, left_out_of, write_market_splits
from fedsim.data.splits import read_splits
from fedsim.data.standins import write_standin
from sites import one_line, put, site

TRAIN, QUERY, GALLERY = PARTS

# -- nothing goes missing without a word -------------------------------------------------------------------------------

OTHERS = [".jfif", ".ppm", ".gif", ".avif", ".heic", ".jpg~", ".txt", ".", "", ".jpg.part", ".JPG2", ". jpg"]
SUFFIXES_DRAWN = [*sorted(SUFFIXES), *map(str.upper, sorted(SUFFIXES)), *OTHERS]
PREFIXES_DRAWN = ["", "._", ".", "~$"]
RUBBISH_DRAWN = ["Thumbs.db", "desktop.ini", ".DS_Store", "0001_c1.jpg:Zone.Identifier", "ehthumbs.db", "._.DS_Store"]
FOLDERS_DRAWN = ["", "", "", "0001", "0001/cam2", ".ipynb_checkpoints", "__MACOSX", "@eaDir", "0002.jpg", "a b"]


def draw(part, rng):
    """Put a file of a random name somewhere in a part of a data set; return it."""
    folder = part / FOLDERS_DRAWN[rng.integers(len(FOLDERS_DRAWN))]
    prefix = PREFIXES_DRAWN[max(0, rng.integers(-6, 4))]
    name = f"{prefix}{rng.integers(1, 6):04d}_c{rng.integers(1, 4)}s1_{rng.integers(99)}"
    name += SUFFIXES_DRAWN[rng.integers(len(SUFFIXES_DRAWN))]
    if rng.random() < 0.1:
        name = RUBBISH_DRAWN[rng.integers(len(RUBBISH_DRAWN))]
    return put(folder / name)


@pytest.mark.parametrize("seed", range(5))
def test_each_of_the_files_drawn_is_read_or_named(tmp_path, seed):
    rng = np.random.default_rng([2, seed])
    folder = site(tmp_path / "site")
    drawn = {draw(folder / TRAIN, rng) for _ in range(120)}
    [domain] = MarketFolders(str(folder)).domains()
    read = {path for part in domain.parts for path in part.images.locations()}
    named = {item.path for item in left_out_of(folder, domain)}
    accounted = read | named
    slipped = [path for path in drawn if not accounted & {path, *path.parents}]
    assert slipped == []
    assert not read & named
    assert all(path.parent == folder / TRAIN and path.suffix.lower() in SUFFIXES for path in drawn & read)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(f"{TRAIN}/0001_c1s1_7.jfif", "with another suffix than .bmp"), (f"{TRAIN}/0001_c1s1_7", "without a suffix"),
     (f"{QUERY}/0011_c1s1_7.avif", "with another suffix"), (f"{GALLERY}/0011/0011_c1s1_7.jpg", "in sub-folders"),
     (f"{TRAIN}/._0001_c1s1_7.jpg", IGNORABLE), (f"{GALLERY}/Thumbs.db", IGNORABLE),
     (f"{TRAIN}/.ipynb_checkpoints/0001_c1s1_7-checkpoint.jpg", IGNORABLE), (f"{TRAIN}/-1_c1s1_7.jpg", BY_PROTOCOL),
     ("bounding_box_trian/0001_c1s1_7.jpg", "outside of bounding_box_train"), ("0001_c1s1_7.jpg", "outside of")],
)  # fmt: skip
def test_a_reason_is_given_by_the_check_and_at_the_start_of_a_fit(tmp_path, caplog, name, reason):
    folder = site(tmp_path / "site")
    path = put(folder / name)
    shown = ".ipynb_checkpoints" if "checkpoints" in name else path.name
    text = one_line(table_of(findings_in(tmp_path)))
    assert "your own; can be used; not read: 1 " in text
    assert reason in text
    assert shown in text
    caplog.set_level(logging.INFO)
    data = FederatedDataModule(MarketFolders(str(tmp_path)), val="none")
    assert len(data.federated.clients) == 1
    lines = [record for record in caplog.records if "files that are not read" in record.message]
    if reason == BY_PROTOCOL:  # as the data set's own rules want it, in every fit
        assert lines == []
        return
    [line] = lines
    assert line.message.startswith("site: files that are not read: 1 ")
    assert reason in line.message
    assert shown in line.message
    assert line.levelno == (logging.INFO if reason == IGNORABLE else logging.WARNING)
    data.list_domains()
    assert len([record for record in caplog.records if "files that are not read" in record.message]) == 1


def test_a_folder_that_is_read_whole_is_not_talked_about(tmp_path, caplog):
    site(tmp_path / "site")
    assert "not read" not in table_of(findings_in(tmp_path))
    FederatedDataModule(MarketFolders(str(tmp_path)), val="none").federated  # noqa: B018
    assert caplog.records == []


def test_a_folder_with_nothing_to_read_says_what_it_holds(tmp_path):
    folder = site(tmp_path / "site")
    for path in list((folder / QUERY).iterdir()):
        (folder / QUERY / path.name[:4]).mkdir()
        path.rename(folder / QUERY / path.name[:4] / path.name)
    with pytest.raises(
        DataError, match=r"query: holds no images, but 3 in sub-folders \(0011/0011.*expected names like"
    ):
        MarketFolders(str(folder)).domains()


def test_names_are_cut_short_but_counts_are_not():
    text = summary([LeftOut(Path(f"query/{n}"), "without a suffix") for n in range(1_234)])
    assert text == "1,234 without a suffix (query/0, query/1, query/2, ...)"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    """The rights of folders do not hold for root, who may run the tests."""
    folder, scandir = site(tmp_path / "site"), os.scandir

    def refuse(path):
        if Path(path) == folder / QUERY:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"query: cannot be listed \(Permission denied\); give yourself"):
        MarketFolders(str(folder)).domains()


def test_links_in_a_circle_are_named_and_not_followed(tmp_path):
    folder = site(tmp_path / "site")
    (folder / TRAIN / "again").symlink_to(folder)
    [item] = left_out_in(folder / TRAIN, set(map(str, (folder / TRAIN).glob("*.png"))))
    assert item.path == folder / TRAIN / "again"


# -- rubbish refuses nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__MACOSX", ".ipynb_checkpoints", ".Trash-1000", "@eaDir", "$RECYCLE.BIN"])
def test_rubbish_beside_data_sets_is_no_data_set(tmp_path, name):
    site(tmp_path / "site")
    (tmp_path / name / QUERY).mkdir(parents=True)
    (tmp_path / name / QUERY / "._0001_c1.jpg").write_bytes(b"\0\5\x16\7")
    assert [domain.name for domain in MarketFolders(str(tmp_path)).domains()] == ["site"]
    assert main(["data", "check", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "kind", ["viper", "cuhk01", "prid2011", "grid", "ilids", "msmt17", "omniglot", "cuhk02", "3dpes"]
)
def test_rubbish_in_a_data_set_of_a_paper_changes_nothing(tmp_path, kind):
    write_standin(kind, tmp_path)
    classes = {cls.name: cls for cls in map(datasets.__dict__.get, datasets.__all__) if hasattr(cls, "name")}
    before = [[len(part) for part in d.parts] for d in classes[kind](str(tmp_path)).domains()]
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        for name in ("._0001001.jpg", "Thumbs.db", ".DS_Store"):
            (folder / name).write_bytes(b"rubbish")
        for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
            (folder / name).mkdir()
            (folder / name / "._0001_1.png").write_bytes(b"rubbish")
    source = classes[kind](str(tmp_path))
    domains = source.domains()
    assert [[len(part) for part in domain.parts] for domain in domains] == before
    left_out = [item for items in source.left_out(domains).values() for item in items]
    assert {item.reason for item in left_out} <= {IGNORABLE, BY_PROTOCOL, "in sub-folders"}
    assert any(item.reason == IGNORABLE for item in left_out)


def test_a_data_set_further_down_is_not_looked_for_in_rubbish(tmp_path):
    write_standin("viper", tmp_path / "viper")
    for camera in ("cam_a", "cam_b"):
        put(tmp_path / "__MACOSX" / "VIPeR" / camera / "._000_45.bmp")
    assert datasets.VIPeR(str(tmp_path)).find() == tmp_path / "viper" / "VIPeR"


def test_rubbish_in_the_authors_data_is_left_out(tmp_path):
    person = tmp_path / "Market" / "pytorch"
    for part in ("train_all", "query", "gallery"):
        put(person / part / "0001" / "0001_c1s1_000001_00.png")
        (person / part / "0001" / "Thumbs.db").write_bytes(b"x")
        (person / part / "0001" / "._0001_c1s1_000001_00.png").write_bytes(b"x")
        (person / part / ".ipynb_checkpoints").mkdir()
    source = FedReIDBench(str(tmp_path))
    [domain] = source.domains()
    assert [len(part) for part in domain.parts] == [1, 1, 1]
    assert len(source.left_out([domain])["market1501"]) == 6


# -- numbers that 64 bits do not hold ----------------------------------------------------------------------------------

NAMES = {
    "identity": "{n}_c1s1_000001_00.png", "camera": "0001_c{n}s1_000001_00.png", "both": "{n}_c{n}.png",
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", NAMES)
def test_numbers_beyond_64_bits_drawn_at_random_are_refused(tmp_path, kind, part):
    rng = np.random.default_rng([3, len(kind), len(part)])
    slipped = []
    for number in range(20):
        digits = "".join(map(str, rng.integers(0, 10, rng.integers(19, 100))))
        folder = site(tmp_path / str(number))
        path = put(folder / part / NAMES[kind].format(n=f"{rng.integers(1, 10)}{digits}"))
        try:
            MarketFolders(str(folder)).domains()
            slipped.append(path.name)
        except DataError as error:
            assert str(error).startswith(f"{path}: the number ")  # noqa: PT017
            assert "more than 18 digits" in str(error)  # noqa: PT017
    assert slipped == []


@pytest.mark.parametrize("digits", ["9" * 18, "0" * 60 + "7", "192168001"])
def test_numbers_that_fit_are_kept(tmp_path, digits):
    path = tmp_path / f"{digits}_c{digits}.png"
    split = label_images([path], r"(?P<pid>-1|\d+)_c(?P<cam>\d+)", "0001_c1.png")
    assert split.pids.tolist() == [int(digits)]
    assert split.camids.tolist() == [int(digits) - 1]


def test_pairs_of_cameras_do_not_overflow(tmp_path):
    pattern = r"(?P<pair>\d+)_(?P<pid>\d+)_(?P<cam>\d)"
    with pytest.raises(DataError, match="more than 18 digits"):
        label_images([tmp_path / f"{'9' * 17}_001_1.png"], pattern, "1_001_1_02.png")


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("omniglot", "character01", f"character{'9' * 30}"), ("prid2011", "person_0001", f"person_{'9' * 30}"),
     ("prid2011", "person_0001", "person_one")],
)  # fmt: skip
def test_numbers_of_folders_are_checked_too(tmp_path, kind, old, new):
    write_standin(kind, tmp_path)
    path = sorted(path for path in tmp_path.rglob(old) if path.is_dir())[0]
    path.rename(path.with_name(new))
    source = Omniglot(str(tmp_path)) if kind == "omniglot" else datasets.PRID2011(str(tmp_path), shots="multi")
    with pytest.raises(DataError, match=rf"{new[:20]}.*(more than 18 digits|the name is not like person_0001)"):
        source.domains()


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5_000, "²", "-3"])
def test_numbers_of_lists_are_checked_too(tmp_path, number):
    folder = write_standin("msmt17", tmp_path)
    path = folder / "list_query.txt"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([f"{first.split()[0]} {number}", *others]))
    with pytest.raises(
        DataError, match=r"list_query\.txt: (the number 9+ has more than 18 digits|line 1 is not a file)"
    ):
        MSMT17(str(tmp_path)).domains()


# -- data sets that are known by lists ---------------------------------------------------------------------------------


def msmt_of_official_size(root, write):
    """The four lists with as many lines as the official ones, and files that are made by ``write``."""
    counts = {"train": (30_248, 1_041, "train"), "val": (2_373, 1_041, "train"), "query": (11_659, 3_060, "test"),
              "gallery": (82_161, 3_060, "test")}  # fmt: skip
    for part in ("train", "test"):
        (root / part).mkdir(parents=True)
    for name, (images, people, part) in counts.items():
        names = [f"{name}_{i % people:04d}_{i % 2 + 1:02d}_{i}.jpg {i % people}" for i in range(images)]
        names = [entry.replace(f"{name}_", f"{i:06d}{name}_", 1) for i, entry in enumerate(names)]
        (root / f"list_{name}.txt").write_text("\n".join(names))
        if write:
            for entry in names:
                os.link(root.parent / "pixel.png", root / part / entry.split()[0])


@pytest.fixture
def pixel(tmp_path):
    return put(tmp_path / "pixel.png", (1, 1))


def test_lists_without_images_are_not_complete(tmp_path, pixel, capsys):
    msmt_of_official_size(tmp_path / "MSMT17_V2", write=False)
    [finding] = [finding for finding in find_data(tmp_path) if finding.name == "msmt17"]
    assert finding.found == finding.official
    assert finding.problem.startswith("not complete: 124,068 of 124,068 images are not there, or empty; first ")
    assert main(["data", "check", str(tmp_path)]) == 1
    out, line = capsys.readouterr()
    assert " complete " not in one_line(out).replace("not complete", "")
    assert line.startswith("fedsim: error: a data set cannot be used: msmt17: not complete: ")


LISTS = {  # a change of a list -> the words about it
    "twice": (lambda text: text * 2, "list_query.txt: not complete: 24 of its files stand in several lines, first "),
    "folder": (lambda text: text.replace("0", "test/0", 1), "; restore them, or correct the list of them"),
    "mark": (lambda text: "\ufeff" + text, "not complete: compare the numbers"),
}


@pytest.mark.parametrize("change", LISTS)
def test_a_wrong_list_has_a_remedy_of_its_own(tmp_path, capsys, change):
    path = write_standin("msmt17", tmp_path) / "list_query.txt"
    path.write_text(LISTS[change][0](path.read_text().rstrip("\n") + "\n"), encoding="utf-8")
    assert main(["data", "check", str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert LISTS[change][1] in error
    assert "cannot be listed" not in out


@pytest.mark.parametrize("damage", ["missing", "empty", "folder", "dangling"])
def test_a_single_missing_image_of_a_list_is_found(tmp_path, damage):
    folder = write_standin("msmt17", tmp_path)
    [finding] = [finding for finding in find_data(tmp_path) if finding.name == "msmt17"]
    assert (finding.problem, finding.is_usable) == ("not complete: compare the numbers", False)
    [domain] = MSMT17(str(tmp_path)).domains()
    path = domain.gallery.images.locations()[-1]
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "folder":
        path.mkdir()
    elif damage == "dangling":
        path.symlink_to(folder / "nothing")
    [finding] = [finding for finding in find_data(tmp_path) if finding.name == "msmt17"]
    assert finding.problem.startswith("not complete: 1 of ")
    assert str(path) in finding.problem
    assert not finding.is_usable


# -- files of splits that are nested without end -----------------------------------------------------------------------


@pytest.fixture
def splits(tmp_path):
    folder = site(tmp_path / "site", tested=range(11, 19))
    write_market_splits(folder)
    return folder / "splits.json"


@pytest.mark.parametrize("depth", [900, 20_000, 200_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
@pytest.mark.parametrize("place", ["all", "splits", "query"])
def test_nested_splits_are_refused(splits, depth, brackets, place):
    opening, closing = ("[", "]") if brackets == "[]" else ('{"a":', "}")
    nested = opening * depth + "1" + closing * depth
    content = json.loads(splits.read_text())
    if place == "query":
        content["splits"][0]["query"] = "HERE"
    elif place == "splits":
        content["splits"] = "HERE"
    text = nested if place == "all" else json.dumps(content).replace('"HERE"', nested)
    splits.write_text(text)
    with pytest.raises(DataError, match=r"splits\.json: "):
        MarketFolders(str(splits.parent)).domains()


def test_splits_drawn_wrongly_never_raise_another_error(splits):
    """Bytes of the file are changed, or an entry gets another type."""
    rng, whole = np.random.default_rng(4), splits.read_text()
    names = [path.name for path in sorted((splits.parent / GALLERY).iterdir())]
    values = [None, 1.5, "x", [], {}, [[1]], [None], 10**30, True, [10**30], [{}], -1]
    slipped = []
    for _ in range(300):
        content = json.loads(whole)
        target = [content, content["splits"][0]][rng.integers(2)]
        target[[*target][rng.integers(len(target))]] = values[rng.integers(len(values))]
        text = json.dumps(content)
        if rng.random() < 0.5:
            place = rng.integers(len(whole))
            text = whole[:place] + chr(rng.integers(32, 127)) + whole[place + 1 :]
        splits.write_text(text)
        try:
            read_splits(splits, names)
        except DataError:
            pass
        except Exception as error:
            slipped.append((text[:80], repr(error)))
    assert slipped == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o000, 0o744, 0o711])
def test_a_sub_folder_of_another_user_is_left_out_with_a_line(mode):
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        root.chmod(0o755)
        for name in ("a.png", "open/b.png", "shut/c.png"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).touch()
        (root / "shut").chmod(mode)
        os.setresuid(12345, 12345, 0)
        try:
            read = sorted(images_outside(root, ()))
            assert read == [root / "a.png", root / "open/b.png"]
            [item] = left_out_in(root, set(map(str, read)), is_deep=True)
            assert item == (root / "shut", "folders that cannot be listed")
        finally:
            os.setresuid(0, 0, 0)


def test_a_folder_that_goes_meanwhile_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a.png").touch()
    (tmp_path / "gone").mkdir()
    walk = os.walk

    def walk_late(folder, **options):
        for parent, folders, names in walk(folder, **options):
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            yield parent, folders, names

    monkeypatch.setattr(os, "walk", walk_late)
    assert [*images_outside(tmp_path, ())] == [tmp_path / "here/a.png"]
