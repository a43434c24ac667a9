"""A federation written as a CSV file is the same federation when it is read."""

import csv
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.datasets import CUHK02, GRID, PRID2011, DukeMTMC, Market1501, VIPeR
from fedsim.data.images import ImagesInParts
from fedsim.data.manifest import _read_lines, domains_of, hash_rows, list_rows, read_manifest, write_manifest
from fedsim.data.standins import write_standin
from fedsim.data.synthetic import SyntheticReID
from fedsim.methods import FedPav
from fedsim.training.settings import LocalTraining
from small import fit, make_model, refuse, sgd, vector

HEADER = "path,pid,cam,dataset,client,part"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standins")
    for name in ("market1501", "viper", "prid2011", "grid", "cuhk02"):
        write_standin(name, folder, 8, size=(16, 8))
    return folder


def sources(root):
    return [Market1501(str(root)), PRID2011(str(root), shots="multi"), GRID(str(root), protocol="splits"),
            VIPeR(str(root), protocol="splits"), CUHK02(str(root))]  # fmt: skip


def federation(root, **options):
    data = FederatedDataModule(sources(root), public="cuhk02", **{"val": "none", **options})
    return replace(data.federated, root=None)  # no manifest lists labelled images of the server


def read_rows(path):
    return [line.row for line in _read_lines(path)]


def paths_of(images):
    if isinstance(images, ImagesInParts):
        return [path for part in images.parts for path in paths_of(part)]
    return list(images.paths)


def plain(value):
    """A split, retrieval set or client as nested lists of plain values."""
    if value is None or isinstance(value, str | int | Path):
        return value
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]  # in their order
    if hasattr(value, "decode"):
        return paths_of(value)
    return {name: plain(item) for name, item in vars(value).items()}


@pytest.mark.parametrize(
    ("partition", "val"),
    [(partition, val) for partition in ("by_dataset", "union") for val in ("identities", "first_image", "none")]
    + [("iid", "identities"), ("by_camera", "none"), ("dirichlet", "none")],
)
def test_what_is_written_reads_back_field_by_field(root, tmp_path, partition, val):
    given = federation(root, partition=partition, val=val, parts=2)
    write_manifest(given, tmp_path / "federation.csv")
    found = read_manifest(tmp_path / "federation.csv")
    assert plain(found) == plain(given)
    assert (given.clients[0].val is None) == (val == "none")
    if val != "none":
        assert (given.clients[0].val.own is None) == (val == "first_image")


def test_the_comparison_sees_differences(root):
    given = plain(federation(root))
    assert given != plain(federation(root, max_images=20))
    assert given != plain(federation(root, val="identities"))
    assert [name for name, _ in given["tests"]] == ["market1501", "prid2011", "grid", "viper"]


