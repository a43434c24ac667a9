"""The simulated time of a server that steps when a few answers have come, and its mean of old and new answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from functools import lru_cache

from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.federation.components.clock import FIELD, NANO, Clock, ClockInputs
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.components.privacy import DifferentialPrivacy
from fedsim.federation.components.window import ClockState, Job, Outcome, Rules, next_window
from fedsim.functional.staleness import discounted, step_of
from fedsim.methods.base import Weights
from fedsim.training.statistics import BatchNormStatistics
from fedsim.training.timetable import Timetable

_HARDWARE = "model.hardware"
_WITHOUT_VALUE = (_HARDWARE, f"{FIELD}.discount")
"""settings whose numbers mean nothing to a user"""
_KNOWN = 100_000
"""sessions whose durations are not computed again"""
Stretch = tuple[slice, Mapping[str, float]]
"""a part of the shared vector, and the weight of each client in it"""


class BufferedClock(Clock):
    """Steps as soon as some clients have answered; see :class:`~fedsim.federation.components.timing.Buffered`.

    ``discount`` gives the factor of an answer by its staleness, ``discount_settings`` are its settings, by name.
    """

    def __init__(
        self,
        inputs: ClockInputs,
        *,
        places: int,
        goal: int,
        discount: Callable[[int], float],
        discount_settings: Mapping[str, float],
        mix: float | None,
        max_staleness: int | None,
    ) -> None:
        super().__init__(inputs)
        self._discount, self._discount_settings = discount, discount_settings
        self._mix, self._max_staleness = mix, max_staleness
        self._place_of = {name: position for position, name in enumerate(inputs.names)}
        self._nanoseconds = lru_cache(_KNOWN)(inputs.nanoseconds)
        self._staleness: list[int] = []
        self._rules = Rules(
            places=places, goal=goal, duration=self._duration, choose=self._choose, outcome=self._outcome
        )

    def timetable(self, round_: int, moment: ClockState) -> tuple[Timetable, ClockState]:
        """Return the clients that begin, and those that fill the buffer."""
        window = next_window(round_, moment, self._rules)
        answers = sorted(window.answers, key=lambda job: self._place_of[job.client])
        table = Timetable(
            [job.client for job in window.called],
            {job.client: self._work(job.client, job.version) for job in answers},
            {job.client: job.version for job in answers},
            [job.client for job in window.too_old],
            kept=self._needed(window.after, round_ + 1),
            seconds=(window.after.clock - moment.clock) / NANO,
        )
        return table, window.after

    def discounted_weights(self, weights: Mapping[str, Weights], table: Timetable) -> dict[str, Weights]:
        """Multiply the weights by the discounts of old answers, and normalise them again."""
        discounts = self._discounts(table)
        return {arch: self._aged(of_arch, discounts) for arch, of_arch in weights.items()}

    def _aged(self, weights: Weights, discounts: Mapping[str, float]) -> Weights:
        if all(discounts[name] == 1 for name in weights.clients):
            return weights
        parameters: Mapping[str, Sequence[float]] | None = None
        if weights.parameters is not None:
            names = list(weights.parameters)
            columns = [
                discounted(dict(zip(names, column, strict=True)), discounts)
                for column in zip(*weights.parameters.values(), strict=True)
            ]
            parameters = {name: [column[name] for column in columns] for name in names}
        return Weights(discounted(weights.clients, discounts), parameters, weights.step_size)

    def rebased_means(
        self, means: Mapping[str, Tensor], weights: Mapping[str, Weights], table: Timetable
    ) -> Mapping[str, Tensor]:
        """Add to each mean the server's changes since its answers began, and shorten the step by the discounts.

        With theta the current model, x_u that of round u, W_u the weights of the answers that began with it, and s the
        mean discount: theta + s * (mean + sum over u of W_u * (theta - x_u) - theta). This is FedBuff's sum of
        discounted changes, with an exact sum of models in place of a sum of rounded changes.
        """
        return {arch: self._forward(arch, mean, weights[arch], table) for arch, mean in means.items()}

    def _forward(self, arch: str, mean: Tensor, weights: Weights, table: Timetable) -> Tensor:
        rounds = {name: table.versions[name] for name in weights.clients}
        mix, discounts = self._mix, self._discounts(table)
        old = sorted({round_ for round_ in rounds.values() if round_ != self.inputs.server.round})
        if not old and mix is None:
            return mean
        theta, result = self.inputs.server.vector(arch).double(), mean.double()
        statistics = self.inputs.statistics[arch]
        for round_ in old if mix is None else ():
            began = self.inputs.old_models.of(round_, arch).to(theta.device).double()
            for stretch, of_clients in _of_parameters(weights, statistics):
                share = math.fsum(weight for name, weight in of_clients.items() if rounds[name] == round_)
                result[stretch] += share * (theta[stretch] - began[stretch])
        # a mixture of variances cannot be negative; a variance plus a change can
        for stretch, of_clients in [*_of_parameters(weights, statistics), (statistics.span, weights.clients)]:
            step = step_of(of_clients, discounts) * (1.0 if mix is None else mix)
            result[stretch] = theta[stretch] + step * (result[stretch] - theta[stretch])
        return result.float()

    def observe(self, record: RoundRecord) -> None:
        """Go on to the end of the round, and forget models on which no client will train."""
        super().observe(record)
        self.inputs.old_models.keep_only(self._needed(self.moment, record.round_ + 1))
        self._staleness = [record.round_ - self.table.versions[name] for name in record.reports]

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the simulated time, the staleness of the answers that count, and the number of old models."""
        metrics = {
            "time/clock": self.moment.clock / NANO,
            "timing/old_models": float(len(self.inputs.old_models.rounds)),
            "timing/too_old": float(len(self.table.too_old)),
        }
        if self._staleness:
            metrics["timing/staleness"] = sum(self._staleness) / len(self._staleness)
        return metrics

    def old_rounds(self, round_: int) -> set[int]:
        """Return the earlier rounds on whose models clients will train from round ``round_`` on."""
        return self._needed(self.moment, round_)

    def _needed(self, moment: ClockState, round_: int) -> set[int]:
        return {job.version for job in moment.under_way if self._outcome(job, round_) == "answers"}

    @property
    def settings(self) -> Mapping[str, float]:
        """The settings that decide when clients under way answer, and what their answers count."""
        inputs = self.inputs
        assert inputs.hardware is not None
        settings: dict[str, float | None]
        settings = {f"{FIELD}.buffer": self._rules.goal, f"{FIELD}.mix": self._mix}
        settings |= {f"{FIELD}.{name}": value for name, value in self._discount_settings.items()}
        settings |= {f"{FIELD}.max_staleness": self._max_staleness, _HARDWARE: inputs.hardware.checksum()}
        settings |= {f"model.availability.{name}": value for name, value in asdict(inputs.availability).items()}
        settings["seed_everything"] = inputs.seed
        return {name: value for name, value in settings.items() if value is not None}

    def _check_jobs(self, jobs: Sequence[Job], settings: Mapping[str, float]) -> None:
        """Accept as many clients under way as there are places, that were called with the same settings."""
        begins = f"ckpt_path: {len(jobs)} clients are under way in the checkpoint, and "
        if settings and (difference := self._difference(settings)):  # an earlier version has saved none
            raise ConfigError(f"{begins}{difference}, or begin a new run")
        if len(jobs) > self._rules.places:
            raise ConfigError(
                f"{begins}model.selection has {self._rules.places} places here; use the selection of the run that "
                "wrote it"
            )

    def _difference(self, saved: Mapping[str, float]) -> str:
        """Return the first saved setting with another value, and the remedy; an empty string if there is none."""
        settings = self.settings
        for name in sorted(settings.keys() | saved.keys()):
            before, after = saved.get(name, "null"), settings.get(name, "null")
            if before != after and name in _WITHOUT_VALUE:
                return f"{name} was another when they were called; use that of the run that wrote it"
            if before != after:
                return f"{name} was {before} when they were called, it is {after} here; set it to {before}"
        return ""

    def _discounts(self, table: Timetable) -> dict[str, float]:
        """Return client -> the factor of its answer."""
        now = self.inputs.server.round
        return {name: self._discount(now - round_) for name, round_ in table.versions.items()}

    def _work(self, client: str, round_: int) -> float:
        """Return the share of its work that a client completes; 0: it does not answer."""
        return self.inputs.availability.of([client], round_, self.inputs.seed)[client]

    def _duration(self, client: str, round_: int) -> int:
        """Return the nanoseconds of a session; a client that drops out keeps its place as long as if it answered."""
        # first downloads may not count; all later rounds have the same bytes
        return self._nanoseconds(client, min(round_, 1), self._work(client, round_) or 1.0)

    def _outcome(self, job: Job, due: int) -> Outcome:
        limit = self._max_staleness
        if self._work(job.client, job.version) == 0:
            return "fails"
        return "too old" if limit is not None and due - job.version > limit else "answers"

    def _choose(self, busy: Set[str], number: int, round_: int, called: int) -> list[str]:
        """Return clients that are not busy: a random sample, in the order of all clients."""
        names = self.inputs.names
        if number >= len(names) - len(busy):
            return [name for name in names if name not in busy]
        generator, chosen = numpy_generator(self.inputs.seed, round_, "called", called), set[str]()
        while len(chosen) < number:  # takes as long as the number of chosen ones, not of all
            name = names[int(generator.integers(len(names)))]
            if name not in busy:
                chosen.add(name)
        return sorted(chosen, key=self._place_of.__getitem__)


