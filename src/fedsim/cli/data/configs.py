"""``fedsim data ...`` on the data sets of a config, or on synthetic ones: decode them, draw them, write a manifest.

Also ``fedsim data check`` and ``preview`` with ``--data.source``: of data sets that a reader of your own lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from tabulate import tabulate

from fedsim.core.checked import checked
from fedsim.core.checks import Natural
from fedsim.core.errors import ConfigError, DataError, NotReadyError
from fedsim.core.paths import Config, InputFolder, NewPicture, OutputFolder, Picture, Table
from fedsim.data import decoded
from fedsim.data.check import findings_of, refuse_unusable, table_of
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federations import check_names
from fedsim.data.listing import listed
from fedsim.data.manifest import hash_rows, write_manifest
from fedsim.data.market import MarketFolders
from fedsim.data.preview import write_contact_sheet
from fedsim.data.synthetic import SyntheticReID
from fedsim.parsing.config_files import read_sections
from fedsim.parsing.error_lines import parsed
from fedsim.parsing.output import print_text
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
    parser, arguments = ArgumentParser(exit_on_error=False, prog="fedsim fit"), None  # whose help lists the settings
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


def prepare_data(data: FederatedDataModule, folder: Path | None, workers: int, verify: bool) -> str:
    """Decode the images of a config, unless they are decoded; return a table, and the unreadable images.

    ``folder`` is by default the config's; ``workers`` processes decode; ``verify`` compares existing files with their
    checksums. Raises ConfigError without a folder, and DataError for a damaged file, or for unreadable images unless
    the config skips these.
    """
    folder = folder or data.cache_dir
    if folder is None:
        raise ConfigError("data.cache_dir: name a folder for decoded images, in the config or by --cache_dir")
    rows: list[list[object]] = []
    problems: list[str] = []
    for wanted in data.wanted():
        was_there = decoded.is_built(folder, wanted)
        path = decoded.build(folder, wanted, workers)
        if was_there and verify:
            decoded.verify(path)
        file = decoded.open_decoded(folder, wanted)
        assert file is not None, path
        state = ("verified" if verify else "was there") if was_there else "decoded"
        size, bad = "{}x{}".format(*wanted.size), len(file.unreadable)
        rows.append([wanted.name, size, len(wanted.files), bad, file.pixels.nbytes / 1e6, state])
        problems += file.unreadable.values()
    if not rows:
        return "nothing to decode: the images of this config are not files"
    problems = list(dict.fromkeys(problems))
    table = tabulate(
        rows, headers=["data set", "size", "images", "unreadable", "MB", ""], floatfmt=".1f", disable_numparse=[0]
    )
    if not problems:
        return f"{table}\n\nin {folder}"
    if data.on_corrupt == "stop":
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DataError(f"{'; '.join(problems[:20])}{more}; or leave such images out with data.on_corrupt: skip")
    return "\n".join([table, "", f"in {folder}; will be left out:", *problems])


_SMALL = (128, 64)
"""height and width of the pictures, unless data.size is given"""


def check_source_of(settings: list[str]) -> Callable[..., str]:
    """Return the command for ``settings``, words of the section data."""

    @checked("--")
    def check(config: Config | None = None, picture: Picture | None = None) -> str:
        """List the data sets that data.source reads, and check their numbers, labels and some of their images.

        The exit code is 1 if one of them cannot be used.

        Args:
            config: config files whose data section is read first.
            picture: an image file for a contact sheet of what was read; null draws none.
        """
        from fedsim.testing import PartRefusedError, check_source  # imports what trains

        data = data_of(config or [], settings)
        domains = data.list_domains()
        check_names(domains)
        findings = [finding for source in data.sources for finding in findings_of(source)]
        print_text(table_of(findings))
        refuse_unusable(Path(), findings)
        for source in data.sources:
            try:
                check_source(source)
            except PartRefusedError as error:
                print_text(f"\n{error}")
                raise NotReadyError(f"data.source: {error.findings[0]}") from error
        if picture is not None:
            write_contact_sheet(domains, _SMALL, Path(picture))
        drawn = f"; wrote {picture}" if picture else ""
        return f"\nno finding{drawn}"

    return check


def preview_source_of(settings: list[str]) -> Callable[..., str]:
    """Return the command for ``settings``, words of the section data."""

    @checked("--")
    def preview(config: Config | None = None, output: NewPicture = "preview.png") -> str:
        """Draw a contact sheet of the data sets that data.source reads: a few people, seen by several cameras.

        Args:
            config: config files whose data section is read first.
            output: the image file to write; it must not exist.
        """
        data = data_of(config or [], settings)
        is_sized = config or any(word.startswith("--data.size") for word in settings)
        domains = data.list_domains()
        write_contact_sheet(domains, data.size if is_sized else _SMALL, Path(output))
        return f"wrote {output}: {len(domains)} data sets"

    return preview
