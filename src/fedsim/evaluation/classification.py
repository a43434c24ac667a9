"""The task of classification: top-1 accuracy on images of the training's classes.

Models classify the queries of a set, or its gallery if there are no queries. A global model is scored only if the head
is shared; local and personalised models use the head that they trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import ACCURACIES
from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.pixels import Pixels
from fedsim.evaluation.ranking import Floats
from fedsim.evaluation.scorer import Outputs, ScoredSet, Scorer, Scores, Writer, passes_of
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import QueryResults
from fedsim.training.features import run_batches
from fedsim.training.flat_model import FlatModel


def hits_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which images are classified right, bool [n]: the first of equal logits counts, and all must be finite.

    ``logits`` are [n, Z], ``labels`` int64 [n], 0 to Z - 1.

    >>> hits_of(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    largest = logits.amax(dim=1, keepdim=True)
    first = (logits == largest).int().argmax(dim=1)
    return (first == labels) & logits.isfinite().all(dim=1)


@final
class Classification(Scorer):
    """Scores logits [n, Z] by the share of images whose class has the largest one; images are queries, in one trial.

    ``precision`` is that of the run: 32-true or bf16-mixed. Raises ConfigError if each client has class numbers of its
    own.
    """

    metrics = ACCURACIES

    def __init__(self, settings: Evaluation, federated: FederatedData, precision: str = "32-true") -> None:
        if federated.classes is None:
            raise ConfigError(
                "data.labels: own numbers each client's classes from 0, so a test image has no label; set it to common"
            )
        if federated.has_unlabelled:
            raise ConfigError(
                "model.evaluation.task: classification needs heads, which clients that cluster their images have not; "
                "leave model.client.cluster out"
            )
        self.settings, self.classes, self.precision = settings, federated.classes, precision

    def select(self, images: RetrievalSet) -> RetrievalSet:
        """Return the images to classify as queries of an empty gallery."""
        chosen = images.query if len(images.query) else images.gallery
        return RetrievalSet(chosen, chosen.take(np.empty(0, dtype=np.int64)))

    def check(self, data: ScoredSet) -> None:
        """Raise DataError if there are no images, or if there is an image of another class."""
        pids = data.images.query.pids
        if not len(pids):
            raise DataError(f"{data.name}: has no images to classify")
        strange = np.setdiff1d(pids, self.classes)
        if len(strange):
            raise DataError(
                f"{data.name}: class {strange[0]} is in no client's data set; "
                "set model.evaluation.task to retrieval for identities outside of the training data"
            )

    def width(self, model: FlatModel) -> int:  # noqa: ARG002 - all heads are as wide
        """Return Z, the number of classes."""
        return len(self.classes)

    def outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        """Return logits, float32 [n, Z]."""
        head, network = model.head, model.network.eval()
        passes = passes_of(self.settings, self.precision, model)
        width, device = self.width(model), model.device
        return run_batches(lambda x: head(network(x).neck), images, width, self.settings, device, passes)

    def blank(self, data: ScoredSet) -> list[Tensor]:
        """Return one table: per image 1 if it is classified right."""
        return [torch.zeros(len(data.images.query), 1, dtype=torch.float64)]

    def score(self, data: ScoredSet, outputs: Outputs, is_assigned: Callable[[int], bool]) -> list[Floats]:
        """Return which images are classified right, 0 or 1 [n, 1]; all images are block 0."""
        pids, logits = data.images.query.pids, outputs.query
        labels = torch.from_numpy(np.searchsorted(self.classes, pids)).to(logits.device)
        hits = hits_of(logits, labels).double().cpu().numpy()[:, None]
        return [hits if is_assigned(0) else np.zeros_like(hits)]

    def results(self, data: ScoredSet, tables: Sequence[Tensor]) -> Scores:
        """Return the accuracy, and which images are classified right; there is no curve."""
        [table] = tables
        hits, pids = table.numpy()[:, 0], data.images.query.pids
        accuracy = np.array([[float(table.sum()) / len(table)]])
        return Scores(accuracy, QueryResults({"top1": hits}, pids, (len(pids),), ()))

    def feature_writer(self, folder: Path) -> Writer:  # noqa: ARG002 - as in retrieval
        """Raise ConfigError: there are no features."""
        raise ConfigError(
            "model.evaluation.task: classification has no retrieval features to write; set it to retrieval"
        )

    def list_writer(self, folder: Path) -> Writer:  # noqa: ARG002 - as in retrieval
        """Raise ConfigError: there are no lists."""
        raise ConfigError("save_ranking: classification ranks nothing; leave it out")
