"""Data sets of one camera, of one identity, of identity 0 only: what the check says is what a fit does."""

import shutil

import numpy as np
import pytest

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import FederatedDataModule
from fedsim.data.check import findings_in, table_of
from fedsim.data.federations import RESERVED, build_federation, obstacle_of
from fedsim.data.images import Domain, GallerySplit, ImageArray, Split
from fedsim.data.manifest import read_manifest, write_manifest
from fedsim.data.market import MarketFolders
from fedsim.evaluation.retrieval import trials_of
from sites import GALLERY, QUERY, TRAIN, one_line, put, site


def split(pids, camids):
    pixels = np.zeros((len(pids), 2, 1, 3), dtype=np.uint8)
    return Split(ImageArray(pixels), np.array(pids, dtype=np.int64), np.array(camids, dtype=np.int64))


def draw_domain(rng):
    """A test set of a few images; often of one camera, one person, junk or distractors only."""
    cameras, first, last = rng.integers(1, 4), rng.integers(-1, 2), rng.integers(1, 4)
    query, gallery = (
        split(rng.integers(first, last + 1, size), rng.integers(0, cameras, size)) for size in rng.integers(1, 6, 2)
    )
    splits = ()
    if rng.random() < 0.4:
        order = rng.permutation(len(gallery))
        cut = rng.integers(1, len(order) + 1)
        splits = (GallerySplit(order[:cut], order[cut:]), GallerySplit(order[:1], order[1:]))
        query = gallery.take(order[:0])
    train = split(rng.integers(5, 5 + rng.integers(1, 4), 6), rng.integers(0, 2, 6))
    return Domain("site", train if rng.random() < 0.5 else None, query, gallery, splits)


def is_scored(domain):
    """Whether evaluation, with the usual settings, finds a query with a match in each trial."""
    sets = build_sets(domain)
    return all(trial.labels.num_valid for trial in trials_of(sets, True, (-1,)))


def build_sets(domain):
    trained = Domain("other", split([1, 2], [0, 1]), domain.query, domain.gallery)
    return build_federation([trained, Domain("site", None, *domain.parts[-2:], domain.splits)], val="none").tests[
        "site"
    ]


def test_the_check_of_sets_drawn_at_random_is_that_of_the_evaluation():
    rng = np.random.default_rng(5)
    slipped, refused = [], 0
    for number in range(1_000):
        domain = draw_domain(rng)
        is_usable = is_scored(domain) and (domain.train is None or len(domain.train.identities) > 1)
        refused += not is_usable
        if is_usable is bool(obstacle_of(domain)):
            slipped.append((number, obstacle_of(domain)))
    assert slipped == []
    assert 300 < refused < 900


# -- what the check says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"cameras": (1,)}, "no query has a match from another camera (all test images are of camera 1); add images of "
                         "other cameras, or set model.evaluation.camera_aware to false"),
     ({"cameras": (7,)}, "all test images are of camera 7"),
     ({"train": [5]}, "only one training identity; training needs at least 2"),
     ({"train": [0]}, "only one training identity; training needs at least 2; if number 0 means"),
     ({"train": [0], "cameras": (1,)}, "only one training identity")],
)  # fmt: skip
def test_a_set_that_cannot_be_used_is_named_and_the_exit_code_is_1(tmp_path, capsys, options, problem):
    site(tmp_path / "data" / "good")
    site(tmp_path / "data" / "site", **options)
    assert main(["data", "check", str(tmp_path / "data")]) == 1
    out, error = capsys.readouterr()
    assert problem in one_line(out)
    assert "good" in out
    assert one_line(out).count("your own; can be used") == 1
    assert error.startswith("fedsim: error: a data set cannot be used: site: ")
    assert problem in error
    assert error.count("\n") == 1
    assert main(["data", "check", str(tmp_path / "data" / "site")]) == 1  # in which it may be Market-1501
    assert problem in capsys.readouterr().err


def test_several_sets_that_cannot_be_used_are_counted(tmp_path, capsys):
    for name in ("first", "second"):
        site(tmp_path / name, cameras=(1,))
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "2 data sets cannot be used, first: first: no query" in capsys.readouterr().err


def test_training_images_of_one_camera_can_be_used_without_validation(tmp_path, capsys):
    folder = site(tmp_path / "site")
    for path in (folder / TRAIN).glob("*_c2*"):
        path.unlink()
    assert main(["data", "check", str(tmp_path)]) == 0
    text = one_line(capsys.readouterr().out)
    assert "your own; can be used; training images are of one camera, so data.val needs to be none" in text


def test_people_who_are_all_distractors_are_said(tmp_path, capsys):
    site(tmp_path / "site", tested=[0])
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "all tested people are identity 0, the number of distractors" in one_line(capsys.readouterr().out)


