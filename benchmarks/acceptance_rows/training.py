"""Rows about training: time, kernels, waits and memory of fedsim's step, beside a loop by hand on the same images.

A round of fedsim is everything between two rounds of the loop: the session of one client, its upload, the server's
step, Lightning's part. Both train the same network on images that are on the device, without augmentation.
"""

from __future__ import annotations

import functools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from acceptance_rows.steps import need_graphs
from acceptance_rows.terms import Bench, Outcome
from fedsim.cli.describe import FederatedTrainer, describe_federation
from fedsim.data.augmentation import Augmentation
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.pixels import HeldPixels
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.functional.normalise import normalise_images
from fedsim.methods import APFL, DACS, SSCU, FedAvg, FedSAM
from fedsim.methods.base import Method
from fedsim.models import Neck, ResNet, SmallCNN
from fedsim.models.reid import ReIDModel
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.features import extract_features
from fedsim.training.settings import LocalTraining
from overhead import CLASSES, Case, RandomClients

SIZE, BATCHES = (256, 128), 40
SMALL, FEW = (32, 16), 4
ROUNDS, WARM_UP = 8, 3
MOST_OVER_LOOP = 1.10
"""largest ratio of fedsim's time to that of the loop by hand"""
MOST_OVER_FASTER = {"capture": 1.5, "compile": 1.25, "channels_last": 1.05}
"""the same beside a loop that is recorded or compiled; a session of fedsim's records its own steps. With images whose
channels are last, beside the usual loop. On one H100: 1.15, 1.08 and 1.02"""
MOST_LAUNCHES = 1.10
"""largest ratio of fedsim's launches per step to those of the loop by hand"""
MOST_PER_STEP: dict[Method, float] = {FedSAM(): 2.6, APFL(): 3.8, DACS(): 7.2, SSCU(): 9.2}
"""largest ratio of a method's launches per step to FedAvg's: those of the simulated GPU with a small network, in which
what is beside the passes counts for more"""
CLIENTS, MOST_PER_CLIENT = 50, 3.0
"""many small clients, of one batch each; largest ratio of a client's time to that of a batch by hand"""
MOST_OVER_FORWARD = 1.10
"""largest ratio of an evaluation's time to that of the same forward passes by hand"""
MOST_MEMORY = 1.15
"""largest ratio of the peak, less what the loop's activations take, to what fedsim describe says"""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
MakesOptimizer = Callable[..., torch.optim.Optimizer]
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


