"""``fedsim data prepare``: decode the images of a config to the disk, before the first run."""

from __future__ import annotations

from pathlib import Path

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import decoded
from fedsim.data.datamodule import FederatedDataModule


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
