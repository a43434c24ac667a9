"""The simulated traffic of a run: bytes per client and round, and the seconds of their transfer.

Paper 003 measures communication by a formula, rounds times twice the model size (Section 3.5). The ledger also covers
clients that do not answer and the tensors that a method sends in addition to the model. Pruned elements are not sent:
:class:`Accounting` has the rules for the encoding of the others. Tensors count as float32 without padding. The traffic
between ranks is not simulated, and is always dense.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor

from fedsim.core.arguments import Section
from fedsim.core.flat import FlatParameters
from fedsim.core.names import metric_name
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.aggregation.masked import clients_prune
from fedsim.federation.aggregation.tables import count_of
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.functional.encodings import Encoding, dense_bytes, sparse_bytes
from fedsim.methods.base import Method
from fedsim.settings.facts import Facts
from fedsim.training.messages import Report
from fedsim.training.server import Server

log = logging.getLogger(__name__)
_PRUNED = Facts(needs="model.method in ('FedDIP', 'FedKLPR', 'LotteryFL', 'SubFedAvg') or '.' in model.method")


@dataclass(frozen=True, kw_only=True)
class Accounting(Section, option="model.accounting"):
    """Rules for the traffic of pruned models and of the first round."""

    encoding: Annotated[Encoding, _PRUNED] = "bitmap"
    """encoding of pruned models: the remaining values plus one bit per element; or plus 32 bits per value for its
    position; or all values with zeros; or the shortest of these. If the receiver has the mask, only values count"""
    masks: Annotated[Literal["changed", "every_upload"], _PRUNED] = "changed"
    """occasions on which a mask is sent: if the receiver lacks it; or with every upload of a method that prunes, and
    never with a download (paper 004's figures)"""
    first_download: bool = True
    """count the downloads of the first round; paper 004 does not, since all clients have the initial weights"""


class Traffic(NamedTuple):
    """Bytes between the server and one client in one round."""

    down: int
    """shared tensors, to the client"""
    up: int
    """shared tensors, to the server"""
    extra_down: int = 0
    """all other tensors, to the client"""
    extra_up: int = 0
    """all other tensors, to the server"""

    @property
    def received(self) -> int:
        """All bytes that the client receives."""
        return self.down + self.extra_down

    @property
    def sent(self) -> int:
        """All bytes that the server receives."""
        return self.up + self.extra_up

    @property
    def extra(self) -> int:
        """All bytes except those of the shared tensors."""
        return self.extra_down + self.extra_up


class Ledger(RoundListener):
    """Counts the bytes of a run, equally on all ranks; with the clients' ``hardware``, also simulates seconds.

    ``method`` declares the tensors besides the shared ones; ``archs``: client -> architecture, for all clients;
    ``rules`` are the rules of the count.
    """

    key = "ledger"

    def __init__(
        self, method: Method, server: Server, archs: Mapping[str, str], hardware: Hardware | None, rules: Accounting
    ) -> None:
        self._method, self._server, self._archs = method, server, archs
        self._hardware, self._counts_first_download = hardware, rules.first_download
        self.pruned = PrunedTraffic(method, server, archs, rules)
        self._model_bytes = {arch: model.shared_bytes for arch, model in server.models.items()}
        self._begun: tuple[int, dict[str, Traffic]] = (-1, {})
        """a round and its traffic by architecture when it began: tables have grown when it is counted"""
        self.round: dict[str, Traffic] = {}
        """client -> its traffic in the last round, for the clients that were selected or have answered"""
        self.seconds: float | None = None
        """simulated, of the last round; None without hardware"""
        self.totals = {"down": 0, "up": 0, "extra": 0, "formula": 0}
        """bytes since the run began; formula: 2 x model size x selected clients, summed over rounds (paper 003,
        Section 3.5)"""

    def begin(self, round_: int) -> None:
        """Note the bytes of a round's downloads before its answers change the tables."""
        self._begun = round_, {arch: self._of_arch(arch, round_) for arch in self._model_bytes}

    def expected(self, round_: int, clients: Sequence[str]) -> dict[str, Traffic]:
        """Return the clients' traffic in round ``round_``, from 0, if they answer and nothing is pruned.

        It lacks the rows of tables that clients will send, and in later rounds get: only they know how many.
        """
        archs, (begun, of_begun) = sorted({self._archs[name] for name in clients}), self._begun
        of_arch = {arch: of_begun[arch] if begun == round_ else self._of_arch(arch, round_) for arch in archs}
        if round_ == 0 and not self._counts_first_download:
            of_arch = {arch: traffic._replace(down=0) for arch, traffic in of_arch.items()}
        return {name: of_arch[self._archs[name]] for name in clients}

    def at_most(self, round_: int, clients: Sequence[str]) -> dict[str, Traffic]:
        """Return an upper bound of a round's traffic by client, but for rows: :meth:`expected` plus masks."""
        whole = self.expected(round_, clients)
        bounds = {name: self.pruned.at_most(self._archs[name], t.down, t.up) for name, t in whole.items()}
        return {name: whole[name]._replace(down=down, up=up) for name, (down, up) in bounds.items()}

    def _of_arch(self, arch: str, round_: int) -> Traffic:
        size, method, server = self._model_bytes[arch], self._method, self._server
        flat, payload = server.models[arch].flat, method.payload(server, arch, round_)
        down = sum(_count(tuple(server.kept[arch][name].shape), flat) for name in payload.down)
        down += sum(server.table(name, columns).numel() for name, columns in payload.tables.items())
        up = sum(_count(shape, flat) for shape in payload.up.values())
        measured = sum(1 if signal == "client" else len(flat.shared_parameters) for signal in method.measures.values())
        return Traffic(size, size, dense_bytes(down), dense_bytes(up + measured))

    def observe(self, record: RoundRecord) -> None:
        """Count the downloads of a round's calls and the uploads of its answers, whenever those were called.

        Uploads of other clients without a report did not arrive.
        """
        reports, called, answered = record.reports, {*record.selected}, {*record.reports, *record.too_old}
        self.round = {}
        for name, whole in self.expected(record.round_, [*dict.fromkeys([*record.selected, *answered])]).items():
            down, up = self.pruned.bytes_of(name, whole.down, whole.up, reports.get(name))
            rows = self._bytes_of_rows(name, record.round_, reports.get(name))
            traffic = whole._replace(down=down, up=up, extra_up=whole.extra_up + rows)
            traffic = traffic if name in called else traffic._replace(down=0, extra_down=0)
            self.round[name] = traffic if name in answered else traffic._replace(up=0, extra_up=0)
        self.pruned.observe(reports)
        images = {name: report.images for name, report in reports.items()}
        self.seconds = self.simulated_seconds(self.round, images) if record.seconds is None else record.seconds
        for traffic in self.round.values():
            self.totals["down"] += traffic.down
            self.totals["up"] += traffic.up
            self.totals["extra"] += traffic.extra
        self.totals["formula"] += sum(2 * self._model_bytes[self._archs[name]] for name in record.selected)

    def _bytes_of_rows(self, name: str, round_: int, report: Report | None) -> int:
        """Return the bytes of the rows that a client has added to tables; without a report they did not arrive."""
        tables = self._method.payload(self._server, self._archs[name], round_).tables if report is not None else {}
        counts = {} if report is None else report.traffic
        return dense_bytes(sum(int(counts.get(count_of(t), 0)) * columns for t, columns in tables.items()))

    def prunes(self, arch: str) -> bool:
        """Return whether clients or the server prune models of an architecture."""
        return self.pruned.occurs(arch)

    def simulated_seconds(self, traffic: Mapping[str, Traffic], images: Mapping[str, float]) -> float | None:
        """Return the seconds of a round on the clients' hardware: those of its slowest client.

        ``traffic``: client -> traffic; ``images``: client -> number of images that it trains on, 0 if it is missing.
        """
        if (hardware := self._hardware) is None:
            return None
        each = (hardware.seconds(name, t.received, images.get(name, 0.0), t.sent) for name, t in traffic.items())
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
                metrics |= self._named(metric_name("comm", name), [self.round[name]] if name in self.round else [])
                if self.pruned.unpruned:
                    metrics[metric_name("comm", name, "density")] = self.pruned.density(name)
        return metrics

    def _named(self, prefix: str, traffic: Sequence[Traffic]) -> dict[str, float]:
        sums = {"down": sum(t.down for t in traffic), "up": sum(t.up for t in traffic)}
        if self.totals["extra"]:
            sums["extra"] = sum(t.extra for t in traffic)
        return {f"{prefix}/{name}_bytes": float(value) for name, value in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return :attr:`totals`, and the numbers of parameters that are not pruned."""
        return {"totals": dict(self.totals), "unpruned": dict(self.pruned.unpruned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an old version may lack the totals."""
        self.pruned.unpruned = dict(state.get("unpruned", {}))
        if state.get("totals") is None:
            log.warning("the checkpoint does not contain the traffic of the run so far: comm/total_bytes restarts at 0")
        else:
            self.totals = dict(state["totals"])


def _count(shape: tuple[int, ...], flat: FlatParameters) -> int:
    """Return the number of elements to be sent; vectors of all shared parameters or entries contain padding."""
    if shape == (flat.num_shared_parameters,):
        return sum(entry.numel for entry in flat.shared_parameters)
    if shape == (flat.num_shared,):
        return sum(entry.numel for entry in flat.shared_entries)
    return prod(shape)


class PrunedTraffic:
    """Computes the bytes of pruned models, from the numbers of parameters that are not pruned.

    ``method`` declares whether clients or the server prune; ``archs``: client -> architecture, for all clients.
    """

    def __init__(self, method: Method, server: Server, archs: Mapping[str, str], rules: Accounting) -> None:
        self._server, self._method, self._archs, self._rules = server, method, archs, rules
        self._sizes = {arch: model.flat.num_shared_elements for arch, model in server.models.items()}
        self.unpruned: dict[str, int] = {}
        """client -> number of shared parameters that the server sends it; a missing client receives all"""
        self._note_server_masks()

    def occurs(self, arch: str) -> bool:
        """Return whether clients or the server prune models of an architecture."""
        return clients_prune(self._method) or self._server_mask(arch) is not None

    def bytes_of(self, name: str, down: int, up: int, report: Report | None) -> tuple[int, int]:
        """Return the bytes of a client's download and upload; ``down`` and ``up`` are those of whole models.

        Without a download, ``down`` is 0; without a report, the upload did not arrive.
        """
        if not self.occurs(self._archs[name]):
            return down, up
        size, encoding = self._sizes[self._archs[name]], self._rules.encoding
        always = self._rules.masks == "every_upload"
        traffic = {} if report is None else report.traffic
        left_down, left_up = self.unpruned.get(name, size), int(traffic.get("unpruned", size))
        # a client always has its own mask, but may have missed a mask of the server
        is_known = always or clients_prune(self._method) or left_down == size
        pruned_down = sparse_bytes(size, left_down, encoding, is_known)
        pruned_up = sparse_bytes(size, left_up, encoding, not (always or traffic.get("new mask")))
        saved = dense_bytes(size)
        return down and down - saved + pruned_down, up - saved + pruned_up

    def at_most(self, arch: str, down: int, up: int) -> tuple[int, int]:
        """Return an upper bound of the bytes of a download and an upload: those of whole models, with masks."""
        if not self.occurs(arch):
            return down, up
        size, always = self._sizes[arch], self._rules.masks == "every_upload"
        is_own = clients_prune(self._method)
        with_mask, without_mask = (
            sparse_bytes(size, size, self._rules.encoding, is_known) for is_known in (False, True)
        )
        saved = dense_bytes(size)
        most_down = without_mask if always or is_own else with_mask
        return down and down - saved + most_down, up - saved + (with_mask if always or is_own else saved)

    def observe(self, reports: Mapping[str, Report]) -> None:
        """Update :attr:`unpruned` after a round."""
        traffic = {name: report.traffic for name, report in reports.items()}
        self.unpruned |= {name: int(numbers["unpruned"]) for name, numbers in traffic.items() if "unpruned" in numbers}
        self._note_server_masks()

    def density(self, name: str) -> float:
        """Return the share of the shared parameters of a client's model that is not pruned."""
        size = self._sizes[self._archs[name]]
        return self.unpruned.get(name, size) / size

    def _note_server_masks(self) -> None:
        """Count the elements that the server sends in the next round, if it prunes."""
        for arch, size in self._sizes.items():
            mask = self._server_mask(arch)
            if mask is not None:
                left = size - int((~mask).count_nonzero())
                self.unpruned |= {name: left for name, client_arch in self._archs.items() if client_arch == arch}

    def _server_mask(self, arch: str) -> Tensor | None:
        name = self._method.payload(self._server, arch, self._server.round).mask
        return None if name is None else self._server.kept[arch][name]
