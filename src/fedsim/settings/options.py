"""Options that fedsim does not declare where they are used: those of a start, and those of libraries' classes.

No class here is built: its fields are the options, and their defaults are those that fedsim gives, if it gives one.
An argument of a library's class that is not here changes results.
"""

from __future__ import annotations

from typing import Annotated, Any

from fedsim.settings.facts import NOTHING, ROUNDING, Facts

SCORING = ("validate", "test", "predict")
WITH_TRAINER = ("fit", *SCORING, "describe")
"""commands with all options of a run"""
_CONTINUES = "the same command continues unfinished runs"


def _of_start(usage: str | None = None, *commands: str, **facts: Any) -> Facts:
    return Facts(effect="nothing", usage=usage, commands=commands, **facts)


def _of_names(command: str, **facts: Any) -> Facts:
    return _of_start(None, command, is_list_of_names=True, **facts)


def _of_evaluation(**facts: Any) -> Facts:
    return Facts(group="evaluation", **facts)


class StartOptions:
    """Options outside of all sections: of the commands that train or score, and facts about those of other commands."""

    help: Annotated[bool, _of_start()]
    """print this text; all: all options with their fields"""
    config: Annotated[str, _of_start("FILE")]
    """settings; may be given several times, later ones win"""
    paper: Annotated[str, _of_start("003/table5")]
    """a row of a paper's table; fedsim papers lists all rows"""
    run_dir: Annotated[str | None, _of_start("FOLDER")] = None
    """output folder of the run; default: runs/METHOD-seedN"""
    ckpt_path: Annotated[str | None, _of_start("RUN_DIR", "fit", *SCORING, of_one_run=_CONTINUES)]
    """the run to continue or to score"""
    seed_everything: Annotated[
        int,
        Facts(is_repeated=True, usage="N", expected=f"a number from 0 to {2**32 - 1}", synonyms=("seed",)),
    ] = 0
    """seed of all randomness"""
    overwrite: Annotated[bool, _of_start("true", "fit", of_one_run="remove the folder to start again")] = False
    """replace an existing run"""
    left_out: Annotated[list[str], _of_start("a b c", "fit")]
    """one run without each of these data sets, then one table (docs/unseen.md)"""
    seeds: Annotated[list[int], _of_start("0 1 2", "fit")]
    """one run per seed, then means and spread; --parallel 2: two at once"""
    parallel: Annotated[int, _of_start(None, "fit")]
    """runs at once, of --seeds and --left_out"""
    images: Annotated[str, _of_start("FOLDER", "predict")]
    """features of the images in a folder, in place of the run's test sets (docs/inference.md)"""
    save_maps: Annotated[bool, _of_start("true", "predict")] = False
    """also draw maps of strong features, into RUN_DIR/maps"""
    save_ranking: Annotated[bool, _of_start("true", "test")] = False
    """also write and draw ranked lists, into RUN_DIR/rankings"""
    weights_only: Annotated[bool | None, _of_start(None, "fit", *SCORING)]
    """how a checkpoint is read"""
    verbose: Annotated[bool, _of_start(None, "validate", "test")]
    """print scores"""
    return_predictions: Annotated[bool | None, _of_start(None, "predict")]
    """of Lightning; features are written into files"""
    print_config: Annotated[bool, _of_start("")]
    """print all settings and exit"""
    clients: Annotated[list[str], _of_names("augment", expected="a list of names, such as '[town0]'")]
    """the clients whose generators a command trains, draws or uses"""
    size: Annotated[Any, Facts(commands=("augment",), expected="a height and a width, such as [64, 32]")]
    """of the images of generators"""
    sets: Annotated[list[str], _of_names("report")]
    """the test sets of a table"""


