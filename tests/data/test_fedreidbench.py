"""The processed data of paper 003, on trees as their authors' public code makes them.

Source: github.com/cap-ntu/FedReID, commit 81a1729. ``data_preprocess/README.md`` lists the folders;
``prepare_big_datasets.py`` copies each image to ``pytorch/PART/ID/NAME``, where ID is NAME up to the first ``_``;
``prepare_small_datasets.py`` copies ``data/SET/cam_0/00012_00001.png`` to ``pytorch/PART/12/cam_0_00012_00001.png``, by
the lists of ``preprocess_small_datasets.py``: views of the first half ask, the others answer. ``get_camera_ids`` in
``data_utils.py`` reads the names: without ``cam``, the identity is first and the camera follows a ``c``.
"""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.check import findings_in
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.datasets import ILIDS, FedReIDBench, VIPeR
from fedsim.data.datasets.base import Counts
from fedsim.data.standins import write_standin
from fedsim.papers.files import read_paper


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 16)).save(path)


def prepare_small(folder, identities, split, suffix=".png"):
    """``identities`` are those of ``meta.json``: per person, the images of each view."""
    parts = {"train_all": [], "query": [], "gallery": []}
    for person in split["trainval"]:
        parts["train_all"] += [image for view in identities[person] for image in view]
    for person in split["test_probe"]:
        first, second = identities[person]
        parts["query"] += first
        parts["gallery"] += second
    for person in set(split["test_gallery"]) - set(split["test_probe"]):
        parts["gallery"] += [image for view in identities[person] for image in view]
    for part, images in parts.items():
        for image in images:
            camera, name = image.split("/")
            draw(folder / "pytorch" / part / str(int(name[:5])) / f"{camera}_{name}")
    (folder / "meta.json").write_text(json.dumps({"identities": identities}))
    (folder / "split.json").write_text(json.dumps(split))
    (folder / "pytorch" / "imgs.json").write_text("{}")


def prepare_big(folder, names):
    for part, files in names.items():
        for name in files:
            draw(folder / "pytorch" / part / name.split("_")[0] / name)


def images_of(person, *counts):
    return [[f"cam_{c}/{person:05d}_{i:05d}.png" for i in range(n)] for c, n in enumerate(counts)]


@pytest.fixture
def root(tmp_path):
    shots = [(2, 2), (1, 2), (2, 1), (1, 1), (0, 1)]  # as in meta.json of PRID, person 4 is in camera 1 alone
    people = [images_of(person, *counts) for person, counts in enumerate(shots)]
    split = {"trainval": [0, 1], "test_probe": [2, 3], "test_gallery": [2, 3, 4]}
    prepare_small(tmp_path / "prid", people, split)
    prepare_small(tmp_path / "cuhk02", people, split | {"test_probe": [], "test_gallery": []})
    prepare_big(tmp_path / "Market", {
        "train_all": ["0002_c1s1_000451_03.jpg", "0002_c6s1_000776_01.jpg", "0007_c3s3_077419_03.jpg"],
        "train": ["0002_c1s1_000451_03.jpg"], "val": ["0002_c6s1_000776_01.jpg"],
        "query": ["0001_c1s1_001051_00.jpg", "0003_c4s6_015641_00.jpg"],
        "gallery": ["-1_c1s1_000401_03.jpg", "0000_c3s2_000001_02.jpg", "0001_c2s1_000301_00.jpg",
                    "0003_c1s6_015971_00.jpg"],
        "multi-query": ["0001_c1s1_001051_00.jpg"],
    })  # fmt: skip
    prepare_big(tmp_path / "MSMT17", {  # both parts number people from 0
        "train_all": ["0000_c1_0000.jpg", "0000_c15_0001.jpg", "0001_c2_0000.jpg"],
        "query": ["0000_c14_0000.jpg"], "gallery": ["0000_c4_0000.jpg", "0001_c4_0001.jpg"],
    })  # fmt: skip
    return tmp_path


