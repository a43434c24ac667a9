"""Runs that were done with other settings than a row's, or whose configuration lacks some."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import lightning

from fedsim.data.datamodule import FederatedDataModule
from fedsim.settings.configuration import fingerprint_of
from fedsim.settings.identity import identity_of
from fedsim.settings.table import setting_at
from forged.runs import Made, complete, data_of, leaves, option_of, other_value, remove_at, set_at, value_at

IDLE_TRAINER = (
    "accelerator", "devices", "num_nodes", "min_epochs", "max_steps", "min_steps", "max_time", "num_sanity_val_steps",
    "limit_predict_batches", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "enable_model_summary",
    "deterministic", "benchmark", "inference_mode", "use_distributed_sampler", "detect_anomaly", "default_root_dir",
    "enable_autolog_hparams", "model_registry",
)  # fmt: skip
"""Options of Lightning's Trainer without effect on what a whole run computes; limits show by the rounds of a run."""
_OWN = {"class_path": "mine.Halve", "init_args": {"every": 1}}


def _library(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.{path}", "init_args": arguments}


_CALLBACKS = (
    _OWN, "mine.Halve", {"class_path": "mine.ModelCheckpoint"}, {"class_path": "mine.callbacks.TQDMProgressBar"},
    {"class_path": "mine.RunSummary"}, _library("callbacks.StochasticWeightAveraging", swa_lrs=0.1),
    _library("callbacks.EarlyStopping", monitor="val/mAP"), _library("callbacks.GradientAccumulationScheduler"),
    _library("callbacks.Timer", duration="00:01:00:00"), _library("callbacks.BackboneFinetuning"),
    _library("callbacks.WeightAveraging"), _library("callbacks.LambdaCallback"),
    {"class_path": "fedsim.testing.Watch"},
)  # fmt: skip
_WATCHER = _library("callbacks.LearningRateMonitor")
_PLUGINS = (
    _library("plugins.precision.MixedPrecision", precision="bf16-mixed", device="cpu"),
    _library("plugins.precision.HalfPrecision", precision="bf16-true"), _library("plugins.DoublePrecision"),
    _library("plugins.io.AsyncCheckpointIO"), {"class_path": "mine.Plugin"}, "mine.Plugin",
    _library("plugins.layer_sync.TorchSyncBatchNorm"),
)  # fmt: skip
_TRAINER: dict[str, tuple[Any, ...]] = {
    "callbacks": (*_CALLBACKS, *([c] for c in _CALLBACKS), *([_WATCHER, c] for c in _CALLBACKS)),
    "plugins": (*_PLUGINS, *([p] for p in _PLUGINS)),
    "precision": ("bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", 16, 64, "bf16", "transformer-engine"),
    "strategy": (
        {"class_path": "mine.FederatedStrategy"}, {"class_path": "mine.Strategy", "init_args": {"timeout": 1}}, "ddp",
        {"class_path": "fedsim.strategy.FederatedStrategy", "init_args": {"mine": 1}}, "mine.FederatedStrategy",
    ),
    "logger": (_OWN, [_OWN], [_library("loggers.CSVLogger", save_dir="x"), _OWN], "mine.Logger"),
    "profiler": (_OWN, {"class_path": "mine.SimpleProfiler"}),
    "accelerator": ({"class_path": "mine.CPUAccelerator"},),
    "limit_train_batches": (0.5, 2, 0.1), "limit_val_batches": (0.5, 3), "limit_test_batches": (0.5, 3),
    "overfit_batches": (1, 0.1, 1.0), "fast_dev_run": (True, 1, 3), "accumulate_grad_batches": (2, 4),
    "gradient_clip_val": (0.1, 1, 5.0), "gradient_clip_algorithm": ("norm", "value"), "val_check_interval": (0.5, 2),
    "sync_batchnorm": (True,), "barebones": (True,), "reload_dataloaders_every_n_epochs": (1,),
    "max_epochs": (1, 3, 1000, -1, None), "check_val_every_n_epoch": (1, 7, 1000),
}  # fmt: skip


def trainer(rng: random.Random, made: Made) -> str:
    """Set an option of Lightning's Trainer, or one that it does not have."""
    names = [name for name in inspect.signature(lightning.Trainer).parameters if name not in IDLE_TRAINER]
    name = rng.choice([*names, *_TRAINER, "an_option_of_later"])
    if rng.random() < 0.05:
        return _set(made, ("an_option_of_later",), rng.choice([1, {"a": 1}, [1]]))
    old = made.config["trainer"].get(name)
    values = [value for value in _TRAINER.get(name, (3, "x", True)) if value != old]
    return _set(made, ("trainer", name), rng.choice(values))


def callbacks_and_plugins(rng: random.Random, made: Made) -> str:
    """Add a callback or plugin of the user's or of Lightning's; one may have the name of one that only watches."""
    name = rng.choice(["callbacks", "plugins"])
    return _set(made, ("trainer", name), copy.deepcopy(rng.choice(_TRAINER[name])))


def data(rng: random.Random, made: Made) -> str:
    """Set an option of the data."""
    values: dict[str, tuple[Any, ...]] = {
        "limit_client_batches": (1, 0.5, 1.0, 7), "max_images": (1, 99), "max_identities": (1, 50), "dry_run": (True,),
        "unseen": (["market1501"], ["viper"], ["x"], "viper"), "public": ("viper", "cuhk02"),
        "partition": ("by_camera", "by_identity", "iid", "dirichlet", "shards", "stratified", "union", "by_dataset"),
        "labels": ("common", "own"), "on_corrupt": ("skip",), "val": ("identities", "images", "first_image", "none"),
        "manifest": ("mine.csv", "/data/mine.csv", "lists/mine"), "size": ([128, 64], [256, 64], 256),
        "test_size": ([384, 128],), "generated": ({"root": "mine"}, {"root": "mine", "share": 0.5}),
        "source": ({"class_path": "fedsim.data.datasets.MarketFolders", "init_args": {"root": "data"}},),
    }  # fmt: skip
    idle = ("cache", "cache_dir", "workers", "parts", "alpha", "val_fraction", "augmentation")
    names = [name for name in inspect.signature(FederatedDataModule).parameters if name not in idle]
    name = rng.choice(names)
    choices = [v for v in values.get(name, (3, "x", True)) if v != made.config["data"].get(name)]
    return _set(made, ("data", name), rng.choice(choices))


def sources(rng: random.Random, made: Made) -> str:
    """Leave out a data set, add one, take one twice, another, or all in another order; or change what one takes."""
    source = made.config["data"]["source"]
    source = [source] if isinstance(source, dict) else source
    place = rng.randrange(len(source))
    data_set, name = source[place], source[place]["class_path"].rpartition(".")[2]
    kind = rng.choice(["less", "more", "twice", "other", "own", "order", "argument", "new argument"])
    arguments = [a for a in data_set.get("init_args", {}) if a not in ("root", "i_know_duke_is_withdrawn")]
    arguments = [a for a in arguments if (name, a) != ("CUHK02", "seed")]  # without effect there
    if kind == "less":
        del source[place]
    elif kind in ("more", "twice"):
        added = {"class_path": f"fedsim.data.datasets.{rng.choice(['GRID', 'CUHKSYSU', 'MarketFolders'])}"}
        source.append(copy.deepcopy(data_set) if kind == "twice" else added)
    elif kind == "order" and len(source) > 1:
        source.insert(0, source.pop())
    elif kind == "own":
        data_set["class_path"] = f"{rng.choice(['mine', 'mine.datasets', 'not_fedsim.data.datasets'])}.{name}"
    elif kind == "other":
        names = [new_name for new_name in ("GRID", "CUHKSYSU", "MarketFolders") if new_name != name]
        data_set["class_path"] = f"fedsim.data.datasets.{rng.choice(names)}"
    elif kind == "new argument" or not arguments:
        data_set.setdefault("init_args", {})["mine"] = rng.choice([1, "x", True])
    else:
        argument = rng.choice(arguments)
        data_set["init_args"][argument] = other_value(data_set["init_args"][argument], rng)
    return _set(made, ("data", "source"), source) + f" ({kind} {name})"


def model(rng: random.Random, made: Made) -> str:
    """Set a value of the model: of any class or section of it."""
    return _leaf(rng, made, "model")


def any_value(rng: random.Random, made: Made) -> str:
    """Set any value of the configuration."""
    return _leaf(rng, made, rng.choice(["model", "data", "trainer"]))


def _leaf(rng: random.Random, made: Made, section: str) -> str:
    places = [(section, *place) for place in leaves(made.config[section])]
    place = rng.choice([place for place in places if _has_effect(made, place)])
    value = other_value(value_at(made.config, place), rng)
    if place[-1] == "class_path":
        value = f"mine.{value_at(made.config, place).rpartition('.')[2]}"
    return _set(made, place, value)


def _has_effect(made: Made, place: tuple[Any, ...]) -> bool:
    """Return whether a value changes results beside any others. A test of each condition is another matter."""
    named = [inner for inner in leaves(made.config) if inner[-1] == "class_path"]
    classes = {option_of(inner): str(value_at(made.config, inner)) for inner in named}
    if place[0] == "trainer":
        return len(place) == 2 and place[1] not in (*IDLE_TRAINER, "logger", "profiler")
    if place[:2] == ("data", "source"):
        return place[-1] not in ("root", "i_know_duke_is_withdrawn", "seed")
    facts, client = setting_at(option_of(place), classes).facts, made.config["model"]["client"]
    if place[1] in ("objective", "head") and (client["cluster"] or client["bottom_up"]):
        return False
    return facts.effect == "results" and not facts.needs and not facts.is_repeated


def own_class(rng: random.Random, made: Made) -> str:
    """Put a class of the user's in the place of one of fedsim's or of a library's, with its name."""
    places = [place for place in leaves(made.config) if place[-1] == "class_path"]
    place = rng.choice(places)
    path = value_at(made.config, place)
    name = path.rpartition(".")[2]
    return _set(
        made, place, rng.choice([f"mine.{name}", f"mine.{path}", f"my_{path}", f"{path}.{name}s", f"mine.x.{name}"])
    )


def other_class(rng: random.Random, made: Made) -> str:
    """Put another class of fedsim or of a library where there is one or none."""
    choices = {
        ("model", "method"): ("fedsim.methods.FedProx", "fedsim.methods.Local", "fedsim.methods.FedBN", "mine.FedPav"),
        ("model", "selection"): ("fedsim.federation.components.selection.RandomFraction", "mine.AllClients"),
        ("model", "attack"): ("fedsim.federation.components.attacks.SignFlip", "mine.Attack"),
        ("model", "aggregation"): ("fedsim.federation.components.aggregation.Median", "mine.Mean"),
        ("model", "privacy"): ("fedsim.federation.components.privacy.WhiteNoise", "mine.Privacy"),
        ("model", "timing"): ("fedsim.federation.components.timing.FedBuff", "mine.Synchronous"),
        ("model", "server_optimizer"): ("torch.optim.Adam", "mine.SGD"),
        ("model", "module"): ("mine.Module", "torch.nn.Linear"),
        ("model", "client", "optimizer"): ("torch.optim.Adam", "mine.SGD", "torch.optim.AdamW"),
        ("model", "backbone"): ("fedsim.models.SmallCNN", "mine.ResNet"),
        ("model", "objective", "metric"): ("fedsim.training.losses.CircleLoss", "mine.Loss"),
    }  # fmt: skip
    place = rng.choice([*choices])
    if place[1] in ("aggregation", "server_optimizer") and made.summary["method"] in ("Local", "FedReIDFineTune"):
        return ""
    if place[1] == "objective" and (
        made.config["model"]["client"]["cluster"] or made.config["model"]["client"]["bottom_up"]
    ):
        return ""
    now = (value_at(made.config, place) or {}).get("class_path")
    path = rng.choice(
        [path for path in choices[place] if path.rpartition(".")[2] != str(now).rpartition(".")[2]] or ["mine.X"]
    )
    return _set(made, place, rng.choice([path, {"class_path": path}]))


def without_a_field(rng: random.Random, made: Made) -> str:
    """Remove a field with an effect: the run was done by another version, or its config was edited."""
    places = [
        place for place in leaves(made.config) if place[0] in ("model", "data", "trainer") and _has_effect(made, place)
    ]
    place = rng.choice(places)
    if place[-1] in ("class_path",) or isinstance(place[-1], int):
        place = place[:-1]
    before = value_at(made.config, place)
    remove_at(made.config, place)
    complete_without(made)
    return f"without {option_of(place)} ({str(before)[:40]})"


def without_a_section(rng: random.Random, made: Made) -> str:
    """Remove a section."""
    sections: list[tuple[str, ...]] = [("model",), ("data",), ("trainer",)]
    sections += [(s, n) for s in ("model", "data") for n, v in made.config[s].items() if isinstance(v, dict)]
    sections += [("model", "client", "schedule"), ("model", "client", "optimizer"), ("data", "source")]
    place = rng.choice(sections)
    if place in (("model", "head"), ("model", "objective")):  # without effect for some methods
        return ""
    remove_at(made.config, place)
    complete_without(made)
    return f"without {option_of(place)}"


def complete_without(made: Made) -> None:
    """Write the hashes of a configuration that lacks something into the summary of the whole data_set."""
    made.summary |= {"fingerprint": fingerprint_of(made.config), "identity": identity_of(made.config)}


def several(rng: random.Random, made: Made) -> str:
    """Make one change that counts among several that do not."""
    made.config["data"]["workers"] = 5
    made.config["trainer"]["devices"] = 4
    made.config["trainer"]["callbacks"] = [_WATCHER]
    made.config["data"]["cache"] = "host"
    return any_value(rng, made)


def _set(made: Made, place: tuple[Any, ...], value: Any) -> str:
    """Set a value, and write the summary of a run that was done so."""
    set_at(made.config, place, value)
    honest_summary = made.summary
    try:
        complete(made)
    except (TypeError, KeyError, AttributeError, ValueError):  # a value that no fit accepts
        complete_without(made)
    made.summary = {**honest_summary, **made.summary, "data": data_of(made.key, made.name)}
    return f"{option_of(place)} {value}"


OF_SETTINGS: dict[str, Callable[[random.Random, Made], str]] = {
    "trainer": trainer,
    "callbacks, plugins": callbacks_and_plugins,
    "data": data,
    "sources": sources,
    "model": model,
    "any value": any_value,
    "own class": own_class,
    "other class": other_class,
    "without a field": without_a_field,
    "without a section": without_a_section,
    "several": several,
}
