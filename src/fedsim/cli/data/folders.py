"""``fedsim data ...`` on folders of image files, which are looked into without torch."""

from __future__ import annotations

from pathlib import Path

from fedsim.data.check import findings_in, refuse_unusable, table_of
from fedsim.data.cuhk03 import Variant, convert_cuhk03
from fedsim.data.cuhksysu import cut_people
from fedsim.data.market import QUERY, write_market_splits
from fedsim.data.splits import SplitStyle
from fedsim.parsing.output import print_text


def check(root: str, all: bool = False) -> str:
    """Look which data sets are in a folder, the papers' or your own, and whether they are complete.

    The exit code is 1 if one of them cannot be used. Your own images are opened, but their pixels are not decoded.

    Args:
        root: the folder of data sets.
        all: also list those of the papers that are not there, and where they are expected.
    """
    folder = Path(root).expanduser()
    findings = findings_in(folder, all)
    print_text(table_of(folder, findings))
    refuse_unusable(findings)
    return ""


def convert(mat: str, protocol: str, output: str, variant: Variant = "detected") -> str:
    """Turn CUHK03's original file into folders that CUHK03NP reads.

    Args:
        mat: cuhk-03.mat.
        protocol: cuhk03_new_protocol_config_detected.mat, or ..._labeled.mat.
        output: the folder of data sets, which gets cuhk03-np.
        variant: boxes by a detector or by hand.
    """
    source, rules, target = (Path(path).expanduser() for path in (mat, protocol, output))
    folder, counts = convert_cuhk03(source, rules, target, variant)
    return f"wrote {folder}: {', '.join(f'{part} {count:,}' for part, count in counts.items())} images"


def cut(root: str, output: str) -> str:
    """Cut the people of CUHK-SYSU's test out of its pictures, into folders that CUHKSYSU reads.

    Args:
        root: the owners' folder, with annotation/test/train_test/TestG50.mat and Image/SSM.
        output: the folder of data sets, which gets cuhksysu4reid.
    """
    folder, counts = cut_people(Path(root).expanduser(), Path(output).expanduser())
    return f"wrote {folder}: {', '.join(f'{part} {count:,}' for part, count in counts.items())} images"


def splits(
    folder: str, num: int = 10, fraction: float = 0.5, style: SplitStyle = "one_query", cross_camera: bool = True,
    asking: list[int] | None = None,
) -> str:  # fmt: skip
    """Draw random splits of a small test set into queries and galleries, and write them as splits.json into its folder.

    A folder with that file is scored on all its splits: mean and spread.

    Args:
        folder: a data set in Market-1501 layout; the images of bounding_box_test are split.
        num: splits to draw.
        fraction: of the identities that are tested on.
        style: one_query: one random image per identity is a query, the others are the gallery; pairs: one query and one
            gallery image.
        cross_camera: draw queries so that a gallery image is from another camera.
        asking: cameras, as numbered in names, that ask in turn, each in one of so many splits of the same people ([1]
            for PRID 2011, [1, 2] for VIPeR in papers 000 and 001); null: drawn for each identity.
    """
    how = {"style": style, "cross_camera": cross_camera, "asking": [camera - 1 for camera in asking or ()]}
    path, drawn = write_market_splits(Path(folder), num=num, fraction=fraction, **how)
    sizes = f"{len(drawn[0].query)} queries, {len(drawn[0].gallery)} gallery images"
    unused = f"; {path.parent / QUERY} is not used while it is there" if (path.parent / QUERY).is_dir() else ""
    return f"wrote {path}: {len(drawn)} splits of {sizes}{unused}"
