"""The success of a backdoor in retrieval: people who wear the trigger are taken for each other.

Q queries, G gallery images, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.pixels import Pixels
from fedsim.evaluation.ranking import Floats, RetrievalLabels
from fedsim.evaluation.retrieval import Retrieval, Trial, score_trials, trials_of
from fedsim.evaluation.scorer import Outputs, ScoredSet, Scorer, Scores, Writer
from fedsim.evaluation.summary import QueryResults
from fedsim.functional.similarity import Similarity
from fedsim.training.flat_model import FlatModel


class ChangedPixels(Pixels):
    """Images of which every batch, uint8 [m, 3, H, W], is changed when it is read."""

    def __init__(self, pixels: Pixels, change: Callable[[Tensor], Tensor]) -> None:
        self._pixels, self._change = pixels, change
        self.num_values = pixels.num_values

    def __len__(self) -> int:
        return len(self._pixels)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """Change each batch; see :meth:`Pixels.batches`."""
        return map(self._change, self._pixels.batches(order))

    def part(self, rows: slice) -> ChangedPixels:
        """Return some of the images."""
        return ChangedPixels(self._pixels.part(rows), self._change)


def successes(plain: Tensor, worn: Tensor, shown: Tensor, wearers: Tensor, junk: Tensor, victims: Tensor) -> Tensor:
    """Return the share of victims for whom each query with the trigger is taken, float64 [b]; NaN: it has no victims.

    A query of identity a is taken for victim v, another identity, if an image of v is first in a gallery in which all
    images of v wear the trigger, and no others do. The first image must be more similar than every other.

    Args:
        plain: [b, G] similarities to the gallery without the trigger.
        worn: [b, G] similarities to the same images with it.
        shown: [G] int64, number of the identity in each gallery image, 0 .. I - 1.
        wearers: [b] int64, the number of each query's identity; -1 if the gallery does not show it.
        junk: [b, G] bool, images that the query's list leaves out.
        victims: [I] bool, identities for whom others may be taken.

    >>> plain = torch.tensor([[0.9, 0.1, 0.2]])
    >>> worn = torch.tensor([[0.9, 0.95, 0.8]])
    >>> people, none = torch.tensor([0, 1, 2]), torch.zeros(1, 3, dtype=torch.bool)
    >>> successes(plain, worn, people, torch.tensor([0]), none, torch.ones(3, dtype=torch.bool))
    tensor([0.5000], dtype=torch.float64)
    """
    columns = len(victims) + 1  # one for "no other identity"
    best, best_worn = (_largest(s.masked_fill(junk, -torch.inf), shown, columns) for s in (plain, worn))
    first, second = best.topk(2, dim=1).values.split(1, dim=1)
    best_other = torch.where(best == first, second, first)  # if two identities share the first place, second is first
    numbers = torch.arange(len(victims), device=plain.device)
    counts = victims & (numbers != wearers[:, None])
    taken = (best_worn > best_other)[:, :-1] & counts
    return taken.sum(1).double() / counts.sum(1)


def _largest(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the largest values [b, count] of ``values`` [b, G] in each group; -inf: it has none.

    ``groups`` are int64 [G], below ``count``. scatter_reduce has no deterministic form on GPUs.
    """
    sizes = groups.new_zeros(count).scatter_add_(0, groups, torch.ones_like(groups))
    by_group = values.T[groups.argsort(stable=True)]
    return torch.segment_reduce(by_group, "max", lengths=sizes, unsafe=True).T  # a check of the sizes would wait


