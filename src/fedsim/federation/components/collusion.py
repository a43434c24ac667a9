"""Attacks by which all attackers send one upload, which is made of other uploads of the round.

An attacker trains as an honest client. When all clients of the round have trained, the parameters of its upload are
replaced. Ranks exchange the uploads of which the malicious one is made in chunks, as for the rules of
``model.aggregation``: no rank has all of them at once, and the result has the same bits on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.data.federated import ClientData
from fedsim.federation.aggregation.gathered import squared_distances
from fedsim.federation.aggregation.masked import clients_prune
from fedsim.federation.components.attacks import UploadAttack
from fedsim.federation.components.privacy import DifferentialPrivacy, Privacy
from fedsim.federation.components.timing import Buffered, Timing
from fedsim.functional.collusion import alie_deviations, min_max_factor, min_sum_factor
from fedsim.methods.base import Method
from fedsim.training.server import Server
from fedsim.training.uploads import Uploads

_FIELD = "model.attack"
Knows = Literal["colluders", "all"]
Direction = Literal["unit", "sign", "std"]


class Numbers(NamedTuple):
    """The clients of an architecture in a round."""

    clients: int
    """n"""
    attackers: int
    """m, those of the clients that attack"""


@dataclass(eq=False)
class Collusion(UploadAttack, ABC):
    """Base of attacks of which a subclass makes the upload; see :meth:`lie`."""

    knows: Knows = "all"
    """the uploads of which the malicious one is made: ``all``: those of the round's honest clients; ``colluders``:
    those that the attackers have trained themselves, before they lie"""

    def check_settings(self, method: Method, privacy: Privacy, timing: Timing) -> None:
        """Raise ConfigError if uploads cannot be compared, or if they are final before all clients have trained."""
        name = f"{_FIELD}: {type(self).__name__}"
        if clients_prune(method) or "uploads" in method.requires:
            raise ConfigError(
                f"{name} averages the uploads of a round, and {type(method).__name__} has its own aggregation; choose "
                "another attack"
            )
        if isinstance(privacy, DifferentialPrivacy):
            raise ConfigError(
                f"{name} makes an upload when all clients have trained, and model.privacy has clipped theirs before; "
                "leave one of them out"
            )
        if isinstance(timing, Buffered):
            raise ConfigError(
                f"{name} compares the uploads of a round, and Buffered of model.timing has answers from several; "
                "choose another attack, or Deadline"
            )

    def forge(
        self, server: Server, arch: str, clients: Sequence[str], gather: Callable[[Sequence[str]], Uploads]
    ) -> dict[str, Tensor]:
        """Return the parameters that the attackers among the round's ``clients`` of an architecture send.

        If there are no honest clients, the attackers use their own uploads. It is a collective of all ranks: ``gather``
        exchanges the shared parameters of some clients. The result is attacker -> [num_shared_parameters] float32, the
        same on all ranks.
        """
        attackers = [name for name in clients if self.acts(name, server.round)]
        if not attackers:
            return {}
        honest = [name for name in clients if name not in attackers]
        uploads = gather(attackers if self.knows == "colluders" else honest or attackers)
        lie = self.lie(uploads, server.vector(arch)[: uploads.length], Numbers(len(clients), len(attackers)))
        return dict.fromkeys(attackers, lie)

    @abstractmethod
    def lie(self, uploads: Uploads, received: Tensor, numbers: Numbers) -> Tensor:
        """Return the malicious upload, [num_shared_parameters] float32, the same on all ranks.

        Args:
            uploads: the shared parameters of the uploads of which it is made; without further tensors.
            received: x, the global model from the start of the round, [num_shared_parameters] float32.
            numbers: of clients and attackers.

        Raises:
            ConfigError: if these clients are too few.
        """


@dataclass(eq=False)
class ALIE(Collusion):
    """Attackers hide within the spread of each coordinate (a little is enough: Baruch et al., NeurIPS 2019).

    They send mu - z * sigma of the parameters that they know; in the paper they know the ``colluders``. As in the
    authors' code, sigma divides by the number of uploads (that of byzfl by one less) and the sign is minus, there for
    gradients; of updates it is as good as plus. One upload has no spread: attackers who know no more than one send it.
    """

    z: float | None = None
    """standard deviations; null: z_max of the paper, of the clients and attackers of the round, or of all where half of
    a round attack. It is negative for a single attacker among an even number of clients"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, inf)", z=self.z)
        self._of_all: Numbers | None = None

    def check(self, server: Server, attackers: Mapping[str, ClientData], task: str) -> None:
        """Refuse half of the clients and more, for which z is not defined."""
        super().check(server, attackers, task)
        clients, number = sum(server.num_clients.values()), len(attackers)
        if self.z is None and 2 * number >= clients:
            raise ConfigError(
                f"{_FIELD}.z: {number} of {clients} clients attack, and the paper's number is "
                "for fewer than half; set it, or name fewer attackers"
            )
        self._of_all = Numbers(clients, number)

    def _deviations(self, numbers: Numbers) -> float:
        if self._of_all is not None and 2 * numbers.attackers >= numbers.clients:
            numbers = self._of_all
        return alie_deviations(*numbers) if self.z is None else self.z

    def lie(self, uploads: Uploads, received: Tensor, numbers: Numbers) -> Tensor:  # noqa: ARG002 - a hook's
        """Return mu - z * sigma."""
        z = self._deviations(numbers)

        def hidden(chunk: Tensor) -> Tensor:
            mean, deviation = _moments(chunk)
            return (mean - z * deviation).float()

        return uploads.combine(hidden)