class Work:
    """One client with random images of ten people, and the network that it trains.

    Args:
        bench: the machine.
        batch_size: images per step.
        batches: steps per round.
    """

    def __init__(self, bench: Bench, batch_size: int, batches: int | None = None) -> None:
        self.bench = bench
        batches = batches or (FEW if bench.reduced else BATCHES)
        size = SMALL if bench.reduced else SIZE
        self.case = Case("acceptance", (), size, min(batch_size, 8) if bench.reduced else batch_size, 1, batches)
        self.sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=5e-4)
        self.neck = Neck(kind="bnneck", dropout=0.0)

    def backbone(self) -> nn.Module:
        """Return a new network, always with the same weights."""
        torch.manual_seed(0)
        return SmallCNN(width=8) if self.bench.reduced else ResNet(50)

    def federation(
        self, optimizer: MakesOptimizer | None = None, method: Method | None = None, **client: bool
    ) -> tuple[Federation, Any]:
        """Return fedsim's model and data, by default of FedAvg; ``client`` are further settings of local training."""
        model = Federation(
            method or FedAvg(share_head=True), self.backbone(), self.neck,
            client=LocalTraining(batch_size=self.case.batch_size, optimizer=optimizer or self.sgd, **client),
            evaluation=Evaluation(test_during_fit=False),
        )  # fmt: skip
        augmentation = Augmentation(pad=0, flip=0.0)
        source = RandomClients(self.case)
        return model, FederatedDataModule(source, val="none", size=self.case.size, augmentation=augmentation)

    def fit(self, model: Federation, data: Any, rounds: int, callback: Callback) -> None:
        """Train without evaluation, loggers and checkpoints, in bf16 on a GPU."""
        gpu = self.bench.is_gpu
        trainer = FederatedTrainer(
            accelerator="gpu" if gpu else "cpu", devices=[self.bench.device.index or 0] if gpu else 1,
            precision="bf16-mixed" if gpu else "32-true", strategy=FederatedStrategy(), max_epochs=rounds, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            use_distributed_sampler=False, limit_val_batches=0, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(model, datamodule=data)

    def loop(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> Loop:
        """Return the loop by hand."""
        return Loop(self, optimizer or self.sgd)


class Loop:
    """Training by hand: images on the device, the same network, loss, precision and optimizer, and nothing else."""

    def __init__(self, work: Work, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        device, case = work.bench.device, work.case
        domain, *_ = RandomClients(case).domains()
        assert domain.train is not None
        self.images = domain.train.images.decode(case.size).to(device)
        self.labels = torch.from_numpy(domain.train.pids).to(device)
        self.net = ReIDModel(work.backbone(), work.neck, CLASSES).to(device).train()
        self.optimizer = optimizer(self.net.parameters())
        self.bench, self.size = work.bench, case.batch_size
        self.index = torch.arange(self.size, device=device)
        self.loss = torch.zeros((), device=device)
        self.keeps_gradients = False
        self.forward: Callable[[Tensor], Tensor] = self.logits
        self.step: Callable[[], None] = self.plain_step

    def logits(self, images: Tensor) -> Tensor:
        """Return the network's logits [B, Z]."""
        assert self.net.head is not None
        logits: Tensor = self.net.head(self.net(images).neck)
        return logits

    def plain_step(self) -> None:
        """Train on the batch at ``index``."""
        with torch.autocast(self.bench.device.type, torch.bfloat16, enabled=self.bench.is_gpu):
            loss = F.cross_entropy(self.forward(normalise_images(self.images[self.index])), self.labels[self.index])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.loss.copy_(loss.detach())

    def round(self) -> None:
        """Train on all images in random order, and read the last loss."""
        for index in torch.randperm(len(self.labels)).to(self.bench.device).split(self.size):
            self.index.copy_(index)
            self.step()
        self.loss.item()

    def compile(self) -> None:
        """Let torch.compile translate the network; the first round then takes a minute."""
        self.forward = torch.compile(self.logits)

    def capture(self) -> None:
        """Record a step as a CUDA graph, which later steps replay: the host then launches one thing per step."""
        stream = torch.cuda.Stream(self.bench.device)
        stream.wait_stream(torch.cuda.current_stream(self.bench.device))
        with torch.cuda.stream(stream):  # libraries choose kernels and allocate before they are recorded
            for _ in range(5):
                self.plain_step()
        torch.cuda.current_stream(self.bench.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.plain_step()
        self.step = graph.replay


class Turns(Callback):
    """Runs a round of the loop after each of fedsim's, and times both.

    Args:
        bench: the machine.
        loop: by hand.
    """

    def __init__(self, bench: Bench, loop: Loop) -> None:
        self.bench, self.loop = bench, loop
        self.times: list[tuple[float, float]] = []
        self.compiled = 0
        """functions that torch.compile has translated in fedsim's rounds, without those of the loop"""

    def _now(self) -> float:
        self.bench.wait()
        return time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._frames = compiled_frames()
        self.mark = self._now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop it, run the other round, start it again."""
        ours = self._now()
        self.compiled += compiled_frames() - self._frames
        self.loop.round()
        theirs = self._now()
        self.times.append((ours - self.mark, theirs - ours))
        self._frames = compiled_frames()
        self.mark = self._now()

    def medians(self) -> tuple[float, float]:
        """Return seconds of a round: fedsim's, the loop's."""
        ours, theirs = (statistics.median(column) for column in zip(*self.times[WARM_UP:], strict=True))
        return ours, theirs


class TurnsInOrder(Turns):
    """The same; it notes, too, whether the maps of each of fedsim's convolutions have their channels last."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at each input of the convolutions."""
        self.orders: list[bool] = []
        [model] = pl_module.parts.models.values()
        for module in model.network.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(self._look)
        super().on_train_start(trainer, pl_module)

    def _look(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.orders.append(inputs[0].is_contiguous(memory_format=torch.channels_last))


def compiled_frames() -> int:
    """Return how many functions torch.compile has translated in this process."""
    return int(torch._dynamo.utils.counters["frames"]["ok"]) if "torch._dynamo" in sys.modules else 0


def check_effect(faster: str, turns: Turns, model: Federation) -> None:
    """Raise RuntimeError if the setting did nothing: its row would time plain steps."""
    if faster == "capture" and any(each.graph_memory.gave_up for each in model.parts.models.values()):
        raise RuntimeError("recording failed, and steps stayed plain")
    if faster == "compile" and not turns.compiled:
        raise RuntimeError("fedsim compiled nothing")
    if isinstance(turns, TurnsInOrder) and not (turns.orders and all(turns.orders)):
        raise RuntimeError("images reached fedsim's convolutions in the usual order")


def speed(bench: Bench, batch_size: int, faster: str = "") -> Outcome:
    """Time fedsim beside the loop.

    ``faster`` is ``capture`` or ``compile``, which both do, each by its own means, or ``channels_last``, fedsim alone.
    """
    if faster == "capture":
        need_graphs(bench)
    work = Work(bench, batch_size)
    loop = work.loop()
    if faster in ("capture", "compile"):
        getattr(loop, faster)()
    turns = (TurnsInOrder if faster == "channels_last" else Turns)(bench, loop)
    settings = {"graph" if faster == "capture" else faster: True} if faster else {}
    model, data = work.federation(**settings)
    work.fit(model, data, WARM_UP + ROUNDS, turns)
    check_effect(faster, turns, model)
    ours, theirs = turns.medians()
    images = work.case.batch_size * work.case.batches
    figure = f"{ours / theirs:.2f} of its time; {images / ours:,.0f} and {images / theirs:,.0f} images/s"
    most = MOST_OVER_FASTER.get(faster, MOST_OVER_LOOP)
    return Outcome(figure, f"{most:.2f}", ours / theirs <= most, of_speed=True)


def many(bench: Bench) -> Outcome:
    """Time rounds of many clients that have one batch each, beside a batch of the loop by hand for each of them."""
    work = Work(bench, 32, batches=1)
    clients = 4 if bench.reduced else CLIENTS
    work.case = replace(work.case, clients=clients)
    turns = Turns(bench, work.loop())
    work.fit(*work.federation(), WARM_UP + ROUNDS, turns)
    ours, theirs = turns.medians()
    figure = f"{ours / clients / theirs:.2f} of a batch by hand; {1e3 * ours / clients:.1f} ms for each client"
    return Outcome(figure, f"{MOST_PER_CLIENT:.2f}", ours / clients / theirs <= MOST_PER_CLIENT, of_speed=True)


def evaluation(bench: Bench) -> Outcome:
    """Time the features of an evaluation, in float32 with mirror images, beside the same passes by hand."""
    work = Work(bench, 64)
    loop, settings = work.loop(), Evaluation(batch_size=64, flip=True)
    loop.net.eval()
    pixels = HeldPixels(loop.images, bench.device)

    def by_hand() -> Tensor:
        with torch.no_grad():
            parts = [normalise_images(part) for part in loop.images.split(settings.batch_size)]
            return torch.cat([loop.net(part).neck + loop.net(part.flip(-1)).neck for part in parts])

    theirs = bench.median_ms(by_hand, ROUNDS)
    ours = bench.median_ms(lambda: extract_features(loop.net, pixels, settings, bench.device), ROUNDS)
    gap = (by_hand() - extract_features(loop.net, pixels, settings, bench.device)).abs().max().item()
    number = len(loop.images)
    figure = (
        f"{ours / theirs:.2f} of its time; {1e3 * number / ours:,.0f} images/s, each with its mirror image; features "
        f"{gap:.0e} apart"
    )
    holds = ours / theirs <= MOST_OVER_FORWARD and gap <= 1e-3
    return Outcome(figure, f"{MOST_OVER_FORWARD:.2f}, 1e-3", holds, of_speed=True)


# -- counted by the profiler -------------------------------------------------------------------------------------------


class Profiled(Callback):
    """Profiles the second round; the first one loads libraries and flattens gradients.

    Args:
        bench: the machine.
    """

    def __init__(self, bench: Bench) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
        self.profile = profile(activities=activities)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        if trainer.current_epoch == 1:
            self.profile.start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        if trainer.current_epoch == 1:
            self.profile.stop()

    def counts(self) -> dict[str, int]:
        """Return how often each operation was called."""
        return {event.key: event.count for event in self.profile.key_averages()}


def per_step(bench: Bench, method: Method | None = None) -> dict[str, float]:
    """Return calls per step: a round of eight batches less one of four, so a session's own calls do not count."""
    counts = []
    for batches in (4, 8):
        work, profiled = Work(bench, 32, batches), Profiled(bench)
        work.fit(*work.federation(method=method), 2, profiled)
        counts.append(profiled.counts())
    of_four, of_eight = counts
    if bench.is_gpu and not any(of_eight.get(name) for name in LAUNCHES):  # then it would see no waits either
        raise RuntimeError("the profiler saw no kernel; it needs NVIDIA's CUPTI")
    return {name: (of_eight.get(name, 0) - of_four.get(name, 0)) / 4 for name in {*of_four, *of_eight}}


def waits(bench: Bench) -> Outcome:
    """Count the times that the host waits for the GPU within a session; on a CPU, numbers that are read off tensors."""
    calls = per_step(bench)
    names = WAITS if bench.is_gpu else ("aten::_local_scalar_dense",)
    counts = {name: calls[name] for name in names if calls.get(name, 0) > 0}
    figure = f"{sum(counts.values()):g} per step" + (f" ({', '.join(counts)})" if counts else "")
    pageable = {name: number for name, number in calls.items() if "Pageable" in name and number > 0}
    copies = "; copies from memory that is not pinned: " + (f"{sum(pageable.values()):g}" if pageable else "none")
    return Outcome(figure + (copies if bench.is_gpu else ""), "0", not counts)


def methods(bench: Bench) -> Outcome:
    """Count launches and waits per step of methods with several passes, launches as multiples of FedAvg's."""
    launching, waiting = (LAUNCHES, WAITS) if bench.is_gpu else (("aten::convolution",), ("aten::_local_scalar_dense",))
    calls = {method: per_step(bench, method) for method in (None, *MOST_PER_STEP)}
    launches, waits_ = (
        {method: sum(counts.get(name, 0) for name in names) for method, counts in calls.items()}
        for names in (launching, waiting)
    )
    ratios = {method: launches[method] / launches[None] for method in MOST_PER_STEP}
    figure = ", ".join(f"{type(method).__name__} {ratio:.1f}" for method, ratio in ratios.items())
    bar = ", ".join(f"{most:g}" for most in MOST_PER_STEP.values())
    holds = all(ratio <= MOST_PER_STEP[method] for method, ratio in ratios.items()) and not any(waits_.values())
    return Outcome(f"{figure}; {sum(waits_.values()):g} waits", f"{bar}; 0", holds)


def kernels(bench: Bench) -> Outcome:
    """Count launches per step, beside those of the loop."""
    names = LAUNCHES if bench.is_gpu else ("aten::convolution", "aten::add_", "aten::copy_")
    calls = per_step(bench)
    ours = sum(calls.get(name, 0) for name in names)
    loop = Work(bench, 32).loop()
    loop.round()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    with profile(activities=activities) as seen:
        for _ in range(4):
            loop.step()
        bench.wait()
    theirs = sum(event.count for event in seen.key_averages() if event.key in names) / 4
    most = MOST_LAUNCHES * theirs
    return Outcome(f"{ours:.0f} per step, by hand {theirs:.0f}", f"{most:.0f}", ours <= most, of_speed=True)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> Outcome:
    """Compare the peak, less the activations that the loop by hand needs, too, with ``fedsim describe``'s lines."""
    adam = functools.partial(torch.optim.Adam, lr=1e-5)
    work = Work(bench, 32, batches=2)  # images are on the device, too: so few are nothing beside the model
    activations = activations_of(work.loop(adam), bench)
    outcome = described_and_used(work, adam, None, activations)
    return replace(outcome, figure=f"{outcome.figure}; activations by hand {activations / 2**20:,.0f} MiB")


def copied_weights(bench: Bench) -> Outcome:
    """Compare the peak with FedSAM, at a step of two images without moments: a copy of the weights is a fifth of it."""
    return described_and_used(Work(bench, 2, batches=2), functools.partial(torch.optim.SGD, lr=1e-5), FedSAM(), 0)


def described_and_used(work: Work, optimizer: MakesOptimizer, method: Method | None, activations: int) -> Outcome:
    """Compare a fit's peak, less the ``activations`` at that time, with what ``fedsim describe`` says."""
    bench, described = work.bench, described_bytes(work, optimizer, method)
    bench.forget_peak()
    before = bench.used()
    work.fit(*work.federation(optimizer, method), 3, Callback())
    most = bench.peak() - before - activations
    bench.need_gpu("a CPU's memory is not counted by torch")
    figure = f"{most / described:.2f} of {described / 2**20:,.0f} MiB"
    return Outcome(figure, f"{MOST_MEMORY:.2f}", most <= MOST_MEMORY * described, of_speed=True)


def activations_of(loop: Loop, bench: Bench) -> int:
    """Return the bytes of a step beyond the model, its gradients and moments, which stay from step to step."""
    loop.keeps_gradients = True
    for _ in range(3):
        loop.step()
    bench.forget_peak()
    stays = bench.used()
    loop.step()
    return bench.peak() - stays


def described_bytes(work: Work, optimizer: MakesOptimizer, method: Method | None) -> float:
    """Return the device memory that ``fedsim describe`` prints for this work, without activations and CUDA's own."""
    model, data = work.federation(optimizer, method)
    rows = re.findall(r"device memory: (.*?) +([\d,.]+) MiB", describe_federation(model, data, 1, 1))
    sizes = [size for name, size in rows if not name.startswith(("activations", "together"))]
    assert sizes, "fedsim describe has no line about device memory"
    return sum(float(size.replace(",", "")) for size in sizes) * 2**20
