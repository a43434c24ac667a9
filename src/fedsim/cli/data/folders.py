"""``fedsim data ...``: typed functions, whose arguments are the options."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from fedsim.cli.commands import run_subcommand
from fedsim.cli.config_files import read_config
from fedsim.cli.values import check_values
from fedsim.core.errors import ConfigError
from fedsim.data.check import check_data
from fedsim.data.cuhk03 import Variant, convert_cuhk03
from fedsim.data.cuhksysu import cut_people
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.manifest import hash_rows, write_manifest
from fedsim.data.market import QUERY, MarketFolders, write_market_splits
from fedsim.data.prepare import prepare_data
from fedsim.data.preview import write_contact_sheet
from fedsim.data.splits import SplitStyle
from fedsim.data.synthetic import SyntheticReID

_FOLDER = {"check": "--root", "splits": "--folder"}  # the option that may be given without its name


def run(args: list[str]) -> str:
    """Run ``fedsim data COMMAND [options]``, and return what is to be printed."""
    if len(args) > 1 and args[0] in _FOLDER and not args[1].startswith("-"):
        args = [args[0], _FOLDER[args[0]], *args[1:]]
    commands = (check, convert, cut, manifest, prepare, preview, splits)
    return run_subcommand("data", {command.__name__: command for command in commands}, args)


def check(root: str, all: bool = False) -> str:
    """Look which data sets are in a folder, the papers' or your own, and whether they are complete.

    Args:
        root: the folder of data sets.
        all: also list those of the papers that are not there, and where they are expected.
    """
    return check_data(Path(root).expanduser(), all)


def prepare(config: str | list[str], cache_dir: str | None = None, workers: int = 2, verify: bool = False) -> str:
    """Decode all images that a run with this config needs; runs with the same data.cache_dir map them into memory.

    Can be interrupted and started again.

    Args:
        config: a config file whose data section names the data sets.
        cache_dir: a folder for decoded images; null: data.cache_dir of the config.
        workers: processes that decode.
        verify: compare files that are there already with their checksums.
    """
    if workers < 0:
        raise ConfigError(f"--workers: {workers} is less than 0")
    folder = None if cache_dir is None else Path(cache_dir).expanduser()
    return prepare_data(data_of(config), folder, workers, verify)


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


def preview(config: str | list[str] | None = None, root: str | None = None, output: str = "preview.png") -> str:
    """Draw a contact sheet of data sets: a few people of each, seen by several cameras.

    Args:
        config: a config file whose data section names the data sets; null draws the synthetic ones.
        root: a folder of data sets in Market-1501 layout, instead of a config.
        output: the image file to write.
    """
    size = (128, 64)
    if root is not None:
        domains = MarketFolders(root).domains()
    elif config:
        data = data_of(config)
        domains, size = data.list_domains(), data.size
    else:
        domains = SyntheticReID().domains()
    write_contact_sheet(domains, size, Path(output))
    return f"wrote {output}: {len(domains)} data sets"


def manifest(config: str | list[str], output: str = "federation.csv") -> str:
    """Write who holds which image, and where everybody is tested, as a CSV file for data.manifest.

    Args:
        config: a config file whose data section describes the federation.
        output: the CSV file to write; paths of images below its folder are relative to it.
    """
    data = data_of(config)
    if data.manifest is not None:
        raise ConfigError(f"data.manifest: {config} has a manifest already, {data.manifest}")
    if data.dry_run:
        raise ConfigError("data.dry_run: the drawn files do not outlive this command; set it to false")
    if data.on_corrupt == "skip":
        data.prepare_data()  # who is in it depends on which images can be read
    rows = write_manifest(data.federated, Path(output))
    # the hash does not depend on where the data lie
    return f"wrote {output}: {len(data.federated.clients)} clients, {len(rows)} rows\nsha256 {hash_rows(rows)}"


def data_of(config: str | list[str]) -> FederatedDataModule:
    """Build the data module of configs' ``data`` sections; what a later one says wins.

    Raises:
        ConfigError: if none has such a section.
    """
    parser, found = ArgumentParser(exit_on_error=False), None
    paths = [config] if isinstance(config, str) else config
    parser.add_class_arguments(FederatedDataModule, "data")
    for path in paths:
        if "data" in (content := read_config(path, parser.groups or ())):
            found = parser.parse_object({"data": content["data"]}, found)
    if found is None:
        raise ConfigError(f"--config: {' and '.join(paths)} has no data section")
    check_values(found.as_dict(), {"data": FederatedDataModule})
    data: FederatedDataModule = parser.instantiate(found)["data"]
    return data


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