def _of_parameters(weights: Weights, statistics: BatchNormStatistics) -> list[Stretch]:
    """Return the parts of the shared parameters whose clients have equal weights."""
    if weights.parameters is None:
        return [(slice(statistics.span.start), weights.clients)]
    columns = [
        dict(zip(weights.parameters, column, strict=True)) for column in zip(*weights.parameters.values(), strict=True)
    ]
    if len(columns) == 1:
        return [(slice(statistics.span.start), columns[0])]
    return [(entry.span, column) for entry, column in zip(statistics.parameters, columns, strict=True)]


def check_buffered(inputs: ClockInputs) -> None:
    """Raise ConfigError for settings under which old answers mean nothing, or something else."""
    method, name = inputs.method, f"model.method: {type(inputs.method).__name__}, as it is configured,"
    # of two rounds, as a method may begin to send with the second
    payloads = [method.payload(inputs.server, arch, round_) for arch in inputs.server.models for round_ in (0, 1)]
    sends = any(p.down or p.known or p.up or p.tables or p.mask for p in payloads)
    rounds = f"; Buffered of {FIELD} has answers from several rounds: "
    remedy = "choose another method, or Deadline"
    bn_stats = {statistics.policy for statistics in inputs.statistics.values()}
    refusals = {
        f"{name} has a step of the server that belongs to a round{rounds}{remedy}": method.server_every > 0,
        f"{name} uploads masks, so that the time of an upload is not known before{rounds}{remedy}": (
            "masks" in method.requires
        ),
        f"{name} combines the single uploads of a round{rounds}{remedy}": "uploads" in method.requires,
        f"{name} uses public images with the server of a round{rounds}{remedy}": "public_images" in method.requires,
        f"{name} sends tensors beside the model that belong to a round{rounds}{remedy}": sends,
        f"model.aggregation: compares the uploads of a round{rounds}set it to null": inputs.aggregation is not None,
        f"model.privacy: DifferentialPrivacy accounts for rounds{rounds}set it to null": (
            isinstance(inputs.privacy, DifferentialPrivacy)
        ),
        f"model.adaptive_backbones: ranks clients by rounds{rounds}set it to null": inputs.has_ladder,
        f"model.selection: {type(inputs.selection).__name__} learns from rounds{rounds}choose AllClients or "
        "RandomFraction": inputs.selection.learns,
    }
    for policy in sorted(bn_stats & {"first", "pooled"}):
        refusals[f"model.bn_stats: {policy} takes the statistics of a round{rounds}set it to mean or local"] = True
    for refusal, applies in refusals.items():
        if applies:
            raise ConfigError(refusal)