@dataclass(eq=False)
class InnerProduct(Collusion):
    """Attackers send the mean update the other way round (inner-product manipulation: Xie et al., UAI 2019).

    In the paper they know the uploads of ``all`` honest clients.
    """

    epsilon: float = 1.0
    """factor of the mean update, which is subtracted from the received model. Under a mean with equal weights, the
    update turns round if it is more than the number of honest clients for each attacker"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(_FIELD, "(0, inf)", epsilon=self.epsilon)

    def lie(self, uploads: Uploads, received: Tensor, numbers: Numbers) -> Tensor:  # noqa: ARG002 - a hook's
        """Return x - epsilon * (mu - x), of the received x and the mean mu."""

        def opposite(chunk: Tensor, x: Tensor) -> Tensor:
            return (x - self.epsilon * (chunk.double().mean(0) - x)).float()

        return uploads.combine(opposite, received)


@dataclass(eq=False)
class _Furthest(Collusion):
    """The lie mu + gamma p with the largest gamma that a subclass allows; only the direction of p counts."""

    direction: Direction = "std"
    """p, ``unit``: minus the mean update; ``sign``: minus its sign; ``std``: minus the standard deviation of each
    coordinate"""

    def lie(self, uploads: Uploads, received: Tensor, numbers: Numbers) -> Tensor:  # noqa: ARG002 - a hook's
        count = len(uploads.clients)

        def terms(chunk: Tensor, x: Tensor) -> Tensor:
            """Return the parts of d_i, a_i and |p|^2 of :func:`min_max_factor`, [2 K + 1]."""
            (mean, _), p = _moments(chunk), _DIRECTIONS[self.direction](chunk, x)
            away = mean - chunk.double()
            return torch.cat([away.square().sum(1), (away * p).sum(1), p.square().sum()[None]])

        squares, products, length = uploads.total(terms, [2 * count + 1], received).cpu().split([count, count, 1])
        gamma = self._factor(uploads, squares, products, float(length))

        def furthest(chunk: Tensor, x: Tensor) -> Tensor:
            mean, _ = _moments(chunk)
            return (mean + gamma * _DIRECTIONS[self.direction](chunk, x)).float()

        return uploads.combine(furthest, received)

    @abstractmethod
    def _factor(self, uploads: Uploads, squares: Tensor, products: Tensor, length: float) -> float:
        """Return gamma; for the arguments see :func:`~fedsim.functional.collusion.min_max_factor`."""


class MinMax(_Furthest):
    """Attackers go as far from each known upload as two of these are apart (Shejwalkar & Houmansadr, NDSS 2021).

    They send mu + gamma p. The paper halves intervals until it has the largest gamma up to a tolerance. This gamma is
    the root of a quadratic equation, without a tolerance.
    """

    def _factor(self, uploads: Uploads, squares: Tensor, products: Tensor, length: float) -> float:
        return min_max_factor(squares, products, length, float(squared_distances(uploads).max()))


class MinSum(_Furthest):
    """Attackers go as far from all known uploads as the furthest of these (Shejwalkar & Houmansadr, NDSS 2021).

    They send mu + gamma p; the sum of squared distances from the known uploads is bounded by the largest of an upload,
    as in the paper (the authors' code has the smallest). The largest gamma is exact, as with :class:`MinMax`.
    """

    def _factor(self, uploads: Uploads, squares: Tensor, products: Tensor, length: float) -> float:  # noqa: ARG002 - a hook's
        return min_sum_factor(squares, length)


def _moments(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each coordinate of [K, c] float32: [c] float64 each."""
    exact = chunk.double()
    return exact.mean(0), exact.std(0, correction=0)


def _against_update(chunk: Tensor, x: Tensor) -> Tensor:
    """Return minus the mean update of [K, c] since ``x`` [c], float64."""
    return x - chunk.double().mean(0)


_DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unit": _against_update,
    "sign": lambda chunk, x: _against_update(chunk, x).sign(),
    "std": lambda chunk, x: -_moments(chunk)[1],  # noqa: ARG005 - as the others
}
"""direction -> p [c] float64 of the known uploads [K, c] and the received model [c]"""
