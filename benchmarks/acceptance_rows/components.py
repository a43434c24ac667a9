"""Rows about parts of every kind: own modules, components with deterministic algorithms, order of maps."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from acceptance_rows import fits
from acceptance_rows.fits import compare, finished, importing, start
from acceptance_rows.terms import Bench, NotHereError, Outcome
from fedsim.federation.components.robust import Aggregation, Krum, Median
from fedsim.models import ResNet, StyleLayers
from fedsim.training.messages import Report
from fedsim.training.uploads import Uploads

LIAR = "--model.attack.attackers=[town0]"
SCORED = "--trainer.limit_val_batches=1.0"
HARDWARE = "--model.hardware={down_mbit: 100, up_mbit: 20, images_per_second: 300}"
STYLE = "--model.backbone.init_args.style="
COMBINED = {
    "Backdoor, GeometricMedian, SNR": [
        "--model.attack=Backdoor", LIAR, "--model.attack.patch=4", "--model.aggregation=GeometricMedian",
        STYLE + "{kind: snr, after: [layer1]}",
    ],
    "GaussianNoise, Krum, MixStyle": [
        "--model.attack=GaussianNoise", LIAR, "--model.aggregation=Krum", "--model.aggregation.bad=0",
        STYLE + "{kind: mix, after: [layer1]}",
    ],
    "LabelFlip, Median, CrossStyle": [
        "--model.attack=LabelFlip", LIAR, "--data.labels=common", "--model.method=FedAvg", "--model.aggregation=Median",
        STYLE + "{kind: cross, crop: both, after: [input]}",
    ],
    "SignFlip, TrimmedMean, Deadline": [
        "--model.attack=SignFlip", LIAR, "--model.aggregation=TrimmedMean", HARDWARE, "--model.timing=Deadline",
        "--model.timing.seconds=60",
    ],
    "ModelReplacement, NormClipping": [
        "--model.attack=ModelReplacement", LIAR, "--model.aggregation=NormClipping", "--model.aggregation.bound=0.5",
    ],
    "MinMax, Bulyan": ["--model.attack=MinMax", LIAR, "--model.aggregation=Bulyan", "--model.aggregation.bad=0"],
    "MinSum, Median": ["--model.attack=MinSum", LIAR, "--model.aggregation=Median"],
    "ALIE, CentredClipping": [
        "--model.attack=ALIE", LIAR, "--model.attack.z=1.0", "--model.aggregation=CentredClipping",
        "--model.aggregation.bound=0.5",
    ],
    "InnerProduct, Bucketing": [
        "--model.attack=InnerProduct", LIAR, "--model.aggregation=Bucketing", "--model.aggregation.rule=Median",
    ],
    "NearestNeighbourMixing": ["--model.aggregation=NearestNeighbourMixing", "--model.aggregation.rule=Median"],
    "Buffered": [HARDWARE, "--model.timing=Buffered", "--model.timing.buffer=2"],
    "FLTrust, standardised images": ["--model.aggregation=FLTrust", "--data.public=town3",
                                     STYLE + "{kind: standardise, after: [input]}"],
    "StyleBank, diversified norms": ["--model.method=StyleBank", STYLE + "{kind: diversify, p: 1.0}"],
    "GPerXAN, assembled norms": ["--model.method=GPerXAN", "--model.backbone.init_args.norm=xan"],
    "SSCU": ["--model.method=SSCU"],
}  # fmt: skip
"""each attack, rule, timing and style in one of the fits"""
OWN = """
import torch
from lightning import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy


class Own(LightningModule):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(8, num_classes)

    def embed(self, images):
        return self.body(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.classifier(self.drop(self.embed(images))), labels)
        self.log("loss", loss)
        self.log("temperature", torch.tensor(0.07))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
"""
"""a module of a user: it draws from the device's stream, and logs a number on the CPU"""
OWN_CONFIG = """
seed_everything: 0
trainer: {{limit_val_batches: 0, accelerator: {accelerator}, deterministic: true, enable_progress_bar: false}}
model:
  method: Ditto
  module: own.Own
  client: {{batch_size: 8}}
data:
  source: {{class_path: SyntheticReID, init_args: {{clients: 3, unseen: 1, scale: 0.2}}}}
  val: none
  size: [32, 16]
"""
CLIENTS, NUMBERS, FEW_NUMBERS = 20, 25_600_000, 100_000
"""uploads of 20 clients with a ResNet-50; in small sizes"""


def components(bench: Bench) -> Outcome:
    """Run a deterministic fit with each attack, rule, timing and style; torch refuses what has no such form."""
    refusals = []
    for name, options in COMBINED.items():
        try:
            finished(bench, name.replace(", ", "-"), 1, SCORED, *options)
        except RuntimeError as error:
            refusals.append(f"{name}: {error}")
    figure = f"{len(COMBINED) - len(refusals)} of {len(COMBINED)} fits"
    return Outcome("; ".join([figure, *refusals[:1]]), f"{len(COMBINED)}", not refusals)


