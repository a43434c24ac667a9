"""Selection of the clients of a round, and their availability: components, usable with every method."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedsim.core.arguments import KeepsArguments, Section
from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.core.seeding import numpy_generator
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.settings.facts import Facts

log = logging.getLogger(__name__)

_MANY = 10_000
"""clients from which on sampling must not touch each of them"""


class Selection(KeepsArguments, RoundListener, ABC, option="model.selection"):
    """The server's choice of clients. Every rank computes it, with the same result."""

    key = "selection"

    learns: ClassVar[bool] = False
    """whether the choice depends on earlier rounds"""
    has_rewards: ClassVar[bool] = False
    """whether :meth:`mean_rewards` returns rewards"""

    @abstractmethod
    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the members of ``clients``, in their order, that take part in round ``round_``, from 0.

        ``seed`` is that of the run; together with the round, it is the only source of randomness.
        """

    def prepare(self, num_images: Mapping[str, int]) -> None:
        """Receive client -> number of its training images, before the first round."""

    def expected_share(self, num_clients: int) -> float | None:  # noqa: ARG002 - for subclasses
        """Return the share of ``num_clients`` clients that a round selects in expectation, whatever their data.

        None: it may depend on them. Differential privacy needs this number.
        """
        return None

    def places(self, num_clients: int) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the number of ``num_clients`` clients that every round selects, if each set of so many is as likely.

        None: it varies, or some sets are preferred. Clients can then not be called one by one (``model.timing``).
        """
        return None

    @property
    def probability(self) -> float | None:
        """The probability of each client to be selected, if independent of other clients and rounds; else None."""
        return None

    def mean_rewards(self) -> dict[str, float]:
        """Return client -> mean reward, for clients that have been selected."""
        return {}


class AllClients(Selection):
    """Every client, every round."""

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:  # noqa: ARG002 - needs neither
        """Return all clients."""
        return list(clients)

    def expected_share(self, num_clients: int) -> float:  # noqa: ARG002 - needs it not
        """Return 1."""
        return 1.0

    def places(self, num_clients: int) -> int:
        """Return the number of clients."""
        return num_clients


class RandomFraction(Selection):
    """A random ceil(S * N) of the N clients, without replacement (McMahan et al., AISTATS 2017, Algorithm 1).

    Args:
        fraction: S in (0, 1].
    """

    def __init__(self, fraction: float = 0.5) -> None:
        within("model.selection", "(0, 1]", fraction=fraction)
        self.fraction = fraction

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the round's sample."""
        generator, num_clients = numpy_generator(seed, round_, "selection"), len(clients)
        count = self._count(num_clients)
        if num_clients > _MANY:  # takes as long as the number of chosen ones, not of all; else other bits would change
            chosen = generator.choice(num_clients, count, replace=False, shuffle=False)
        else:
            chosen = generator.permutation(num_clients)[:count]
        return [clients[i] for i in sorted(chosen)]

    def expected_share(self, num_clients: int) -> float:
        """Return ceil(S * N) / N."""
        return self._count(num_clients) / num_clients

    def places(self, num_clients: int) -> int:
        """Return ceil(S * N)."""
        return self._count(num_clients)

    def _count(self, num_clients: int) -> int:
        # without the margin, 0.28 * 25 = 7.000000000000001 would select 8 of 25 clients
        return math.ceil(self.fraction * num_clients - 1e-9)


class PoissonSampling(Selection):
    """Each client with the same probability, independently; the number of selected clients varies, and may be 0.

    This sampling amplifies differential privacy.

    Args:
        rate: the probability, in (0, 1].
    """

    def __init__(self, rate: float = 0.5) -> None:
        within("model.selection", "(0, 1]", rate=rate)
        self.rate = rate

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the round's sample."""
        samples = numpy_generator(seed, round_, "Poisson selection").random(len(clients))
        return [clients[i] for i in np.flatnonzero(samples < self.rate).tolist()]

    def expected_share(self, num_clients: int) -> float:  # noqa: ARG002 - needs it not
        """Return the probability."""
        return self.rate

    @property
    def probability(self) -> float:
        """The rate."""
        return self.rate


