"""Callbacks that watch a run: progress, signals, the run's summary, W&B, TensorBoard."""

from fedsim.federation.callbacks.beginning import RunBeginning, in_run_folder
from fedsim.federation.callbacks.live_table import LiveTable
from fedsim.federation.callbacks.preemption import Preemption
from fedsim.federation.callbacks.progress import RoundProgress
from fedsim.federation.callbacks.run_folder import FolderStart
from fedsim.federation.callbacks.script_config import describe_script
from fedsim.federation.callbacks.summary import KeepConfig, MetricsFile, RunSummary, ScoreLastRound
from fedsim.federation.callbacks.tensorboard import TensorBoardPages
from fedsim.federation.callbacks.tracking import Tracking, join_mlflow_run, join_run
from fedsim.federation.events import RoundCallback

__all__ = [
    "FolderStart",
    "KeepConfig",
    "LiveTable",
    "MetricsFile",
    "Preemption",
    "RoundCallback",
    "RoundProgress",
    "RunBeginning",
    "RunSummary",
    "ScoreLastRound",
    "TensorBoardPages",
    "Tracking",
    "describe_script",
    "in_run_folder",
    "join_mlflow_run",
    "join_run",
]
