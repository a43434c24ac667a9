"""``fedsim data ...`` on folders of image files, without an import of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedsim.core.checked import checked
from fedsim.core.checks import NumberKind, Part
from fedsim.core.paths import InputFile, InputFolder, OutputFolder
from fedsim.data.check import findings_in, refuse_unusable, table_of
from fedsim.data.conversions import Variant, convert_cuhk03, cut_people
from fedsim.data.market import QUERY, write_market_splits
from fedsim.data.splits import SplitStyle
from fedsim.parsing.output import print_text

_Splits = Annotated[int, NumberKind("[1, 10000]")]
"""more take hours, and no test set needs them"""


@checked("--")
def check(root: InputFolder, all: bool = False) -> str:
    """List the data sets in a folder, the papers' or your own, and check that they are complete.

    The exit code is 1 if one of them cannot be used, or there is none. Your own images are opened, but their pixels are
    not decoded.

    Args:
        root: the folder of data sets.
        all: also list the papers' data sets that are missing, with the folders where they are expected.
    """
    folder = Path(root)
    findings = findings_in(folder, all)
    if findings:
        print_text(table_of(findings))
    refuse_unusable(folder, findings)
    return ""


@checked("--")
def convert(mat: InputFile, protocol: InputFile, output: OutputFolder, variant: Variant = "detected") -> str:
    """Turn CUHK03's original file into folders that CUHK03NP reads.

    Args:
        mat: cuhk-03.mat.
        protocol: cuhk03_new_protocol_config_detected.mat, or ..._labeled.mat.
        output: the folder of data sets, in which cuhk03-np is written.
        variant: bounding boxes of a detector, or labeled by hand.
    """
    source, protocol_file, target = map(Path, (mat, protocol, output))
    folder, counts = convert_cuhk03(source, protocol_file, target, variant)
    return f"wrote {folder}: {', '.join(f'{part} {count:,}' for part, count in counts.items())} images"


@checked("--")
def cut(root: InputFolder, output: OutputFolder) -> str:
    """Cut the people of CUHK-SYSU's test set out of its pictures, into folders that CUHKSYSU reads.

    Args:
        root: the owners' folder, with annotation/test/train_test/TestG50.mat and Image/SSM.
        output: the folder of data sets, in which cuhksysu4reid is written.
    """
    folder, counts = cut_people(Path(root), Path(output))
    return f"wrote {folder}: {', '.join(f'{part} {count:,}' for part, count in counts.items())} images"


@checked("--")
def splits(
    folder: InputFolder, num: _Splits = 10, fraction: Part = 0.5, style: SplitStyle = "one_query",
    cross_camera: bool = True, asking: list[int] | None = None,
) -> str:  # fmt: skip
    """Sample splits of a small test set into queries and galleries, and write them as splits.json into its folder.

    A folder with that file is scored on all its splits: mean and spread.

    Args:
        folder: a data set in Market-1501 layout; the images of bounding_box_test are split.
        num: number of splits, at most 10,000.
        fraction: share of the identities that is tested on.
        style: one_query: one random image per identity is a query, the others are the gallery; pairs: one query and one
            gallery image.
        cross_camera: choose queries that have a gallery image from another camera.
        asking: cameras of the queries, numbered as in file names; the same people are split once per camera ([1] for
            PRID 2011, [1, 2] for VIPeR in papers 000 and 001); null: sampled for each identity.
    """
    options = {"style": style, "cross_camera": cross_camera, "asking": [camera - 1 for camera in asking or ()]}
    path, written = write_market_splits(Path(folder), num=num, fraction=fraction, **options)
    sizes = f"{len(written[0].query)} queries, {len(written[0].gallery)} gallery images"
    unused = f"; {path.parent / QUERY} is not used while this file exists" if (path.parent / QUERY).is_dir() else ""
    return f"wrote {path}: {len(written)} splits of {sizes}{unused}"
