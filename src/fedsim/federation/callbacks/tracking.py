"""Additions for W&B to the numbers of every logger: the run's identity, tables, curves, pictures.

For all names and their meaning, see docs/tracking.md.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from typing import Any, get_args
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image

import fedsim
from fedsim._version import __version__
from fedsim.core.errors import ConfigError, RunStoppedError
from fedsim.core.files import replacing
from fedsim.core.metrics import ACCURACIES, METRICS
from fedsim.core.names import metric_name, metric_parts, one_line
from fedsim.core.replaced_run import MLFLOW_ID_FILE, RUN_ID_FILE
from fedsim.data.preview import contact_sheet
from fedsim.evaluation.summary import MAX_NAMES, Curve, Kind, few_names
from fedsim.federation.callbacks.summary import federation_of
from fedsim.federation.checks.compatibility import data_of
from fedsim.federation.events import RoundCallback, strategy_of, was_stopped
from fedsim.federation.federation import Federation
from fedsim.settings.configuration import without_folders
from fedsim.settings.table import setting_at

log = logging.getLogger(__name__)


_CHARTED = ("mAP", "rank1")
"""metrics with a chart for each data set"""
_OWN_DATA: list[str] = []
"""WANDB_DATA_DIR as :func:`join_run` has set it, for an earlier run of this process"""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""of a request to a server of MLflow, which would try for minutes"""
_ANSWER_SECONDS = 5
_SHEET_DOMAINS = 8
_SHEET_SIZE = (128, 64)


class Describes(RoundCallback, ABC):
    """Describes the run before its first numbers are logged, and shows the data of a new run.

    Args:
        config: the resolved configuration.
    """

    logger_class: type[WandbLogger | TensorBoardLogger]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self._has_begun = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew: a trainer can fit twice."""
        self._has_begun = False

    def on_round_trained(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Describe the run, and draw a contact sheet of the data, where a logger of the job takes them."""
        if self._has_begun or not self._experiments(trainer):
            return
        self._has_begun = True
        self._describe(trainer, pl_module)
        if trainer.current_epoch == 0:
            try:
                sheet = contact_sheet(data_of(trainer).list_domains()[:_SHEET_DOMAINS], _SHEET_SIZE)
            except Exception as error:  # a missing picture must not end the run
                log.warning("no contact sheet of the data: %s", error)
                return
            self._show(trainer, sheet)

    def _experiments(self, trainer: Trainer) -> list[Any]:
        """Return the runs, or writers, of the loggers of this kind; only the first rank has any."""
        if not trainer.is_global_zero:
            return []
        return [logger.experiment for logger in trainer.loggers if isinstance(logger, self.logger_class)]

    @abstractmethod
    def _describe(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Describe the run."""

    @abstractmethod
    def _show(self, trainer: Trainer, sheet: Image.Image) -> None:
        """Log the contact sheet."""


class Tracking(Describes):
    """Fills the run of every WandbLogger, on the first rank.

    Args:
        config: the resolved configuration.
    """

    logger_class = WandbLogger

    def _describe(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the round the x-axis of all charts, and log configuration and versions."""
        for run in self._experiments(trainer):
            for name in ("epoch", "trainer/global_step"):  # Lightning's: the round, minus one
                run.define_metric(name, hidden=True)
            run.define_metric("round")
            run.define_metric("*", step_metric="round", step_sync=True)
            for name in uncharted(federation_of(pl_module)):
                if "*" not in name:  # W&B takes it for a pattern; such a number has a chart
                    run.define_metric(name, step_metric="round", step_sync=True, hidden=True)
            about = {**code_version(), "ranks": trainer.world_size}
            run.config.update({**public_config(self.config), "fedsim": about}, allow_val_change=True)

    def _show(self, trainer: Trainer, sheet: Image.Image) -> None:
        import wandb

        for run in self._experiments(trainer):
            run.log({"data": wandb.Image(sheet), "round": 0})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the clients' numbers of the round: by name if they are few, as distributions if they are many."""
        if not (runs := self._experiments(trainer)):
            return
        federation, values = federation_of(pl_module), dict[str, dict[str, float]]()
        for name, report in federation.reports.items():
            for metric, value in report.numbers.items():
                values.setdefault(metric, {})[name] = value
        for run in runs:
            row: dict[str, Any] = {"round": trainer.current_epoch + 1}
            for metric, client_values in values.items():
                if len(federation.parts.names) <= MAX_NAMES:
                    row |= {metric_name("train", name, metric): value for name, value in client_values.items()}
                else:
                    row |= _spread(f"train/{metric}", client_values.values())
            run.log(row)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the evaluation's table and CMC curves."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        federation, round_ = federation_of(pl_module), trainer.current_epoch + 1
        for run in self._experiments(trainer):
            row = {**_table(federation.scores, round_), **_score_spreads(federation.scores)}
            run.log({**row, **_cmc(federation.evaluator.curves, round_), "round": round_})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark a preempted run in W&B: the server of a sweep gives it to the next agent, which continues it."""
        stop_signal = strategy_of(trainer).stop_signal
        if was_stopped(trainer) and stop_signal in (signal.SIGTERM, signal.SIGUSR1):
            for run in self._experiments(trainer):
                run.mark_preempting()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Mark a run in W&B that was preempted within a round."""
        if isinstance(exception, RunStoppedError):
            self.on_train_end(trainer, pl_module)


def reach_wandb(logger: WandbLogger) -> None:
    """Log in before the first round, if the logger's run will need that; W&B raises without a key.

    Raises:
        ConfigError: if W&B's server does not answer; W&B itself would try for up to a minute, and blame the key.
    """
    import wandb

    mode = logger._wandb_init.get("mode") or os.environ.get("WANDB_MODE") or "online"
    if mode == "online" and not logger._offline:
        address = str(wandb.setup().settings.base_url)
        if (reason := _unreachable(address)) is not None:
            raise ConfigError(
                f"trainer.logger: W&B's server {address} does not answer ({reason}); "
                "set WANDB_BASE_URL to yours, or WANDB_MODE=offline"
            )
        wandb.login()


def _unreachable(address: str) -> str | None:
    """Reason why a web address gives no answer in seconds, through a proxy if one is set; None if it gives any."""
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_ANSWER_SECONDS):
            return None
    except HTTPError:  # an answer, too
        return None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, SSLError) else one_line(str(reason), 80)  # W&B may know the certificate


