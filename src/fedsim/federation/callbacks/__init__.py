"""Callbacks that watch a run: progress, signals, the run's summary, W&B."""

from fedsim.federation.callbacks.config import KeepConfig
from fedsim.federation.callbacks.last_round import ScoreLastRound
from fedsim.federation.callbacks.mlflow_run import join_mlflow_run, reach_mlflow
from fedsim.federation.callbacks.preemption import Preemption
from fedsim.federation.callbacks.progress import RoundProgress
from fedsim.federation.callbacks.summary import RunSummary
from fedsim.federation.callbacks.tracking import Tracking, join_run
from fedsim.federation.events import RoundCallback

__all__ = [
    "KeepConfig",
    "Preemption",
    "RoundCallback",
    "RoundProgress",
    "RunSummary",
    "ScoreLastRound",
    "Tracking",
    "join_mlflow_run",
    "join_run",
    "reach_mlflow",
]
