"""Callbacks that watch a run: progress, signals, the run's summary, W&B."""

from fedsim.federation.callbacks.beginning import HoldRunDirectory, RunBeginning
from fedsim.federation.callbacks.preemption import Preemption
from fedsim.federation.callbacks.progress import RoundProgress
from fedsim.federation.callbacks.summary import KeepConfig, MetricsFile, RunSummary, ScoreLastRound
from fedsim.federation.callbacks.tracking import Tracking, join_mlflow_run, join_run, reach_mlflow, reach_wandb
from fedsim.federation.events import RoundCallback

__all__ = [
    "HoldRunDirectory",
    "KeepConfig",
    "MetricsFile",
    "Preemption",
    "RoundCallback",
    "RoundProgress",
    "RunBeginning",
    "RunSummary",
    "ScoreLastRound",
    "Tracking",
    "join_mlflow_run",
    "join_run",
    "reach_mlflow",
    "reach_wandb",
]
