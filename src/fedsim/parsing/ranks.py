"""Start the other ranks early, before the slow imports that parse the command line."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsim.core import spares
from fedsim.core.errors import FedSimError
from fedsim.core.nvidia import GPUS, visible_gpus
from fedsim.parsing.config_files import config_at, normalise, read_config, with_shipped

_FEW = 8
"""this many ranks are started early on any machine; more than two per core may be a typo and could fill the memory"""

_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fedsim.core.collector import imports_without_collection
from fedsim.core.spares import become_rank
with imports_without_collection():
    import fedsim.cli.fit
become_rank()
from fedsim.__main__ import main
sys.exit(main())
"""


def start_ranks(words: Sequence[str]) -> None:
    """Start the other ranks of this machine, which import modules while this rank does, and print their number."""
    if not spares.may_start():
        return
    ranks = ranks_asked_for(words)
    if 1 < ranks <= max(2 * (os.cpu_count() or 1), _FEW):
        spares.start(ranks - 1, _PROGRAM)
        sys.stderr.write(f"starting {ranks} ranks\n")
        sys.stderr.flush()


def ranks_asked_for(words: Sequence[str], environ: Mapping[str, str] = os.environ, gpus: Path = GPUS) -> int:
    """Return the number of ranks that ``trainer.devices`` requests in a command line and its config files.

    Return 1 if the number cannot be determined yet, and for mistakes, which the parser reports. Too small a number does
    no harm: the missing ranks are started later.

    Args:
        words: of the command line, without the command.
        environ: environment variables; CUDA_VISIBLE_DEVICES limits the GPUs.
        gpus: the folder with one folder per GPU.
    """
    trainer: dict[str, object] = {"devices": "auto", "accelerator": "auto"}
    try:
        arguments = with_shipped(normalise(list(words)))
        for word, next_word in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
            if path := config_at(word, next_word):
                section = read_config(path).get("trainer")
                trainer |= section if isinstance(section, dict) else {}
            elif word.startswith("--trainer."):
                name, _, value = word.removeprefix("--trainer.").partition("=")
                trainer[name] = value or next_word
    except FedSimError:
        return 1
    devices = str(trainer["devices"]).strip()
    if devices in ("auto", "-1") and trainer["accelerator"] in ("auto", "gpu", "cuda"):
        return max(visible_gpus(environ, gpus), 1)
    return int(devices) if devices.isdigit() else 1
