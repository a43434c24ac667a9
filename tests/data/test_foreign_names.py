"""Folders and names of files as owners and public code have them, read by ours: never names made up from our reader.

Each case names its source, a public repository and the file in it that reads the data set as it is given away. Where
that file tells only which parts of a name count, the others are filled in.
"""

from __future__ import annotations

import pytest
from PIL import Image

from fedsim.data import datasets
from fedsim.data.market import MarketFolders

TORCHREID = "KaiyangZhou/deep-person-reid: torchreid/data/datasets/image"
FASTREID = "JDAI-CV/fast-reid: fastreid/data/datasets"
DGD = "Cysu/dgd_person_reid: data"


def case(source, kind, files, **options):
    """``files``: path -> (identity, camera from 0)."""
    return pytest.param(kind, options, files, id=source)


CASES = [
    case(f"{TORCHREID}/market1501.py", datasets.Market1501, {
        "market1501/Market-1501-v15.09.15/bounding_box_train/0002_c1s1_000451_03.jpg": (2, 0),
        "market1501/Market-1501-v15.09.15/query/0001_c6s1_001051_00.jpg": (1, 5),
        "market1501/Market-1501-v15.09.15/bounding_box_test/0001_c2s1_000301_00.jpg": (1, 1),
        "market1501/Market-1501-v15.09.15/bounding_box_test/0000_c1s1_000151_01.jpg": (0, 0),
        "market1501/Market-1501-v15.09.15/bounding_box_test/-1_c1s1_000401_03.jpg": (-1, 0),
    }),
    case(f"{TORCHREID}/msmt17.py, version 1", datasets.MSMT17, {
        "msmt17/MSMT17_V1/train/0000/0000_000_01_0303morning_0015_0.jpg": (1, 0),
        "msmt17/MSMT17_V1/test/0000/0000_000_14_0303morning_0015_0.jpg": (10_001, 13),
        "msmt17/MSMT17_V1/test/0000/0000_001_05_0303morning_0020_1.jpg": (10_001, 4),
    }),
    case("zhunzhong07/person-re-ranking: evaluation/data/CUHK03, names in filelist", datasets.CUHK03NP, {
        "cuhk03-np/labeled/bounding_box_train/1_001_1_01.png": (10_001, 0),
        "cuhk03-np/labeled/query/1_003_1_02.png": (10_003, 0),
        "cuhk03-np/labeled/bounding_box_test/1_003_2_06.png": (10_003, 1),
    }, variant="labeled"),
    case(f"{TORCHREID}/cuhk01.py", datasets.CUHK01, {
        f"cuhk01/campus/{pid:04d}{image:03d}.png": (pid, (image - 1) // 2) for pid in (1, 2) for image in (1, 2, 3, 4)
    }),
    case(f"{TORCHREID}/cuhk02.py", datasets.CUHK02, {
        f"cuhk02/Dataset/P{pair}/cam{view}/{name}": (10_000 * pair + int(name[:3]), 2 * pair + view - 3)
        for pair in range(1, 6) for view in (1, 2) for name in ("001_16202.png", "002_16228.png")
    }),
    case(f"{TORCHREID}/prid.py", datasets.PRID2011, {
        f"prid2011/prid_2011/single_shot/cam_{letter}/person_{pid:04d}.png": (pid if pid <= 200 else 10_000 + pid, cam)
        for cam, letter in enumerate("ab") for pid in (1, 2, *((201,) if letter == "b" else ()))
    }),
    case(f"{TORCHREID}/viper.py", datasets.VIPeR, {  # angles differ; files are numbered with gaps
        "viper/VIPeR/cam_a/000_45.bmp": (1, 0), "viper/VIPeR/cam_b/000_180.bmp": (1, 1),
        "viper/VIPeR/cam_a/873_0.bmp": (874, 0), "viper/VIPeR/cam_b/873_90.bmp": (874, 1),
    }),
    case(f"{DGD}/format_3dpes.py", datasets.ThreeDPeS, {  # identity and view; half of the views, the fewer, ask
        "3DPeS/RGB/1_1_FRAME_10_RGB.bmp": (1, 1), "3DPeS/RGB/1_1_FRAME_15_RGB.bmp": (1, 1),
        "3DPeS/RGB/1_16_FRAME_25_RGB.bmp": (1, 0), "3DPeS/RGB/1_20_FRAME_7_RGB.bmp": (1, 1),
        "3DPeS/RGB/100_3_FRAME_5_RGB.bmp": (100, 1), "3DPeS/RGB/100_11_FRAME_5_RGB.bmp": (100, 0),
        "3DPeS/RGB/7_2_FRAME_5_RGB.bmp": (7, 1),
    }),
    case(f"{TORCHREID}/ilids.py", datasets.ILIDS, {
        f"ilids/i-LIDS_Pedestrian/Persons/{pid:04d}{image:03d}.jpg": (pid, None) for pid in (1, 119)
        for image in (1, 2, 3, 4)
    }),
    case(f"{TORCHREID}/grid.py", datasets.GRID, {
        "grid/underground_reid/probe/0001_1_25023_116_134_128_330.jpeg": (1, None),
        "grid/underground_reid/probe/0250_4_25023_116_134_128_330.jpeg": (250, None),
        "grid/underground_reid/gallery/0001_2_25053_9_99_130_320.jpeg": (1, None),
        "grid/underground_reid/gallery/0250_8_25053_9_99_130_320.jpeg": (250, None),
        "grid/underground_reid/gallery/0000_7_25053_9_99_130_320.jpeg": (0, None),
    }),
    case(f"{FASTREID}/caviara.py", datasets.CAVIAR4REID, {
        f"CAVIARa/{pid:04d}{image:03d}.jpg": (pid, image // 11) for pid in (1, 2, 72)
        for image in range(1, 11 if pid == 72 else 21)
    }),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "files"), CASES)
def test_files_of_the_owners_are_read(tmp_path, kind, options, files):
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 16)).save(tmp_path / path)
    if kind is datasets.MSMT17:
        for part, listed in zip(("train", "query", "gallery"), files, strict=True):
            _, folder, _, name = listed.split("/", 3)
            (tmp_path / "msmt17" / folder / f"list_{part}.txt").write_text(f"{name} 0\n")
    (domain,) = kind(str(tmp_path), **options).domains()
    found = {}
    for split in (domain.train, domain.query, domain.gallery):
        for path, pid, cam in zip(split.images.locations(), split.pids, split.camids, strict=True):
            found[str(path.relative_to(tmp_path))] = (pid, cam)
    assert set(found) == set(files)
    for path, (pid, camera) in files.items():
        assert found[path][0] == pid, path
        assert camera in (None, found[path][1]), path


def test_duke_in_the_layout_of_its_owners(tmp_path):
    """layumi/DukeMTMC-reID_evaluation, and torchreid's dukemtmcreid.py: cameras 1 to 8, frames after an f."""
    names = {"bounding_box_train": "0001_c2_f0046182.jpg", "query": "0005_c8_f0051341.jpg",
             "bounding_box_test": "0005_c1_f0051701.jpg"}  # fmt: skip
    for part, name in names.items():
        (tmp_path / "DukeMTMC-reID" / part).mkdir(parents=True)
        Image.new("RGB", (8, 16)).save(tmp_path / "DukeMTMC-reID" / part / name)
    (domain,) = MarketFolders(str(tmp_path / "DukeMTMC-reID")).domains()
    assert [split.camids.tolist() for split in (domain.train, domain.query, domain.gallery)] == [[1], [7], [0]]