def test_training_on_the_manifest_is_training_on_the_config(root, tmp_path):
    options = {"val": "identities", "val_fraction": 0.4, "size": (16, 8)}
    data = FederatedDataModule([Market1501(str(root)), PRID2011(str(root))], **options)
    write_manifest(data.federated, tmp_path / "federation.csv")
    listed = FederatedDataModule(manifest=str(tmp_path / "federation.csv"), **options)
    training = LocalTraining(batch_size=4, optimizer=sgd)
    trained = [fit(make_model(FedPav(), client=training), given, rounds=2) for given in (data, listed)]
    assert torch.equal(vector(trained[0]), vector(trained[1]))
    scores = [{split: model.evaluator.score(split) for split in ("val", "test")} for model in trained]
    assert scores[0] == scores[1]
    assert "val/mAP" in scores[0]["val"]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_can_be_read_by_eye(root, tmp_path):
    write_manifest(federation(root), root / "federation.csv")
    with (root / "federation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == HEADER
    assert rows[0] == {
        "path": "Market-1501-v15.09.15/bounding_box_train/0001_c1s1_000000_00.jpg", "pid": "1", "cam": "0",
        "dataset": "market1501", "client": "market1501", "part": "train",
    }  # fmt: skip
    parts = list(dict.fromkeys((row["dataset"], row["client"], row["part"]) for row in rows))
    tens = [(name, "", f"{part} {i}") for i in range(10) for part in ("query", "gallery") for name in ("viper",)]
    assert parts[:6] == [
        ("market1501", "market1501", "train"), ("prid2011", "prid2011", "train"),
        ("market1501", "", "query"), ("market1501", "", "gallery"), ("prid2011", "", "query"),
        ("prid2011", "", "gallery"),
    ]  # fmt: skip
    assert [part for part in parts if part[0] == "viper"] == [("viper", "", "gallery"), *tens]
    assert parts[-1] == ("cuhk02", "", "public")
    write_manifest(federation(root), tmp_path / "elsewhere" / "federation.csv")  # folders on the way are created
    assert all(row.path.is_absolute() for row in read_rows(tmp_path / "elsewhere" / "federation.csv"))
    first = (tmp_path / "elsewhere" / "federation.csv").read_text().splitlines()[1]
    assert first.startswith(f"{root}/Market-1501-v15.09.15/")


def test_a_manifest_moves_with_its_images(root, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(root / "VIPeR", folder / "VIPeR")
    write_manifest(FederatedDataModule(VIPeR(str(folder)), val="none").federated, folder / "federation.csv")
    folder.rename(tmp_path / "there")
    (client,) = read_manifest(tmp_path / "there" / "federation.csv").clients
    assert client.train.images.decode((16, 8)).shape == (8, 3, 16, 8)


def test_names_with_commas_quotes_lines_and_foreign_bytes_survive(root, tmp_path):
    folder = tmp_path / 'a, "b"\nc \udcff é'
    shutil.copytree(root / "VIPeR", folder / "VIPeR")
    given = FederatedDataModule(VIPeR(str(folder)), val="none").federated
    write_manifest(given, tmp_path / "federation.csv")
    assert plain(read_manifest(tmp_path / "federation.csv")) == plain(given)


def test_spreadsheets_may_save_it_with_their_marks(root, tmp_path):
    given = federation(root)
    write_manifest(given, root / "federation.csv")
    text = (root / "federation.csv").read_bytes().replace(b"\n", b"\r\n")
    (root / "saved.csv").write_bytes(b"\xef\xbb\xbf" + text)
    assert plain(read_manifest(root / "saved.csv")) == plain(given)


def test_the_hash_is_that_of_the_data_not_of_their_place(root, tmp_path):
    here = hash_rows(write_manifest(federation(root), root / "federation.csv"))
    shutil.copytree(root, tmp_path / "copy")
    (tmp_path / "copy" / "VIPeR").rename(tmp_path / "copy" / "viper")  # another usual name
    assert hash_rows(list(list_rows(federation(tmp_path / "copy")))) == here
    assert hash_rows(read_rows(root / "federation.csv")) == here
    assert hash_rows(list(list_rows(federation(root, val="identities")))) != here
    (tmp_path / "copy" / "viper" / "cam_a" / "000_0.bmp").rename(tmp_path / "copy" / "viper" / "cam_a" / "000_1.bmp")
    assert hash_rows(list(list_rows(federation(tmp_path / "copy")))) != here


def test_the_hash_is_of_a_csv_file_with_paths_below_each_data_set(root):
    rows = list(list_rows(FederatedDataModule(VIPeR(str(root)), val="none").federated))
    lines = [HEADER]
    lines += [",".join([str(row.path.relative_to(root / "VIPeR")), *map(str, row[1:])]) for row in rows]
    text = "".join(line + "\n" for line in lines)
    assert hash_rows(rows) == hashlib.sha256(text.encode()).hexdigest()


def test_domains_are_there_for_pictures(root, tmp_path):
    write_manifest(federation(root, partition="by_camera"), tmp_path / "federation.csv")
    data = FederatedDataModule(manifest=str(tmp_path / "federation.csv"), val="none")
    domains = {domain.name: domain for domain in data.list_domains()}
    assert list(domains) == ["market1501", "prid2011", "grid", "viper", "cuhk02"], "the last one is public"
    market = Market1501(str(root)).domains()[0]
    assert sorted(paths_of(domains["market1501"].train.images)) == sorted(paths_of(market.train.images))
    assert domains["viper"].train is None
    assert len(domains["viper"].splits) == 10
    union = {domain.name: domain.train for domain in domains_of(federation(root, partition="union"))}
    assert [name for name, train in union.items() if train is not None] == ["union", "cuhk02"]


# -- what is refused ---------------------------------------------------------------------------------------------------

GOOD = """\
path,pid,cam,dataset,client,part
a0.png,1,0,town,anna,train
a1.png,2,1,town,anna,train
a2.png,3,0,town,anna,val_query
a2.png,3,0,town,anna,val_gallery
a3.png,3,1,town,anna,val_gallery
q0.png,8,0,town,,query
g0.png,8,1,town,,gallery
p0.png,5,0,new,,gallery
p1.png,5,1,new,,gallery
p0.png,5,0,new,,query 0
p1.png,5,1,new,,gallery 0
u0.png,0,0,street,,public
"""


def test_a_manifest_by_hand(tmp_path):
    (tmp_path / "m.csv").write_text(GOOD)
    found = read_manifest(tmp_path / "m.csv")
    (anna,) = found.clients
    assert (anna.name, anna.tests, anna.labels.tolist(), anna.val.own.tolist()) == ("anna", ("town",), [0, 1], [0])
    assert (list(found.tests), found.unseen, found.public_name) == (["town", "new"], ("new",), "street")
    assert [[part.tolist() for part in split] for split in found.tests["new"].splits] == [[[0], [1]]]
    with pytest.raises(DataError, match=r"a0\.png: cannot read this image"):
        anna.train.images.decode((4, 4))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (HEADER, "path,pid,cam,part", "line 1 is not path,pid,cam,dataset,client,part"),
        ("a1.png,2,1,town", "a1.png,two,1,town", "line 3: pid 'two' is not an integer"),
        ("a1.png,2,1,town", "a1.png,2.0,1,town", "line 3: pid '2.0' is not an integer"),
        ("a1.png,2,1,town", "a1.png,-2,1,town", "line 3: pid '-2' is not an integer from -1 on"),
        ("a1.png,2,1,town", f"a1.png,{10**20},1,town", "line 3: pid '1000.* is not an integer"),
        ("a1.png,2,1,town", "a1.png,2,,town", "line 3: cam '' is not an integer from 0 on"),
        ("a1.png,2,1,town", ",2,1,town", "line 3: path is empty"),
        ("a1.png,2,1,town", "a1.png,2,1,", "line 3: a data set cannot be called ''"),
        ("a1.png,2,1,town", "a1.png,2,1,unseen", "line 3: a data set cannot be called 'unseen'"),
        ("a1.png,2,1,town", "a1.png,-1,1,town", "line 3: part train has no junk images"),
        ("a1.png,2,1,town,anna,train", "a1.png,2,1,town,anna,training", "line 3: part 'training' is not one of train"),
        ("a1.png,2,1,town,anna,train", "a1.png,2,1,town,,train", "line 3: part train needs a client"),
        ("a1.png,2,1,town,anna,train", "a1.png,2,1,town,train", "line 3: has 5 fields instead of 6"),
        ("q0.png,8,0,town,,query", "q0.png,8,0,town,anna,query", "line 7: part query belongs to no client"),
        ("q0.png,8", 'q0.png,"8', "line [0-9]+: is not CSV"),
        ("a0.png,1,0,town,anna,train\na1.png,2,1,town,anna,train\n", "",
         "line 2: client anna has no training images"),
        ("q0.png,8,0,town", "q0.png,2,0,town", "line 3: identity 2 is in both train and test of town"),
        ("a1.png,2,1,town", "a1.png,8,1,town", "line 3: identity 8 is in both train and test of town"),
        ("q0.png,8,0,town,,query", "q0.png,8,0,town,,query\nq0.png,9,0,town,,query",
         r"line 8: q0\.png is in this query twice, first in line 7"),
        ("a1.png,2,1", "a0.png,2,1", r"line 3: a0\.png is in this train twice, first in line 2; remove one of them"),
        ("g0.png,8,1", "a1.png,8,1", r"line 8: a1\.png is tested on \(gallery\), and in train of anna, line 3"),
        ("a1.png,2,1,town,anna,", "a1.png,2,1,town,\udcff,", r"line 3: of a client, '\\udcff' holds bytes that"),
        ("a1.png,2,1,town,", "a1.png,5,1,new,", ""),  # of two data sets: their numbers are the client's own
        ("a2.png,3,0,town,anna,val_query\n", "", "line 4: a client needs both val_query and val_gallery"),
        ("a2.png,3,0,town,anna,val_gallery\n", "a2.png,3,0,town,anna,val_gallery\n" * 2, "line 6: a2.png is .* twice"),
        ("a2.png,3,0,town,anna,val_query", "a2.png,3,1,town,anna,val_query", "line 4: pid or cam differ from line 5"),
        ("a2.png,3,0,town,anna,val_query", "a2.png,3,0,town,anna,val_query\nb.png,3,0,town,anna,val_query",
         "line 5: this query is not in val_gallery"),
        ("g0.png,8,1,town,,gallery\n", "", "line 7: town has no gallery"),
        ("q0.png,8,0,town,,query\n", "", "line 7: town needs rows with the part query, or else query 0"),
        ("p1.png,5,1,new,,gallery 0", "p1.png,5,1,new,,query", "line 9: new needs rows with the part query, or else"),
        ("p1.png,5,1,new,,gallery 0\n", "", "line 9: new has no rows with the part gallery 0"),
        ("p1.png,5,1,new,,gallery 0", "p1.png,5,1,new,,gallery 1", "line 9: new has no rows with the part gallery 0"),
        ("p1.png,5,1,new,,gallery 0", "x.png,5,1,new,,gallery 0", "line 12: this image of gallery 0 is not in the gal"),
        ("u0.png,0,0,street", "u0.png,0,0,town", "line 13: town is public, so it cannot be used for training or test"),
        ("u0.png,0,0,street", "u0.png,0,0,new", "line 13: new is public"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, old, new, message):
    assert GOOD.count(old) == 1
    path = tmp_path / "m.csv"
    path.write_text(GOOD.replace(old, new), errors="surrogateescape")
    if not message:
        read_manifest(path)
        return
    with pytest.raises(DataError, match=f"{path}: {message}") as error:
        read_manifest(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "lists no images"), (HEADER + "\n", "lists no images"), (None, "cannot read this manifest"),
     (HEADER + "\nq.png,1,0,t,,query\ng.png,1,1,t,,gallery\n", "no client has training images")],
)  # fmt: skip
def test_manifests_without_a_federation_are_refused(tmp_path, content, message):
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=f"{path}: {message}"):
        read_manifest(path)


