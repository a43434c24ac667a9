"""The declared effects of settings against runs: is a setting really without effect where its facts say so?

A tiny synthetic federation is trained under some configurations. In each of them, one setting after another gets
another value, and the run is compared with the first one: the tensors of the last checkpoint, bit by bit, and the
logged numbers but for measured times. A setting whose facts (``fedsim.settings.facts``) say ``nothing`` there, for
itself or by ``needs``, must change no bit; one that says ``rounding`` may change the last ones, one that says
``seconds`` the simulated seconds. Of a setting that says ``results``, a run without a change is listed, as it may lack
a condition. Under all configurations but the first, only those settings are changed whose effect is another one than
under the first, and those of classes that this has not.

    python benchmarks/settings_effect.py
    python benchmarks/settings_effect.py --only DACS SKA
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import yaml
from lightning import LightningModule
from safetensors.torch import load_file
from torch import nn

from fedsim.__main__ import main as fedsim
from fedsim.settings.configuration import Flat, SettingValue, flat
from fedsim.settings.effects import STRONGER
from fedsim.settings.table import class_at, classes_below, setting_at

TINY = """
seed_everything: 0
trainer: {max_epochs: 2, check_val_every_n_epoch: 2, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 4}}
  neck: {kind: linear, dim: 8, dropout: 0.2}
  client:
    batch_size: 8
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.2}}
  val_fraction: 0.3
  size: [32, 16]
  augmentation: {pad: 2, flip: 0.5}
"""


def model(**settings: Any) -> dict[str, Any]:
    """Return a configuration with these settings of the model."""
    return {"model": settings}


def client(**settings: Any) -> dict[str, Any]:
    """Return a configuration with these settings of local training."""
    return model(client=settings)


def named(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a class with arguments."""
    return {"class_path": name, "init_args": arguments}


