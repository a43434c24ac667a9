"""The MLflow run of a run directory: begun once, and continued by every later start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from fedsim.core.files import replacing
from fedsim.federation.callbacks.tracking import public_config

MLFLOW_ID_FILE = "mlflow_id"
"""In the run directory: the id of the MLflow run that a continued job continues."""


def reach_mlflow(logger: MLFlowLogger) -> None:
    """Ask a logger's server something, before the run directory is touched; MLflow raises if it does not answer."""
    logger._mlflow_client.get_experiment_by_name(logger._experiment_name)


def join_mlflow_run(logger: MLFlowLogger, folder: Path, config: Mapping[str, Any]) -> None:
    """Let a logger, before its first use, continue the MLflow run whose id is in the run directory, or begin one.

    A run that begins gets the name of ``folder``, unless the logger has one, and ``config`` as its parameters. A logger
    with a ``run_id`` of its own keeps it. Call it on rank 0 only.
    """
    path = folder / MLFLOW_ID_FILE
    if logger._run_id is not None:  # there is no public way to ask for it, or to set it later
        return
    if path.is_file():
        logger._run_id = path.read_text().strip()
        return
    if logger._run_name is None:
        logger._run_name = folder.name
    logger.log_hyperparams(public_config(config))
    with replacing(path) as partial:
        partial.write_text(str(logger.run_id))
