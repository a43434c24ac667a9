"""Finished runs from Python: their models and rankings."""

from fedsim.inference.model import SavedModel, load_model
from fedsim.inference.ranking import Ranked, rank

__all__ = ["Ranked", "SavedModel", "load_model", "rank"]
