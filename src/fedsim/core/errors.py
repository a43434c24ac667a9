"""Errors that people can act on. The command line prints them as one line and exits with code 2."""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "FedSimError", "PeerError", "TrainingError"]


class FedSimError(Exception):
    """Base of every error whose message names what is wrong and what to do about it."""


class ConfigError(FedSimError, ValueError):
    """A setting is wrong. The message starts with the setting's name as it is written in a config."""


class DataError(FedSimError, ValueError):
    """A folder, file, identity or client cannot be used. The message names it."""


class TrainingError(FedSimError, RuntimeError):
    """Training of one client failed (for example: its loss is not finite). The message names client and round."""


class PeerError(FedSimError, RuntimeError):
    """Another rank failed; the message names that rank and what it reported. The cause is in that rank's own error."""
