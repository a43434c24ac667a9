"""From facts to a verdict: the lines of the page, and the problems that prevent a fit.

A finding depends only on the facts and the options of the fit, so it can be tested without the machine in question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedsim.cli.doctor.facts import GIB, MachineFacts, RequestedFit
from fedsim.core.extras import DISTRIBUTION, to_install
from fedsim.core.nvidia import failure_in, why_unseen
from fedsim.core.placement import by_device
from fedsim.core.room import Room

Evidence = Literal["tried", "read", "guessed"]

_SHARED = GIB  # several ranks share images and sums in it; containers have 64 MiB by default
_DISK, _LITTLE_DISK = GIB, 10 * GIB  # a checkpoint of ResNet-50 with eight clients' states takes about 1 GiB
_LITTLE_GPU = 0.5  # share of a GPU's memory: if less is free, another process uses the GPU

_BY_GLOO = "--trainer.strategy.process_group_backend gloo"


class Line(NamedTuple):
    """A fact on the page."""

    about: str
    text: str
    sure: Evidence
    """tried: tested just now; read: from a file, variable or library; guessed: concluded from other facts"""


class Problem(NamedTuple):
    """A problem that prevents a fit, or may do so."""

    problem: str
    remedy: str
    blocks: bool = True
    """whether it prevents the fit"""


@dataclass(frozen=True)
class Checkup:
    """The page."""

    resources: list[Line]
    """of the machine"""
    uses: list[Line]
    """of them, by the fit"""
    findings: list[Problem]

    @property
    def blocks(self) -> list[Problem]:
        """The problems that prevent the fit."""
        return [finding for finding in self.findings if finding.blocks]


def examine(facts: MachineFacts, requested: RequestedFit) -> Checkup:
    """Return the page about a machine and the fit of ``requested``."""
    checks = (_libraries, _namesake, _unseen_gpus, _refusal, _gpus, _sums, _faiss, _memory, _readers, _folders, _wandb)
    findings = [finding for check in checks for finding in check(facts, requested)]
    return Checkup(_resources(facts), _uses(facts, requested), findings)


# -- problems ----------------------------------------------------------------------------------------------------------


def _libraries(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    if facts.torch.problem:
        yield Problem(f"torch: {facts.torch.problem}", "install fedsim again: pip install -e .")
    elif facts.plan.problem:
        yield Problem(f"ranks: {facts.plan.problem}", "install fedsim again: pip install -e .")


def _namesake(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    if facts.namesake:
        cause = f"the package {facts.namesake} is imported as fedsim, too: Python may find either"
        yield Problem(cause, f"pip uninstall fedsim, then install {DISTRIBUTION} again", blocks=False)


def _refusal(facts: MachineFacts, __: RequestedFit) -> Iterator[Problem]:
    """The error line with which a fit would end; it contains its remedy."""
    if facts.plan.refusal:
        cause, _, remedy = facts.plan.refusal.partition("; ")
        yield Problem(cause, remedy or "see fedsim fit --help")


def _unseen_gpus(facts: MachineFacts, requested: RequestedFit) -> Iterator[Problem]:
    """GPUs that the machine has, or the fit requires, and that torch does not find."""
    required = requested.accelerator in ("gpu", "cuda")
    if facts.torch.gpus or facts.torch.problem or requested.accelerator == "cpu":
        return
    if not (required or facts.nvidia or facts.driver):
        return
    cause, remedy, hidden = why_unseen(facts.torch.version, facts.torch.cuda, facts.driver, facts.nvidia, facts.visible)
    torch_message = f" (torch: {facts.torch.why_no_gpu.partition('. ')[0]})" if facts.torch.why_no_gpu else ""
    remedy += "" if required else ", or set --trainer.accelerator cpu"
    yield Problem(cause + torch_message, remedy, blocks=required or not hidden)


def _gpus(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    if not facts.plan.on_gpu:
        return
    numbers = [int(device.partition(":")[2] or 0) for device in facts.plan.devices]
    chosen = {number: facts.torch.gpus[number] for number in numbers if number < len(facts.torch.gpus)}
    for number, gpu in chosen.items():
        if gpu.problem:
            remedy = failure.remedy if (failure := failure_in(gpu.problem)) else "leave it out of trainer.devices"
            yield Problem(f"cuda:{number} ({gpu.name}) does not work: {gpu.problem}", remedy)
        elif gpu.free < _LITTLE_GPU * gpu.total:
            cause = f"cuda:{number}: {_gib(gpu.free)} of {_gib(gpu.total)} GiB are free, so another process uses it"
            yield Problem(cause, "choose other GPUs with trainer.devices, such as '[1]'", blocks=False)
    if len({gpu.name for gpu in chosen.values()}) > 1:
        cause = f"the GPUs are of different models: {_counted([gpu.name for gpu in chosen.values()])}"
        yield Problem(cause, "results are equal only on one model: choose with trainer.devices", blocks=False)


def _sums(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    several, by_nccl = len(facts.plan.devices) > 1, facts.plan.by_nccl
    if facts.sums:
        name = "NCCL" if by_nccl else "gloo"
        of_nccl = f"set NCCL_DEBUG=INFO for more, {_BY_GLOO}, or --trainer.devices 1"
        remedy = of_nccl if by_nccl else "see docs/cluster.md"
        yield Problem(f"{name} cannot sum over the ranks of this machine: {facts.sums}", remedy)
    if by_nccl and not facts.torch.nccl:
        yield Problem(
            "torch has no NCCL, by which GPUs sum",
            f"install torch with CUDA (pytorch.org), set {_BY_GLOO}, or use one rank",
        )
    if several and facts.shared.free < _SHARED:
        free = facts.shared.free / 2**20
        cause = f"{facts.shared.where} has {free:,.0f} MiB free, which {len(facts.plan.devices)} ranks share"
        yield Problem(cause, "give the container more: --shm-size=8g, or --ipc=host")


def _faiss(facts: MachineFacts, requested: RequestedFit) -> Iterator[Problem]:
    """FAISS ranks only if the fit requires it; ``fedsim rank`` uses it by default to find neighbours."""
    required, faiss = requested.backend == "faiss", facts.faiss
    otherwise = "leave model.evaluation.backend at auto" if required else "fedsim rank: set --backend torch"
    if faiss.problem:
        yield Problem(f"faiss: {faiss.problem}", f"{to_install('faiss')}, or {otherwise}", required)
        return
    for device, problem in (faiss.trials or {}).items():
        if problem:
            is_used = device == "cpu" or not facts.plan.devices or device in facts.plan.devices
            yield Problem(f"faiss on {device}: {problem}", otherwise, required and is_used)
    if facts.plan.on_gpu and not faiss.for_gpu:
        cause = f"{faiss.version or 'this FAISS'} is built for CPUs, ranks are on GPUs"
        yield Problem(cause, f"install faiss-gpu, or {otherwise}", required)
    elif facts.plan.on_gpu and faiss.sees < len(facts.torch.gpus):
        cause = f"faiss finds {faiss.sees} GPUs, torch {len(facts.torch.gpus)}"
        yield Problem(cause, f"install its CUDA libraries (docs/evaluation.md), or {otherwise}", required)


def _memory(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    ranks = len(facts.plan.devices)
    if facts.cores < ranks:
        cause = f"{ranks} ranks have {facts.cores:g} cores"
        yield Problem(cause, "request a core per rank, better four (--cpus-per-task)", blocks=False)
    if facts.memory.free < 2 * GIB * max(ranks, 1):
        cause = f"{_gib(facts.memory.free)} GiB of memory are free, for {max(ranks, 1)} ranks"
        yield Problem(cause, "a rank needs about 2 GiB in addition to its images", blocks=False)


def _readers(facts: MachineFacts, _: RequestedFit) -> Iterator[Problem]:
    """Processes that read images; without them a fit runs, more slowly."""
    if facts.readers:
        remedy = "ranks read their images themselves; allow more processes, or give the container a larger /dev/shm"
        yield Problem(f"data.workers: processes that read images cannot run: {facts.readers}", remedy, blocks=False)


def _folders(facts: MachineFacts, requested: RequestedFit) -> Iterator[Problem]:
    disk = facts.disk
    if disk.problem:
        yield Problem(f"run_dir: {requested.run_dir} cannot be a folder: {disk.problem}", "give another --run_dir")
    elif disk.free < _LITTLE_DISK:
        cause = f"run_dir: {_gib(disk.free)} GiB are free at {disk.where}"
        yield Problem(cause, "make room, or give another --run_dir", blocks=disk.free < _DISK)


def _wandb(facts: MachineFacts, requested: RequestedFit) -> Iterator[Problem]:
    if requested.tracked and facts.wandb.mode == "online" and not facts.wandb.login:
        yield Problem("W&B: a logger needs a login, and there is none", "run wandb login, or set WANDB_MODE=offline")


# -- the machine, and its part that is used ----------------------------------------------------------------------------


def _resources(facts: MachineFacts) -> list[Line]:
    torch, faiss = facts.torch, facts.faiss
    gpus = _counted([f"{gpu.name}, {_gib(gpu.total)} GiB" for gpu in torch.gpus])
    if torch.gpus:
        gpus += f"; free: {', '.join(_gib(gpu.free) for gpu in torch.gpus)} GiB"
    cuda = f"CUDA {torch.cuda}" if torch.cuda else "built for CPUs"
    nccl = f"; NCCL {torch.nccl}" if torch.nccl else ""
    return [
        Line("GPUs", gpus or f"none that torch can use; NVIDIA GPUs on the bus: {facts.nvidia}", "tried"),
        Line("NVIDIA driver", facts.driver or "none", "read"),
        Line("torch", torch.problem or f"{torch.version}; {cuda}{nccl}", "tried"),
        Line("faiss", faiss.problem or _faiss_line(facts), "tried"),
        Line("cores", f"{facts.cores:g} for this process", "read"),
        Line("memory", f"{_gib(facts.memory.free)} of {_gib(facts.memory.total)} GiB free", "read"),
        Line("shared memory", _room(facts.shared), "read"),
        Line("reading processes", facts.readers or "batches were handed over", "tried"),
        Line("disk of run_dir", facts.disk.problem or _room(facts.disk), "read"),
        Line("Slurm", facts.slurm, "read"),
        Line("W&B", f"{facts.wandb.mode}; login: {facts.wandb.login or 'none'}", "read"),
    ]


def _faiss_line(facts: MachineFacts) -> str:
    faiss = facts.faiss
    built = f"for GPUs, finds {faiss.sees}" if faiss.for_gpu else "for CPUs"
    cuda = f", CUDA {faiss.cuda}" if faiss.cuda else ""
    agreeing = [device for device, problem in (faiss.trials or {}).items() if not problem]
    devices = ", ".join(agreeing) or "no device"
    return f"{faiss.version or 'own build'}{cuda}; {built}; same neighbours as torch on {devices}"


def _uses(facts: MachineFacts, requested: RequestedFit) -> list[Line]:
    plan = facts.plan
    if not plan.devices:
        return [Line("device", "unknown", "guessed")]
    ranks = f"{len(plan.devices)} here, {plan.world} in all" if plan.world > len(plan.devices) else str(plan.world)
    name = "NCCL" if plan.by_nccl else "gloo"
    if plan.ranks_share_gpu:
        name = "gloo within a GPU" + f", {name} among GPUs" * (not plan.is_on_one)
    tried = facts.sums == ""
    sums = f"{name}, {'a sum was right' if tried else 'not tried'}" if plan.world > 1 else "none: there is one rank"
    by_faiss = facts.faiss.version and not facts.faiss.problem and (not plan.on_gpu or facts.faiss.sees)
    return [
        Line("device", ", ".join(dict.fromkeys(plan.devices)), "tried"),
        Line("ranks", ranks + (f", by {plan.launcher}" if plan.launcher else ""), "tried"),
        *_sharing(facts),
        Line("sums over ranks", sums, "tried" if tried or plan.world == 1 else "guessed"),
        Line("ranking", "faiss" if requested.backend == "faiss" else "torch", "read"),
        Line("neighbours in fedsim rank", "faiss" if by_faiss else "torch", "guessed"),
    ]


def _sharing(facts: MachineFacts) -> list[Line]:
    """Return the ranks that share a GPU, or the option by which they could."""
    plan = facts.plan
    if plan.ranks_share_gpu:
        lines = [Line("ranks that share", by_device(plan.devices), "tried")]
        if facts.sums_on_one is not None:
            works = "works with NCCL_MULTI_RANK_GPU_ENABLE=1, which fedsim does not need (docs/gpus.md)"
            lines.append(Line("NCCL within a GPU", facts.sums_on_one or works, "tried"))
        return lines
    if plan.on_gpu:
        option = "several on a GPU, which a batch of 32 does not fill: --trainer.strategy.ranks_per_device 2"
        return [Line("ranks can share", option, "guessed")]
    return []


def _counted(names: list[str]) -> str:
    """Join distinct names, with their counts.

    >>> _counted(["A", "B", "A"])
    '2 x A, 1 x B'
    """
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _room(room: Room) -> str:
    return f"{_gib(room.free)} of {_gib(room.total)} GiB free at {room.where}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.0f}" if num_bytes >= 10 * GIB else f"{num_bytes / GIB:.1f}"
