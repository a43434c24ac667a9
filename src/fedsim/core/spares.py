"""Spares: processes that import PyTorch at the same time as the first rank, and then become the machine's other ranks.

Lightning starts the other ranks of a machine after the first one has read its config and its data. They begin to import
only then, and the first rank waits for them as long as its own imports took. A spare imports from the beginning.
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
"""variables of launchers: if one is set, another program has started this process as one of several"""

Process = subprocess.Popen[bytes]

_spares: list[Process] = []


def may_start(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the command ``fedsim`` itself, and must start the other ranks."""
    if not os.path.isfile(sys.argv[0]):  # empty in an interactive Python, whose working directory may be fedsim's
        return False
    program = os.path.realpath(sys.argv[0])
    is_fedsim = os.path.basename(program) == "fedsim" or program.endswith(os.path.join("fedsim", "__main__.py"))
    return is_fedsim and not any(name in environ for name in _LAUNCHERS)


def start(number: int, program: str) -> None:
    """Start ``number`` Python processes with ``program``, which calls :func:`become_rank` after its imports."""
    command = [sys.executable, "-c", program]
    _spares.extend(subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(number))
    if number:
        atexit.register(dismiss)


def count() -> int:
    """Return the number of spares that wait."""
    return len(_spares)


def take() -> list[Process]:
    """Return the spares, which the caller then owns."""
    taken = [*_spares]
    _spares.clear()
    return taken


def dismiss() -> None:
    """Kill the spares that were not used."""
    for spare in take():
        with spare:  # closes its pipe, and waits
            spare.kill()


def begin(spare: Process, arguments: list[str], environment: Mapping[str, str]) -> None:
    """Let a spare become a rank with these command-line ``arguments`` and this ``environment``."""
    assert spare.stdin is not None
    message = json.dumps({"arguments": arguments, "environment": dict(environment)}).encode() + b"\n"
    with suppress(BrokenPipeError), spare.stdin as pipe:  # broken: the spare has ended, which Lightning detects
        pipe.write(message)


def become_rank() -> None:
    """Wait in a spare for the message of :func:`begin`; end the process if the first rank ends without sending one.

    Ctrl-C reaches all processes of a terminal. Only the first rank reacts to it while the others are still spares.
    """
    with open(0, "rb", closefd=False) as pipe:
        message = pipe.readline()  # not to the end, which would wait for each fork of the first rank that lives
    if not message.endswith(b"\n"):
        os._exit(0)
    content = json.loads(message)
    os.environ.clear()
    os.environ.update(content["environment"])
    sys.argv[1:] = content["arguments"]
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # it has read the variables when it was imported
        lightning.rank_zero_only.rank = int(os.environ["LOCAL_RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
