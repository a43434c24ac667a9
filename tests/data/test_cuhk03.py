"""CUHK03's .mat file becomes the folders of the new protocol."""

import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedsim.cli.data.command import run as run_data_command
from fedsim.core.errors import ConfigError, DataError
from fedsim.data.conversions import convert_cuhk03
from fedsim.data.datasets import CUHK03NP

PEOPLE = (4, 3, 1, 1, 1)
"""per pair of cameras"""
TRAINED = {(1, 1), (1, 2), (2, 1)}
"""(pair, person)"""
MISSING = {(1, 1, 3), (1, 4, 6), (2, 2, 10)}
"""(pair, person, image) that are not in the file"""


def draw(variant):
    """(pair, person, image) -> uint8 [H, W, 3], all from 1."""
    rng = np.random.Generator(np.random.Philox(len(variant)))
    shape = {"detected": (9, 4, 3), "labeled": (7, 5, 3)}[variant]
    keys = [(pair, person, image) for pair in range(1, 6) for person in range(1, PEOPLE[pair - 1] + 1)
            for image in range(1, 11)]  # fmt: skip
    return {key: rng.integers(0, 256, shape).astype(np.uint8) for key in keys if key not in MISSING}


def write_mat(path):
    """As MATLAB writes it: cells are arrays of references, columns come first, an empty cell is its size."""
    h5py = pytest.importorskip("h5py", reason="needs h5py to write a .mat file of MATLAB 7.3")
    with h5py.File(path, "w") as file:
        for variant in ("detected", "labeled"):
            drawn = draw(variant)
            cell = file.create_dataset(variant, (1, 5), dtype=h5py.ref_dtype)
            for pair, people in enumerate(PEOPLE, start=1):
                images = file.create_dataset(f"#refs#/{variant}{pair}", (10, people), dtype=h5py.ref_dtype)
                cell[0, pair - 1] = images.ref
                for person in range(1, people + 1):
                    for image in range(1, 11):
                        pixels = drawn.get((pair, person, image))
                        content = np.zeros(2, dtype=np.uint64) if pixels is None else pixels.transpose(2, 1, 0)
                        name = f"#refs#/{variant}_{pair}_{person}_{image}"
                        images[image - 1, person - 1] = file.create_dataset(name, data=content).ref


def name_of(pair, person, image):
    return f"{pair}_{person:03d}_{1 if image <= 5 else 2}_{image:02d}.png"


def parts(variant):
    """Folder -> keys of its images; the first two images of a view of a new person ask."""
    keys = sorted(draw(variant))
    test = [key for key in keys if key[:2] not in TRAINED]
    query = [key for key in test if key[2] in (1, 7)]
    return {
        "bounding_box_train": [key for key in keys if key[:2] in TRAINED],
        "query": query,
        "bounding_box_test": [key for key in test if key not in query],
    }


def write_protocol(path, variant, **changes):
    keys = sorted(draw(variant))
    files = np.empty((len(keys), 1), dtype=object)
    files[:, 0] = [name_of(*key) for key in keys]
    rows = {part: np.array([[keys.index(key) + 1] for key in chosen]) for part, chosen in parts(variant).items()}
    content = {
        "filelist": files,
        "train_idx": rows["bounding_box_train"],
        "query_idx": rows["query"],
        "gallery_idx": rows["bounding_box_test"],
    }
    savemat(path, content | changes)
    return path


@pytest.fixture(scope="module")
def mat(tmp_path_factory):
    path = tmp_path_factory.mktemp("mat") / "cuhk-03.mat"
    write_mat(path)
    return path