@pytest.mark.parametrize("damage", ["name", "common", "misspelt", "all lonely"])
def test_a_set_that_is_refused_by_every_command_has_exit_code_1(tmp_path, damage):
    folder = site(tmp_path / "site")
    if damage == "misspelt":
        (folder / TRAIN).rename(folder / "bounding-box_trian")
    elif damage == "all lonely":
        shutil.rmtree(folder / QUERY)
        put(folder / QUERY / "0099_c1.png")
    else:
        put(folder / {"name": f"{TRAIN}/person.png", "common": f"{TRAIN}/0011_c1.png"}[damage])
    assert main(["data", "check", str(tmp_path)]) == 1
    with pytest.raises(DataError):
        MarketFolders(str(tmp_path)).domains()


# -- data as owners have them ------------------------------------------------------------------------------------------


def commands(root, tmp_path):
    """What data check, init and the start of a fit print and log about a root, with the exit code of the first two."""
    words = (["data", "check", str(root)], ["init", str(root), "--output", str(tmp_path / "c.yaml")])
    checked, begun = map(main, words)
    FederatedDataModule(MarketFolders(str(root))).list_domains()
    return checked, begun


def test_queries_without_a_match_are_left_out_counted_and_said(tmp_path, capsys, caplog):
    folder = site(tmp_path / "data" / "site")
    lonely = [put(folder / QUERY / f"00{pid}_c1s1_1.png") for pid in (97, 98)]
    assert commands(tmp_path / "data", tmp_path) == (0, 0)
    said = "2 queries without a match: their people have no image in bounding_box_test (query/0097_c1s1_1.png, query/0"
    assert said in one_line(capsys.readouterr().out)
    assert caplog.text.count(f"site: files that are not read: {said}") == 2  # init and fit
    [domain] = MarketFolders(str(folder)).domains()
    assert not {*lonely} & {*domain.query.images.locations()}
    with pytest.raises(DataError, match="identity 0097 has no image in bounding_box_test"):
        MarketFolders(str(folder), unmatched="refuse").domains()


MISPLACED = {  # folder in which the data set lies, and its training folder -> the words about it
    ("fruit/fruit", TRAIN): "fruit/fruit: data sets one folder too deep, to be moved up",
    ("fruit", "Bounding-Box-Train"): "fruit/Bounding-Box-Train: to be renamed bounding_box_train",
}


@pytest.mark.parametrize("place", MISPLACED, ids=str)
def test_a_data_set_at_another_place_is_named_with_the_remedy(tmp_path, capsys, caplog, place):
    root, (where, train) = tmp_path / "data", place
    site(root / "good")
    (site(root / where) / TRAIN).rename(root / where / train)
    if train != TRAIN:
        for part in (QUERY, GALLERY):
            shutil.rmtree(root / where / part)
    assert commands(root, tmp_path) == (1, 0)
    assert one_line(f"fruit - - - {root}/{MISPLACED[place]}").replace(" ", "") in one_line(
        capsys.readouterr().out
    ).replace(" ", "")
    path, _, reason = MISPLACED[place].partition(": ")
    assert caplog.text.count(f"files that are not read: 1 {reason} ({path})") == 2
    shutil.rmtree(root / "good")
    with pytest.raises(DataError, match=r"no data set in Market-1501 layout, .*; 1 "):
        MarketFolders(str(root)).domains()


COPIES = {"same name": "0001_c1s1_1.png", "same person": "0001_c2s1_9.png", "another name": "0012_c2s1_9.png"}


@pytest.mark.parametrize("kind", COPIES)
def test_training_pictures_in_the_test_set_are_found(tmp_path, capsys, caplog, kind):
    folder = site(tmp_path / "data" / "site")
    shutil.copy(folder / TRAIN / "0001_c1s1_1.png", folder / GALLERY / COPIES[kind])
    put(folder / GALLERY / "0002_c1s1_1.png")  # another picture of the same name
    codes = commands(tmp_path / "data", tmp_path)
    line = f"1 test images are also training images (bounding_box_test/{COPIES[kind]}); remove them from one of the two"
    assert codes == (1, 0)
    assert f"data set cannot be used: site: {line}" in capsys.readouterr().err
    # a fit looks only at images with a common name or identity
    assert caplog.text.count(f"site: {line}") == (0 if kind == "another name" else 2)