def test_a_client_without_a_test_set_is_drawn_as_a_data_set(tmp_path):
    (tmp_path / "m.csv").write_text("\n".join(line for line in GOOD.splitlines() if ",town,," not in line) + "\n")
    domains = domains_of(read_manifest(tmp_path / "m.csv"))
    assert [(domain.name, len(domain.train or ())) for domain in domains] == [("new", 0), ("anna", 4), ("street", 1)]


def test_drawn_people_have_no_files(tmp_path):
    federated = FederatedDataModule(SyntheticReID(clients=2, unseen=0, scale=0.2), val="none").federated
    with pytest.raises(ConfigError, match=r"data\.source: the images of town0 are no files \(SyntheticImages\)"):
        write_manifest(federated, tmp_path / "m.csv")
    assert not (tmp_path / "m.csv").exists()


def test_a_source_or_a_manifest():
    with pytest.raises(ConfigError, match=r"data\.source: give either a source of data sets or data\.manifest"):
        FederatedDataModule()
    with pytest.raises(ConfigError, match=r"data\.source: give either a source of data sets or data\.manifest"):
        FederatedDataModule(SyntheticReID(), manifest="m.csv")


@pytest.mark.parametrize(
    "option", [{"partition": "union"}, {"unseen": ["a"]}, {"public": "a"}, {"max_images": 5}, {"max_identities": 5},
               {"dry_run": True}], ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_a_manifest_alone_decides(option):
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(option))}: data\.manifest lists the images"):
        FederatedDataModule(manifest="m.csv", **option)