def test_names_tell_people_and_cameras(root):
    msmt17, market, prid = FedReIDBench(str(root)).domains()
    assert [d.name for d in (msmt17, market, prid)] == ["msmt17", "market1501", "prid2011"]
    assert (market.train.pids.tolist(), market.train.camids.tolist()) == ([2, 2, 7], [0, 5, 2])
    assert (market.query.pids.tolist(), market.query.camids.tolist()) == ([1, 3], [0, 3])
    assert market.gallery.pids.tolist() == [-1, 0, 1, 3]  # junk, a distractor, people
    assert msmt17.train.camids.tolist() == [14, 0, 1]  # two digits
    assert not set(msmt17.train.pids) & set(msmt17.query.pids)
    assert min(msmt17.train.pids.min(), msmt17.query.pids.min()) > 0  # 0 would be a distractor
    assert (len(prid.train), len(prid.query), len(prid.gallery)) == (7, 3, 3)
    assert set(prid.query.camids) == {0}
    assert set(prid.gallery.camids) == {1}
    assert len(np.unique(prid.train.pids)) == 2
    assert set(prid.query.pids) < set(prid.gallery.pids)  # one person more answers
    assert not set(prid.train.pids) & set(prid.gallery.pids)


def test_the_nine_are_a_federation_and_the_tenth_is_public(root):
    sources = [FedReIDBench(str(root)), FedReIDBench(str(root), names=["cuhk02"])]
    data = FederatedDataModule(sources, val="none", public="cuhk02", size=(16, 8))
    data.setup("fit")
    assert [client.name for client in data.federated.clients] == ["msmt17", "market1501", "prid2011"]
    assert len(data.federated.public) == 7


def test_the_public_data_set_is_read_where_a_row_asks_for_it(root):
    """``fedsim fit --paper 003/figure7_kd --data.source FedReIDBench --data.source.root FOLDER``."""
    data = FederatedDataModule(FedReIDBench(str(root)), val="none", public="cuhk02", size=(16, 8))
    assert [client.name for client in data.federated.clients] == ["msmt17", "market1501", "prid2011"]
    assert len(data.federated.public) == 7


def test_public_and_unseen_data_sets_have_the_names_of_their_folders_too(root):
    source = FedReIDBench(str(root))
    data = FederatedDataModule(source, val="none", public="Market", unseen=["prid"], size=(16, 8))
    assert [client.name for client in data.federated.clients] == ["msmt17"]
    assert (data.public, data.unseen, len(data.federated.public)) == ("market1501", ("prid2011",), 9)
    with pytest.raises(ConfigError, match=r"data\.public: there is no data set viper; choose from msmt17, market1501"):
        _ = FederatedDataModule(source, val="none", public="viper", size=(16, 8)).federated


def test_clients_of_the_tables_that_are_left_out_are_named_first(root, caplog):
    FedReIDBench(str(root)).domains()
    missing = "cuhk03-np-detected, cuhk01, viper, 3dpes, ilids (are not there)"
    assert caplog.messages == [
        f"{root}: left out of the nine clients of paper 003: {missing}; "
        "DukeMTMC-reID (withdrawn by its owners, and not there)"
    ]
    (root / "DukeMTMC-reID" / "pytorch").mkdir(parents=True)
    caplog.clear()
    FedReIDBench(str(root)).domains()
    taken = "'[MSMT17, DukeMTMC-reID, Market, prid]'"
    assert caplog.messages[0].endswith(f"DukeMTMC-reID (withdrawn by its owners; data.source.names {taken} takes it)")
    caplog.clear()
    FedReIDBench(str(root), names=["Market"]).domains()
    assert caplog.messages == []


def test_duke_is_read_only_by_its_name(root):
    prepare_big(root / "DukeMTMC-reID", {
        "train_all": ["0001_c2_f0046182.jpg"], "query": ["0005_c2_f0046985.jpg"], "gallery": ["0005_c5_f0051681.jpg"],
    })  # fmt: skip
    assert "dukemtmc" not in [d.name for d in FedReIDBench(str(root)).domains()]
    (duke,) = FedReIDBench(str(root), names=["DukeMTMC-reID"]).domains()
    assert (duke.query.camids.tolist(), duke.gallery.camids.tolist()) == ([1], [4])