def join_run(logger: WandbLogger, folder: Path) -> None:
    """Let a logger, before its first use, continue the W&B run whose id is in the run directory, or begin one.

    Call it on rank 0 only. The run's files go below ``folder``, too, unless the logger has another ``save_dir``.
    """
    path, options = folder / RUN_ID_FILE, logger._wandb_init  # there is no public way to set an id later
    if options.get("id") is None:
        if not path.is_file():
            with replacing(path) as partial:  # an agent of W&B sets the id that it expects
                partial.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
        options["id"] = path.read_text().strip()
    if options.get("anonymous") is None:
        options.pop("anonymous", None)  # W&B warns even if it is None
    if options.get("dir") in (None, "."):
        options["dir"] = str(folder)
    # W&B collects tables and pictures in the home directory, which may be read-only, or not exist (in containers)
    if os.environ.get("WANDB_DATA_DIR") in (None, *_OWN_DATA):
        os.environ["WANDB_DATA_DIR"] = str(folder.absolute() / "wandb")
        _OWN_DATA[:] = [os.environ["WANDB_DATA_DIR"]]
    if options.get("name") is None and "WANDB_SWEEP_ID" not in os.environ:
        options["name"] = os.environ.get("WANDB_NAME") or folder.name


def end_run(code: int) -> None:
    """Close this process's W&B run, if there is one.

    Otherwise W&B would treat every end of the process without a traceback as a success. ``code`` is the exit code.
    """
    wandb = sys.modules.get("wandb")  # a process with a run has imported it
    if wandb is not None and wandb.run is not None:
        wandb.run.finish(exit_code=code)


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it may leave the machine: absolute paths are shortened to their last part.

    >>> public_config({"run_dir": "/home/a/runs/b", "data": {"root": "/home/a/reid", "size": [64, 32]}})
    {'data': {'root': 'reid', 'size': [64, 32]}}
    """
    kept = {
        name: without_folders(value) for name, value in config.items() if setting_at(name).facts.effect != "nothing"
    }
    if isinstance(trainer := kept.get("trainer"), dict):
        kept["trainer"] = {k: v for k, v in trainer.items() if k not in ("logger", "default_root_dir")}
    return kept


def uncharted(federation: Federation) -> Iterator[str]:
    """Yield the names of numbers of single clients and data sets without charts.

    Four clients have 275 numbers. The table and the CMC plots contain those without charts.
    """
    clients = federation.parts.names
    domains = [*clients, *sorted(federation.parts.federated.unseen)]
    if len(domains) > MAX_NAMES:  # then they are not logged by name
        return
    metrics = [name for name in METRICS if name not in _CHARTED]
    for parts in itertools.product(("val", "test"), get_args(Kind), domains, metrics):
        yield metric_name(*parts)
    for client in clients:
        yield from (metric_name("train", client, number) for number in ("images", "seconds", "weight"))
        yield from (metric_name("comm", client, number) for number in ("down_bytes", "up_bytes"))


def code_version() -> dict[str, Any]:
    """Return fedsim's version and, if its source is in a repository, the commit and whether files differ from it."""
    # an installed copy may be in a virtual environment within another repository, unknown to git
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"version": __version__}
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return {"version": __version__, "commit": commit, "changed": bool(changes)}


