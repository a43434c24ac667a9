"""Facts that only a trial shows. Each trial is a process of its own, which may crash or hang, and has a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fedsim.cli.doctor.facts import (
    Facts,
    FaissFacts,
    FitDevices,
    Gpu,
    TorchFacts,
    Wish,
    memory_room,
    nvidia_driver,
    nvidia_on_bus,
    room_of,
    slurm_of,
    usable_cores,
    wandb_of,
)

LIMIT = 120.0
"""seconds that libraries may take to load and to be tried; from a slow disk they need a minute"""
_MOST_CPU_RANKS = 2  # that try a sum: more of them would say no more

T = TypeVar("T", TorchFacts, FaissFacts, FitDevices)


class ProbeProcess:
    """A process that looks at something and writes what it saw as a line of JSON; it is gone when the block ends.

    Args:
        what: a function of :mod:`fedsim.cli.doctor.probe`.
        given: its arguments, as plain values.
    """

    def __init__(self, what: str, *given: object) -> None:
        command = [sys.executable, "-P", "-m", "fedsim.cli.doctor.probe", what, json.dumps(given)]
        # in a group of its own: what it starts goes with it
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return what it saw, or ``{"problem": why not}``; it has until ``deadline`` (time.monotonic())."""
        try:
            out, err = self.process.communicate(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return {"problem": "no answer in time: it hangs, or the disk with the libraries is slow"}
        code = self.process.returncode
        if code < 0:
            return {"problem": f"its process was ended by {signal.Signals(-code).name}"}
        with suppress(json.JSONDecodeError, IndexError):
            seen = json.loads(out.splitlines()[-1])
            if isinstance(seen, dict):
                return seen
        return {"problem": next(reversed(err.strip().splitlines()), f"its process ended with code {code}")}

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def gather(wish: Wish, environ: Mapping[str, str] = os.environ, limit: float = LIMIT) -> Facts:
    """Look at this machine, and try what the fit of ``wish`` would use; it takes about twice ``limit`` at most."""
    deadline = time.monotonic() + limit
    with ExitStack() as stack:  # the slow ones begin first, at the same time
        machine = stack.enter_context(ProbeProcess("torch_and_plan", asdict(wish)))
        faiss = stack.enter_context(ProbeProcess("faiss"))
        facts = quick_facts(wish, environ)
        seen = machine.answer(deadline)
        torch = read(TorchFacts, seen.get("torch", seen))
        plan = read(FitDevices, seen.get("plan", seen))
        shared = room_of(Path(plan.shared))
        facts = replace(facts, torch=torch, plan=plan, shared=shared, faiss=read(FaissFacts, faiss.answer(deadline)))
    return replace(facts, sums=try_sums(plan.devices, limit))


def quick_facts(wish: Wish, environ: Mapping[str, str]) -> Facts:
    """Return what needs no trial."""
    return Facts(
        nvidia=nvidia_on_bus(),
        driver=nvidia_driver(),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        cores=usable_cores(),
        memory=memory_room(),
        disk=room_of(Path(wish.run_dir).expanduser()),
        slurm=slurm_of(environ),
        wandb=wandb_of(environ, Path.home(), Path.cwd()),
    )


def read(cls: type[T], seen: Mapping[str, Any]) -> T:
    """Build facts from a trial's answer; fields that it does not have keep their defaults."""
    known = {field.name: seen[field.name] for field in fields(cls) if field.name in seen}
    if "gpus" in known:
        known["gpus"] = tuple(Gpu(**gpu) for gpu in known["gpus"])
    if "devices" in known:
        known["devices"] = tuple(known["devices"])
    return cls(**known)


def try_sums(devices: Sequence[str], limit: float) -> str | None:
    """Let a process per device sum; return why they cannot, empty if they can, None for a single rank.

    Ranks that share a GPU sum as CPUs do, and the GPUs by one rank of each.
    """
    if len(devices) > 1:
        gpus = tuple(dict.fromkeys(devices))
        devices = gpus if len(gpus) > 1 else ("cpu",) * _MOST_CPU_RANKS
    if len(devices) < 2:
        return None
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="fedsim-doctor-") as folder, ExitStack() as stack:
        store = str(Path(folder) / "store")
        trials = [
            stack.enter_context(ProbeProcess("sums", rank, devices, store, limit / 2)) for rank in range(len(devices))
        ]
        problems = [trial.answer(deadline).get("problem", "") for trial in trials]
    return next(filter(None, problems), "")
