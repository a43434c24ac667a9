"""The federation: the round, its parts, and the callbacks that watch it."""

from fedsim.federation.federation import Federation

__all__ = ["Federation"]
