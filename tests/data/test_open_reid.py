"""CUHK03 in open-reid's format: files as that library writes them, and everything that may be wrong in them."""

import json
import random

import numpy as np
import pytest
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.data.datasets import CUHK03

PAIRS = (7, 5)
"""people in each pair of cameras"""
TESTED = ([(1, 2), (1, 5), (2, 1), (2, 2)], [(1, 1), (1, 3), (2, 4), (2, 5)])
"""of each split: pair and person, from 1, as in the original file"""


def boxes(pair, person, view, kind):
    """How many of at most five boxes there are: a person may have none, and some have a single one."""
    return (3 * pair + 2 * person + view + 2 * kind) % 6 if (pair, person) != (1, 2) else 1 - kind


@pytest.fixture
def folder(tmp_path):
    """The files that open-reid's reid/datasets/cuhk03.py makes of the original: eight digits, two, four.

    For each person in the order of pairs: hand-drawn boxes of view 1, then detected ones; the same of view 2.
    """
    root = tmp_path / "cuhk03_release"
    (root / "images").mkdir(parents=True)
    people = []
    for pair, count in enumerate(PAIRS, start=1):
        for person in range(1, count + 1):
            cameras = []
            for view in (0, 1):
                names = []
                for kind in (0, 1):
                    for _ in range(boxes(pair, person, view, kind)):
                        names.append(f"{len(people):08d}_{view:02d}_{len(names):04d}.jpg")
                        Image.new("RGB", (4, 8), (len(people), view, len(names))).save(root / "images" / names[-1])
                cameras.append(names)
            people.append(cameras)
    first = [0, *np.cumsum(PAIRS).tolist()]
    splits = []
    for pairs in TESTED:
        test = sorted(first[pair - 1] + person - 1 for pair, person in pairs)
        rest = list(set(range(first[-1])) - set(test))
        splits.append({"trainval": rest, "query": test, "gallery": test})
    meta = {"name": "cuhk03", "shot": "multiple", "num_cameras": 2, "identities": people}
    for name, content in (("meta", meta), ("splits", splits)):
        (root / f"{name}.json").write_text(json.dumps(content, indent=4, separators=(",", ": ")))
    return root


def listed(split):
    """Name, identity and camera of each image."""
    names = [path.name for path in split.images.locations()]
    return list(zip(names, split.pids.tolist(), split.camids.tolist(), strict=True))


def expected(folder, number, part):
    """The images of a part by loops over the two files: paper 005's code takes the last image as the query."""
    people = json.loads((folder / "meta.json").read_text())["identities"]
    split = json.loads((folder / "splits.json").read_text())[number]
    images = []
    for person in sorted(split[part]):
        for camera in (0, 1):
            names = people[person][camera]
            if part == "query":
                names = names[-1:]
            elif part == "gallery" and len(names) > 1:
                names = names[:-1]
            images += [(name, person + 1, camera) for name in names]
    return images


@pytest.mark.parametrize("number", [0, 1])
def test_people_images_and_queries_are_those_of_the_two_files(folder, number):
    (domain,) = CUHK03(str(folder.parent), split=number).domains()
    assert domain.name == "cuhk03"
    for split, part in ((domain.train, "trainval"), (domain.query, "query"), (domain.gallery, "gallery")):
        assert listed(split) == expected(folder, number, part)
    assert len(domain.train.identities) <= 8
    assert not np.intersect1d(domain.train.pids, domain.gallery.pids).size


def test_an_only_image_of_a_person_and_camera_asks_and_answers(folder):
    (domain,) = CUHK03(str(folder)).domains()
    person = 1 + 1  # (1, 2): one hand-drawn box per view
    asked, answering = ([entry for entry in listed(s) if entry[1] == person] for s in (domain.query, domain.gallery))
    assert asked == answering == [(f"{person - 1:08d}_{view:02d}_0000.jpg", person, view) for view in (0, 1)]


def test_all_images_ask_as_in_the_library_itself(folder):
    (last,), (every,) = CUHK03(str(folder)).domains(), CUHK03(str(folder), query="all").domains()
    assert listed(every.query) == listed(every.gallery)
    assert {*listed(every.query)} == {*listed(last.query), *listed(last.gallery)}
    assert listed(every.train) == listed(last.train)


