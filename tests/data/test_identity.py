"""The identity of a run's data: equal wherever the same files are, and another one for any other data."""

import json
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsim.__main__ import main
from fedsim.cli.describe import describe_federation
from fedsim.data import Domain, FederatedDataModule, Generated, ImageFiles, Images, MarketFolders, ReIDSource, Split
from fedsim.data.datasets import CIFAR10, Omniglot, VIPeR
from fedsim.data.generated import write_generated
from fedsim.data.identity import LABELS_ONLY, digest_of, identity_of
from fedsim.data.images import ImageArray
from fedsim.data.manifest import write_manifest
from fedsim.data.market import PARTS, write_market_splits
from fedsim.data.standins import write_standin
from fedsim.data.synthetic import SyntheticReID
from fedsim.methods import FedAvg
from fedsim.report.runs import read_run
from once import people, standins
from sites import GALLERY, QUERY, TRAIN, site
from small import make_data, make_model

DRAWS = range(8)


def tree(folder, rng):
    """A data set whose files have all different sizes; nothing decodes them."""
    shots, number = rng.randint(1, 3), 0
    for part, pids in ((TRAIN, range(1, 7)), (QUERY, range(11, 15)), (GALLERY, range(11, 15))):
        (folder / part).mkdir(parents=True)
        for pid in pids:
            for camera in (1, 2):
                for shot in range(shots + (part == GALLERY)):
                    number += 1
                    path = folder / part / f"{pid:04d}_c{camera}s{PARTS.index(part)}_{shot:06d}.jpg"
                    path.write_bytes(b"x" * (1000 + 3 * number))
    return folder


def identity(root, **options):
    return FederatedDataModule(MarketFolders(str(root)), **{"val": "none"} | options).identity(1000)


def any_file(folder, part, rng):
    return rng.choice(sorted((folder / part).iterdir()))


@pytest.fixture(params=DRAWS)
def drawn(request, tmp_path):
    rng = random.Random(request.param)
    return tree(tmp_path / "here" / "town", rng), rng


# -- the same data -----------------------------------------------------------------------------------------------------


def moved(folder, rng, monkeypatch):
    return shutil.copytree(folder, folder.parents[1] / "a" / "deep" / "er" / "place" / "town")


def linked(folder, rng, monkeypatch):
    (folder.parents[1] / "link").symlink_to(folder.parent)
    return folder.parents[1] / "link"


def part_linked(folder, rng, monkeypatch):
    part = rng.choice(PARTS)
    (folder / part).rename(folder.parents[1] / "other disk")
    (folder / part).symlink_to(folder.parents[1] / "other disk")
    return folder.parent


def file_linked(folder, rng, monkeypatch):
    path = any_file(folder, rng.choice(PARTS), rng)
    path.rename(folder.parents[1] / "elsewhere.jpg")
    path.symlink_to(folder.parents[1] / "elsewhere.jpg")
    return folder.parent


def slashes(folder, rng, monkeypatch):
    return f"{folder.parent}/./{'/' * rng.randint(1, 3)}"


def relative(folder, rng, monkeypatch):
    monkeypatch.chdir(folder.parent)
    return rng.choice([".", "town", "town/../", "../here/"])


def hidden(folder, rng, monkeypatch):
    for name in (".DS_Store", "._0001_c1s1_000000.jpg", "Thumbs.db", "readme.txt"):
        (folder / rng.choice(PARTS) / name).write_bytes(b"y" * rng.randint(1, 9))
    return folder.parent


def listed_otherwise(folder, rng, monkeypatch):
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path):
            with scandir(path) as listed:
                entries = list(listed)
            self.entries = iter(rng.sample(entries, len(entries)))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Shuffled)
    return folder.parent


SAME = (moved, linked, part_linked, file_linked, slashes, relative, hidden, listed_otherwise)


@pytest.mark.parametrize("change", SAME)
def test_the_same_files_elsewhere_are_the_same_data(drawn, change, monkeypatch):
    folder, rng = drawn
    before = identity(folder.parent)
    assert identity(change(folder, rng, monkeypatch)) == before


def test_the_order_of_a_source_is_no_difference(drawn):
    folder, rng = drawn
    [domain] = MarketFolders(str(folder)).domains()
    order = {len(part): np.array(rng.sample(range(len(part)), len(part))) for part in domain.parts}
    shuffled = domain.map_splits(lambda split: split.take(order[len(split)]))
    assert digest_of(shuffled) == digest_of(domain)


# -- other data --------------------------------------------------------------------------------------------------------


def resized(folder, rng):
    with any_file(folder, rng.choice(PARTS), rng).open("ab") as file:
        file.write(b"x")


