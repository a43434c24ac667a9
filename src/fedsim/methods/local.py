"""Local training: the lower bound that every paper of the field prints.

Each client trains alone on its own images, for the same number of rounds and epochs as in a federation; nothing is
shared. The published rows are single models, one per data set (for example paper 003, Table 2, "local training").

On unseen domains every client's model is scored and the scores are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.methods.base import Method
from fedsim.models.groups import Group


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Nothing is shared."""

    shared_groups = frozenset[Group]()