def method(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a configuration with a method."""
    return model(method=named(name, **arguments))


def network(**arguments: Any) -> dict[str, Any]:
    """Return a configuration with these arguments of the small network."""
    return model(backbone=named("SmallCNN", **{"width": 4} | arguments))


CLUSTER = {"eps": 0.7, "min_samples": 2, "k1": 6, "k2": 2}
NO_VALIDATION = {"data": {"val": "none"}}


def clustered(**settings: Any) -> dict[str, Any]:
    """Return a configuration whose clients cluster their images."""
    return client(cluster=CLUSTER | settings, num_instances=2) | NO_VALIDATION


LINKS = {"up_mbit": 10, "down_mbit": 20, "images_per_second": 30}
GROWN = {"bottom_up": {}, "local_epochs": 2}
COMMON = {"data": {"labels": "common", "val": "images"}}
FEW_CLIENTS = {"class_path": "UCB", "init_args": {"count": 2}}
PRUNED = {"prune_from": 1, "step": 0.3}
UNPRUNED = {"prune": False, "weighting": "size"}
CONTEXTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "own module": model(module="settings_effect.OwnModule", backbone=None),
    "triplet": model(objective={"triplet": 1.0}, client={"sampler": "identity"}),
    "step": client(schedule={"kind": "step", "step": 1}),
    "milestones": client(schedule={"kind": "milestones", "milestones": [1]}),
    "cosine": client(schedule={"kind": "cosine", "rounds": 3}),
    "warmup": client(schedule={"warmup": 2}),
    "bnneck": model(neck={"kind": "bnneck"}),
    "no affine": model(neck={"kind": "bnneck", "affine": False}),
    "no neck": model(neck={"kind": "none"}),
    "whole batch": client(batch_size=None),
    "straggle": model(availability={"straggle": 0.5}),
    "one client draws people": model(clients={"town0": {"sampler": "identity"}}),
    "one client clusters": model(clients={"town0": {"cluster": CLUSTER}}) | NO_VALIDATION,
    "one client of whole batches": model(client={"batch_size": None}, clients={"town0": {"batch_size": 8}}),
    "hardware": model(hardware=LINKS),
    "deadline": model(hardware=LINKS, timing=named("Deadline", first=2)),
    "dirichlet": {"data": {"partition": "dirichlet", "parts": 2, "val": "none"}},
    "iid": {"data": {"partition": "iid", "parts": 2, "val": "none"}},
    "union": {"data": {"partition": "union", "val": "none"}},
    "classification": method("FedAvg") | {"data": {"labels": "common", "val": "images"}},
    "bf16": {"trainer": {"precision": "bf16-mixed"}},
    "cluster": clustered(),
    "no camera loss": clustered(loss={"camera": 0.0, "inter": 0.0}),
    "bottom-up": client(bottom_up={}) | NO_VALIDATION,
    "mix": network(style={"kind": "mix", "p": 1.0}),
    "cross": network(style={"kind": "cross", "crop": "both", "p": 1.0}),
    "cross without boxes": network(style={"kind": "cross"}),
    "snr": network(width=16, style={"kind": "snr", "reduction": 4}),
    "standardise": network(style={"kind": "standardise"}),
    "diversify": network(style={"kind": "diversify", "p": 1.0}),
    "no style": network(style={"kind": "none"}),
    "attention": network(norm="se"),
    "MobileNetV2": model(backbone=named("MobileNetV2", width=0.1)),
    "Local": method("Local"),
    "FedReIDFineTune": method("FedReIDFineTune"),
    "FedSGD": method("FedSGD") | COMMON,
    "FedSGD of epochs": method("FedSGD", steps=None) | COMMON,
    "FedBN": method("FedBN"),
    "FedProx": method("FedProx"),
    "FedRep": method("FedRep", head_epochs=1),
    "FedSAM": method("FedSAM"),
    "FedAtt": method("FedAtt", share_head=False),
    "FedDyn": method("FedDyn"),
    "FedALA": method("FedALA", start_epochs=3),
    "APFL": method("APFL"),
    "Ditto": method("Ditto"),
    "LGFedAvg": method("LGFedAvg"),
    "FedProto": method("FedProto") | COMMON,
    "GPerXAN": method("GPerXAN"),
    "GPerXAN, guided": method("GPerXAN", share_head=True, guide=0.5) | COMMON,
    "PFedMe": method("PFedMe"),
    "PerFedAvg": method("PerFedAvg"),
    "PerFedAvg HF": method("PerFedAvg", variant="hessian_free"),
    "IFCA": method("IFCA"),
    "DACS": method("DACS"),
    "DACS without expert": method("DACS", lam_au=0.0, lam_div=0.0),
    "SSCU": method("SSCU"),
    "SSCU without expert": method("SSCU", lam_au=0.0, lam_div=0.0),
    "StyleBank": method("StyleBank"),
    "FedBABU": method("FedBABU", fine_tune_epochs=1),
    "FedBABU without fine-tuning": method("FedBABU", fine_tune_epochs=0),
    "FedCAPR": method("FedCAPR"),
    "FedCAPR without regulariser": method("FedCAPR", regulariser=0.0),
    "FedDIP": method("FedDIP", rounds=3, reconfig_interval=1, initial=0.3),
    "FedDIP without penalty": method("FedDIP", rounds=3, reconfig_interval=1, lam=0.0),
    "FedKLPR": method("FedKLPR", min_accuracy=0.0, **PRUNED),
    "FedKLPR in every round": method("FedKLPR", crr=False, **PRUNED),
    "FedKLPR without pruning": method("FedKLPR", prune=False, weighting="klaw"),
    "FedKLPR by size": method("FedKLPR", regulariser="none", **UNPRUNED),
    "FedKLPR, cosine": method("FedKLPR", regulariser="cosine", **UNPRUNED),
    "FedKLPR, lam 0": method("FedKLPR", lam=0.0, **UNPRUNED),
    "CDW": method("FedPav", weighting="cdw"),
    "distillation": method("FedPav", distillation={}) | {"data": {"public": "new0"}},
    "FedReID": method("FedReID"),
    "FedReID without expert": method("FedReID", expert=False),
    "FedUReID": model(method=named("FedUReID", precision=0.1), client=GROWN) | NO_VALIDATION,
    "FedUReID of whole rounds": model(method=named("FedUReID", dynamic=False), client=GROWN) | NO_VALIDATION,
    "LotteryFL": method("LotteryFL", start_accuracy=0.0),
    "SubFedAvg": model(method=named("SubFedAvg", min_accuracy=0.0), client={"local_epochs": 2}),
    "MOON": method("MOON"),
    "MOON without contrast": method("MOON", mu=0.0),
    "SKA": method("SKA"),
    "SKA, mean": method("SKA", dual=False, unseen="avg"),
    "SKA, attention": model(method="SKA", backbone=named("SmallCNN", width=4, norm="se")),
    "WeightedPav, speed": model(method=named("WeightedPav", weighting="performance"), hardware=LINKS),
    "noise": model(privacy=named("WhiteNoise", beta=0.001)),
    "differential privacy": model(
        method=named("FedPav", weighting="uniform"),
        privacy=named("DifferentialPrivacy", clip=1.0, noise_multiplier=0.1),
        bn_stats="local",
    ),
    "UCB": model(selection=FEW_CLIENTS),
    "trimmed mean": model(aggregation=named("TrimmedMean", trim=0.33)),
    "FedAdam": model(server_optimizer="FedAdam"),
    "center": model(objective={"center": {}}),
}
"""name -> what it adds to the usual configuration"""
VALUES: dict[str, Any] = {
    "model.client.optimizer.foreach": True,
    "model.client.optimizer.fused": True,
    "model.client.optimizer": "torch.optim.Adam",
    "model.neck": {"kind": "bnneck"},
    "model.head": {"init": "torch"},
    "model.objective": {"triplet": 1.0},
    "model.privacy": {"class_path": "WhiteNoise", "init_args": {"beta": 0.01}},
    "model.client.cluster.k2": 3,
    "model.client.cluster.loss.temperature": 0.2,
    "model.client.cluster.loss.inter_negatives": 2,
    "model.client.cluster.loss.camera_positives": 1,
    "model.client.cluster.loss.camera_negatives": 2,
    "model.clients": {"town0": {"batch_size": 4}},
    "model.hardware": {"up_mbit": 10, "down_mbit": 20, "images_per_second": 30},
    "model.hardware.images_per_second": 7,
    "model.attack": "SignFlip",
    "model.aggregation": "Median",
    "model.server_optimizer": {"class_path": "FedAvgM", "init_args": {"lr": 0.5}},
    "model.selection": "RandomFraction",
    "model.client.micro_batch": 4,
    "model.client.batch_size": 6,
    "model.client.num_instances": 2,
    "model.client.grad_clip": 0.1,
    "model.client.head_lr": 0.1,
    "model.client.local_steps": 1,
    "model.client.schedule.milestones": [2],
    "model.client.long_round": {"round": 2, "local_epochs": 2},
    "model.neck.dim": 12,
    "model.bn_stats": "first",
    "model.objective.center": {},
    "model.evaluation.junk_pids": [-1, 0],
    "model.evaluation.backend": "faiss",
    "model.evaluation.batch_size": 5,
    "model.evaluation.share_from": 1,
    "data.size": [48, 24],
    "data.test_size": [48, 24],
    "data.val_fraction": 0.4,
    "data.augmentation.crop": [24, 12],
    "data.max_images": 20,
    "data.max_identities": 3,
    "data.limit_client_batches": 1,
    "data.unseen": ["town1"],
    "data.public": "new0",
    "data.parts": 3,
    "data.alpha": 5.0,
    "data.val": "images",
}
"""option -> another value, where its type does not say one"""
LEFT_OUT = (
    "data.manifest", "data.generated", "data.cache_dir", "data.source", "data.partition", "model.seed", "model.module",
    "model.method", "model.backbone", "model.adaptive_backbones", "model.private",
    "model.client.optimizer.differentiable", "model.client.optimizer.capturable",
)  # fmt: skip
"""options that name files, or classes that are other configurations, and two that no optimizer on CPUs takes here"""


class OwnModule(LightningModule):
    """A user's module."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.neck = nn.Linear(6 * 15 * 7, 8)
        self.classifier = nn.Linear(8, num_classes)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [B, 8] of images."""
        return self.neck(self.backbone(images))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.classifier(self.embed(images)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


SECONDS = "time/simulated_seconds"


class Result(NamedTuple):
    """What a run has computed."""

    tensors: Mapping[str, torch.Tensor]
    """of the last checkpoint"""
    numbers: Mapping[str, float]
    """logged, by round and column, but for measured times"""
    entries: Flat
    """its settings"""


def merged(below: Any, above: Any) -> Any:
    """Return a configuration with another one on top; a class replaces a class."""
    if not isinstance(below, dict) or not isinstance(above, dict) or "class_path" in above:
        return above
    return below | {name: merged(below.get(name), value) for name, value in above.items()}


def run(config: Mapping[str, Any]) -> Result | str:
    """Train with a configuration; return the line of a refusal, if there is one."""
    with tempfile.TemporaryDirectory(prefix="fedsim-effect-") as folder:
        file, output, errors = Path(folder) / "config.yaml", io.StringIO(), io.StringIO()
        file.write_text(yaml.safe_dump(dict(config)))
        words = ["fit", "--config", str(file), "--run_dir", f"{folder}/run"]
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                code = fedsim(words)
        except Exception as error:  # a defect, to be listed
            return f"traceback: {type(error).__name__}: {error}"
        if code:
            lines = [line for line in errors.getvalue().splitlines() if "error" in line]
            return (lines or errors.getvalue().splitlines() or ["?"])[-1]
        return _read(Path(folder) / "run")


def _read(folder: Path) -> Result:
    last = folder / "checkpoints" / "last.ckpt"
    content = last / (last / "current").read_text().strip()
    tensors = {n: t for file in content.glob("*.safetensors") for n, t in load_file(file).items()}
    tensors |= dict(_tensors_in(torch.load(content / "global.ckpt", weights_only=False)["state_dict"]))
    with (folder / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    numbers = {
        f"{row['round']} {name}": float(value)
        for row in rows for name, value in row.items() if value and (not name.startswith("time/") or name == SECONDS)
    }  # fmt: skip
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return Result(tensors, numbers, flat(config))


def _tensors_in(content: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        yield name, content
    elif isinstance(content, Mapping):
        for key, inner in content.items():
            yield from _tensors_in(inner, f"{name}.{key}")


def difference(first: Result, second: Result) -> tuple[float, list[str]]:
    """Return the largest relative difference of two runs, and the logged numbers that differ.

    Infinite: they have other tensors. Numbers that only one of them logs are left out.
    """
    names = sorted(
        n for n in first.numbers.keys() & second.numbers.keys() if not _same(first.numbers[n], second.numbers[n])
    )
    if first.tensors.keys() != second.tensors.keys():
        return math.inf, names
    return max((_apart(first.tensors[name], second.tensors[name]) for name in first.tensors), default=0.0), names


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    first, second = first.double(), second.double()
    return float((first - second).norm() / first.norm().clamp_min(1e-12))


def other_value(option: str, entry: SettingValue, entries: Flat) -> Any:
    """Return another value of a setting; None if none is known."""
    value, hint = entry.value, _hint(option, entries)
    if option in VALUES and VALUES[option] != value:
        return VALUES[option]
    choices = [c for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
    if choices:
        return next((choice for choice in choices if choice != value), None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        is_whole = hint is int or int in get_args(hint)
        return value + 1 if is_whole else (value * 0.6 if value else 0.3)
    if isinstance(value, list) and value and all(isinstance(inner, int | float) for inner in value):
        return [*value[:-1], value[-1] + 1]
    numbers = {int: 2, float: 0.3}
    return next((numbers[part] for part in get_args(hint) if value is None and part in numbers), None)


def _hint(option: str, entries: Flat) -> Any:
    above, _, name = option.rpartition(".")
    entry = entries.get(above)
    cls = class_at(str(entry.value)) if entry is not None else class_at(setting_at(above).base)
    return None if cls is None else _hints(cls.path).get(name)


@cache
def _hints(path: str) -> dict[str, Any]:
    module, _, name = path.rpartition(".")
    cls = getattr(import_module(module), name)
    return get_type_hints(cls if hasattr(cls, "__dataclass_fields__") else cls.__init__)


def with_value(config: Mapping[str, Any], option: str, value: Any, entries: Flat) -> dict[str, Any]:
    """Return a configuration in which a setting has another value."""
    first, *parts = option.split(".")
    changed = yaml.safe_load(yaml.safe_dump(dict(config)))
    place, so_far = changed.setdefault(first, {}), first
    for part in parts[:-1]:
        so_far = f"{so_far}.{part}"
        inner = place.get(part)
        entry = entries.get(so_far)  # of settings by name, the names alone are there
        if entry is not None and _is_class(entry):
            inner = inner if isinstance(inner, dict) and "class_path" in inner else {"class_path": entry.value}
            place[part] = inner
            place = inner.setdefault("init_args", {})
        else:
            place = place.setdefault(part, {}) if isinstance(inner, dict) or inner is None else inner
    place[parts[-1]] = value
    return changed


def _is_class(entry: SettingValue) -> bool:
    return bool(entry.setting.base) and len(classes_below(entry.setting.base)) != 1


def options_of(entries: Flat, usual: Flat | None, seen: set[str]) -> list[str]:
    """Return the options that are changed under a configuration; ``seen`` are those that have changed results."""
    options = [o for o in entries if o.startswith(("model.", "data.")) and not o.startswith("data.source.")]
    options = [o for o in options if o not in LEFT_OUT]
    if usual is None:
        return options
    new = [o for o in options if o not in usual or usual[o].effect != entries[o].effect]
    return [o for o in new if entries[o].effect != "results" or o not in seen]


ONE_STEP = {"trainer": {"max_epochs": 1, "check_val_every_n_epoch": 1}, "model": {"client": {"local_steps": 1}}}
"""in which rounding is not spread"""
ROUNDING = 1e-4
"""largest relative difference of weights after one step that is called rounding"""


def verdict(effect: str, apart: float, columns: list[str]) -> str:
    """Return whether a difference is what a setting's effect says; ``columns`` are logged numbers that differ."""
    if effect == "nothing":
        return "wrong" if apart or columns else "right"
    if effect == "seconds":
        return "wrong" if apart or not all(column.endswith(SECONDS) for column in columns) else "right"
    if effect == "rounding":
        return "right" if apart < ROUNDING else "wrong"
    return "right" if apart or columns else "no effect seen"


def config_of(name: str) -> dict[str, Any]:
    """Return one of the configurations."""
    return dict(merged(yaml.safe_load(TINY), CONTEXTS[name]))


def examine(name: str, usual: Flat | None, seen: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield option, effect and verdict of each setting under a configuration."""
    config = config_of(name)
    first = run(config)
    if isinstance(first, str):
        yield "", "", f"refused: {first}"
        return
    for option in options_of(first.entries, usual, seen):
        effect, text = examine_one(config, first, option)
        seen |= {option} if (effect, text) == ("results", "right") else set()
        yield option, effect, text


def examine_one(config: Mapping[str, Any], first: Result, option: str) -> tuple[str, str]:
    """Return effect and verdict of a setting under a configuration, whose run is ``first``."""
    entry = first.entries[option]
    value = other_value(option, entry, first.entries)
    if value is None:
        return entry.effect, "no other value"
    is_step = entry.effect == "rounding"
    base = merged(config, ONE_STEP) if is_step else config
    changed, unchanged = run(with_value(base, option, value, first.entries)), run(base) if is_step else first
    if isinstance(changed, str) or isinstance(unchanged, str):
        return entry.effect, f"refused: {str(changed)[:110]}"
    apart, columns = difference(unchanged, changed)
    effect = max((entry.effect, changed.entries.get(option, entry).effect), key=lambda effect: STRONGER[effect])
    text = verdict(effect, apart, columns)
    detail = "" if text == "right" else f": {entry.value} -> {value}, weights {apart:.1e}, {columns[:2]}"
    return effect, text + detail


def main() -> None:
    """Print a line for each setting that is not right, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*CONTEXTS], help="names of configurations")
    only = parser.parse_args().only
    base = run(yaml.safe_load(TINY))
    assert isinstance(base, Result), base
    counts, seen = Counter[tuple[str, str]](), set[str]()
    for name in only:
        for option, effect, text in examine(name, None if name == "usual" else base.entries, seen):
            counts[effect, text.partition(":")[0]] += 1
            if text != "right":
                print(f"{name}: {option} ({effect}): {text}", flush=True)
    for (effect, text), count in sorted(counts.items()):
        print(f"{effect or 'configuration'}, {text}: {count}")


if __name__ == "__main__":
    main()
