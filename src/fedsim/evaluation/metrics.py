"""Re-identification metrics for torchmetrics, also outside of fedsim.

>>> import torch
>>> metric = ReIDRetrieval()
>>> pids, camids = torch.tensor([1, 2, 1, 2]), torch.tensor([0, 0, 1, 1])
>>> is_query = torch.tensor([True, True, False, False])
>>> metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.2, 0.8]]), pids, camids, is_query)
>>> {name: float(value) for name, value in metric.compute().items() if name in ("rank1", "mAP", "num_valid")}
{'rank1': 1.0, 'mAP': 1.0, 'num_valid': 2.0}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from fedsim.evaluation.backends import BackendName, make_backend
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import JUNK, MAX_RANK, Ranking, RetrievalLabels
from fedsim.functional.similarity import Distance


class _Retrieval(Metric):
    """Collects features of queries and gallery, on any number of ranks, and ranks them at the end.

    Equally similar gallery images keep the order of the updates, rank after rank. If that order matters, or a sampler
    pads batches with images of other ranks, give ``index``: each image's place in the data set's list.

    Args:
        distance: ``cosine``, or ``euclidean`` on features as they are.
        camera_aware: whether the same identity in the same camera is junk.
        junk_pids: identities whose gallery images count neither as right nor as wrong.
        invalid_as_zero: average over all queries; those without a match count as zeros.
        single_gallery_shot: CMC on galleries with one random image per identity, in expectation.
        backend: ``torch``, ``faiss``, or ``auto``.
        kwargs: of :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = True  # forward() then needs no rule to join a batch with the rest

    features: list[Tensor]
    labels: list[Tensor]

    def __init__(
        self,
        distance: Distance = "cosine",
        camera_aware: bool = True,
        junk_pids: Sequence[int] = (JUNK,),
        invalid_as_zero: bool = False,
        single_gallery_shot: bool = False,
        backend: BackendName = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.camera_aware = camera_aware
        self.junk_pids = tuple(junk_pids)
        self.ranker = Ranker(distance, make_backend(backend), single_gallery_shot, invalid_as_zero)
        self.add_state("features", default=[], dist_reduce_fx=_join)
        self.add_state("labels", default=[], dist_reduce_fx=_join)

    def update(
        self, features: Tensor, pids: Tensor, camids: Tensor, is_query: Tensor | bool, index: Tensor | None = None
    ) -> None:
        """Add images: features [B, D], identities [B], cameras [B]; raise ValueError if lengths differ.

        ``is_query`` is [B], or one value for all; ``index`` [B] the place of each image in the list of queries or
        gallery images: one image per place counts.
        """
        size = len(features)
        query = torch.as_tensor(is_query, device=features.device).bool()
        query = query.expand(size) if query.dim() == 0 else query
        position = torch.full((size,), -1, device=features.device) if index is None else index
        columns = {"pids": pids, "camids": camids, "is_query": query, "index": position}
        for name, column in columns.items():
            if column.shape != (size,):
                raise ValueError(f"{name}: {list(column.shape)} values for {size} images")
        # float32 here: half precision would lose ranks later
        self.features.append(features.detach().float())
        self.labels.append(torch.stack([c.to(features.device, torch.int64) for c in columns.values()], dim=1))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the images of all ranks; a rank may have none."""
        # torchmetrics gathers one tensor per list, with equally many dimensions on all ranks
        self.features = [_join(self.features) if len(self.features) else torch.zeros(0, 0, device=self.device)]
        nothing = torch.zeros(0, 4, dtype=torch.int64, device=self.device)
        self.labels = [_join(self.labels) if len(self.labels) else nothing]
        super().sync(*args, **kwargs)

    def ranking(self) -> Ranking:
        """Rank everything that was added; raise ValueError if there are no queries or no gallery."""
        if len(self.features) == 0 or len(_join(self.labels)) == 0:
            raise ValueError("update() was never called: there is nothing to rank")
        features, labels = _join(self.features), _join(self.labels)
        query, gallery = (_in_order(labels, is_query) for is_query in (1, 0))
        for name, part in (("queries", query), ("gallery images", gallery)):
            if len(part) == 0:
                raise ValueError(f"there are no {name}; is_query marks the queries")
        pids, camids = (labels[:, column].cpu().numpy() for column in (0, 1))
        q, g = query.cpu().numpy(), gallery.cpu().numpy()
        rules = RetrievalLabels(pids[q], camids[q], pids[g], camids[g], self.camera_aware, self.junk_pids)
        return self.ranker.score(features[query], features[gallery], rules)


class ReIDRetrieval(_Retrieval):
    """All scores of :class:`fedsim.evaluation.Ranking` from one ranking."""

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics of the ranking (fractions of 1), num_valid, num_queries and cmc [50]."""
        ranking = self.ranking()
        values = {**ranking.metrics, **{name: getattr(ranking, name) for name in ("num_valid", "num_queries", "cmc")}}
        return {name: torch.tensor(value) for name, value in values.items()}

    def plot(self, val: dict[str, Tensor] | None = None, ax: Any = None) -> Any:
        """Draw the CMC curve of ``val`` (None: of :meth:`compute`) with the scores as title; return (figure, axes)."""
        scores = self.compute() if val is None else val
        title = ", ".join(f"{name} {100 * float(scores[name]):.1f}" for name in ("rank1", "mAP", "mINP"))
        return _plot_cmc(scores["cmc"], title, ax)


class CMC(_Retrieval):
    """Cumulative matching characteristic up to ``max_rank``, at most 50; see :class:`ReIDRetrieval` for ``kwargs``."""

    def __init__(self, max_rank: int = MAX_RANK, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 1 <= max_rank <= MAX_RANK:
            raise ValueError(f"max_rank: {max_rank} is not between 1 and {MAX_RANK}")
        self.max_rank = max_rank

    def compute(self) -> Tensor:
        """Return [max_rank]: the share of queries with a match among the first 1, 2, ... images."""
        return torch.tensor(self.ranking().cmc[: self.max_rank])

    def plot(self, val: Tensor | None = None, ax: Any = None) -> Any:
        """Draw the curve; return (figure, axes)."""
        return _plot_cmc(self.compute() if val is None else val, "", ax)


class MeanAP(_Retrieval):
    """Mean average precision; see :class:`ReIDRetrieval` for ``kwargs``.

    ``trapezoid`` integrates precision over recall by trapezoids (Market-1501's code, paper 003), not by rectangles.
    """

    def __init__(self, trapezoid: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trapezoid = trapezoid

    def compute(self) -> Tensor:
        """Return a scalar, fraction of 1."""
        ranking = self.ranking()
        return torch.tensor(ranking.mAP_trapezoid if self.trapezoid else ranking.mAP)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Draw one or several values; return (figure, axes)."""
        return self._plot(val, ax)


def _join(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Join the rows of batches or ranks; some may have none."""
    if isinstance(parts, Tensor):  # already joined
        return parts
    filled = [part for part in parts if len(part)]
    return torch.cat(filled) if filled else parts[0]


def _in_order(labels: Tensor, is_query: int) -> Tensor:
    """Return the rows of queries or gallery images, sorted by index; of equal indices, the first."""
    rows = (labels[:, 2] == is_query).nonzero().flatten()
    places = labels[rows, 3].cpu().numpy()
    if len(set((places < 0).tolist())) > 1:
        raise ValueError("index: give it for all images, or for none")
    if not len(places) or places.min() < 0:
        return rows
    return rows[torch.from_numpy(np.unique(places, return_index=True)[1]).to(rows.device)]


def _plot_cmc(cmc: Tensor, title: str, ax: Any) -> Any:
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots()
    ax.plot(range(1, len(cmc) + 1), 100 * cmc.cpu().numpy(), marker=".")
    ax.set(xlabel="rank", ylabel="queries with a match (%)", title=title, ylim=(None, 100))
    return ax.figure, ax
