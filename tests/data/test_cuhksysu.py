"""CUHK-SYSU's own files become a re-ID test set.

The file follows the owners' code, ShuangLI59/person_search (lib/datasets/psdb.py): ``TestG50`` is a row of structs with
``Query``, one struct of ``imname``, ``idlocate`` (left, top, width, height) and ``ishard``, and ``Gallery``, a row of
such structs; ``idlocate`` is empty where the person is not in the picture.
"""

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.data.conversions import PICTURES, PROTOCOL, cut_people
from fedsim.data.datasets import CUHKSYSU
from small import refuse

# person -> (picture of the query, box), [(picture of the gallery, box or nothing)]
PEOPLE = [
    (("s16929.jpg", (3, 4, 10, 20)), [("s1.jpg", (0, 0, 8, 30)), ("s2.jpg", (5, 5, 12, 24)), ("s3.jpg", ())]),
    (("s1.jpg", (20, 1, 9, 19)), [("s3.jpg", (7, 2, 11, 22)), ("s2.jpg", ()), ("s16929.jpg", ())]),
]


def struct(names, rows):
    """A MATLAB struct array [1, n], as scipy writes it."""
    array = np.zeros((1, len(rows)), dtype=[(name, object) for name in names])
    for number, row in enumerate(rows):
        array[0, number] = tuple(row)
    return array


def shown(name, box):
    return (np.array([name]), np.array([box], dtype=np.int32) if box else np.zeros((0, 0)), np.array([[0]]))


def pixels(name):
    """Each picture has a pattern of its own, without loss."""
    return np.random.default_rng(sum(map(ord, name))).integers(0, 256, (40, 48, 3), dtype=np.uint8)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "dataset"
    (folder / PICTURES).mkdir(parents=True)
    (folder / PROTOCOL).parent.mkdir(parents=True)
    for name in ("s16929.jpg", "s1.jpg", "s2.jpg", "s3.jpg"):
        Image.fromarray(pixels(name)).save(folder / PICTURES / name, format="PNG")
    fields = ("imname", "idlocate", "ishard")
    entries = [
        (struct(fields, [shown(*query)]), struct(fields, [shown(*one) for one in gallery])) for query, gallery in PEOPLE
    ]
    savemat(folder / PROTOCOL, {"TestG50": struct(("Query", "Gallery"), entries)})
    return folder


def test_people_are_cut_out_as_the_owners_mark_them(root, tmp_path, capsys):
    assert main(["data", "cut", "--root", str(root), "--output", str(tmp_path / "data")]) == 0
    assert "query 2, gallery 3 images" in capsys.readouterr().out
    [domain] = CUHKSYSU(str(tmp_path / "data")).domains()
    assert domain.train is None
    assert domain.query.pids.tolist() == [1, 2]
    assert sorted(domain.gallery.pids.tolist()) == [1, 1, 2]
    assert set(domain.query.camids) == {0}
    assert set(domain.gallery.camids) == {1}
    expected = {
        (part, pid): [pixels(name)[box[1] : box[1] + box[3], box[0] : box[0] + box[2]] for name, box in boxes if box]
        for pid, (query, gallery) in enumerate(PEOPLE, start=1)
        for part, boxes in (("query", [query]), ("gallery", gallery))
    }
    for part, split in (("query", domain.query), ("gallery", domain.gallery)):
        for pid in (1, 2):
            found = [p for p, of in zip(split.images.locations(), split.pids, strict=True) if of == pid]
            assert len(found) == len(expected[part, pid])
            for path, crop in zip(sorted(found), expected[part, pid], strict=True):
                assert np.array_equal(np.asarray(Image.open(path)), crop)


def test_a_folder_that_is_there_is_kept(root, tmp_path, capsys):
    (tmp_path / "data" / "cuhksysu4reid").mkdir(parents=True)
    line = refuse(capsys, "data", "cut", "--root", root, "--output", tmp_path / "data")
    assert "cuhksysu4reid exists already" in line


def test_a_missing_or_damaged_protocol_is_named(root, tmp_path):
    (root / PROTOCOL).write_bytes(b"no MATLAB file at all" * 20)
    with pytest.raises(DataError, match=r"TestG50\.mat: is not CUHK-SYSU's"):
        cut_people(root, tmp_path / "data")
    (root / PROTOCOL).unlink()
    with pytest.raises(DataError, match=r"TestG50\.mat: no such file; --root is the owners' folder"):
        cut_people(root, tmp_path / "data")
    assert not (tmp_path / "data" / "cuhksysu4reid").exists()


@pytest.mark.parametrize("damage", ["missing", "small"])
def test_a_picture_that_does_not_fit_is_named_and_nothing_is_left(root, tmp_path, damage):
    picture = root / PICTURES / "s2.jpg"
    if damage == "missing":
        picture.unlink()
    else:
        Image.new("RGB", (10, 10)).save(picture)
    with pytest.raises(DataError, match=r"s2\.jpg: (cannot read this image|the box \[5, 5, 12, 24\] of TestG50)"):
        cut_people(root, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
