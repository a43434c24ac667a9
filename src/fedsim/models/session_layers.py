"""Layers that keep something for one session of a client."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class SessionLayer(Protocol):
    """A layer of a backbone, also of a user's, that keeps something of a session: its model calls both methods."""

    def begin_session(self) -> None:
        """Keep what holds at the start: the model has its download, and no batch yet."""

    def end_session(self) -> None:
        """Forget it: nothing depends on earlier sessions."""
