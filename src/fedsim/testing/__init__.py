"""Checks for authors of methods, backbones, data sources and losses: call them in your own tests.

Each raises an AssertionError with a sentence for each finding, and returns None for a part that can be used.
"""

from fedsim.testing.findings import PartRefusedError
from fedsim.testing.method import check_method

__all__ = ["PartRefusedError", "check_method"]
