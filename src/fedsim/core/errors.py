"""Errors that users can solve. The command line prints them as one line and exits with code 2."""

from __future__ import annotations

import signal
from typing import ClassVar


class FedSimError(Exception):
    """Base of every error whose message names the problem and the remedy."""


class ConfigError(FedSimError, ValueError):
    """A setting is wrong. The message starts with the setting's name as it is written in a config."""


class DataError(FedSimError, ValueError):
    """A folder, file, identity or client cannot be used. The message names it."""


class RunsFailedError(FedSimError, RuntimeError):
    """Some runs of a sweep, or of several seeds, failed; the others are complete."""


class NotReadyError(FedSimError, RuntimeError):
    """A fit cannot run on this machine as configured; the report with the reasons is already written."""


class NoResultError(FedSimError, RuntimeError):
    """A command came to its end without a result: no client ever trained, or there was nothing to score."""


class TrainingError(FedSimError, RuntimeError):
    """Training of one client failed. The message names client and round."""


class LeftOutError(TrainingError):
    """A client's update does not count: the round can go on without it."""

    why: ClassVar[str]
    """the reason, for a message about several clients"""


class BadUpdateError(LeftOutError):
    """A client's loss or weights are not finite, or too large to be summed, or a running variance is negative."""

    why = "not finite, too large, or with a negative variance"


class NoClustersError(LeftOutError):
    """A client found no clusters of its images in a whole round."""

    why = "no clusters of their images"


class PeerError(FedSimError, RuntimeError):
    """Another rank (``rank``, None: unknown) failed or gave no sign of life; the message repeats its report."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RunStoppedError(FedSimError, RuntimeError):
    """Signal ``signum`` asked the run to end before its last round."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignal(BaseException):
    """Signal ``signum``, raised where it arrived. It is no Exception, which the interrupted code might catch."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def first_line(error: BaseException) -> str:
    """Return the first line of a message, which may be a page."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0][:300]