def test_validation_is_what_the_manifest_lists(tmp_path):
    (tmp_path / "m.csv").write_text(GOOD)
    assert FederatedDataModule(manifest=str(tmp_path / "m.csv")).federated.clients[0].val is not None
    assert FederatedDataModule(manifest=str(tmp_path / "m.csv"), val="none").federated.clients[0].val is None
    (tmp_path / "m.csv").write_text("\n".join(line for line in GOOD.splitlines() if "val_" not in line) + "\n")
    with pytest.raises(ConfigError, match=r"data\.val: .*m\.csv lists no validation images; set data\.val to none"):
        _ = FederatedDataModule(manifest=str(tmp_path / "m.csv")).federated


# -- the command -------------------------------------------------------------------------------------------------------


def config_of(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(f"data:\n  val: none\n  size: [16, 8]\n{text}")
    return path


def test_the_command_writes_what_a_run_reads(root, tmp_path, capsys):
    config = config_of(tmp_path, f"  source: {{class_path: VIPeR, init_args: {{root: {root}}}}}\n  max_images: 6\n")
    output = tmp_path / "viper.csv"
    assert main(["data", "manifest", "--config", str(config), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert f"wrote {output}: 1 clients, 14 rows" in said
    assert f"sha256 {hash_rows(read_rows(output))}" in said
    options = ["--data.manifest", str(output), "--data.val", "none", "--model.backbone", "SmallCNN"]
    run = ["--model.method", "FedPav", "--model.client.batch_size", "4", "--run_dir", str(tmp_path / "run")]
    assert main(["describe", *options, *run, "--trainer.accelerator=cpu"]) == 0
    assert "viper" in capsys.readouterr().out


def test_the_command_refuses_in_one_line(root, tmp_path, capsys):
    def refusal(text):
        return refuse(capsys, "data", "manifest", "--config", config_of(tmp_path, text), "--output", tmp_path / "m.csv")

    assert "are no files" in refusal("  source: SyntheticReID\n")
    viper = f"  source: {{class_path: VIPeR, init_args: {{root: {root}}}}}\n"
    assert "data.dry_run: its synthetic files are deleted when this command ends" in refusal(
        viper + "  dry_run: true\n"
    )
    assert "has a manifest already" in refusal("  manifest: federation.csv\n")
    assert "data.source: give either a source of data sets or data.manifest" in refusal("")
    assert not (tmp_path / "m.csv").exists()


def test_duke_is_refused_before_its_folder_is_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"withdrawn by its owners; leave it out, as configs/data/fedreidbench_eight"):
        DukeMTMC(str(tmp_path)).domains()
