"""Processes of ``fedsim augment fit``, each with some of the clients.

The processes share only the output folder.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.core.errors import DataError
from fedsim.core.parents import following
from fedsim.core.placement import place
from fedsim.parsing.documents import as_yaml

log = logging.getLogger(__name__)


def fit_in_processes(names: Sequence[str], processes: int, pretrain: str | None, options: Mapping[str, Any]) -> None:
    """Train the generators of some clients at the same time; that of ``pretrain`` before all others.

    Args:
        names: names of the clients.
        processes: largest number of processes.
        pretrain: a client, or None.
        options: options of the call as plain values; ``settings`` is the file of settings that determine a generator.

    Raises:
        DataError: if a process failed; the others have ended, too.
    """
    for group in ([name for name in names if name == pretrain], [name for name in names if name != pretrain]):
        if group:  # a generator's steps take the same time for any client
            placement = place(dict.fromkeys(group, 1.0), min(processes, len(group)))
            _run([placement.clients_of(rank) for rank in range(len(placement.loads))], options)


def _run(shares: Sequence[Sequence[str]], options: Mapping[str, Any]) -> None:
    log.info("%d processes: %s", len(shares), "; ".join(", ".join(share) for share in shares))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for row, share in enumerate(shares):
            argv = _command(share, row, options)
            running.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, preexec_fn=following(signal.SIGTERM)))
        codes = [process.wait() for process in running]
    finally:
        for process in running:  # no effect on processes that have ended
            process.terminate()
        for process in running:
            process.wait()
    if failed := [(share, code) for share, code in zip(shares, codes, strict=True) if code]:
        share, code = failed[0]
        ending = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise DataError(
            f"clients {', '.join(share)}: their process {ending}; the training so far is kept, "
            "the same command continues it"
        )


def _command(share: Sequence[str], row: int, options: Mapping[str, Any]) -> list[str]:
    config = options["config"] if isinstance(options["config"], str) else as_yaml(options["config"])
    common = {name: options[name] for name in ("settings", "output", "device", "threads")}
    arguments = {**common, "config": config, "clients": as_yaml(list(share)), "row": row}
    return [
        sys.executable,
        "-m",
        "fedsim",
        "augment",
        "fit",
        *(f"--{name}={value}" for name, value in arguments.items()),
    ]