def own_module(bench: Bench) -> Outcome:
    """Run a user's module with dropout twice a session: resumed, and on two ranks if there are GPUs."""
    whole, parts = run_own(bench, "own", 3), run_own(bench, "own-parts", 1)
    fits.run([*own_options(bench, "own-parts", 3), "--ckpt_path", "last"], importing(bench.folder))
    outcome = compare("with and without a pause", whole, parts)
    if not outcome.holds or bench.gpus < 2:
        return outcome
    on_two = run_own(bench, "own-two", 3, "--trainer.devices=2")
    return compare("with and without a pause: 0 differ; 1 and 2 ranks", whole, on_two)


def own_options(bench: Bench, name: str, rounds: int) -> list[str]:
    """Write module and config of a run; return the options of its fit."""
    (bench.folder / "own.py").write_text(OWN)
    config = bench.folder / f"{name}.yaml"
    config.write_text(OWN_CONFIG.format(accelerator="gpu" if bench.is_gpu else "cpu"))
    folder = ["--run_dir", str(bench.folder / name)]
    return ["fit", "--config", str(config), *folder, f"--trainer.max_epochs={rounds}", "--trainer.devices=1"]


def run_own(bench: Bench, name: str, rounds: int, *more: str) -> Path:
    """Fit the user's module; return the run's directory."""
    fits.run([*own_options(bench, name, rounds), *more], importing(bench.folder))
    return bench.folder / name


def formats(bench: Bench) -> Outcome:
    """Count convolutions whose maps lose their order, in ResNets with each style layer, norm and fusion of maps."""
    lost = {}
    networks = {
        kind: ResNet(18, style=StyleLayers(kind=kind, p=1.0, crop="both"))
        for kind in ("mix", "cross", "standardise", "diversify", "snr")
    }
    networks |= {"ibn": ResNet(18, ibn=True), "xan": ResNet(18, norm="xan"), "mscam": ResNet(18, fam="mscam")}
    for name, network in networks.items():
        orders = orders_of(network.to(bench.device))
        if count := orders.count(False):
            lost[name] = f"{count} of {len(orders)} with {name}"
    return Outcome(", ".join(lost.values()) or "0", "0", not lost)


def orders_of(network: nn.Module) -> list[bool]:
    """Return for each convolution whether its maps have their channels last, in a pass of images that have."""
    orders = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        orders.append(inputs[0].is_contiguous(memory_format=torch.channels_last))

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(look)
    images = torch.randn(2, 3, 64, 32, device=next(network.parameters()).device)
    network.train()(images.contiguous(memory_format=torch.channels_last))
    return orders


class _Server:
    """A server, as far as a rule knows it."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector

    def vector(self, _: str) -> Tensor:
        """Return the global model."""
        return self._vector


def robust(bench: Bench) -> Outcome:
    """Time two rules on uploads in the host's memory: a median, and distances between all."""
    length = FEW_NUMBERS if bench.reduced else NUMBERS
    vectors = torch.randn(CLIENTS, length)
    names = [f"client{number}" for number in range(CLIENTS)]
    uploads = Uploads(names, length, lambda span: vectors[:, span].to(bench.device), device=bench.device)
    server, reports = _Server(torch.zeros(length, device=bench.device)), {name: Report(1, {}) for name in names}
    rules: dict[str, Aggregation] = {"median": Median(), "distances": Krum()}
    seconds = {
        name: bench.median_ms(lambda rule=rule: rule.aggregate(server, "", uploads, reports), 1) / 1e3  # type: ignore[misc]
        for name, rule in rules.items()
    }
    figure = ", ".join(f"{name} {number:.1f} s" for name, number in seconds.items())
    return Outcome(f"{figure}, {CLIENTS} uploads of {length / 1e6:.1f} M numbers", "", of_speed=True)


# -- processes on GPUs -------------------------------------------------------------------------------------------------

QUERY = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
ENDLESS = ("--trainer.max_epochs=1000000", "--model.client.optimizer=torch.optim.Adam",
           "--model.client.optimizer.init_args.lr=0.001")  # fmt: skip


def one_process(bench: Bench) -> Outcome:
    """Let each rank train by Adam on a GPU of its own; nvidia-smi says which processes have memory on which GPUs."""
    bench.need_gpu("each rank has one of its own")
    process = start([*fits.options_of(bench, "processes"), *ENDLESS, f"--trainer.devices={bench.gpus}"])
    try:
        fits.await_checkpoint(bench.folder / "processes", process)
        time.sleep(1.0)
        listing = subprocess.run(QUERY, capture_output=True, text=True, check=False).stdout
    finally:
        process.kill()
        process.wait()
    return judge_processes(listing)


def judge_processes(listing: str) -> Outcome:
    """Judge nvidia-smi's list of processes: none has memory on two GPUs."""
    gpus_of = defaultdict(set)
    for line in listing.splitlines():
        pid, _, gpu = line.partition(",")
        gpus_of[pid.strip()].add(gpu.strip())
    if not gpus_of:
        raise NotHereError("nvidia-smi lists no process, as in some containers")
    several = [pid for pid, gpus in gpus_of.items() if len(gpus) > 1]
    return Outcome(f"{len(several)} of {len(gpus_of)} processes are on several GPUs", "0", not several)