@pytest.mark.parametrize("variant", ["detected", "labeled"])
def test_both_variants_are_converted_and_loaded(mat, tmp_path, variant):
    protocol = write_protocol(tmp_path / f"cuhk03_new_protocol_config_{variant}.mat", variant)
    args = ["convert", "--mat", str(mat), "--protocol", str(protocol), "--output", str(tmp_path / "data")]
    text = run_data_command([*args, "--variant", variant])
    expected = parts(variant)
    sizes = ", ".join(f"{part} {len(keys)}" for part, keys in expected.items())
    assert text == f"wrote {tmp_path / 'data' / 'cuhk03-np' / variant}: {sizes} images"
    folder, drawn = tmp_path / "data" / "cuhk03-np" / variant, draw(variant)
    for part, keys in expected.items():
        assert sorted(path.name for path in (folder / part).iterdir()) == sorted(name_of(*key) for key in keys)
        for key in keys:
            with Image.open(folder / part / name_of(*key)) as image:
                assert (np.asarray(image) == drawn[key]).all()
    assert [path.name for path in folder.parent.iterdir()] == [variant]  # nothing else is left
    (domain,) = CUHK03NP(str(tmp_path / "data"), variant=variant).domains()
    assert (len(domain.train), len(domain.query), len(domain.gallery)) == tuple(map(len, expected.values()))
    assert len(domain.train.identities) == 3
    for split, keys in zip((domain.train, domain.query, domain.gallery), expected.values(), strict=True):
        cameras = {10_000 * pair + person: set() for pair, person, _ in keys}
        for pair, person, image in keys:
            cameras[10_000 * pair + person].add((image - 1) // 5)
        assert split.identities.tolist() == sorted(cameras)
        for pid, seen in cameras.items():
            assert set(split.camids[split.pids == pid].tolist()) == seen


def test_what_is_there_is_not_overwritten(mat, tmp_path):
    protocol = write_protocol(tmp_path / "protocol.mat", "detected")
    convert_cuhk03(mat, protocol, tmp_path, "detected")
    with pytest.raises(ConfigError, match=r"--output: .*cuhk03-np/detected exists already"):
        convert_cuhk03(mat, protocol, tmp_path, "detected")


def test_the_other_variants_protocol_is_refused(mat, tmp_path):
    protocol = write_protocol(tmp_path / "cuhk03_new_protocol_config_labeled.mat", "labeled")
    with pytest.raises(ConfigError, match=r"--variant: .* is the protocol of the labeled boxes"):
        convert_cuhk03(mat, protocol, tmp_path, "detected")


def files(*names):
    cells = np.empty((len(names), 1), dtype=object)
    cells[:, 0] = names
    return {"filelist": cells, "train_idx": [[1]], "query_idx": [[1]], "gallery_idx": [[1]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [(files("1_001_1_03.png"), r"cuhk-03\.mat: holds no image 1_001_1_03\.png, which the protocol names"),
     (files("1_005_1_01.png"), r"holds no image 1_005_1_01\.png"),
     (files("6_001_1_01.png"), r"holds no image 6_001_1_01\.png"),
     (files("1_001_2_01.png"), r"protocol\.mat: the name 1_001_2_01\.png is not like .* images 1 to 5 are view 1"),
     (files("1_000_1_01.png"), r"the name 1_000_1_01\.png is not like"),
     (files("1_001_2_11.png"), r"the name 1_001_2_11\.png is not like"),
     (files("../../evil.png"), r"the name \.\./\.\./evil\.png is not like"),
     ({"query_idx": [[0]]}, r"protocol\.mat: query_idx does not fit the \d+ names of filelist"),
     ({"gallery_idx": [[10_000]]}, r"gallery_idx does not fit"),
     ({"train_idx": np.zeros((0, 1))}, r"train_idx does not fit")],
)  # fmt: skip
def test_files_that_do_not_fit_are_named_and_nothing_is_left(mat, tmp_path, changes, message):
    protocol = write_protocol(tmp_path / "protocol.mat", "detected", **changes)
    with pytest.raises(DataError, match=message):
        convert_cuhk03(mat, protocol, tmp_path / "data", "detected")
    assert not [path for path in (tmp_path / "data").rglob("*") if path.name != "cuhk03-np"]


@pytest.mark.parametrize(
    "content",
    [np.zeros((1, 4, 9), np.uint8), np.zeros((3, 4, 9)), np.zeros((4, 9), np.uint8)],
    ids=["one channel", "float64", "two dimensions"],
)
def test_what_is_no_image_is_not_written(mat, tmp_path, content):
    import h5py

    shutil.copy(mat, tmp_path / "cuhk-03.mat")
    with h5py.File(tmp_path / "cuhk-03.mat", "r+") as file:
        del file["#refs#/detected_1_1_1"]
        images = file["#refs#/detected1"]
        images[0, 0] = file.create_dataset("#refs#/other", data=content).ref
    protocol = write_protocol(tmp_path / "protocol.mat", "detected")
    with pytest.raises(DataError, match=r"holds no image 1_001_1_01\.png"):
        convert_cuhk03(tmp_path / "cuhk-03.mat", protocol, tmp_path, "detected")


def test_damaged_files_are_named(mat, tmp_path):
    broken = tmp_path / "broken.mat"
    broken.write_bytes(b"not a .mat file")
    with pytest.raises(DataError, match=r"broken\.mat: is not CUHK03's new protocol"):
        convert_cuhk03(mat, broken, tmp_path, "detected")
    with pytest.raises(DataError, match=r"nowhere\.mat: no such file"):
        convert_cuhk03(mat, tmp_path / "nowhere.mat", tmp_path, "detected")
    protocol = write_protocol(tmp_path / "protocol.mat", "detected")
    for path in (broken, tmp_path / "missing.mat"):
        with pytest.raises(DataError, match=rf"{path.name}: cannot be read as cuhk-03\.mat"):
            convert_cuhk03(path, protocol, tmp_path, "detected")


def test_another_hdf5_file_is_named(tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs h5py to write a .mat file of MATLAB 7.3")
    protocol = write_protocol(tmp_path / "protocol.mat", "detected")
    for number, content in enumerate(({}, {"detected": np.zeros((1, 5))})):
        path = tmp_path / f"other{number}.mat"
        with h5py.File(path, "w") as file:
            for name, values in content.items():
                file[name] = values
        with pytest.raises(DataError, match=rf"other{number}\.mat: holds no cell detected"):
            convert_cuhk03(path, protocol, tmp_path, "detected")


def test_without_h5py_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "h5py", None)
    protocol = write_protocol(tmp_path / "protocol.mat", "detected")
    with pytest.raises(ConfigError, match=r"--mat needs h5py; pip install 'fedsim-reid\[cuhk03\]'"):
        convert_cuhk03(tmp_path / "cuhk-03.mat", protocol, tmp_path, "detected")