class PowerOfChoice(Selection):
    """The clients with the largest losses among random candidates (Cho, Wang, Joshi, arXiv:2010.01243, rpow-d).

    In each round, d candidates are sampled without replacement, with probabilities in proportion to their numbers of
    images; the m of them with the largest losses take part. The loss is the mean training loss of the client's last
    session, infinite before the first; in the paper's pow-d, all candidates report their loss on the current model,
    which costs a download each. Among equal losses, the candidate that was sampled first is selected.

    Args:
        count: m, clients per round; all clients, if there are no more.
        candidates: d, at least m. With d = m the choice is random.
    """

    learns = True

    def __init__(self, count: int = 5, candidates: int = 10) -> None:
        at_least("model.selection", 1, count=count)
        at_least(
            "model.selection", count, hint=", the number of clients that are selected from them", candidates=candidates
        )
        self.count, self.candidates = count, candidates
        self.losses: dict[str, float] = {}
        """client -> mean training loss of its last session"""
        self._num_images: Mapping[str, int] = {}

    def prepare(self, num_images: Mapping[str, int]) -> None:
        """Store the numbers of images, which determine the probabilities of the candidates; forget another run."""
        self._num_images, self.losses = num_images, {}

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the candidates with the largest losses."""
        sizes = np.array([self._num_images.get(client, 1) for client in clients], dtype=np.float64)
        sampled = numpy_generator(seed, round_, "power of choice").choice(
            len(clients), min(self.candidates, len(clients)), replace=False, p=sizes / sizes.sum()
        )
        worst = sorted(sampled, key=lambda i: -self.losses.get(clients[i], math.inf))[: self.count]
        return [clients[i] for i in sorted(worst)]

    def observe(self, record: RoundRecord) -> None:
        """Store the losses; a client that did not answer keeps its last one."""
        self.losses |= {client: report.loss for client, report in record.reports.items()}

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the losses by which the next round selects, of ``clients`` that have taken part."""
        answered = [client for client in clients if client in self.losses]
        return {metric_name("selection", client, "loss"): self.losses[client] for client in answered}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses."""
        return {"loss": dict(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the losses; after a checkpoint of another selection, all clients count as new."""
        self.losses = dict(state.get("loss", {}))


