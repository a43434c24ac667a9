"""Scoring a federation as classifiers: top-1 accuracy on images of the training's classes.

Ranks share the work as in retrieval. Models classify the queries of a set, or its gallery if there are no queries. A
global model is scored only if the head is shared; local and personalised models use the head that they trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.federated import RetrievalSet
from fedsim.data.images import Index
from fedsim.data.pixels import Pixels
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.plan import ScoringJob, SplitName
from fedsim.evaluation.settings import Evaluation
from fedsim.training.features import run_batches
from fedsim.training.flat_model import FlatModel


def evaluator_for(settings: Evaluation) -> type[Evaluator]:
    """Return the evaluator of ``settings.task``."""
    return ClassificationEvaluator if settings.task == "classification" else Evaluator


def hits_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which images are classified right, bool [n]: the first of equal logits counts, and all must be finite.

    ``logits`` are [n, Z], ``labels`` int64 [n], 0 to Z - 1.

    >>> hits_of(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    largest = logits.amax(dim=1, keepdim=True)
    first = (logits == largest).int().argmax(dim=1)
    return (first == labels) & logits.isfinite().all(dim=1)


class ClassificationEvaluator(Evaluator):
    """Scores models by the share of images whose class has the largest logit; see :class:`Evaluator`.

    Raises ConfigError if each client has class numbers of its own.
    """

    def __post_init__(self) -> None:
        """Check that a class has one label."""
        super().__post_init__()
        if self.federated.classes is None:
            raise ConfigError(
                "data.labels: own numbers each client's classes from 0, so a test image has no label; set it to common"
            )
        if self.federated.has_unlabelled:
            raise ConfigError(
                "model.evaluation.task: classification needs heads, which clients that cluster their images have not; "
                "leave model.client.cluster out"
            )

    def write_features(self, folder: Path, maps: Path | None = None) -> list[Path]:  # noqa: ARG002 - as in retrieval
        """Raise ConfigError: there are none."""
        what = "classification has no retrieval features to write"
        raise ConfigError(f"model.evaluation.task: {what}; set it to retrieval")

    def score(self, split: SplitName, trained: Any = (), rankings: Path | None = None) -> dict[str, float]:
        """Score all models; see :meth:`Evaluator.score`."""
        if rankings is not None:
            raise ConfigError("save_ranking: classification ranks nothing; leave it out")
        return super().score(split, trained)

    def _sets(self, split: SplitName, domain: str) -> RetrievalSet:
        """Return the images to classify as queries of an empty gallery."""
        sets = super()._sets(split, domain)
        images = sets.query if len(sets.query) else sets.gallery
        return RetrievalSet(images, images.take(np.empty(0, dtype=np.int64)))

    def _check(self, split: SplitName, domain: str) -> None:
        """Raise DataError if there is an image of another class."""
        classes, pids = self._classes, self._sets(split, domain).query.pids
        if not len(pids):
            raise DataError(f"{split} set of {domain}: has no images to classify")
        strange = np.setdiff1d(pids, classes)
        if len(strange):
            raise DataError(
                f"{split} set of {domain}: class {strange[0]} is in no client's data set; "
                "set model.evaluation.task to retrieval for identities that nobody trains on"
            )

    def _width(self, model: FlatModel) -> int:  # noqa: ARG002 - all heads are as wide
        return len(self._classes)

    def _outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        """Return logits, float32 [n, Z]."""
        head, network = model.head, model.network.eval()
        return run_batches(lambda x: head(network(x).neck), images, self._width(model), self.settings, model.device)

    def _blank(self, split: SplitName, job: ScoringJob) -> list[Tensor]:
        """Return one table: per image 1 if it is classified right."""
        return [torch.zeros(len(self._sets(split, job.domain).query), 1, dtype=torch.float64)]

    def _score(
        self,
        split: SplitName,
        job: ScoringJob,
        query: Tensor,
        gallery: Tensor,  # noqa: ARG002 - empty
    ) -> Iterator[NDArray[np.float64]]:
        pids = self._sets(split, job.domain).query.pids
        labels = torch.from_numpy(np.searchsorted(self._classes, pids)).to(query.device)
        hits = hits_of(query, labels).double().cpu().numpy()[:, None]
        yield hits if self._is_mine(job, 0) else np.zeros_like(hits)

    def _metrics_of(self, tables: list[Tensor]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return means over images [1, 1], and no curve."""
        return np.array([[float(table.sum()) / len(table)] for table in tables]), np.empty(0)

    def _of_queries(self, table: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return which images are classified right."""
        return {"top1": table[:, 0]}

    @property
    def _classes(self) -> Index:
        assert self.federated.classes is not None
        return self.federated.classes