def one_fewer(folder, rng):
    any_file(folder, rng.choice((TRAIN, GALLERY)), rng).unlink()


def one_more(folder, rng):
    path = any_file(folder, rng.choice(PARTS), rng)
    shutil.copy(path, path.with_name(path.name.replace(".jpg", "9.jpg")))


def renumbered(folder, rng):
    path = any_file(folder, TRAIN, rng)
    path.rename(path.with_name("0009" + path.name[4:]))


def other_camera(folder, rng):
    path = any_file(folder, rng.choice((TRAIN, GALLERY)), rng)
    path.rename(path.with_name(path.name.replace("_c1", "_c3").replace("_c2", "_c4")))


def contents_swapped(folder, rng):
    first, second = (any_file(folder, part, rng) for part in rng.sample(PARTS, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def files_swapped(folder, rng):
    first, second = any_file(folder, QUERY, rng), any_file(folder, GALLERY, rng)
    to_first, to_second = first.with_name(second.name), second.with_name(first.name)
    first.rename(folder / "aside")
    second.rename(to_first)
    (folder / "aside").rename(to_second)


def parts_swapped(folder, rng):
    (folder / QUERY).rename(folder / "aside")
    (folder / GALLERY).rename(folder / QUERY)
    (folder / "aside").rename(folder / GALLERY)


def subset(folder, rng):
    pid = rng.choice((1, 2, 11, 12))
    for part in PARTS:
        for path in (folder / part).glob(f"{pid:04d}_*"):
            path.unlink()


def no_training(folder, rng):
    shutil.rmtree(folder / TRAIN)
    tree(folder.parent / "other town", rng)


OTHER = (resized, one_fewer, one_more, renumbered, other_camera, contents_swapped, files_swapped, parts_swapped,
         subset, no_training)  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_other_files_are_other_data(drawn, change):
    folder, rng = drawn
    before = identity(folder.parent)
    change(folder, rng)
    after = identity(folder.parent)
    assert after["digest"] != before["digest"]
    assert after["sets"]["town"]["digest"] != before["sets"]["town"]["digest"]


def test_other_random_splits_are_other_data(tmp_path):
    folder = site(tmp_path / "town", tested=range(11, 19))
    shutil.rmtree(folder / QUERY)
    digests = []
    for fraction in (0.5, 0.5, 0.75):
        write_market_splits(folder, fraction=fraction)
        digests.append(identity(tmp_path)["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_settings_are_no_identity(tmp_path):
    site(tmp_path / "town", train=range(1, 9))
    site(tmp_path / "new", train=())
    expected = identity(tmp_path)
    options = ({"partition": "by_camera"}, {"partition": "iid", "parts": 2}, {"max_images": 10}, {"max_identities": 2},
               {"val": "identities"}, {"val": "images"}, {"public": "new"}, {"cache": "none"})  # fmt: skip
    assert all(identity(tmp_path, **changed) == expected for changed in options)
    assert identity(tmp_path / "town", cache_dir=str(tmp_path / "cache")) == identity(tmp_path / "town")


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_folders(tmp_path):
    folder = site(tmp_path / "town", train=range(1, 6), tested=range(11, 14), cameras=(1, 2, 5))
    for name in ("-1_c1s1_000001.jpg", "0000_c2s1_000001.jpg"):  # junk and a distractor are images, and no people
        (folder / GALLERY / name).write_bytes(b"x")
    counts = identity(tmp_path)["sets"]["town"]
    del counts["digest"]
    assert counts == {
        "train": {"people": 5, "cameras": 3, "images": 15},
        "query": {"people": 3, "cameras": 1, "images": 3},
        "gallery": {"people": 3, "cameras": 3, "images": 11},
    }


def test_people_that_are_unknown_are_not_counted(tmp_path):
    site(tmp_path / "town")
    data = FederatedDataModule(MarketFolders(str(tmp_path), unlabelled=True), val="none")
    assert data.identity(1000)["sets"]["town"]["train"] == {"people": None, "cameras": 2, "images": 10}


def test_random_splits_count_as_tables_do(tmp_path):
    write_standin("viper", tmp_path, people=8)
    [domain] = VIPeR(str(tmp_path), protocol="splits").domains()
    counts = identity_of([domain], (), 1000)["sets"]["viper"]
    assert counts["train"] is None
    assert counts["query"]["images"] == counts["gallery"]["images"] == 4
    assert counts["pool"] == {"people": 8, "cameras": 2, "images": 16}
    assert counts["splits"] == 10


# -- sources of other kinds --------------------------------------------------------------------------------------------


def digests(*sources):
    return [FederatedDataModule(source, val="none").identity(1000)["digest"] for source in sources]


def test_drawn_people_are_known_by_what_decides_them():
    towns = [{}, {}, {"seed": 1}, {"scale": 0.9}, {"clients": 5}, {"unseen": 1}]
    first, again, *others = digests(*(SyntheticReID(**{"clients": 6, "scale": 0.2} | town) for town in towns))
    assert first == again
    assert len({first, *others}) == 5


class Painted(ReIDSource):
    """Images in memory, or of a class of the user's."""

    def __init__(self, value=0, person=1, wrap=lambda images: images):
        self.value, self.person, self.wrap = value, person, wrap

    def domains(self):
        pixels = np.zeros((4, 4, 2, 3), dtype=np.uint8)
        pixels[2, 1, 1, 1] = self.value
        split = Split(self.wrap(ImageArray(pixels)), np.array([1, 1, 2, 1 + self.person]), np.array([0, 1, 0, 1]))
        test = replace(split, pids=split.pids + 10)
        return [Domain("painted", split, test, test)]


class Own(Images):
    """Without files, and without a content."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def take(self, index):
        return Own(self.images.take(index))

    def decode(self, size):
        return self.images.decode(size)


def test_images_in_memory_are_known_by_their_pixels():
    first, again, pixel, label = digests(Painted(), Painted(), Painted(value=1), Painted(person=0))
    assert first == again
    assert len({first, pixel, label}) == 3


def test_of_unknown_pixels_only_labels_count_and_the_digest_says_so():
    data = FederatedDataModule(Painted(wrap=Own), val="none").identity(1000)
    assert data["sets"]["painted"]["digest"].endswith(LABELS_ONLY)
    first, label = digests(Painted(wrap=Own), Painted(wrap=Own, person=0))
    assert first != label


@pytest.mark.parametrize(("kind", "name"), [(CIFAR10, "cifar10"), (Omniglot, "omniglot")])
def test_arrays_and_inverted_files(kind, name, tmp_path):
    with standins(), people():
        for place in ("here", "there"):
            write_standin(name, tmp_path / place, people=8, size=(16, 16))
    first, again = digests(*(kind(str(tmp_path / place)) for place in ("here", "there")))
    assert first == again
    largest = max(
        (path for path in (tmp_path / "there").rglob("*_*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    content = largest.read_bytes()
    if kind is CIFAR10:  # of a pickle, one pixel
        middle = len(content) // 2
        largest.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        largest.write_bytes(content + b"x")
    assert digests(kind(str(tmp_path / "there")))[0] != first


@pytest.mark.parametrize("partition", ["by_camera", "union"])
def test_a_manifest_is_known_by_its_files(tmp_path, partition):
    tree(tmp_path / "root" / "town", random.Random(0))
    tree(tmp_path / "root" / "street", random.Random(1))
    data = FederatedDataModule(MarketFolders(str(tmp_path / "root")), partition=partition, val="images")
    write_manifest(data.federated, tmp_path / "root" / "m.csv")

    def listed(root):
        return FederatedDataModule(manifest=str(root / "m.csv"), val="images").identity(1000)

    first = listed(tmp_path / "root")
    images = sum(len(list((tmp_path / "root" / name / TRAIN).iterdir())) for name in ("town", "street"))
    assert sum((counts["train"] or {"images": 0})["images"] for counts in first["sets"].values()) == images
    assert listed(shutil.move(tmp_path / "root", tmp_path / "moved")) == first
    resized(tmp_path / "moved" / "street", random.Random(2))
    assert listed(tmp_path / "moved")["digest"] != first["digest"]


def test_generated_images_count_too(tmp_path):
    site(tmp_path / "sites" / "town")
    options = [{}]
    for number, (weight, level) in enumerate([(0.5, 0), (0.5, 0), (0.25, 0), (0.5, 7)]):
        images = torch.full((2, 3, 8, 4), level, dtype=torch.uint8)
        images[:, :, :level] = torch.randint(0, 255, (2, 3, level, 4), generator=torch.manual_seed(0))
        write_generated(tmp_path / str(number) / "town", images, [{1: weight}, {2: 1.0}])
        options.append({"generated": Generated(root=str(tmp_path / str(number)))})
    plain, first, again, weights, pixels = (identity(tmp_path / "sites", **given) for given in options)
    assert first == again
    assert (first["generated"]["images"], "generated" in plain) == (2, False)
    assert len({data["digest"] for data in (plain, first, weights, pixels)}) == 4


def test_standins_never_look_like_the_data(tmp_path):
    with standins(), people():
        dry = FederatedDataModule(VIPeR("nowhere"), val="none", dry_run=True)
        data = dry.identity(1000)
        read = FederatedDataModule(VIPeR(str(dry._standins.name)), val="none").identity(1000)
    assert data["dry_run"] is True
    assert (data["sets"], "dry_run" in read) == (read["sets"], False)
    assert data["digest"] != read["digest"]


def test_of_very_many_data_sets_there_are_sums():
    towns = [SyntheticReID(clients=60, unseen=1, identities=2, seed=seed) for seed in (0, 0, 1)]
    first, again, seed = (FederatedDataModule(town, val="none").identity(50) for town in towns)
    assert first == again
    assert first["images"] == {"train": 60 * 8, "query": 96, "gallery": 96}
    assert (first["num_sets"], "sets" in first, len(json.dumps(first)) < 300) == (61, False, True)
    assert seed["digest"] != first["digest"]


class Town(SyntheticReID):
    """Towns of the user's: the class alone does not decide them."""

    def domains(self):
        return super().domains()[self.seed :]


def test_many_data_sets_of_an_own_class_have_digests_of_their_own():
    seeds = [FederatedDataModule(Town(clients=9, unseen=0, seed=seed), val="none").identity(5) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1]
    assert seeds[2]["digest"] != seeds[0]["digest"]


def test_files_that_are_not_there_are_no_reason_to_stop():
    split = Split(ImageFiles([]), *np.zeros((2, 0), dtype=np.int64))
    missing = Split(ImageFiles(["/nowhere/0001_c1.jpg"]), np.array([1]), np.array([0]))
    assert digest_of(Domain("a", None, missing, missing)) != digest_of(Domain("a", None, split, split))


# -- where it is shown and kept ----------------------------------------------------------------------------------------


def test_describe_prints_it(tmp_path):
    write_standin("viper", tmp_path, people=8)
    data = make_data([SyntheticReID(clients=2, unseen=0, scale=0.2), VIPeR(str(tmp_path), protocol="splits")])
    text = describe_federation(make_model(FedAvg()), data, 1, 2)
    sets = data.identity(1000)["sets"]
    assert sets["viper"]["digest"] in text
    assert "first of 10 splits of 8 / 2 / 16" in text
    assert f"Digest of all: {data.identity(1000)['digest']}; numbers are people / cameras / images" in text
    crowd = make_data(SyntheticReID(clients=1001, unseen=0, identities=2))
    assert "1,001 data sets; images: 8,008 train, 0 query" in describe_federation(make_model(FedAvg()), crowd, 1, 2)


def test_a_summary_has_it_and_other_data_at_a_resume_are_a_change(tmp_path, caplog):
    runs = tmp_path / "run"
    words = ["fit", "--config", "quickstart", "--data.source.class_path=MarketFolders",
             f"--data.source.init_args.root={tmp_path / 'sites'}", "--data.val=none", "--data.size=[32, 16]",
             f"--run_dir={runs}", "--trainer.devices=1", "--trainer.limit_val_batches=0"]  # fmt: skip
    folder = site(tmp_path / "sites" / "town")
    site(tmp_path / "sites" / "street")
    expected = identity(tmp_path / "sites")

    def resumed(rounds):
        caplog.clear()
        assert main([*words, f"--trainer.max_epochs={rounds}", "--ckpt_path=last"]) == 0
        lines = [record.message for record in caplog.records if record.message.startswith("changed")]
        return json.loads((runs / "summary.json").read_text()), [line for line in lines if "max_epochs" not in line]

    first, _ = resumed(1)
    assert first["data"] == expected
    again, lines = resumed(2)
    assert (again["data"], lines) == (expected, [])
    shutil.copy(next((folder / TRAIN).iterdir()), folder / TRAIN / "0001_c1s1_9.png")
    other, lines = resumed(3)
    new = identity(tmp_path / "sites")
    assert lines == [f"changed since round 2: data {expected['digest']} -> {new['digest']}: town"]
    change = {"after_round": 2, "setting": "data", "from": expected["digest"], "to": new["digest"], "counts": True}
    assert (other["data"], change in other["changes"]) == (new, True)
    assert "data" in [change.setting for change in read_run(runs).changes], "so no report takes it for one setting"
    last, lines = resumed(4)
    assert (last["changes"][: len(other["changes"])], lines) == (other["changes"], [])
    assert main(["test", "--ckpt_path", str(runs), "--model.evaluation.flip=true"]) == 0
    tested = json.loads((runs / "tests" / "last.json").read_text())
    assert (tested["data"], tested["settings"]["model"]["evaluation"]["flip"]) == (new, True)
    assert tested["settings"]["data"]["source"]["init_args"]["root"] == str(tmp_path / "sites")