class TrainerOptions:
    """Options of Lightning's Trainer. How long a run has trained is known from its rounds, not from its limits."""

    accelerator: Annotated[
        Any,
        _of_start(
            "cpu",
            expected="cpu, cuda or auto",
            remedy="set trainer.accelerator to cpu or auto",
            refused_by="gpu backend found|can not run on your system",
        ),
    ]
    """or cuda, auto"""
    devices: Annotated[
        Any,
        _of_start(
            "N",
            synonyms=("gpus", "num_gpus", "gpu", "gpu_id"),
            remedy="give a number of ranks from 1, or auto; on GPUs also a list of GPUs",
            refused_by=r"You requested gpu|GPUs requested|CUDA_VISIBLE_DEVICES|Device ID|invalid literal for int\(\)",
        ),
    ]
    """ranks: processes with one device each"""
    num_nodes: Annotated[
        Any,
        _of_start(remedy="leave it out, or give the number of machines, which Slurm or torchrun must start"),
    ]
    """machines"""
    strategy: Annotated[
        Any,
        Facts(
            base="fedsim.strategy.strategy.FederatedStrategy",
            spellings={"auto": "FederatedStrategy"},
            remedy="leave it out or use fedsim.strategy.FederatedStrategy",
        ),
    ]
    """how ranks meet"""
    precision: Annotated[
        Any,
        Facts(
            null="32-true",
            spellings={"32": "32-true", "bf16": "bf16-mixed"},
            usage="bf16-mixed",
            expected="32-true or bf16-mixed",
        ),
    ]
    """or 32-true"""
    logger: Annotated[list[Any], Facts(effect="nothing", base="lightning.pytorch.loggers.Logger", is_set=True)]
    """where numbers are written beside metrics.csv"""
    callbacks: Annotated[list[Any], Facts(null=[], base="lightning.pytorch.callbacks.Callback")]
    """your own hooks"""
    plugins: Annotated[list[Any], Facts(null=[], is_set=True)]
    """of Lightning"""
    max_epochs: Annotated[
        int,
        Facts(
            is_length=True,
            usage="N",
            synonyms=("epochs", "rounds", "num_rounds", "global_rounds"),
            remedy="give a number of rounds, 1 or more",
        ),
    ] = 100
    """communication rounds"""
    min_epochs: Annotated[Any, Facts(needs="trainer.callbacks or trainer.max_time")]
    max_steps: Annotated[Any, NOTHING]
    min_steps: Annotated[Any, Facts(needs="trainer.callbacks or trainer.max_time")]
    max_time: Annotated[
        Any,
        _of_start(
            remedy="give days:hours:minutes:seconds, such as 00:12:00:00",
            refused_by=r"Timer\(duration=",
        ),
    ]
    limit_train_batches: Annotated[Any, Facts(null=1.0)]
    limit_val_batches: Annotated[Any, _of_evaluation(null=1.0)]
    limit_test_batches: Annotated[Any, _of_evaluation(null=1.0)]
    limit_predict_batches: Annotated[Any, NOTHING]
    val_check_interval: Annotated[Any, _of_evaluation(null=1.0)]
    check_val_every_n_epoch: Annotated[Any, _of_evaluation(is_length=True, usage="N")]
    """rounds between two evaluations"""
    num_sanity_val_steps: Annotated[Any, NOTHING] = 0
    log_every_n_steps: Annotated[Any, NOTHING] = 1
    enable_checkpointing: Annotated[Any, NOTHING]
    enable_progress_bar: Annotated[Any, NOTHING]
    enable_model_summary: Annotated[Any, NOTHING] = False
    enable_autolog_hparams: Annotated[Any, NOTHING]
    deterministic: Annotated[Any, Facts(effect="rounding", null=False)]
    benchmark: Annotated[Any, Facts(effect="rounding", null=False)]
    inference_mode: Annotated[Any, NOTHING]
    use_distributed_sampler: Annotated[Any, NOTHING] = False
    profiler: Annotated[Any, NOTHING]
    detect_anomaly: Annotated[Any, NOTHING]
    default_root_dir: Annotated[Any, NOTHING]
    model_registry: Annotated[Any, NOTHING]


class OptimizerOptions:
    """Arguments of torch's optimizers: the rate, and those that choose between implementations of the same step."""

    lr: Annotated[float, Facts(usage="RATE", synonyms=("learning_rate",), remedy="give a number from 0, such as 0.01")]
    """learning rate"""
    foreach: Annotated[Any, ROUNDING]
    fused: Annotated[Any, ROUNDING]
    capturable: Annotated[Any, ROUNDING]


OF_LIBRARIES: dict[str, type] = {
    "lightning.pytorch.trainer.trainer.Trainer": TrainerOptions,
    "torch.optim.optimizer.Optimizer": OptimizerOptions,
}
"""Base class of a library -> the options of its classes of which fedsim knows more."""
WATCHERS = {
    "lightning.pytorch.callbacks": (
        "DeviceStatsMonitor", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "RichModelSummary",
        "RichProgressBar", "ThroughputMonitor", "TQDMProgressBar",
    ),
}  # fmt: skip
"""Callbacks of libraries that only watch: a run has the same numbers without them."""


def trainer_defaults() -> dict[str, Any]:
    """Return fedsim's defaults of Lightning's options of the Trainer."""
    return {name: vars(TrainerOptions)[name] for name in TrainerOptions.__annotations__ if name in vars(TrainerOptions)}
