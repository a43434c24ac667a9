"""Scoring the federation's models: global, local (before aggregation) and personalised (global + private groups).

Every score is one row of a table that exactly one rank fills; a sum over ranks then gives all rows to everybody, and
the same bits on any number of ranks. Personal models run on their own client's domain; unseen domains are for the
global model, or, where the method has none, for everybody's personal model, whose scores are averaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.client import Client
from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.placement import Placement
from fedsim.data.federations import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.evaluation.extraction import extract_features
from fedsim.evaluation.ranking import Ranking, num_valid_queries, rank_features
from fedsim.method import Method
from fedsim.resident import Resident
from fedsim.server import Server
from fedsim.settings import Evaluation
from fedsim.strategy import FederatedStrategy

__all__ = ["METRICS", "Evaluator", "Kind", "Row"]

log = logging.getLogger(__name__)

Kind = Literal["global", "local", "personalised"]
SplitName = Literal["val", "test"]

METRICS = ("rank1", "rank5", "rank10", "mAP", "mAP_trapezoid", "mINP")
"""Columns of the table."""


class Row(NamedTuple):
    """One model on one query/gallery set."""

    kind: Kind
    domain: str
    client: str | None
    """whose model; None: the global model of :attr:`arch`"""
    arch: str
    owner: int
    """the rank that scores it"""


class _Loaded(NamedTuple):
    """A retrieval set with decoded images."""

    sets: RetrievalSet
    query: Tensor
    gallery: Tensor


@dataclass
class Evaluator:
    """Scores models on the sets of this rank.

    Args:
        settings: how.
        method: says what a personalised model is.
        server: the global models.
        clients: hosted by this rank.
        residents: one model per architecture.
        archs: client -> architecture, for all clients.
        federated: all clients' data, not decoded.
        placement: who hosts whom.
        strategy: the collectives.
        decode: images, name -> uint8 tensor.
        progress: told the name of each set before it is scored.
    """

    settings: Evaluation
    method: Method
    server: Server
    clients: Mapping[str, Client]
    residents: Mapping[str, Resident]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    strategy: FederatedStrategy
    decode: Callable[[Images, str], Tensor]
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """Start with nothing decoded."""
        self._loaded: dict[tuple[SplitName, str], _Loaded] = {}

    @property
    def has_global(self) -> bool:
        """Whether the server's models can retrieve on their own."""
        return all(resident.is_complete for resident in self.residents.values())

    @property
    def primary(self) -> Kind:
        """The model that the method delivers, by which checkpoints are selected."""
        return "global" if self.has_global else "personalised"

    def prepare(self, split: SplitName) -> None:
        """Check and decode this rank's sets now, so that a damaged image is reported before hours of training."""
        rows = self._rows(split, ())
        for domain in dict.fromkeys(row.domain for row in rows):
            _check_matches(split, domain, self._sets(split, domain), self.settings.camera_aware)
        for row in rows:
            if row.owner == self.strategy.global_rank:
                self._load(split, row)

    def score(self, split: SplitName, trained: Iterable[str] = ()) -> dict[str, float]:
        """Score all models.

        Args:
            split: ``val`` or ``test``.
            trained: clients that have a local model from this round.

        Returns:
            ``split/kind/domain/metric`` -> fraction of 1; ``domain`` is also ``seen`` and ``unseen``, the means over
            those; and ``split/metric``, the mean over clients of the method's primary model.
        """
        rows = self._rows(split, tuple(trained))
        table = torch.zeros(len(rows), len(METRICS), dtype=torch.float64)
        with self.strategy.together():
            self._fill(split, rows, table)
        self.strategy.exchange([table])
        return self._summarise(split, rows, table)

    def write_features(self, folder: Path) -> list[Path]:
        """Write the primary model's features of each test set to ``folder``/DOMAIN.npz.

        Arrays: query, gallery (float32 [n, D], not normalised), query_pids, query_camids, gallery_pids, gallery_camids.

        Returns:
            the files of all ranks.
        """
        rows = [row for row in self._rows("test", ()) if row.kind == self.primary]
        several = len({row.domain for row in rows}) < len(rows)
        with self.strategy.together():
            for row in rows:
                if row.owner == self.strategy.global_rank:
                    self._write(row, folder / _file_name(row, several))
        return [folder / _file_name(row, several) for row in rows]

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _rows(self, split: SplitName, trained: tuple[str, ...]) -> list[Row]:
        rows: list[Row] = []
        for data in self.federated.clients:
            arch, owner = self.archs[data.name], self.placement.ranks[data.name]
            domains = data.tests if split == "test" else ((data.name,) if data.val is not None else ())
            for domain in domains:
                if self.residents[arch].is_complete:
                    rows.append(Row("global", domain, None, arch, owner))
                if data.name in trained:
                    rows.append(Row("local", domain, data.name, arch, owner))
                rows.append(Row("personalised", domain, data.name, arch, owner))
        return rows + (self._unseen_rows() if split == "test" else [])

    def _unseen_rows(self) -> list[Row]:
        rows: list[Row] = []
        for domain in self.federated.unseen:
            if self.has_global:
                for arch in sorted(self.residents):
                    rows.append(Row("global", domain, None, arch, len(rows) % self.strategy.world_size))
            else:
                ranks = self.placement.ranks
                rows += [Row("personalised", domain, c, self.archs[c], ranks[c]) for c in ranks]
        return rows

    def _fill(self, split: SplitName, rows: list[Row], table: Tensor) -> None:
        done: dict[tuple[str, str, str], Ranking] = {}
        for row, scores in zip(rows, table, strict=True):
            if row.owner != self.strategy.global_rank:
                continue
            key = (*self._weights_of(row), row.domain)
            if key not in done:
                done[key] = self._score_row(split, row)
            scores[:] = torch.tensor([done[key].__dict__[metric] for metric in METRICS], dtype=torch.float64)

    def _weights_of(self, row: Row) -> tuple[str, str]:
        """Name the weights behind a row: rows with equal weights are computed once.

        Where everything that retrieval needs is shared, a personalised model is the global one; where nothing is, it is
        the local one.
        """
        kind = type(self.method)
        plain = kind.personalise is Method.personalise and kind.download is Method.download
        resident = self.residents[row.arch]
        if row.client is None or (row.kind == "personalised" and plain and resident.is_complete):
            return "global", row.arch
        if plain and resident.flat.num_shared == 0:
            return "private", row.client
        return row.kind, row.client

    def _score_row(self, split: SplitName, row: Row) -> Ranking:
        self.progress(f"{row.kind} model on {row.domain}")
        loaded = self._load(split, row)
        query, gallery = self._features(row, loaded)
        sets = loaded.sets
        labels = (sets.query.pids, sets.query.camids, sets.gallery.pids, sets.gallery.camids)
        return rank_features(query, gallery, *labels, camera_aware=self.settings.camera_aware, own=sets.own)

    def _features(self, row: Row, loaded: _Loaded) -> tuple[Tensor, Tensor]:
        resident = self.residents[row.arch]
        self._load_model(row, resident)
        device = resident.flat.buffer.device
        query = extract_features(resident.model, loaded.query, self.settings, device)
        gallery = extract_features(resident.model, loaded.gallery, self.settings, device)
        if row.client is not None:
            self.clients[row.client].unload()
        return query, gallery

    def _load_model(self, row: Row, resident: Resident) -> None:
        if row.client is None:
            resident.flat.shared.copy_(self.server.model(row.arch))
            return
        client = self.clients[row.client]
        if row.kind == "local":
            assert client.snapshot is not None
            resident.flat.buffer.copy_(client.snapshot)
        else:
            client.load()
            self.method.personalise(client, self.server)

    def _load(self, split: SplitName, row: Row) -> _Loaded:
        key = (split, row.domain)
        if key not in self._loaded:
            sets = self._sets(split, row.domain)
            query = self.decode(sets.query.images, f"{row.domain} queries")
            gallery = self.decode(sets.gallery.images, f"{row.domain} gallery")
            self._loaded[key] = _Loaded(sets, query, gallery)
        return self._loaded[key]

    def _sets(self, split: SplitName, domain: str) -> RetrievalSet:
        if split == "test":
            return self.federated.tests[domain]
        sets = next(client.val for client in self.federated.clients if client.name == domain)
        assert sets is not None
        return sets

    def _write(self, row: Row, path: Path) -> None:
        loaded = self._load("test", row)
        query, gallery = self._features(row, loaded)
        sets = loaded.sets
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(
                file, query=query.numpy(), gallery=gallery.numpy(),
                query_pids=sets.query.pids, query_camids=sets.query.camids,
                gallery_pids=sets.gallery.pids, gallery_camids=sets.gallery.camids,
            )  # fmt: skip

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _summarise(self, split: SplitName, rows: list[Row], table: Tensor) -> dict[str, float]:
        values = table.numpy()
        metrics: dict[str, float] = {}
        unseen = set(self.federated.unseen) if split == "test" else set()
        for kind in ("global", "local", "personalised"):
            domains = list(dict.fromkeys(row.domain for row in rows if row.kind == kind))
            means = {d: values[[r.kind == kind and r.domain == d for r in rows]].mean(axis=0) for d in domains}
            for name, members in (("seen", set(domains) - unseen), ("unseen", set(domains) & unseen)):
                # a mean over the local models of a sample of clients would stand beside means over all of them
                partial = kind == "local" and len({row.client for row in rows if row.kind == kind}) < len(self.archs)
                if members and not partial:
                    means[name] = np.mean([means[d] for d in domains if d in members], axis=0)
            for domain, row_values in means.items():
                for metric, value in zip(METRICS, row_values, strict=True):
                    metrics[f"{split}/{kind}/{domain}/{metric}"] = float(value)
        for metric in METRICS:
            key = f"{split}/{self.primary}/seen/{metric}"
            if key in metrics:
                metrics[f"{split}/{metric}"] = metrics[key]
        return metrics


def _file_name(row: Row, several: bool) -> str:
    return f"{row.domain}@{row.client or row.arch}.npz" if several else f"{row.domain}.npz"


def _check_matches(split: str, domain: str, sets: RetrievalSet, camera_aware: bool) -> None:
    """Raise DataError if no query can have a match; say how many have none."""
    labels = (sets.query.pids, sets.query.camids, sets.gallery.pids, sets.gallery.camids)
    valid = num_valid_queries(*labels, camera_aware=camera_aware, own=sets.own)
    if valid == 0:
        raise DataError(
            f"{split} set of {domain}: no query has a match"
            + (" in another camera; set model.evaluation.camera_aware to false" if camera_aware else "")
            + (", or data.val to none" if split == "val" else "")
        )
    if valid < len(sets.query):
        log.info("%s set of %s: %d of %d queries have a match, the others do not count", split, domain, valid,
                 len(sets.query))  # fmt: skip
