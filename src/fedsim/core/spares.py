"""Processes that import PyTorch while the first rank does, and then become its other ranks.

Lightning starts the other ranks of a machine when the first one has read its config and its data. They begin to import
only then, and the first one waits for them, as long as it has taken itself. A spare imports from the first moment.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

_LAUNCHERS = (
    "RANK", "LOCAL_RANK", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
)  # fmt: skip
"""variables by which this process is one of several that somebody else has started"""

Process = subprocess.Popen[bytes]

_spares: list[Process] = []


def may_start(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the command ``fedsim`` itself, and the one that starts the others."""
    if not os.path.isfile(sys.argv[0]):  # empty in an interactive Python, whose working directory may be fedsim's
        return False
    program = os.path.realpath(sys.argv[0])
    is_fedsim = os.path.basename(program) == "fedsim" or program.endswith(os.path.join("fedsim", "__main__.py"))
    return is_fedsim and not any(name in environ for name in _LAUNCHERS)


def start(number: int, program: str) -> None:
    """Start ``number`` Pythons with ``program``, which calls :func:`become_rank` when it has imported what it needs."""
    command = [sys.executable, "-c", program]
    _spares.extend(subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(number))
    if number:
        atexit.register(dismiss)


def count() -> int:
    """Return the number of processes that wait."""
    return len(_spares)


def take() -> list[Process]:
    """Return the processes that were started, and forget them."""
    taken = [*_spares]
    _spares.clear()
    return taken


def dismiss() -> None:
    """End whoever was not taken."""
    for spare in take():
        with spare:  # closes its pipe, and waits
            spare.kill()


def begin(spare: Process, arguments: list[str], environment: Mapping[str, str]) -> None:
    """Let a spare become a rank with ``arguments``, of the command line, and ``environment``."""
    assert spare.stdin is not None
    told = json.dumps({"arguments": arguments, "environment": dict(environment)}).encode()
    with suppress(BrokenPipeError), spare.stdin as pipe:  # broken: it has ended, which Lightning sees
        pipe.write(told)


def become_rank() -> None:
    """Wait in a spare until it is told its rank; end if nobody does, also when the first rank was killed.

    Ctrl-C reaches all processes of a terminal: one that is no rank yet leaves the answer to the first rank.
    """
    with open(0, "rb", closefd=False) as pipe:
        told = pipe.read()
    if not told:
        os._exit(0)
    content = json.loads(told)
    os.environ.clear()
    os.environ.update(content["environment"])
    sys.argv[1:] = content["arguments"]
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # it has read the variables when it was imported
        lightning.rank_zero_only.rank = int(os.environ["LOCAL_RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
