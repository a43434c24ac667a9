"""Pruned models: the means of elements that only some clients have, and the bytes of messages that lack elements.

The rest of the room knows no masks: it asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.federation.aggregation.sums import Aggregator
from fedsim.functional.encodings import Encoding, dense_bytes, sparse_bytes
from fedsim.functional.pruning import zero_pruned_
from fedsim.methods.base import Method, Weights
from fedsim.training.messages import Measured, Report, Signals, Upload
from fedsim.training.server import Server
from fedsim.training.statistics import BatchNormStatistics


def clients_prune(method: Method) -> bool:
    """Return whether uploads may lack elements, each client's others."""
    return "masks" in method.requires


class MaskedAggregator(Aggregator):
    """Sums the uploads of clients that prune; see :class:`~fedsim.federation.aggregation.sums.Aggregator`.

    The buffer is [sum of w m x | sum of w m | sum of w], and an element's mean is
    ``(sum of w m x) / (sum of w m / sum of w)``. The second quotient is exactly 1 where nobody has pruned, so that
    masks of ones change no bit. (Plain fp32 sums of more than two ranks need not add in the same order at both places;
    there it is 1 up to rounding.) Statistics are not masked.
    """

    columns: ClassVar[tuple[str, ...]] = ("unpruned", "new mask")
    """shared parameters, counted by element, that the client has not pruned; 1 if the server did not know the mask"""

    def length_of(self, statistics: BatchNormStatistics) -> int:
        """Return the length of the three parts."""
        return statistics.num_shared + statistics.span.start + 1

    def check(self, upload: Upload) -> None:
        """Take every upload."""

    def facts(self, client: str, upload: Upload) -> Signals:
        """Count the elements that an upload's mask leaves."""
        total = sum(entry.numel for entry in self.statistics[self.archs[client]].parameters)
        if upload.mask is None:
            return dict(zip(self.columns, (float(total), 0.0), strict=True))
        unpruned = Measured((~upload.mask).count_nonzero(), lambda pruned: total - pruned[0])
        is_new = upload.is_new_mask
        told = Measured(is_new) if isinstance(is_new, Tensor) else float(is_new)
        return dict(zip(self.columns, (unpruned, told), strict=True))

    def sum_model(self, client: str, upload: Upload, weights: Weights, total: Tensor) -> None:
        """Add a client's elements, and its weight where it has them."""
        x = upload.vector.to(total.device)
        values, shares = total.split([len(x), len(total) - len(x)])
        mask = torch.ones(len(shares), dtype=torch.bool, device=total.device)
        if upload.mask is not None:
            sent = upload.mask.to(total.device)
            x = x.clone()
            zero_pruned_(x[: len(sent)], sent)
            if not upload.zeros_count:
                mask[:-1] = sent
        of_parameters = [weights.clients[client]] if weights.parameters is None else weights.parameters[client]
        assert len(of_parameters) == 1, "weights of single tensors do not go together with masks"
        self.add_weighted(shares, of_parameters[0], mask)
        self.sum_vector(client, x, weights, values)

    def divide(self, arch: str, total: Tensor) -> Tensor:
        """Divide each element by the share of the weights that has it; note those that nobody has."""
        num_shared = self.statistics[arch].num_shared
        mean, share = total[:num_shared], total[num_shared:-1] / total[-1]
        self.untouched[arch] = share == 0
        mean[: len(share)].div_(share).masked_fill_(self.untouched[arch], 0.0)
        return mean


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Rules for the traffic of pruned models and of the first round."""

    encoding: Encoding = "bitmap"
    """of pruned models: the remaining values plus one bit per element; or plus 32 bits per value for its position; or
    all values with zeros; or the shortest of these. If the receiver already has the mask, only values are counted"""
    masks: Literal["changed", "every_upload"] = "changed"
    """when a mask is sent: if the receiver lacks it; or with every upload of a method that prunes, and never down
    (paper 004's figures)"""
    first_download: bool = True
    """count the downloads of the first round; paper 004 does not, since everybody has the initial weights"""


class PrunedTraffic:
    """Knows how much of the clients' models is left, and the bytes that it takes to send it.

    ``method`` declares who prunes; ``archs``: client -> architecture, for all clients.
    """

    def __init__(self, method: Method, server: Server, archs: Mapping[str, str], rules: Accounting) -> None:
        self._server, self._method, self._archs, self._rules = server, method, archs, rules
        self._sizes = {arch: model.flat.num_shared_elements for arch, model in server.models.items()}
        self.unpruned: dict[str, int] = {}
        """client -> number of shared parameters that the server sends it; clients that are missing get all"""
        self._note_server_masks()

    def occurs(self, arch: str) -> bool:
        """Return whether clients prune models of an architecture, or the server does."""
        return clients_prune(self._method) or self._server_mask(arch) is not None

    def bytes_of(self, name: str, down: int, up: int, report: Report | None) -> tuple[int, int]:
        """Return the bytes of a client's download and upload, given those of whole models.

        Without a download, ``down`` is 0; without a report, the upload did not arrive.
        """
        if not self.occurs(self._archs[name]):
            return down, up
        size, encoding = self._sizes[self._archs[name]], self._rules.encoding
        always = self._rules.masks == "every_upload"
        own = {} if report is None else report.traffic
        left_down, left_up = self.unpruned.get(name, size), int(own.get("unpruned", size))
        # a client has its own mask; of the server's it may have missed some
        is_known = always or clients_prune(self._method) or left_down == size
        pruned_down = sparse_bytes(size, left_down, encoding, is_known)
        pruned_up = sparse_bytes(size, left_up, encoding, not (always or own.get("new mask")))
        saved = dense_bytes(size)
        return down and down - saved + pruned_down, up - saved + pruned_up

    def at_most(self, arch: str, down: int, up: int) -> tuple[int, int]:
        """Return an upper bound of the bytes of a download and an upload, given those of whole models: with masks."""
        if not self.occurs(arch):
            return down, up
        size, always = self._sizes[arch], self._rules.masks == "every_upload"
        is_own = clients_prune(self._method)
        masked, known = (sparse_bytes(size, size, self._rules.encoding, is_known) for is_known in (False, True))
        saved = dense_bytes(size)
        most_down = known if always or is_own else masked
        return down and down - saved + most_down, up - saved + (masked if always or is_own else saved)

    def observe(self, reports: Mapping[str, Report]) -> None:
        """Learn how much is left after a round."""
        told = {name: report.traffic for name, report in reports.items()}
        self.unpruned |= {name: int(numbers["unpruned"]) for name, numbers in told.items() if "unpruned" in numbers}
        self._note_server_masks()

    def density(self, name: str) -> float:
        """Return the share of the shared parameters that a client's model has left."""
        size = self._sizes[self._archs[name]]
        return self.unpruned.get(name, size) / size

    def _note_server_masks(self) -> None:
        """Count the elements that the server sends in the next round, if it prunes."""
        for arch, size in self._sizes.items():
            mask = self._server_mask(arch)
            if mask is not None:
                left = size - int((~mask).count_nonzero())
                self.unpruned |= {name: left for name, its in self._archs.items() if its == arch}

    def _server_mask(self, arch: str) -> Tensor | None:
        name = self._method.payload(self._server, arch, self._server.round).mask
        return None if name is None else self._server.kept[arch][name]
