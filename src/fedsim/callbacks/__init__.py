"""What watches a run: progress, signals, the run's summary."""

from fedsim.callbacks.config import KeepConfig
from fedsim.callbacks.events import RoundCallback
from fedsim.callbacks.preemption import Preemption
from fedsim.callbacks.progress import RoundProgress
from fedsim.callbacks.summary import RunSummary

__all__ = ["KeepConfig", "Preemption", "RoundCallback", "RoundProgress", "RunSummary"]