class UCB(Selection):
    r"""The K clients with the largest upper confidence bounds (Waref et al. 2025, paper 002, Fig. 8 and Eq. (11)).

    $A_i = H_i / N_i + \rho \sqrt{\ln t / N_i}$, the form of UCB1 (Auer et al., Machine Learning 2002): client i has
    been selected N_i times, with a total reward of H_i, and t is the round, from 1. Clients that have not been selected
    yet come first, in random order, so that no client is selected twice before all were selected once. Ties are
    resolved by the seed.

    Deviations and gaps of the paper. The root is missing in the printed Fig. 8. The reward goes to the argmax of Eq.
    (10), normalised over all selected clients; here architectures are averaged separately, so rewards compare the
    method's weights as if all clients had one architecture. Distances of parameters depend more on the architecture
    than on the data: one architecture may win all rewards. ``among: architecture`` divides a weight by the mean of the
    selected clients of its architecture, so that the only client of an architecture has 1. With the paper's weights,
    the literal rule rewards the client that moves most, and soon includes it in every round; ``argmin`` follows the
    paper's text, which prefers clients close to the global model. A client that does not answer counts as selected,
    without a reward. The paper states neither K nor rho.

    Args:
        count: K; all clients, if there are no more.
        rho: weight of the exploration.
        reward: ``argmax``: 1 for the client with the largest aggregation weight, 0 for the others; ``argmin``: 1 for
            the client with the smallest; ``soft``: the weight itself.
        among: clients whose weights are compared: ``all``, or ``architecture``: those of the same architecture.
    """

    learns = has_rewards = True

    def __init__(
        self,
        count: int = 5,
        rho: float = 1.0,
        reward: Literal["argmax", "argmin", "soft"] = "argmax",
        among: Annotated[
            Literal["all", "architecture"],
            Facts(needs="reward == 'soft' or model.clients or model.adaptive_backbones"),
        ] = "all",
    ) -> None:
        at_least("model.selection", 1, count=count)
        if not 0 <= rho < math.inf:
            raise ConfigError(f"model.selection.rho: {rho} is not a finite number from 0")
        self.count, self.rho, self.reward, self.among = count, rho, reward, among
        self._has_warned = False
        self.rewards: dict[str, float] = {}
        """client -> H_i, for clients that have been selected"""
        self.num_selected: dict[str, int] = {}
        """client -> N_i, for the same clients"""

    def prepare(self, num_images: Mapping[str, int]) -> None:
        """Forget another run; warn if each round selects one client of several, whose weight and reward are always 1.

        Log that ``rho`` has no effect if each round selects all.
        """
        self.rewards, self.num_selected = {}, {}
        if self.count >= len(num_images):
            log.info("without effect: model.selection.rho, as each round selects all clients")
        if self.count == 1 < len(num_images):
            log.warning(
                "model.selection.count: 1 client per round always has the weight 1 and the reward, so clients take "
                "turns, and nothing is averaged; set it to 2 or more"
            )

    def bound(self, client: str, round_: int) -> float:
        """Return A_i in round ``round_``, from 0; infinite for a client that has not been selected yet."""
        times = self.num_selected.get(client, 0)
        if times == 0:
            return math.inf
        return self.rewards[client] / times + self.rho * math.sqrt(math.log(round_ + 1) / times)  # Fig. 8

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the K clients with the largest bounds."""
        order = numpy_generator(seed, round_, "UCB selection").permutation(len(clients))
        best = sorted(range(len(clients)), key=lambda i: (-self.bound(clients[i], round_), order[i]))[: self.count]
        return [clients[i] for i in sorted(best)]

    def observe(self, record: RoundRecord) -> None:
        """Count the selected clients, and reward them by aggregation weights."""
        for client in record.selected:
            self.num_selected[client] = self.num_selected.get(client, 0) + 1
            self.rewards.setdefault(client, 0.0)
        for client, reward in self._rewards(record.round_, self._compared(record), record.seed).items():
            self.rewards[client] += reward

    def _compared(self, record: RoundRecord) -> Mapping[str, float]:
        """Return the weights that compete for the reward."""
        groups: dict[str, list[float]] = {}
        for client, weight in record.weights.items():
            groups.setdefault(record.archs.get(client, ""), []).append(weight)
        if self.among == "all":
            if len(groups) > 1 and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "rewards compare clients of several architectures, whose distances differ in scale; "
                    "set model.selection.among: architecture to compare each with its own"
                )
            return record.weights
        means = {arch: sum(weights) / len(weights) or 1.0 for arch, weights in groups.items()}  # 1.0 if all are 0
        return {client: weight / means[record.archs.get(client, "")] for client, weight in record.weights.items()}

    def _rewards(self, round_: int, weights: Mapping[str, float], seed: int) -> dict[str, float]:
        if self.reward == "soft" or not weights:
            return dict(weights)
        best = (max if self.reward == "argmax" else min)(weights.values())
        winners = [client for client, weight in weights.items() if weight == best]
        return {winners[numpy_generator(seed, round_, "UCB reward").integers(len(winners))]: 1.0}  # Eq. (11)

    def mean_rewards(self) -> dict[str, float]:
        """Return H_i / N_i."""
        return {client: self.rewards[client] / times for client, times in self.num_selected.items()}

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:
        """Return H, N, and the A with which the next round selects, of ``clients`` that have been selected."""
        metrics: dict[str, float] = {}
        for client in (client for client in clients if client in self.num_selected):
            numbers = {"H": self.rewards[client], "N": self.num_selected[client], "A": self.bound(client, round_ + 1)}
            metrics |= {metric_name("selection", client, name): float(value) for name, value in numbers.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return H and N."""
        return {"H": dict(self.rewards), "N": dict(self.num_selected)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore H and N; after a checkpoint without them, all clients count as new."""
        if not state:
            log.warning("the checkpoint is of another selection: every client counts as never selected")
        self.rewards, self.num_selected = dict(state.get("H", {})), dict(state.get("N", {}))


@dataclass(frozen=True, kw_only=True)
class Availability(Section, option="model.availability"):
    """Clients that fail or are slow, sampled for each client and round."""

    drop: float = 0.0
    """probability that a selected client does not answer: it neither trains nor counts"""
    straggle: float = 0.0
    """probability that a client is slow and sends an incomplete update"""
    straggler_work: Annotated[float, Facts(needs="straggle")] = 0.5
    """share of its batches that a slow client completes (at least one batch)"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        field, straggler_work = "model.availability", self.straggler_work
        within(field, "[0, 1]", drop=self.drop, straggle=self.straggle, straggler_work=straggler_work)
        if self.straggler_work == 0:
            raise ConfigError("model.availability.straggler_work: 0 would be a drop-out; set drop instead")

    def of(self, clients: Sequence[str], round_: int, seed: int) -> dict[str, float]:
        """Return client -> the share of its local work that it completes: 0 (dropped), ``straggler_work`` or 1."""
        work = dict.fromkeys(clients, 1.0)
        for client in clients if self.drop or self.straggle else ():
            dropped, slow = numpy_generator(seed, round_, client, "availability").random(2)
            if dropped < self.drop:
                work[client] = 0.0
            elif slow < self.straggle:
                work[client] = self.straggler_work
        return work
