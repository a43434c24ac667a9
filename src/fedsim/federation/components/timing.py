"""The setting ``model.timing``: how long the server waits for its clients, in simulated time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fedsim.core.arguments import ChecksArguments
from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.federation.components.buffered_clock import BufferedClock, check_buffered
from fedsim.federation.components.clock import FIELD, NANO, Clock, ClockInputs, DeadlineClock, SynchronousClock
from fedsim.federation.components.privacy import DifferentialPrivacy
from fedsim.federation.components.selection import Selection
from fedsim.functional.staleness import hinge, polynomial
from fedsim.settings.facts import Facts

_HINGE = Facts(needs="discount == 'hinge'")


class Timing(ChecksArguments, ABC, option="model.timing"):
    """How long the server waits for its clients."""

    @abstractmethod
    def start(self, inputs: ClockInputs) -> Clock:
        """Return the clock of a run.

        Raises:
            ConfigError: if the federation's other settings contradict the timing.
        """

    def places(self, selection: Selection, num_clients: int) -> int:  # noqa: ARG002 - for subclasses
        """Return how many clients may be under way when a round ends."""
        return 0


class Synchronous(Timing):
    """A round ends when all of its clients have answered."""

    def start(self, inputs: ClockInputs) -> Clock:
        """Return a clock."""
        return SynchronousClock(inputs)


@dataclass(frozen=True, kw_only=True)
class Deadline(Timing):
    """A round ends at a time, or with its first answers.

    It does not wait for the others (Bonawitz et al., MLSys 2019). Clients that are late have downloaded the model for
    nothing: they neither train nor send. So it costs no computing time to call more clients than are needed. For a
    client that drops out, it waits until this should have answered.
    """

    seconds: float | None = None
    """simulated seconds after which a round ends; null: there is no such time"""
    first: int | None = None
    """number of answers with which a round ends; null: all that come in time"""
    late: Literal["drop", "partial"] = "drop"
    """clients that would need more than ``seconds``: they are dropped, or train as many of their batches as fit, at
    least one (in the manner of TimelyFL, Zhang et al. 2023)"""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.seconds is None and self.first is None:
            raise ConfigError(f"{FIELD}.seconds: Deadline has no end; set seconds or first")
        within(FIELD, "[1e-9, 1e12]", seconds=self.seconds)  # the clock counts nanoseconds
        at_least(FIELD, 1, first=self.first)
        if self.late == "partial" and self.seconds is None:
            raise ConfigError(f"{FIELD}.late: partial work needs a time at which it ends; set seconds")

    def start(self, inputs: ClockInputs) -> Clock:
        """Return a clock."""
        check_hardware(inputs, "Deadline")
        privacy = inputs.privacy
        if self.first is not None and isinstance(privacy, DifferentialPrivacy) and privacy.mode == "central":
            raise ConfigError(
                f"{FIELD}.first: without a client another one is among the first, so the sum differs by up to twice "
                "the clip, for which model.privacy does not account; give seconds in its place, or set mode: local"
            )
        places = inputs.selection.places(len(inputs.names))
        if self.first is not None and places is not None and self.first > places:
            raise ConfigError(
                f"{FIELD}.first: waits for {self.first} answers, but model.selection picks {places} clients in each "
                "round; lower it, or pick more"
            )
        self._check_fastest(inputs)
        end = None if self.seconds is None else round(self.seconds * NANO)
        return DeadlineClock(inputs, end, self.first, self.late == "partial")

    def _check_fastest(self, inputs: ClockInputs) -> None:
        """Raise ConfigError if no client can answer in time."""
        if self.seconds is None:
            return
        work, purpose = (0.0, "for its messages alone") if self.late == "partial" else (1.0, "for its session")
        # of round 1, counted from 0: in the first, downloads may take no time
        needs: dict[str, int] = {}
        for name in inputs.names:
            needs[name] = inputs.nanoseconds(name, 1, work)
            if needs[name] + (work == 0) <= self.seconds * NANO:
                return
        fastest = min(needs, key=needs.__getitem__)
        raise ConfigError(
            f"{FIELD}.seconds: a round of {self.seconds:g} s ends before the fastest client answers: {fastest} "
            f"needs {needs[fastest] / NANO:.4g} s {purpose}; raise it"
        )


@dataclass(frozen=True, kw_only=True)
class Buffered(Timing):
    """The server steps as soon as a few clients have answered: FedBuff and FedAsync.

    FedBuff is of Nguyen et al. (AISTATS 2022). As many clients as the selection picks for a round are always under way.
    When a client has answered, another one begins at once with the current model. So answers may be trained on an older
    model than the one that they change: an answer of staleness s, the number of steps in between, has a factor, which
    is (1 + s) ** -power by default. A client that has answered rests until the next step. With ``buffer: 1`` and
    ``mix`` this is FedAsync (Xie, Koyejo and Gupta 2019, arXiv:1903.03934); with a buffer of all clients it is
    synchronous training. The factors' defaults are those of FedAsync's experiments: ``power`` 0.5, or ``slope`` 10 and
    ``until`` 4, with a ``mix`` of 0.6.

    Running statistics are averaged over the answers and mixed into the server's with the same factors: as changes of
    changes, variances could become negative.
    """

    buffer: int
    """K, number of answers with which the server steps"""
    discount: Literal["polynomial", "hinge"] = "polynomial"
    """the factor of old answers: (1 + s) ** -power; or 1 up to s = until, and 1 / (slope (s - until) + 1) beyond"""
    power: Annotated[float, Facts(needs="discount == 'polynomial'")] = 0.5
    """a, exponent of the discount of old answers, from 0 to 10; 0: there is none"""
    slope: Annotated[float, _HINGE] = 10.0
    """a of the hinge, from 0 to 1e6; 0: there is no discount"""
    until: Annotated[int, _HINGE] = 4
    """b of the hinge, the largest staleness without a discount"""
    mix: float | None = None
    """alpha of FedAsync: the server goes this share of the way to the mean of the answered models. null: it adds the
    mean of their changes, as FedBuff does"""
    max_staleness: int | None = None
    """answers of a larger staleness are thrown away; null: none are"""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least(FIELD, 1, buffer=self.buffer)
        at_least(FIELD, 0, max_staleness=self.max_staleness)
        within(FIELD, "(0, 1]", mix=self.mix)
        within(FIELD, "[0, 10]", power=self.power)  # beyond, factors of old answers become 0, and so may their sum
        within(FIELD, "[0, 1e6]", slope=self.slope)
        at_least(FIELD, 0, until=self.until)

    def start(self, inputs: ClockInputs) -> Clock:
        """Return a clock."""
        check_hardware(inputs, "Buffered")
        check_buffered(inputs)
        places = inputs.selection.places(len(inputs.names))
        if places is None:
            raise ConfigError(
                f"model.selection: {type(inputs.selection).__name__} chooses for a round as a whole, but with "
                f"Buffered of {FIELD} clients begin one by one; choose AllClients or RandomFraction"
            )
        if self.buffer > places:
            raise ConfigError(
                f"{FIELD}.buffer: waits for {self.buffer} answers, but only {places} clients are under way at once "
                "(model.selection); lower it, or pick more"
            )
        discount: Callable[[int], float]
        settings: dict[str, float]
        if self.discount == "hinge":
            discount, settings = partial(hinge, a=self.slope, b=self.until), {"slope": self.slope, "until": self.until}
            settings["discount"] = 1.0  # that it is the hinge: earlier versions have none
        else:
            discount, settings = partial(polynomial, a=self.power), {"power": self.power}
        return BufferedClock(
            inputs, places=places, goal=self.buffer, discount=discount, discount_settings=settings, mix=self.mix,
            max_staleness=self.max_staleness,
        )  # fmt: skip

    def places(self, selection: Selection, num_clients: int) -> int:
        """Return how many clients may be under way when a round ends."""
        return selection.places(num_clients) or 0


def check_hardware(inputs: ClockInputs, name: str) -> None:
    """Raise ConfigError if clients have no speeds; ``name`` is that of the timing."""
    if inputs.hardware is None:
        raise ConfigError(f"model.hardware: {name} of {FIELD} needs the speeds of links and devices; set it")