def test_what_is_missing_is_named(root, tmp_path):
    with pytest.raises(DataError, match=r"nothing: holds no folder like Market/pytorch"):
        FedReIDBench(str(tmp_path / "nothing")).domains()
    with pytest.raises(DataError, match=r"data\.source\.names: there is no market; choose from MSMT17"):
        FedReIDBench(str(root), names=["market"]).domains()
    with pytest.raises(DataError, match=r"viper/pytorch/train_all: no such folder"):
        FedReIDBench(str(root), names=["viper"]).domains()


def test_the_gallery_gets_an_odd_image(tmp_path):
    """As in i-LIDS's ``meta.json``, where camera 1 has as many images of each person as camera 0, or one more."""
    counts = {person: 2 + person % 3 for person in range(1, 9)}
    for person, count in counts.items():
        for image in range(count):
            draw(tmp_path / "i-LIDS_Pedestrian" / "Persons" / f"{person:04d}{image + 1:03d}.jpg")
    (domain,) = ILIDS(str(tmp_path)).domains()
    for person in domain.query.identities:
        asked, answers = (int((part.pids == person).sum()) for part in (domain.query, domain.gallery))
        assert (asked, answers) == (counts[person] // 2, (counts[person] + 1) // 2)


def test_check_reads_the_folders_where_they_are(root, capsys, monkeypatch):
    """They are in their place, and have too few images; the number of images of one set is made the official one."""
    size = Counts(2, 3, 2, 4)
    monkeypatch.setattr(FedReIDBench, "official_counts", FedReIDBench.official_counts | {"market1501": size})
    findings = {finding.name: finding for finding in findings_in(root)}
    assert findings.keys() == {"msmt17", "market1501", "prid2011", "cuhk02"}
    assert findings["market1501"].verdict == "complete"
    assert findings["market1501"].layout == "Market/pytorch: read by data.source FedReIDBench"
    assert (findings["prid2011"].found, findings["prid2011"].official) == ((2, 7, 3, 3), (285, 3_744, 100, 649))
    assert findings["prid2011"].problem == "not complete: compare the numbers"
    assert main(["data", "check", "--data.source", "FedReIDBench", "--data.source.root", str(root)]) == 1
    printed = capsys.readouterr()
    assert "2 / 3 / 2 / 4" in printed.out
    assert "msmt17: not complete: compare the numbers" in printed.err
    [image] = (root / "prid" / "pytorch" / "query" / "3").iterdir()
    image.write_bytes(b"")
    assert "1 of 13 images are not there, or empty" in {f.name: f for f in findings_in(root)}["prid2011"].problem
    shutil.copytree(root / "Market", root / "DukeMTMC-reID")
    assert {f.name for f in findings_in(root) if "withdrew it" in f.notes} == {"dukemtmc"}
    shutil.rmtree(root / "MSMT17" / "pytorch" / "query")
    assert "no such folder" in {finding.name: finding for finding in findings_in(root)}["msmt17"].problem


@pytest.mark.parametrize("kind", [VIPeR, ILIDS])
def test_check_of_a_source_compares_with_the_official_numbers(tmp_path, kind, capsys):
    """Those of i-LIDS depend on the drawn half."""
    write_standin(kind.name, tmp_path)
    code = main(["data", "check", "--data.source", kind.__name__, "--data.source.root", str(tmp_path)])
    assert code == (1 if kind is VIPeR else 0)
    assert ("not complete: compare the numbers" in capsys.readouterr().out) == (kind is VIPeR)


def test_official_numbers_are_those_of_the_papers_table():
    counts = read_paper("003").content["counts"]
    for name, official in FedReIDBench.official_counts.items():
        row = counts[name]
        assert official == (*row["train"], row["query"][1], row["gallery"]), name
