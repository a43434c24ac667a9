"""The simulated traffic of a run: bytes per client and round, and the seconds of their transfer.

Paper 003 measures communication by a formula, rounds times twice the model size (Section 3.5). The ledger also covers
clients that do not answer and the tensors that a method sends beside the model. Pruned elements are not sent:
:class:`~fedsim.federation.aggregation.masked.Accounting` says how the rest is encoded. Tensors count as float32 without
padding. The traffic between ranks is something else, and dense.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fedsim.core.flat import FlatParameters
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.aggregation.masked import Accounting, PrunedTraffic
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.functional.encodings import dense_bytes
from fedsim.methods.base import Method
from fedsim.training.server import Server

log = logging.getLogger(__name__)


class Traffic(NamedTuple):
    """Bytes between the server and one client in one round."""

    down: int
    """shared tensors, to the client"""
    up: int
    """shared tensors, to the server"""
    extra_down: int = 0
    """whatever else, to the client"""
    extra_up: int = 0
    """whatever else, to the server"""

    @property
    def received(self) -> int:
        """All that the client gets."""
        return self.down + self.extra_down

    @property
    def sent(self) -> int:
        """All that the server gets."""
        return self.up + self.extra_up

    @property
    def extra(self) -> int:
        """All but the shared tensors."""
        return self.extra_down + self.extra_up


class Ledger(RoundListener):
    """Counts the bytes of a run, alike on all ranks, and with ``hardware``, the clients', simulates seconds.

    ``method`` declares the tensors beside the shared ones; ``archs``: client -> architecture, for all clients; the
    ``rules`` are those of the count.
    """

    key = "ledger"

    def __init__(
        self, method: Method, server: Server, archs: Mapping[str, str], hardware: Hardware | None, rules: Accounting
    ) -> None:
        self._method, self._server, self._archs = method, server, archs
        self._hardware, self._counts_first_download = hardware, rules.first_download
        self.pruned = PrunedTraffic(method, server, archs, rules)
        self._model_bytes = {arch: model.shared_bytes for arch, model in server.models.items()}
        self.round: dict[str, Traffic] = {}
        """client -> its traffic in the last round, of the clients that were selected"""
        self.seconds: float | None = None
        """simulated, of the last round; None without hardware"""
        self.totals = {"down": 0, "up": 0, "extra": 0, "formula": 0}
        """bytes since the run began; formula: 2 x model size x selected clients, summed over rounds (paper 003,
        Section 3.5)"""

    def expected(self, round_: int, clients: Sequence[str]) -> dict[str, Traffic]:
        """Return the clients' traffic in round ``round_``, from 0, if they answer and nothing is pruned."""
        of_arch = {arch: self._of_arch(arch, round_) for arch in sorted({self._archs[name] for name in clients})}
        if round_ == 0 and not self._counts_first_download:
            of_arch = {arch: traffic._replace(down=0) for arch, traffic in of_arch.items()}
        return {name: of_arch[self._archs[name]] for name in clients}

    def at_most(self, round_: int, clients: Sequence[str]) -> dict[str, Traffic]:
        """Return an upper bound of the clients' traffic in round ``round_``: :meth:`expected`, and all masks."""
        whole = self.expected(round_, clients)
        bounds = {name: self.pruned.at_most(self._archs[name], t.down, t.up) for name, t in whole.items()}
        return {name: whole[name]._replace(down=down, up=up) for name, (down, up) in bounds.items()}

    def _of_arch(self, arch: str, round_: int) -> Traffic:
        size, method, server = self._model_bytes[arch], self._method, self._server
        flat, payload = server.models[arch].flat, method.payload(server, arch, round_)
        down = sum(_count(tuple(server.kept[arch][name].shape), flat) for name in payload.down)
        up = sum(_count(shape, flat) for shape in payload.up.values())
        measured = sum(1 if kind == "client" else len(flat.shared_parameters) for kind in method.measures.values())
        return Traffic(size, size, dense_bytes(down), dense_bytes(up + measured))

    def observe(self, record: RoundRecord) -> None:
        """Enter a round. Uploads of clients without a report did not arrive."""
        reports, expected = record.reports, self.expected(record.round_, record.selected)
        self.round = {}
        for name, whole in expected.items():
            down, up = self.pruned.bytes_of(name, whole.down, whole.up, reports.get(name))
            traffic = whole._replace(down=down, up=up)
            self.round[name] = traffic if name in reports else traffic._replace(up=0, extra_up=0)
        self.pruned.observe(reports)
        self.seconds = self.simulated_seconds(self.round, {name: report.images for name, report in reports.items()})
        for traffic in self.round.values():
            self.totals["down"] += traffic.down
            self.totals["up"] += traffic.up
            self.totals["extra"] += traffic.extra
        self.totals["formula"] += sum(2 * self._model_bytes[self._archs[name]] for name in record.selected)

    def prunes(self, arch: str) -> bool:
        """Whether clients prune models of an architecture, or the server does."""
        return self.pruned.occurs(arch)

    def simulated_seconds(self, traffic: Mapping[str, Traffic], images: Mapping[str, float]) -> float | None:
        """Return the seconds of a round on the clients' hardware: those of its slowest client.

        ``traffic`` and ``images``, the number that it trains on, are by client; a missing client trains on none.
        """
        if (own := self._hardware) is None:
            return None
        each = (own.seconds(name, t.received, images.get(name, 0.0), t.sent) for name, t in traffic.items())
        return max(each, default=0.0)

    @property
    def total(self) -> int:
        """All bytes since the run began."""
        return self.totals["down"] + self.totals["up"] + self.totals["extra"]

    def metrics(self, round_: int = 0, clients: Sequence[str] = ()) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the last round's bytes, and those since the run began."""
        metrics = self._named("comm", list(self.round.values()))
        metrics |= {"comm/total_bytes": float(self.total), "comm/formula_bytes": float(self.totals["formula"])}
        if self.pruned.unpruned and self.round:
            densities = [self.pruned.density(name) for name in self.round]
            metrics["comm/density"] = sum(densities) / len(densities)
        if self.seconds is not None:
            metrics["time/simulated_seconds"] = self.seconds
        if len(self._archs) <= MAX_NAMES:
            for name in self._archs:
                metrics |= self._named(f"comm/{name}", [self.round[name]] if name in self.round else [])
                if self.pruned.unpruned:
                    metrics[f"comm/{name}/density"] = self.pruned.density(name)
        return metrics

    def _named(self, prefix: str, traffic: Sequence[Traffic]) -> dict[str, float]:
        sums = {"down": sum(t.down for t in traffic), "up": sum(t.up for t in traffic)}
        if self.totals["extra"]:
            sums["extra"] = sum(t.extra for t in traffic)
        return {f"{prefix}/{name}_bytes": float(value) for name, value in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return :attr:`totals`, and how many parameters clients have left."""
        return {"totals": dict(self.totals), "unpruned": dict(self.pruned.unpruned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an old version may lack the totals."""
        self.pruned.unpruned = dict(state.get("unpruned", {}))
        if state.get("totals") is None:
            log.warning("the checkpoint does not say what the run has sent so far: comm/total_bytes starts anew")
        else:
            self.totals = dict(state["totals"])


def _count(shape: tuple[int, ...], flat: FlatParameters) -> int:
    """How many numbers there are to be sent; in a vector of all shared parameters or entries some only pad it."""
    if shape == (flat.num_shared_parameters,):
        return sum(entry.numel for entry in flat.shared_parameters)
    if shape == (flat.num_shared,):
        return sum(entry.numel for entry in flat.shared_entries)
    return prod(shape)
