"""Facts from trials. Each trial runs in a separate process with a time limit, because it may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fedsim.cli.doctor.facts import (
    FaissFacts,
    FitDevices,
    Gpu,
    MachineFacts,
    RequestedFit,
    TorchFacts,
    namesake_of,
    nvidia_on_bus,
    slurm_of,
    wandb_of,
)
from fedsim.core.nvidia import nvidia_driver
from fedsim.core.parents import following
from fedsim.core.paths import expanded
from fedsim.core.room import memory_room, room_of, usable_cores

LIMIT = 120.0
"""seconds for loading and trying the libraries; from a slow disk they need a minute"""
_READERS = 2  # processes that read images, as by default
_MOST_CPU_RANKS = 2  # ranks that try a sum: two are enough

T = TypeVar("T", TorchFacts, FaissFacts, FitDevices)


class ProbeProcess:
    """A process that runs a function of a probe and writes the result as a line of JSON; it is ended with the block.

    Args:
        function: name of a function of :mod:`fedsim.cli.doctor.probe`.
        arguments: its arguments, as plain values.
    """

    def __init__(self, function: str, *arguments: object) -> None:
        command = [sys.executable, "-P", "-m", "fedsim.cli.doctor.probe", function, json.dumps(arguments)]
        # in a process group of its own, so that its children are ended with it
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=following(),
        )  # fmt: skip

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return the result, or ``{"problem": reason}``; it has time until ``deadline`` (time.monotonic())."""
        try:
            out, err = self.process.communicate(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return {"problem": "no answer in time: it hangs, or the disk with the libraries is slow"}
        code = self.process.returncode
        if code < 0:
            return {"problem": f"its process was ended by {signal.Signals(-code).name}"}
        with suppress(json.JSONDecodeError, IndexError):
            result = json.loads(out.splitlines()[-1])
            if isinstance(result, dict):
                return result
        return {"problem": next(reversed(err.strip().splitlines()), f"its process ended with code {code}")}

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def gather(requested: RequestedFit, environ: Mapping[str, str] = os.environ, limit: float = LIMIT) -> MachineFacts:
    """Return the facts of this machine, with trials for ``requested``; it takes about twice ``limit`` at most."""
    deadline = time.monotonic() + limit
    with ExitStack() as stack:  # the slow processes are started first, at the same time
        machine = stack.enter_context(ProbeProcess("torch_and_plan", asdict(requested)))
        faiss = stack.enter_context(ProbeProcess("faiss"))
        readers = stack.enter_context(ProbeProcess("readers", _READERS))
        facts = quick_facts(requested, environ)
        answer = machine.answer(deadline)
        torch = read(TorchFacts, answer.get("torch", answer))
        plan = read(FitDevices, answer.get("plan", answer))
        shared = room_of(Path(plan.shared))
        facts = replace(facts, torch=torch, plan=plan, shared=shared, faiss=read(FaissFacts, faiss.answer(deadline)))
        facts = replace(facts, readers=readers.answer(deadline).get("problem", ""))
    sums = try_sums(plan.devices, limit, by_gloo=plan.by == "gloo")
    return replace(facts, sums=sums, sums_on_one=try_sums_on_one(plan.devices, limit))


def quick_facts(requested: RequestedFit, environ: Mapping[str, str]) -> MachineFacts:
    """Return the facts that need no trial."""
    return MachineFacts(
        nvidia=nvidia_on_bus(),
        driver=nvidia_driver(),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        cores=usable_cores(),
        memory=memory_room(),
        disk=room_of(Path(expanded(requested.run_dir, "run_dir"))),
        slurm=slurm_of(environ),
        wandb=wandb_of(environ, Path.home(), Path.cwd()),
        namesake=namesake_of(),
    )


def read(cls: type[T], answer: Mapping[str, Any]) -> T:
    """Build facts from a trial's answer; missing fields keep their defaults."""
    values = {field.name: answer[field.name] for field in fields(cls) if field.name in answer}
    if "gpus" in values:
        values["gpus"] = tuple(Gpu(**gpu) for gpu in values["gpus"])
    if "devices" in values:
        values["devices"] = tuple(values["devices"])
    return cls(**values)


def try_sums(devices: Sequence[str], limit: float, *, by_gloo: bool = False) -> str | None:
    """Try a sum over one process per device; return its error, empty if it was right, None for a single rank.

    Ranks that share a GPU sum on the CPU; the GPUs sum through one rank of each, by NCCL. ``by_gloo``: through the
    CPU, too.
    """
    if len(devices) > 1:
        gpus = tuple(dict.fromkeys(devices))
        devices = gpus if len(gpus) > 1 and not by_gloo else ("cpu",) * _MOST_CPU_RANKS
    return _summed(devices, limit) if len(devices) > 1 else None


def try_sums_on_one(devices: Sequence[str], limit: float) -> str | None:
    """Try whether NCCL sums over two ranks of one GPU, with :data:`fedsim.strategy.trial.MULTI_RANK`.

    Return its error, empty if the sum was right, None if no ranks share a GPU.
    """
    shared = [device for device, count in Counter(devices).items() if count > 1 and device.startswith("cuda")]
    return _summed((shared[0],) * 2, limit) if shared else None


def _summed(devices: Sequence[str], limit: float) -> str:
    """Let one process per device sum; return the first error, or an empty text."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="fedsim-doctor-") as folder, ExitStack() as stack:
        store = str(Path(folder) / "store")
        trials = [
            stack.enter_context(ProbeProcess("sums", rank, devices, store, limit / 2)) for rank in range(len(devices))
        ]
        problems = [trial.answer(deadline).get("problem", "") for trial in trials]
    return next(filter(None, problems), "")
