"""What watches a run: progress, signals, the run's summary, W&B."""

from fedsim.callbacks.config import KeepConfig
from fedsim.callbacks.events import RoundCallback
from fedsim.callbacks.preemption import Preemption
from fedsim.callbacks.progress import RoundProgress
from fedsim.callbacks.summary import RunSummary
from fedsim.callbacks.tracking import Tracking

__all__ = ["KeepConfig", "Preemption", "RoundCallback", "RoundProgress", "RunSummary", "Tracking"]