def test_an_original_file_of_cuhk03_gets_the_command_that_converts_it(tmp_path, capsys):
    (tmp_path / "cuhk-03.mat").write_bytes(b"x")
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "is CUHK03's original file; fedsim data convert makes the folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("people", "code", "note"),
    [(1, 1, "only one training identity; training needs at least 2"),
     (3, 0, "training identities are fewer than 4, so data.val needs to be first_image or none"), (4, 0, "")],
)  # fmt: skip
def test_check_and_fit_agree_on_too_few_identities(tmp_path, capsys, people, code, note):
    site(tmp_path / "site", train=range(1, people + 1))
    assert main(["data", "check", str(tmp_path)]) == code
    assert note in one_line(capsys.readouterr().out)
    data = FederatedDataModule(MarketFolders(str(tmp_path)))
    if note:
        words = note if code else "set data.val to first_image or none"
        with pytest.raises(DataError, match=words):
            _ = data.federated
    else:
        assert len(data.federated.clients) == 1


@pytest.mark.parametrize(("name", "shown"), [("a\nb", "a\\nb"), ("stra\udcdfe", "stra\\udcdfe")])
def test_any_name_of_a_folder_can_be_printed(tmp_path, name, shown):
    site(tmp_path / name)
    text = table_of(findings_in(tmp_path))
    assert shown in text
    assert text.isprintable() or text.encode("utf-8")
    assert text.count("\n") == table_of(findings_in(site(tmp_path / "plain" / "site").parent)).count("\n")


def test_people_without_numbers_get_a_second_remedy(tmp_path, capsys):
    folder = site(tmp_path / "site")
    for path in list((folder / TRAIN).iterdir()):
        path.rename(path.with_name(path.name.partition("_")[2].replace("s1", f"s{path.name[:4]}")))
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "; or, if people are unknown, set unlabelled: true of data.source" in one_line(capsys.readouterr().out)
    assert len(MarketFolders(str(tmp_path), unlabelled=True).domains()[0].train) == 10


def test_only_a_folder_with_a_data_set_has_exit_code_0(tmp_path):
    assert main(["data", "check", str(tmp_path)]) == 1
    site(tmp_path / "site")
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "your own; can be used" in table_of(findings_in(tmp_path))
    assert len(list((tmp_path / "site" / GALLERY).iterdir())) == 6


# -- identity 0 is a number like others --------------------------------------------------------------------------------


def clients_of(domains, **options):
    return build_federation(domains, val="none", **options).clients


@pytest.mark.parametrize("pid", [0, 5])
def test_a_client_whose_only_identity_is_number_0_trains_like_one_with_number_5(tmp_path, pid):
    site(tmp_path / "site", train=[pid])
    [client] = clients_of(MarketFolders(str(tmp_path)).domains())
    assert client.knows_identities
    assert client.num_classes == 1
    assert client.labels.tolist() == [0, 0]


def test_a_manifest_of_identity_0_is_the_same_federation(tmp_path):
    site(tmp_path / "site", train=[0])
    federated = build_federation(MarketFolders(str(tmp_path)).domains(), val="none")
    write_manifest(federated, tmp_path / "federation.csv")
    [client], [again] = federated.clients, read_manifest(tmp_path / "federation.csv").clients
    assert client.knows_identities is again.knows_identities is True
    assert client.labels.tolist() == again.labels.tolist()


@pytest.mark.parametrize("first", [0, 5])
def test_parts_with_one_identity_each_know_it(tmp_path, first):
    site(tmp_path / "site", train=range(first, first + 4))
    clients = clients_of(MarketFolders(str(tmp_path)).domains(), partition="by_identity", parts=4)
    assert [client.num_classes for client in clients] == [1] * 4
    assert all(client.knows_identities for client in clients)


def test_people_are_unknown_if_the_source_says_so(tmp_path):
    site(tmp_path / "site", train=range(5))
    domains = MarketFolders(str(tmp_path), unlabelled=True).domains()
    for options in ({}, {"partition": "iid", "parts": 2}):
        assert not any(client.knows_identities for client in clients_of(domains, **options))
    with pytest.raises(DataError, match=r"client site: validation needs identities.*set data\.val to none"):
        build_federation(domains)
    own = [Domain("site", split([0, 0, 0], [0, 1, 0]), split([1], [0]), split([1], [1]))]  # of a source of one's own
    assert [client.knows_identities for client in clients_of(own)] == [False]
    with pytest.raises(ConfigError, match="parts"):
        clients_of(own, partition="iid", parts=4)


# -- names of data sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESERVED)
def test_a_check_refuses_the_names_that_a_fit_refuses(name, tmp_path, capsys):
    site(tmp_path / name)
    for source in ([str(tmp_path)], ["--data.source=MarketFolders", f"--data.source.root={tmp_path}"]):
        assert main(["data", "check", *source])
        texts = one_line("".join(capsys.readouterr()))
        assert f"a data set cannot be called {name}, the name of a mean; rename the folder" in texts
        assert "can be used" not in texts
