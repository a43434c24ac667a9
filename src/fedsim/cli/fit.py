"""The commands that train and test: LightningCLI with fedsim's defaults."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import ActionYesNo, Namespace
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from fedsim.cli.checks import (
    check_config,
    check_fit,
    check_folders,
    check_run,
    check_weights,
    give_old_addresses,
    let_loggers_stand_alone,
    write_into,
)
from fedsim.cli.describe import FederatedTrainer, weights_for
from fedsim.cli.outcome import check_scores, end_fit, say_scores
from fedsim.cli.run_directory import (
    Settled,
    default_run_dir,
    keep_scores,
    look_for_fit,
    settle_checkpoint,
    with_own_config,
)
from fedsim.core.devices import check_accelerator
from fedsim.core.errors import ConfigError
from fedsim.core.files import check_folder, make_folder, missing_folders, remove_empty
from fedsim.core.paths import expanded, run_folder
from fedsim.core.replaced_run import FEATURES, MAPS, RANKINGS, write_round
from fedsim.core.versions import holding
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.summary import MAX_LISTED
from fedsim.federation.callbacks import (
    FolderStart,
    KeepConfig,
    MetricsFile,
    Preemption,
    RoundProgress,
    RunSummary,
    ScoreLastRound,
    TensorBoardPages,
    Tracking,
    in_run_folder,
)
from fedsim.federation.callbacks.tracking import keep_artifacts
from fedsim.federation.checks.compatibility import check_callbacks, check_one_batch, naming_the_field
from fedsim.federation.components.selection import AllClients
from fedsim.federation.events import as_list
from fedsim.federation.federation import Federation
from fedsim.inference import pictures  # noqa: F401 - the parser finds the names of loaded classes
from fedsim.papers.files import OfAPaper
from fedsim.parsing.agent_words import folder_of_sweep_run, keep_words
from fedsim.parsing.command_line import given, merged, with_clients
from fedsim.parsing.documents import SafeLoader
from fedsim.parsing.error_lines import parser_errors_explained
from fedsim.parsing.options import asks_for_help
from fedsim.parsing.output import print_text, rank_of_this_process
from fedsim.settings.changes import Change
from fedsim.settings.configuration import fingerprint_of, line_of_idle
from fedsim.settings.identity import identity_of, line_of_identity
from fedsim.settings.options import trainer_defaults
from fedsim.settings.table import section, walk
from fedsim.strategy.sharing import devices_of_run

log = logging.getLogger(__name__)

_PARSERS: dict[tuple[str, bool], dict[str, Any]] = {}
"""(command, whether with the texts of the help) -> the attributes in which Lightning's CLI keeps its parser"""


