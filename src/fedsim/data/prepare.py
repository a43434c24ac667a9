"""``fedsim data prepare``: the decoded images of a config, on the disk before the first run."""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import decoded
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.decoded import DecodedFile, Wanted

__all__ = ["prepare_data"]


def prepare_data(data: FederatedDataModule, folder: Path | None, workers: int, verify: bool) -> str:
    """Decode what runs on this data will need, as far as it has not been done.

    Args:
        data: of a config.
        folder: for decoded images; None: the config's.
        workers: processes that decode.
        verify: compare files that are there already with their checksums.

    Returns:
        a table, and the images that could not be read.

    Raises:
        ConfigError: if no folder is given.
        DataError: if images cannot be read and the config does not skip these, or a file is damaged.
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
        found = decoded.open_decoded(folder, wanted)
        assert found is not None, path
        rows.append([*_row(wanted, found), ("verified" if verify else "was there") if was_there else "decoded"])
        problems += found.unreadable.values()
    if not rows:
        return "nothing to decode: the images of this config are no files"
    problems = list(dict.fromkeys(problems))
    table = tabulate(rows, headers=["data set", "size", "images", "unreadable", "MB", ""], floatfmt=".1f")
    if not problems:
        return f"{table}\n\nin {folder}"
    if data.on_corrupt == "stop":
        raise DataError(
            f"{'; '.join(problems[:20])}{f'; and {len(problems) - 20} more' if len(problems) > 20 else ''}; "
            "or leave such images out with data.on_corrupt: skip"
        )
    return "\n".join([table, "", f"in {folder}; will be left out:", *problems])


def _row(wanted: Wanted, found: DecodedFile) -> list[object]:
    height, width = wanted.size
    return [wanted.name, f"{height}x{width}", len(wanted.files), len(found.unreadable), found.pixels.nbytes / 1e6]
