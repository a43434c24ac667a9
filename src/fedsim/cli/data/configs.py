"""``fedsim data ...`` on the data sets of a config, or on synthetic ones: decode them, draw them, write a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from fedsim.core.checked import checked
from fedsim.core.checks import Natural
from fedsim.core.errors import ConfigError
from fedsim.core.paths import Config, InputFolder, NewPicture, OutputFolder, Table
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.listing import listed
from fedsim.data.manifest import hash_rows, write_manifest
from fedsim.data.market import MarketFolders
from fedsim.data.prepare import prepare_data
from fedsim.data.preview import write_contact_sheet
from fedsim.data.synthetic import SyntheticReID
from fedsim.parsing.config_files import read_sections
from fedsim.parsing.error_lines import parsed
from fedsim.parsing.values import check_values


@checked("--")
def manifest(config: Config, output: Table = "federation.csv") -> str:
    """Write the images of each client and of each test set as a CSV file for data.manifest.

    Args:
        config: a config file whose data section describes the federation.
        output: the CSV file to write; paths of images below its folder are relative to it.
    """
    data = data_of(config)
    if data.manifest is not None:
        raise ConfigError(f"data.manifest: {config} has a manifest already, {data.manifest}")
    if data.dry_run:
        raise ConfigError("data.dry_run: its synthetic files are deleted when this command ends; set it to false")
    if data.on_corrupt == "skip":
        data.prepare_data()  # images that cannot be read are not in the manifest
    rows = write_manifest(data.federated, Path(output))
    # the hash does not depend on where the data lie
    return f"wrote {output}: {len(data.federated.clients)} clients, {len(rows)} rows\nsha256 {hash_rows(rows)}"


@checked("--")
def prepare(config: Config, cache_dir: OutputFolder | None = None, workers: Natural = 2, verify: bool = False) -> str:
    """Decode all images that a run with this config needs; runs with the same data.cache_dir map them into memory.

    Can be interrupted and started again.

    Args:
        config: a config file whose data section names the data sets.
        cache_dir: a folder for decoded images; null: data.cache_dir of the config.
        workers: number of processes that decode.
        verify: compare existing files with their checksums.
    """
    folder = None if cache_dir is None else Path(cache_dir)
    return prepare_data(data_of(config), folder, workers, verify)


@checked("--")
def preview(config: Config | None = None, root: InputFolder | None = None, output: NewPicture = "preview.png") -> str:
    """Draw a contact sheet of data sets: a few people of each, seen by several cameras.

    Args:
        config: a config file whose data section names the data sets; null draws the synthetic ones.
        root: a folder of data sets in Market-1501 layout, instead of a config.
        output: the image file to write; it must not exist.
    """
    size = (128, 64)
    if root is not None:
        domains = listed(MarketFolders(root))
    elif config:
        data = data_of(config)
        domains, size = data.list_domains(), data.size
    else:
        domains = SyntheticReID().domains()
    write_contact_sheet(domains, size, Path(output))
    return f"wrote {output}: {len(domains)} data sets"


def data_of(config: str | list[str], settings: Sequence[str] = ()) -> FederatedDataModule:
    """Build the data module of configs' ``data`` sections; a later section overrides earlier ones.

    ``settings``: words such as ``--data.source``, which override all sections.

    Raises:
        ConfigError: if none has such a section.
    """
    parser, arguments = ArgumentParser(exit_on_error=False), None
    paths = [config] if isinstance(config, str) else config
    parser.add_class_arguments(FederatedDataModule, "data")
    for path in paths:
        if "data" in (content := read_sections(path)):
            arguments = parser.parse_object({"data": content["data"]}, arguments)
    if settings:
        arguments = parsed(parser, list(settings), arguments)
    if arguments is None:
        raise ConfigError(f"--config: {' and '.join(paths)} has no data section")
    check_values(arguments.as_dict(), {"data": FederatedDataModule})
    data: FederatedDataModule = parser.instantiate(arguments)["data"]
    return data