@final
class TriggeredRetrieval(Scorer):
    """Scores features of images with and without a trigger by the share of (query, victim) that :func:`successes` has.

    Victims are the identities that queries show. ``plain`` is the task without a trigger; ``paste`` puts it on images,
    uint8 [m, 3, H, W]. A model's outputs are its features without and with the trigger, side by side.
    """

    metrics = ("success",)

    def __init__(self, plain: Retrieval, paste: Callable[[Tensor], Tensor]) -> None:
        self.plain, self.paste = plain, paste

    def check(self, data: ScoredSet) -> None:
        """See :meth:`Retrieval.check`."""
        self.plain.check(data)

    def width(self, model: FlatModel) -> int:
        """Return twice the number of features."""
        return 2 * self.plain.width(model)

    def outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        """Return features without and with the trigger, float32 [n, 2 D]."""
        worn = ChangedPixels(images, self.paste)
        return torch.cat([self.plain.outputs(model, images), self.plain.outputs(model, worn)], dim=1)

    def blank(self, data: ScoredSet) -> list[Tensor]:
        """Return zero tables with two columns: the share of victims, and whether there are any."""
        return [torch.zeros(trial.num_queries, 2, dtype=torch.float64) for trial in self._trials_of(data)]

    def score(self, data: ScoredSet, outputs: Outputs, is_assigned: Callable[[int], bool]) -> list[Floats]:
        """Return the tables with this rank's blocks of queries."""
        return score_trials(self._trials_of(data), outputs, is_assigned, 2, self._rows)

    def results(self, data: ScoredSet, tables: Sequence[Tensor]) -> Scores:
        """Return means over the queries for whom there are victims; 0 if there are none."""
        means = [float(table[:, 0].sum() / table[:, 1].sum().clamp(min=1)) for table in tables]
        full = np.concatenate([table.numpy() for table in tables])
        trials = self._trials_of(data)
        pids = np.concatenate([trial.labels.query_pids for trial in trials])
        scores = {"success": np.where(full[:, 1] > 0, full[:, 0], np.nan)}
        return Scores(np.array(means)[:, None], QueryResults(scores, pids, tuple(t.num_queries for t in trials), ()))

    def feature_writer(self, folder: Path) -> Writer:  # noqa: ARG002 - a hook's
        """Refuse: the features are those of the plain task."""
        raise ConfigError("model.attack: features with a trigger are not written; predict without model.attack")

    def list_writer(self, folder: Path) -> Writer:  # noqa: ARG002 - a hook's
        """Refuse: each victim has a gallery of its own."""
        raise ConfigError("model.attack: lists with a trigger are not written; leave save_ranking out")

    def _rows(self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, blocks: Sequence[slice]) -> Floats:
        worn_query = query[:, query.shape[1] // 2 :]
        to_plain, to_worn = (Similarity(worn_query, g, self.plain.settings.distance) for g in gallery.chunk(2, dim=1))
        people, shown = np.unique(labels.gallery_pids, return_inverse=True)
        number_of = {int(pid): number for number, pid in enumerate(people)}
        victims = np.isin(people, labels.query_pids) & ~np.isin(people, labels.junk_pids)
        shown_there, victims_there = (torch.from_numpy(array).to(query.device) for array in (shown, victims))
        shares = []
        for rows in blocks:
            wearers = [number_of.get(int(pid), -1) for pid in labels.query_pids[rows]]
            junk = np.zeros((len(wearers), len(shown)), dtype=bool)
            junk[:, labels.junk_columns] = True
            for row, number in zip(junk, range(rows.start, rows.stop), strict=True):
                row[labels.positives_and_junk(number)[1]] = True
            plain, worn = to_plain.block(rows), to_worn.block(rows)
            wearers_there = torch.tensor(wearers, device=query.device)
            junk_there = torch.from_numpy(junk).to(query.device)
            shares.append(successes(plain, worn, shown_there, wearers_there, junk_there, victims_there).cpu().numpy())
        of_all = np.concatenate(shares)
        return np.stack([np.nan_to_num(of_all), np.isfinite(of_all)], axis=1)

    def _trials_of(self, data: ScoredSet) -> list[Trial]:
        settings = self.plain.settings
        return trials_of(data.images, settings.camera_aware, settings.junk_pids)
