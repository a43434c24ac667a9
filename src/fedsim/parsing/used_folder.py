"""Refuse a fit into the folder of another run at once: seconds before the imports that parse the command line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import ConfigError, FedSimError
from fedsim.core.files import expanded
from fedsim.core.run_lock import WAYS, RunLock
from fedsim.parsing.config_files import config_at, read_config, with_shipped
from fedsim.parsing.output import rank_of_this_process

_DECIDING = ("run_dir", "overwrite", "ckpt_path", "print_config")


def refuse_used_folder(words: Sequence[str]) -> None:
    """Refuse a fit whose ``--run_dir`` has the results of a run, if it neither continues nor replaces that.

    Only what is certain from the command line is refused here; the fit itself looks again, after its other checks.

    Args:
        words: of the command line, without the command.

    Raises:
        ConfigError: naming the folder and the ways on.
    """
    options = dict(_deciding_options(words))
    if options.keys() != {"run_dir"} or options["run_dir"] in ("null", "None") or rank_of_this_process() > 0:
        return
    try:
        folder = Path(expanded(options["run_dir"], "run_dir"))
        is_used = (folder / "summary.json").is_file()
    except (FedSimError, OSError, ValueError):  # the fit names the mistake
        return
    if is_used:
        RunLock(folder).look()
        raise ConfigError(f"run_dir: {folder} holds a run already; {WAYS}")


def _deciding_options(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the deciding options of a command line and of its config files, with their values."""
    options = []
    arguments = with_shipped(words)
    for word, next_word in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, sign, value = word.partition("=")
        if word.startswith("--") and name[2:] in _DECIDING:
            options.append((name[2:], value if sign else next_word))
        elif path := config_at(word, next_word):
            try:
                content = read_config(path)
            except FedSimError:  # the parser names the mistake
                return []
            options += [(key, str(content[key])) for key in _DECIDING if content.get(key) not in (None, False)]
    return options
