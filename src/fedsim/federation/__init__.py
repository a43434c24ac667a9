"""The federation: the round, what makes it, and what watches it."""

from fedsim.federation.federation import Federation

__all__ = ["Federation"]