def _git(*args: str) -> str | None:
    command = ["git", "-C", str(Path(fedsim.__file__).parent), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _spread(name: str, values: Iterable[float]) -> dict[str, Any]:
    """Return quantiles and a histogram, instead of many curves."""
    import wandb

    numbers = np.array([value for value in values if np.isfinite(value)])
    if not len(numbers):
        return {}
    row = {f"spread/{name}/p{q}": float(np.percentile(numbers, q)) for q in (0, 25, 50, 75, 100)}
    return {**row, f"spread/{name}/histogram": wandb.Histogram(numbers.tolist())}


def _score_spreads(scores: Mapping[str, float]) -> dict[str, Any]:
    """Return the distributions of the scores of data sets that are too many to be logged by name."""
    named, groups = few_names(scores), dict[str, list[float]]()
    for key, value in scores.items():
        if key not in named:
            split, model_kind, _, metric = key.split("/")
            groups.setdefault(f"{split}/{model_kind}/{metric}", []).append(value)
    return {k: v for name, values in groups.items() for k, v in _spread(name, values).items()}


def _table(scores: Mapping[str, float], round_: int) -> dict[str, Any]:
    """Return a table of data set x model x metric, as fractions of 1; of many data sets, the means."""
    import wandb

    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    for key, value in few_names(scores).items():
        if key.count("/") == 3:
            split, model_kind, domain, metric = metric_parts(key)
            rows.setdefault((split, domain, model_kind), {})[metric] = value
    if not rows:
        return {}
    metrics = [metric for metric in (*METRICS, *ACCURACIES) if any(metric in values for values in rows.values())]
    columns: list[str | int] = ["round", "split", "data set", "model", *metrics]
    data = [[round_, *row, *(values.get(metric) for metric in metrics)] for row, values in rows.items()]
    return {"scores": wandb.Table(columns=columns, data=data)}


def _cmc(curves: Mapping[Curve, list[float]], round_: int) -> dict[str, Any]:
    """Return a plot per split and kind of model, with a line per data set, unless these are too many."""
    import wandb

    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (split, model_kind, domain), curve in curves.items():
        groups.setdefault((split, model_kind), {})[domain] = curve
    return {
        f"cmc/{split}/{model_kind}": wandb.plot.line_series(
            xs=list(range(1, 1 + len(next(iter(lines.values()))))),
            ys=list(lines.values()),
            keys=list(lines),
            title=f"CMC, {split}, {model_kind} model, round {round_}",
            xname="rank",
        )
        for (split, model_kind), lines in groups.items()
        if len(lines) <= MAX_NAMES
    }


def reach_mlflow(logger: MLFlowLogger) -> None:
    """Send a request to a logger's server before the first round; MLflow raises if there is no answer in seconds."""
    with short_patience():
        logger._mlflow_client.get_experiment_by_name(logger._experiment_name)


def keep_artifacts(logger: MLFlowLogger, folder: Path) -> None:
    """Add configuration and summary to a logger's run; a server that is gone costs no result, and one line."""
    from mlflow.exceptions import MlflowException

    with short_patience():
        for name in ("config.yaml", "summary.json"):
            try:
                logger.experiment.log_artifact(logger.run_id, str(folder / name))
            except (MlflowException, OSError) as error:
                log.warning("MLflow: %s is not among the artifacts: %s", name, one_line(str(error), 200))


@contextmanager
def short_patience() -> Iterator[None]:
    """Let MLflow, which reads these variables with each request, give up in seconds."""
    added = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def join_mlflow_run(logger: MLFlowLogger, folder: Path, config: Mapping[str, Any]) -> None:
    """Let a logger, before its first use, continue the MLflow run whose id is in the run directory, or begin one.

    A new run gets the name of ``folder``, unless the logger has a name, and ``config`` as its parameters. A logger with
    a ``run_id`` keeps it. Call it on rank 0 only.
    """
    path = folder / MLFLOW_ID_FILE
    if logger._run_id is not None:  # there is no public way to read it, or to set it later
        return
    if path.is_file():
        logger._run_id = path.read_text().strip()
        return
    if logger._run_name is None:
        logger._run_name = folder.name
    logger.log_hyperparams(public_config(config))
    with replacing(path) as partial:
        partial.write_text(str(logger.run_id))
