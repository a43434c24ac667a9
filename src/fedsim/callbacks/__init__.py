"""What watches a run: progress, the run's summary."""

from fedsim.callbacks.events import RoundCallback
from fedsim.callbacks.progress import RoundProgress
from fedsim.callbacks.summary import RunSummary

__all__ = ["RoundCallback", "RoundProgress", "RunSummary"]
