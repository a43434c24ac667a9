"""Ranks: the Lightning strategy with all collectives, launchers, the control channel, checkpoint files."""

from fedsim.strategy.strategy import FederatedStrategy

__all__ = ["FederatedStrategy"]
