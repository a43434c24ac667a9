"""Finished runs from Python: their models, rankings and results."""

from fedsim.inference.model import SavedModel, load_model
from fedsim.inference.ranking import Ranked, rank
from fedsim.inference.results import RunResults, load_run

__all__ = ["Ranked", "RunResults", "SavedModel", "load_model", "load_run", "rank"]
