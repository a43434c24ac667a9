"""Checks for authors of methods, modules, backbones, data sources and losses: call them in your own tests.

Each raises an AssertionError with a sentence for each finding, and returns None for a part that can be used.
"""

from fedsim.testing.backbone import check_backbone
from fedsim.testing.findings import PartRefusedError
from fedsim.testing.loss import check_loss
from fedsim.testing.method import check_method
from fedsim.testing.module import check_module
from fedsim.testing.source import check_source

__all__ = ["PartRefusedError", "check_backbone", "check_loss", "check_method", "check_module", "check_source"]
