"""Runs that differ from a row's run in what cannot change its results, or only in their last bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from forged.runs import Made, complete, leaves, set_at, value_at
from forged.settings import complete_without

Change = Callable[[dict[str, Any], random.Random], str | None]


def _library(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.{name}", "init_args": arguments}


def _values(section: str, values: dict[str, tuple[Any, ...]]) -> Change:
    """Return a change of one of some options of a section to another value."""

    def change(config: dict[str, Any], rng: random.Random) -> str:
        """Set the option."""
        name = rng.choice([*values])
        value = rng.choice(values[name])
        set_at(config, (*section.split("."), *name.split(".")), value)
        return f"{section}.{name} {value}"

    return change


def _root(config: dict[str, Any], rng: random.Random) -> str:
    for place in [*leaves(config["data"]["source"])]:
        if place[-1] == "root":
            set_at(config["data"]["source"], place, "/elsewhere/of/another/machine")
    return "data.source.root"


def _list(config: dict[str, Any], rng: random.Random) -> str | None:
    source = config["data"]["source"]
    if isinstance(source, list):
        return None
    config["data"]["source"] = [source]
    return "a list of one data set"


def _paths(config: dict[str, Any], rng: random.Random) -> str:
    """Name classes by another path."""
    places = [place for place in leaves(config) if place[-1] == "class_path"]
    for place in places:
        path = value_at(config, place)
        package, name = path.partition(".")[0], path.rpartition(".")[2]
        if package == "fedsim":
            set_at(config, place, rng.choice([f"fedsim.{name}", f"fedsim.elsewhere.of.later.{name}", name]))
        elif path.startswith("torch.optim"):
            set_at(config, place, f"torch.optim.{name.lower()}.{name}")
    return "paths of classes"


def _numbers(config: dict[str, Any], rng: random.Random) -> str:
    """Write whole numbers with a point, and the other way round."""
    for place in [*leaves(config["model"])]:
        value = value_at(config["model"], place)
        if isinstance(value, float) and value.is_integer():
            set_at(config["model"], place, int(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            set_at(config["model"], place, float(value))
    return "1 and 1.0"


def _test_size(config: dict[str, Any], rng: random.Random) -> str | None:
    if config["data"]["test_size"] is not None:
        return None
    config["data"]["test_size"] = list(config["data"]["size"])
    return "data.test_size as data.size"


def _left_out(config: dict[str, Any], rng: random.Random) -> str | None:
    """Leave out options that have their defaults, as an earlier version that lacks them."""
    defaults = {
        ("model", "client", "long_round"): None, ("model", "tf32"): True, ("data", "on_corrupt"): "stop",
        ("model", "client", "bottom_up"): None, ("model", "adaptive_backbones"): None, ("data", "labels"): "own",
        ("trainer", "barebones"): False, ("model", "evaluation", "single_gallery_shot"): False,
    }  # fmt: skip
    place = rng.choice([*defaults])
    section = value_at(config, place[:-1])
    if section[place[-1]] != defaults[place]:
        return None
    del section[place[-1]]
    return f"without {'.'.join(place)}"


def _idle(config: dict[str, Any], rng: random.Random) -> str | None:
    """Change an option that has no effect beside the others."""
    model, data = config["model"], config["data"]
    client, objective = model["client"], model["objective"]
    has_sampler = client["sampler"] != "shuffle" or client["cluster"] or model["clients"]
    cases = [
        (client["schedule"]["kind"] == "constant", client["schedule"], "step", 7),
        (client["schedule"]["kind"] == "constant", client["schedule"], "milestones", [3]),
        (not client["schedule"]["warmup"], client["schedule"], "warmup_start", 0.5),
        (data["partition"] == "by_dataset", data, "parts", 9),
        (data["partition"] == "by_dataset", data, "alpha", 0.1),
        (not has_sampler, client, "num_instances", 8),
        (data["val"] == "none", data, "val_fraction", 0.5),
        (objective and not objective["triplet"], objective, "margin", 0.7),
        (objective and not objective["triplet"], objective, "squared", True),
        (not model["availability"]["straggle"], model["availability"], "straggler_work", 0.9),
        (config["trainer"]["accelerator"] == "cpu", model, "tf32", False),
    ]  # fmt: skip
    holds, section, name, value = rng.choice(cases)
    if not holds:
        return None
    section[name] = value
    return f"{name} {value}"


_TRAINER = {
    "accelerator": ("cpu", "cuda"), "devices": (1, 4, [0, 1]), "num_nodes": (2,), "min_epochs": (1,),
    "max_steps": (-1, 10**9), "max_time": (None, "30:00:00:00", {"days": 30}), "num_sanity_val_steps": (2,),
    "log_every_n_steps": (50,), "enable_checkpointing": (True, False), "enable_progress_bar": (True, False),
    "enable_model_summary": (True,), "deterministic": (True, False, "warn"), "benchmark": (True, False),
    "inference_mode": (False,), "profiler": ("simple",), "detect_anomaly": (True,), "default_root_dir": ("/x",),
    "limit_predict_batches": (3,), "model_registry": ("x",), "enable_autolog_hparams": (False,),
    "logger": (_library("loggers.TensorBoardLogger", save_dir="x"), [_library("loggers.WandbLogger")], False),
}  # fmt: skip
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "precision": ("32-true", 32, "32", None), "limit_train_batches": (1.0, None), "limit_val_batches": (1.0, None),
    "limit_test_batches": (1.0, 1), "callbacks": ([], None), "plugins": ([], None), "val_check_interval": (1.0, None),
    "overfit_batches": (0, 0.0),
}  # fmt: skip
_WATCHERS = {
    "callbacks": (
        [_library("callbacks.LearningRateMonitor")], _library("callbacks.RichProgressBar"),
        [_library("callbacks.ModelCheckpoint", monitor="val/mAP"), _library("callbacks.DeviceStatsMonitor")],
        [_library("callbacks.progress.TQDMProgressBar", refresh_rate=3)], [_library("callbacks.ModelSummary")],
        ["lightning.pytorch.callbacks.LearningRateMonitor"],
    ),
}  # fmt: skip
_MACHINE = {"cache": ("none", "host", "device"), "workers": (0, 9), "cache_dir": ("/x", None)}
_ROUNDING = {
    "threads": (2, 8), "reduction": ("fp32", "exact"), "tf32": (False, True), "client.compile": (True,),
    "client.channels_last": (True, False), "client.prefetch": (True,),
    "client_store": ("host", "disk"), "evaluation.batch_size": (8, 256), "evaluation.backend": ("torch",),
    "evaluation.share_from": (1,), "evaluation.ensemble": (True,), "client.graph": (True,),
}  # fmt: skip
_CHANGES: dict[str, Change] = {
    "root": _root,
    "machine": _values("data", _MACHINE),
    "rounding": _values("model", _ROUNDING),
    "trainer": _values("trainer", _TRAINER),
    "spellings": _values("trainer", _SPELLINGS),
    "watchers": _values("trainer", _WATCHERS),
    "idle": _idle,
    "list": _list,
    "paths": _paths,
    "numbers": _numbers,
    "test size": _test_size,
    "left out": _left_out,
    "strategy": _values("trainer.strategy.init_args", {"timeout": ("0:30:00",), "ranks_per_device": (2,)}),
    "optimizer": _values("model.client.optimizer.init_args", {"foreach": (True, False), "fused": (True,)}),
}


def _as_run(change: Change) -> Callable[[random.Random, Made], str]:
    def run(rng: random.Random, made: Made) -> str:
        """Do the run with the change."""
        if done := change(made.config, rng) or "":
            complete_without(made)
        return done

    return run


def _several(rng: random.Random, made: Made) -> str:
    """Make several changes, in a drawn order."""
    done = [HONEST[kind](rng, made) for kind in rng.sample([*_CHANGES], 6)]
    return "; ".join(filter(None, done))


def _seed(rng: random.Random, made: Made) -> str:
    made.config["seed_everything"] = rng.randint(3, 10**6)
    complete(made)
    return f"seed {made.config['seed_everything']}"


HONEST: dict[str, Callable[[random.Random, Made], str]] = {
    "seed": _seed,
    **{name: _as_run(change) for name, change in _CHANGES.items()},
    "several": _several,
}
