"""Facts of a machine, as plain values: those from files and variables, and those from trials.

Nothing here imports torch, so that a library that does not load hides no other fact. Each trial runs in a separate
process with a time limit, because it may crash or hang.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import netrc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fedsim.core.nvidia import nvidia_driver
from fedsim.core.parents import following
from fedsim.core.paths import expanded
from fedsim.core.room import Room, memory_room, room_of, usable_cores

GIB = 2**30
_NO_ROOM = Room("/dev/shm", 0, 0)
_NVIDIA = "0x10de"  # the vendor on a PCI bus
_DISPLAYS = ("0x0300", "0x0302")  # classes of its devices: graphics, and processors without a screen


@dataclass(frozen=True)
class RequestedFit:
    """The part of a fit's config that concerns the machine."""

    accelerator: str = "auto"
    devices: str | int | list[int] = "auto"
    num_nodes: int = 1
    backend: str = "auto"
    """of model.evaluation"""
    run_dir: str = "runs"
    tracked: bool = False
    """whether there is a WandbLogger"""
    ranks_per_device: int = 1
    """of trainer.strategy"""
    process_group_backend: str | None = None
    """of trainer.strategy: nccl, gloo, or None for that of the devices"""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch finds."""

    name: str
    total: int
    """bytes of memory"""
    free: int
    """bytes that no process uses"""
    problem: str = ""
    """error of a small matrix product on it; empty: none"""


@dataclass(frozen=True)
class TorchFacts:
    """The PyTorch that fedsim imports."""

    version: str = ""
    cuda: str | None = None
    """version of its CUDA libraries; None: it is built for CPUs"""
    nccl: str = ""
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = ""
    """torch's message, if it finds none"""
    problem: str = ""
    """error of its import or trial; empty: none"""


@dataclass(frozen=True)
class FitDevices:
    """Devices and ranks of a fit, found with the code that a fit runs."""

    devices: tuple[str, ...] = ()
    """of the ranks on this machine: cpu, or cuda:0, ..."""
    world: int = 1
    """ranks on all machines"""
    shared: str = "/dev/shm"
    """folder of the files that ranks of a machine share"""
    launcher: str = ""
    """Slurm or torchrun, if one has started this process"""
    by: str = ""
    """what sums over ranks, among GPUs if ranks share them: nccl or gloo; empty: that of the devices"""
    refusal: str = ""
    """the error line with which a fit would end; empty: none"""
    problem: str = ""
    """error of the trial; empty: none"""

    @property
    def on_gpu(self) -> bool:
        """Whether ranks are on GPUs."""
        return bool(self.devices) and self.devices[0].startswith("cuda")

    @property
    def ranks_share_gpu(self) -> bool:
        """Whether several ranks are on one GPU."""
        return self.on_gpu and len(set(self.devices)) < len(self.devices)

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL sums, among GPUs if ranks share them."""
        return self.on_gpu and not self.is_on_one and self.by != "gloo"

    @property
    def is_on_one(self) -> bool:
        """Whether all ranks of the run have the same device."""
        return len(set(self.devices)) == 1 and self.world == len(self.devices)


@dataclass(frozen=True)
class FaissFacts:
    """FAISS, in a process that has loaded torch before."""

    version: str = ""
    cuda: str = ""
    """major version of the CUDA libraries that its package requires; empty: none"""
    for_gpu: bool = False
    """whether it is built for GPUs"""
    sees: int = 0
    """number of GPUs that it finds"""
    trials: Mapping[str, str] | None = None
    """device -> difference between its neighbours and those of torch; empty: none. None: not tried"""
    problem: str = ""
    """error of its import or trial; empty: none"""


@dataclass(frozen=True)
class Wandb:
    """Mode and login of Weights & Biases."""

    mode: str
    """online, offline or disabled"""
    login: str
    """source of the login; empty: there is none"""


@dataclass(frozen=True)
class MachineFacts:
    """All facts of a machine."""

    nvidia: int
    """NVIDIA GPUs on the bus, also those that cannot be used"""
    driver: str
    """version of the NVIDIA driver that is loaded; empty: none"""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None: not set"""
    cores: float
    """number that this process may use"""
    memory: Room
    disk: Room
    """of run_dir"""
    slurm: str
    wandb: Wandb
    shared: Room = _NO_ROOM
    """of FitDevices.shared"""
    torch: TorchFacts = TorchFacts()
    plan: FitDevices = FitDevices()
    faiss: FaissFacts = FaissFacts()
    sums: str | None = None
    """error of a sum over ranks of this machine; empty: none; None: not tried"""
    sums_on_one: str | None = None
    """error of NCCL's sum over two ranks of one GPU, with the variable that allows it; None: not tried"""
    readers: str = ""
    """error of processes that read images; empty: none"""
    namesake: str = ""
    """another installed package that Python imports as fedsim; empty: none"""


def namesake_of(package: str = "fedsim") -> str:
    """Return name and version of a package that is imported as fedsim, too: ours is called fedsim-reid."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvidia_on_bus(root: Path = Path("/")) -> int:
    """Count the machine's NVIDIA GPUs; in a container, also those that it may not use."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, device_class = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == _NVIDIA and device_class[:6] in _DISPLAYS
    return count


def slurm_of(environ: Mapping[str, str]) -> str:
    """Return a short text on the Slurm job of this process, if any."""
    if "SLURM_JOB_ID" in environ:
        nodes, tasks = environ.get("SLURM_NNODES", "1"), environ.get("SLURM_NTASKS", "1")
        return f"in job {environ['SLURM_JOB_ID']}: nodes {nodes}, tasks {tasks}"
    return "no job; sbatch is here" if shutil.which("sbatch") else "none"


def wandb_of(environ: Mapping[str, str], home: Path, folder: Path) -> Wandb:
    """Return mode and login of W&B, without a request to its server. Only the presence of a login is used.

    ``folder`` is the one in which the run is started: ``wandb offline`` writes its setting there.
    """
    settings = configparser.ConfigParser()
    with suppress(configparser.Error, OSError):
        settings.read([home / ".config/wandb/settings", folder / "wandb/settings"])
    mode = environ.get("WANDB_MODE") or str(settings.get("default", "mode", fallback="online"))
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(environ.get("NETRC", home / ".netrc"))
    login = "WANDB_API_KEY" if environ.get("WANDB_API_KEY") else ""
    if not login:
        with suppress(OSError, netrc.NetrcParseError):
            login = str(file) if host in netrc.netrc(str(file)).hosts else ""
    return Wandb(mode, login)


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
        code, words = self.process.returncode, next(reversed(err.strip().splitlines()), "")
        if code < 0:  # a library that aborts has written its reason
            ended = f"its process was ended by {signal.Signals(-code).name}"
            return {"problem": f"{ended}: {words}" if words else ended}
        with suppress(json.JSONDecodeError, IndexError):
            result = json.loads(out.splitlines()[-1])
            if isinstance(result, dict):
                return result
        return {"problem": words or f"its process ended with code {code}"}

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