def test_the_pixels_are_those_of_the_named_files(folder):
    (domain,) = CUHK03(str(folder)).domains()
    pixels = domain.query.images.take(np.array([0, 3])).decode((8, 4))
    for row, place in enumerate((0, 3)):
        name, person, camera = listed(domain.query)[place]
        number = int(name.split("_")[2].partition(".")[0]) + 1
        assert pixels[row].float().mean(dim=(1, 2)).numpy() == pytest.approx([person - 1, camera, number], abs=3)


def spoil_file(rng, folder, names, place):
    """Make a file wrong."""
    if rng.random() < 0.5:
        (folder / "images" / names[place]).unlink()
        return f"lacks 1 of the .* first {names[place]}"
    (folder / rng.choice(["meta.json", "splits.json"])).write_bytes(rng.choice([b"", b"{", b"\xff\xfe", b"[" * 9999]))
    return "cannot be read as JSON"


def spoil_meta(rng, meta, at):
    """Make the list of people wrong; ``at``: person, camera and place of a name."""
    people, (person, camera, place) = meta["identities"], at
    names = people[person][camera]
    renamed = [f"{person}.jpg", "", "a_b_c.jpg", f"{person:08d}_{camera:02d}_0001", f"../{names[place]}"]
    kinds = {
        "is listed for person": [
            lambda: names.__setitem__(place, rng.choice(renamed)),
            lambda: people[(person + 1) % 12][camera].append(names.pop(place)),
        ],
        "twice": [lambda: names.append(names[place])],
        "num_cameras is": [
            lambda: people[person].append([]),
            lambda: meta.update(num_cameras=rng.choice([1, 3, None, "2"])),
        ],
        "is not a list of people": [
            lambda: meta.update(identities=rng.choice([None, [], {}, [[1]], [["a"]], [[["a"], [1]]], "x"])),
        ],
    }
    line = rng.choice([*kinds])
    rng.choice(kinds[line])()
    return line


def spoil_split(rng, split):
    """Make a split wrong."""
    part = rng.choice(["trainval", "query", "gallery"])
    kinds = {
        "are not lists of people, each once, from 0 to 11": [
            lambda: split[part].append(rng.choice([12, -1, 10**9])),
            lambda: split[part].append(split[part][0]),
            lambda: split.pop(part),
            lambda: split[part].clear(),
            lambda: split[part].__setitem__(0, rng.choice([None, "0", 0.0, True, [0]])),
        ],
        "is in training and in test": [lambda: split["trainval"].append(rng.choice(split["gallery"]))],
        "is in only one of query and gallery": [lambda: split[rng.choice(["query", "gallery"])].pop()],
    }
    line = rng.choice([*kinds])
    rng.choice(kinds[line])()
    return line


def spoil(rng, folder):
    """Make one thing wrong; return words of the line that must name it."""
    meta, splits = (json.loads((folder / f"{name}.json").read_text()) for name in ("meta", "splits"))
    people = meta["identities"]
    person = rng.choice([p for p in range(12) if all(len(names) > 1 for names in people[p])])
    camera = rng.randrange(2)
    place = rng.randrange(len(people[person][camera]))
    kind = rng.choice(["file", "meta", "split"])
    if kind == "file":
        return spoil_file(rng, folder, people[person][camera], place)
    line = spoil_meta(rng, meta, (person, camera, place)) if kind == "meta" else spoil_split(rng, splits[0])
    for name, content in (("meta", meta), ("splits", splits)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return line


def test_wrong_files_are_one_line_each(folder):
    rng = random.Random(0)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen = set()
    for _ in range(200):
        line = spoil(rng, folder)
        with pytest.raises(DataError, match=line) as error:
            CUHK03(str(folder)).domains()
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)
        seen.add(line.partition(" first")[0])
        for path, content in whole.items():
            if path.suffix == ".json" or not path.exists():
                path.write_bytes(content)
    assert len(seen) == 9
    CUHK03(str(folder)).domains()


@pytest.mark.parametrize("number", [2, -1, 10**9])
def test_a_split_that_is_not_there_is_one_line(folder, number):
    with pytest.raises(DataError, match=rf"splits.json: has no split {number}; set split to a number from 0 to 1"):
        CUHK03(str(folder), split=number).domains()
