"""Events inside a round, beside Lightning's own callback hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning import Callback

if TYPE_CHECKING:
    from fedsim.core.placement import Placement
    from fedsim.training.client import BatchReport

__all__ = ["RoundCallback"]


class RoundCallback(Callback):
    """A Lightning callback that also hears what happens within a round, on the rank where it happens."""

    def on_placed(self, placement: Placement) -> None:
        """Clients have been assigned to ranks."""

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Round ``round_`` (from 0) starts; ``clients`` are those that train on this rank."""

    def on_client_batch(self, report: BatchReport) -> None:
        """A client has done one batch."""

    def on_scoring(self, what: str) -> None:
        """A model is about to be scored on a data set."""