def run(command: str, args: list[str]) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict`` or ``describe`` with the words after it, which are checked."""
    give_old_addresses()
    let_loggers_stand_alone()
    with holding():
        FedSimCLI([command, *with_clients(with_own_config(command, args))], args)


class FedSimCLI(LightningCLI):
    """LightningCLI with fedsim's defaults, one run directory per run, and errors of one line."""

    def __init__(self, args: list[str], words: list[str] | None = None) -> None:
        self.command, self.words = args[0], words or args[1:]
        self.asks_for_help = asks_for_help(args)
        self._missing: list[Path] = []  # folders that a command makes, and that are removed with its refusal
        try:
            with ExitStack() as self._folder:  # of a fit, from its last check on
                self._call(args)
        except BaseException:
            remove_empty(self._missing)
            raise

    def _call(self, args: list[str]) -> None:
        """Parse the arguments, build the objects, and run the command."""
        super().__init__(
            model_class=Federation,
            datamodule_class=FederatedDataModule,
            trainer_class=FederatedTrainer,
            trainer_defaults={"strategy": {"class_path": "fedsim.strategy.FederatedStrategy"}, **trainer_defaults()},
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # no abbreviations of names: a new option could change their meaning
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, self.command: {"allow_abbrev": False}},
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override] # Lightning calls it on the object, too
        """Return the given command and its arguments that are no options: all parsers take half a second to build."""
        return {self.command: {**LightningCLI.subcommands(), "describe": {"model", "datamodule"}}[self.command]}

    def setup_parser(self, *args: Any) -> None:
        """Build a command's parser once per process; each command line gets a copy of its own."""
        key = self.command, self.asks_for_help
        if key not in _PARSERS:
            before = {*vars(self)}
            super().setup_parser(*args)
            _PARSERS[key] = {name: value for name, value in vars(self).items() if name not in before}
        vars(self).update(deepcopy(_PARSERS[key]))

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add fedsim's own options, and link the model's seed to seed_everything."""
        texts = {name: setting.text for name, setting in section("").arguments.items()}
        parser.add_argument("--run_dir", type=str | None, default=None, help=texts["run_dir"])
        parser.add_argument("--overwrite", type=bool, default=False, help=texts["overwrite"])
        for name in ("save_ranking", "save_maps"):
            parser.add_argument(f"--{name}", action=ActionYesNo, nargs="?", default=False, help=texts[name])
        parser.add_argument("--paper", action=OfAPaper)
        # by its class path: the parser cannot derive it from an instance
        parser.set_defaults({"model.selection": {"class_path": f"{AllClients.__module__}.AllClients"}})
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the config files first: the parser accepts some faulty files, and does not name the others."""
        command, *words = cast("list[str]", args)
        settings = merged(given(words))
        with parser_errors_explained(command, (option for option, _ in walk())):
            super().parse_arguments(parser, args)
        check_weights(settings, self.config[command].as_dict())

    def _dump_config(self) -> None:
        """Skip the dump of hyper-parameters, which neither class saves: it takes a fifth of ``describe``."""
        self.config_dump: dict[str, Any] = {}

    def before_instantiate_classes(self) -> None:
        """Determine the run directory and the checkpoint before objects are built."""
        config = self.config[self.subcommand]
        _expand_paths(config)
        goes_on = config.get("ckpt_path") is not None  # by the user's word
        self.given_dir = None if config["run_dir"] is None else Path(config["run_dir"])
        check_config(config.as_dict())
        if config["run_dir"] is None:
            method = str(config["model"]["method"]["class_path"])
            config["run_dir"] = default_run_dir(method, config["seed_everything"])
            if self.subcommand == "fit" and folder_of_sweep_run() and not goes_on:
                config["ckpt_path"] = "last"  # W&B's agent starts a preempted run again
        self.run_dir = run_folder(config["run_dir"], "run_dir")
        if self.subcommand == "fit":
            look_for_fit(self.run_dir)
            check_folders(as_list(config["trainer"]["logger"]))
        else:
            config["trainer"]["logger"] = False  # some write files, or contact a server, when they are built
        if self.subcommand in ("validate", "test", "predict") and config["ckpt_path"] is None:
            raise ConfigError(
                f"ckpt_path: {self.subcommand} needs a checkpoint: best, last, or a path such as "
                f"{self.run_dir}/checkpoints/best.ckpt"
            )
        if config["save_ranking"] and self.subcommand != "test":
            raise ConfigError("save_ranking: ranked lists are written by fedsim test only")
        if config["save_maps"] and self.subcommand != "predict":
            raise ConfigError("save_maps: pictures of maps are written by fedsim predict only")
        self._settle(config)
        if self.subcommand == "fit" and goes_on:
            self._start(config).check_way("--ckpt_path", "--overwrite")
        if self.subcommand == "fit" and self.given_dir is None and rank_of_this_process() == 0:
            self._start(config).check_free()  # before data are listed
        if "verbose" in config:
            config["verbose"] = False  # Lightning's own table; fedsim prints another

    def _settle(self, config: Namespace) -> None:
        """Read the checkpoint of the command, if it has one: a wrong one is reported before processes start."""
        self.restarts, self.scored = False, Settled(None)
        if config.get("ckpt_path"):
            checkpoint, rounds = str(config["ckpt_path"]), config["trainer"]["max_epochs"]
            self.scored = settle_checkpoint(checkpoint, self.run_dir, self.subcommand == "fit", rounds)
            config["ckpt_path"] = None if self.scored.path is None else str(self.scored.path)
            self.restarts = self.scored.path is None

    def after_instantiate_classes(self) -> None:
        """Check options and folders before other processes are started."""
        config = self.config[self.subcommand]
        if config["save_ranking"]:
            self.model.rankings = self.run_dir / RANKINGS
        if config["save_maps"]:
            self.model.maps = self.run_dir / MAPS
        check_run(self.trainer, self.model, self.datamodule, describes=self.subcommand == "describe")
        if self.subcommand in ("fit", "describe"):
            self._look_at_settings(config)
        if self.subcommand == "fit":
            if self.scored.content is not None and rank_of_this_process() == 0:
                self._start(config).check_free()  # before the checkpoint of another run is compared
            check_fit(self.trainer, self.model, self.datamodule, self.scored.content)
            self.scored = self.scored._replace(content=None)  # which may be large
            self._prepare_run(config)
        elif rank_of_this_process() == 0 and (self.subcommand == "predict" or self.model.rankings is not None):
            self._missing = missing_folders(*(self.run_dir / name for name in (FEATURES, RANKINGS, MAPS)))
            features = self.run_dir / FEATURES if self.subcommand == "predict" else None
            for folder in filter(None, (features, self.model.rankings, self.model.maps)):
                check_folder(folder, "run_dir")
            make_folder(self.run_dir, "run_dir")  # last: all other checks have passed

    def _look_at_settings(self, config: Namespace) -> None:
        """Log the settings without effect beside the others; refuse a network that hides which they are."""
        if self.model.settings.module is not None and config["model"]["module"] is None:
            name = config["model"]["backbone"]["class_path"]
            raise ConfigError(f"model.backbone: {name} is a LightningModule; leave it out, and set model.module to it")
        if remark := line_of_idle(self._resolved()):
            log.info(remark)

    def _prepare_run(self, config: Namespace) -> None:
        """Let the run begin in its directory when its first round has trained; all other checks have passed."""
        at_once = partial(keep_words, self.run_dir, self.words) if folder_of_sweep_run() else None
        has_mlflow = any(isinstance(logger, MLFlowLogger) for logger in self.trainer.loggers)
        config_of_run, start = self._resolved() if has_mlflow else {}, self._start(config)
        folder = in_run_folder(self.trainer, start, self._changes(), config=config_of_run, at_once=at_once)
        self._folder.enter_context(folder)

    def _start(self, config: Namespace) -> FolderStart:
        """Return the settings by which a fit begins, continues or replaces a run."""
        rounds = self.scored.resumed.rounds if self.scored.resumed else 0
        return FolderStart(self.run_dir, bool(config["overwrite"]), config["ckpt_path"], rounds, self.restarts)

    def _changes(self) -> list[Change]:
        return self.scored.resumed.changes(self._resolved()) if self.scored.resumed else []

    def instantiate_classes(self) -> None:
        """Build everything, with pretrained weights only where they are needed."""
        with weights_for(self.command, bool(self.config[self.subcommand]["data"]["dry_run"])):
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with fedsim's loggers and callbacks around the user's."""
        config = self.config_init[self.subcommand]["trainer"]
        if str(config["precision"]) in ("16", "16-mixed"):  # on CPUs Lightning silently takes another
            precision = config["precision"]
            raise ConfigError(f"trainer.precision: {precision} is not supported; use 32-true or bf16-mixed")
        limit = config["limit_train_batches"]
        if isinstance(limit, float) and limit.is_integer():  # so reads the parser 1, depending on the order of imports
            limit = kwargs["limit_train_batches"] = int(limit)
        check_one_batch(limit)
        if config["barebones"]:
            raise ConfigError(
                "trainer.barebones: is not supported (no output); use trainer.fast_dev_run for a quick check"
            )
        on_each = getattr(config["strategy"], "ranks_per_device", 1)  # another strategy is refused below
        kwargs["devices"], kwargs["num_nodes"] = devices_of_run(
            config["devices"], config["num_nodes"], on_each, elsewhere=self.subcommand == "describe"
        )
        kwargs["default_root_dir"] = str(self.run_dir)
        kwargs["callbacks"] = self._callbacks(config)
        kwargs["logger"] = self._loggers(config["logger"])
        # without Lightning's bar, and without its error about fedsim's bar
        kwargs["enable_progress_bar"] = any(isinstance(c, ProgressBar) for c in kwargs["callbacks"])
        check_accelerator(config["accelerator"], warns=self.subcommand != "describe")
        with naming_the_field(vars(config)):
            trainer = super().instantiate_trainer(**kwargs)
        # the command and Preemption listen; Lightning's handlers would only set a flag, or wait for the other ranks
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign] # no other way
        return trainer

    def _callbacks(self, config: Namespace) -> list[Callback]:
        callbacks: list[Callback] = as_list(config["callbacks"])
        check_callbacks(callbacks)
        if self.subcommand != "fit":
            return callbacks
        if config["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RoundProgress())
        if not config["fast_dev_run"]:
            # first: before the callbacks that save its state
            resolved = self._resolved()
            identity = identity_of(resolved)
            summary = RunSummary(str(self.run_dir), fingerprint_of(resolved), self._changes(), identity=identity)
            of_run = self.config[self.subcommand].clone()
            of_run["ckpt_path"], of_run["overwrite"] = None, False  # settings of this start, not of the run
            callbacks[:0] = [summary, KeepConfig(self._text_of(of_run))]
        if any(isinstance(logger, WandbLogger) for logger in as_list(config["logger"])):
            callbacks.append(Tracking(self._resolved()))
        if any(isinstance(logger, TensorBoardLogger) for logger in as_list(config["logger"])):
            callbacks.append(TensorBoardPages(self._resolved()))
        callbacks.append(ScoreLastRound())
        if not any(isinstance(c, Preemption) for c in callbacks):
            callbacks.append(Preemption())
        if config["enable_checkpointing"] is not False and not any(isinstance(c, ModelCheckpoint) for c in callbacks):
            callbacks += self._checkpoints()
        return callbacks

    def _checkpoints(self) -> list[Callback]:
        """``last.ckpt`` after every round, and ``best.ckpt`` by validation score where there is one."""
        checkpoint = partial(ModelCheckpoint, dirpath=self.run_dir / "checkpoints", enable_version_counter=False)
        last = checkpoint(filename="last", save_on_train_epoch_end=True)
        if self.config[self.subcommand]["data"]["val"] == "none":
            return [last]
        # Lightning's save_last would write only together with the best one
        best = checkpoint(filename="best", monitor=self.model.settings.evaluation.monitor, mode="max")
        return [best, last]  # in this order, so that last.ckpt contains the best score

    def _loggers(self, configured: Any) -> list[Logger] | bool:
        """Return the logger of metrics.csv and the configured ones; False turns all off."""
        if configured is False:
            return False
        for logger in as_list(configured):
            if isinstance(logger, TensorBoardLogger):
                write_into(logger, self.run_dir)
        return [MetricsFile(self.run_dir), *as_list(configured)]

    def _resolved(self) -> dict[str, Any]:
        return dict(yaml.load(self._text_of(self.config[self.subcommand]), SafeLoader))

    def _text_of(self, config: Namespace) -> str:
        yaml_text: str = self._parser(self.subcommand).dump(
            config, skip_none=False, skip_validation=True
        )  # it is parsed
        return yaml_text

    # -- output after a command ----------------------------------------------------------------------------------------

    def after_fit(self) -> None:
        """Print the run's table; raise RunStoppedError if a signal ended the run."""
        resumed = self.scored.resumed
        begun = resumed.rounds if resumed else -1 if self.scored.path else 0
        for logger in self.trainer.loggers:
            if isinstance(logger, MLFlowLogger) and self.trainer.is_global_zero:
                keep_artifacts(logger, self.run_dir)
        end_fit(self.trainer, self.run_dir, begun, self.model.has_trained, self.model.settings.availability.drop)

    def after_describe(self) -> None:
        """Print the identity of the settings."""
        print_text(f"\n{line_of_identity(self._resolved())}")

    def after_test(self) -> None:
        """Print the scores, and keep those of test sets."""
        if not self.trainer.is_global_zero:
            return
        check_scores(self.trainer.callback_metrics, self.command)
        log.info(self.scored.line)
        say_scores(self.trainer.callback_metrics, self.model.settings.evaluation.task)
        if self.model.rankings is not None:
            write_round(self.model.rankings, self.scored.round_)
            print_text(f"wrote {self.model.rankings}")
        if self.subcommand == "test":
            conditions = {"settings": self._resolved(), "data": self.datamodule.identity(MAX_LISTED)}
            log.info(keep_scores(self.given_dir, self.scored, self.model, conditions))

    after_validate = after_test

    def after_predict(self) -> None:
        """Print the folder of the features."""
        if self.trainer.is_global_zero:
            log.info(self.scored.line)
            for folder in filter(None, (self.run_dir / FEATURES, self.model.maps)):
                write_round(folder, self.scored.round_)
            print_text(f"wrote {self.run_dir / FEATURES}" + (f" and {self.model.maps}" if self.model.maps else ""))


def _expand_paths(config: Namespace) -> None:
    """Give all writers of a run the same path: libraries replace only some of ``~`` and variables."""
    for name in ("run_dir", "ckpt_path"):
        if config.get(name) is not None:
            config[name] = expanded(str(config[name]), name)


def _seed(seed: bool | int | None) -> int:
    if seed is None or isinstance(seed, bool):
        raise ConfigError("seed_everything: give a number; a run without a known seed cannot be repeated")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed_everything: {seed} is not a number from 0 to {2**32 - 1}")
    return seed
