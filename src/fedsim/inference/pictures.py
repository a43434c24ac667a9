"""Pictures while a federation trains: the same as of ``fedsim report``, of the global model, for every logger."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer

from fedsim.core.arguments import ChecksArguments
from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.core.names import one_line
from fedsim.core.replaced_run import PICTURES
from fedsim.data.federated import RetrievalSet
from fedsim.evaluation.evaluator import Evaluator
from fedsim.evaluation.pictures import first_images
from fedsim.evaluation.plan import ScoringJob
from fedsim.evaluation.retrieval import Retrieval, trials_of
from fedsim.evaluation.scorer import Outputs
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.callbacks.picture_loggers import Embedding, has_projector, log_embedding, log_picture
from fedsim.federation.callbacks.summary import RunSummary, federation_of
from fedsim.federation.checks.compatibility import data_of
from fedsim.federation.events import callbacks_of, strategy_of
from fedsim.inference.feature_pictures import write_confusion, write_projections, write_queries
from fedsim.inference.projection import draw_thumbnails, sample_people
from fedsim.inference.run_features import ModelOnSet, RunFeatures
from fedsim.report.course import COURSE, add_to_course, round_folder, rounds_with_pictures
from fedsim.report.projection import Projection, Projector

log = logging.getLogger(__name__)
_FIELD = "trainer.callbacks: Pictures"
_SIDE = 32  # of a thumbnail, pixels


class Pictures(ChecksArguments, Callback, option="trainer.callbacks"):
    """Draws single queries, domain confusion and points of features in scored rounds, into RUN/pictures and loggers.

    They are pictures of the global model on test images, whose features are extracted for them by all ranks. W&B,
    TensorBoard and MLflow get them, too.

    Args:
        every: each n-th scored round is drawn.
        queries: worst or best: queries of each test set with the lowest or highest average precision; null: none.
        num_queries: of each test set.
        confusion: from which data set and camera wrong first images come.
        projection: pca or tsne: features as points of the plane, and in TensorBoard's projector; null: none.
        sample: images of a test set, at most. Of larger sets, whole people with a query are drawn by a fixed seed.
    """

    def __init__(
        self,
        every: int = 1,
        queries: Literal["worst", "best"] | None = "worst",
        num_queries: int = 8,
        confusion: bool = True,
        projection: Projector | None = "pca",
        sample: int = 1000,
    ) -> None:
        at_least(_FIELD, 1, every=every, num_queries=num_queries, sample=sample)
        self.every, self.queries, self.num_queries = every, queries, num_queries
        self.confusion, self.projection, self.sample = confusion, projection, sample
        self._scored = 0
        self._run: Path | None = None
        self._evaluator: Evaluator | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Count anew; a checkpoint's count comes after it."""
        self._scored = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the images.

        Raises:
            ConfigError: if the run classifies, has no directory or no global model, or ``sample`` is too small.
        """
        self._evaluator, federation = None, federation_of(pl_module)
        if trainer.fast_dev_run:  # type: ignore[attr-defined] # Lightning sets it; such a fit writes nothing
            return
        self._run = next((c.path.parent for c in callbacks_of(trainer) if isinstance(c, RunSummary)), None)
        if self._run is None:
            raise ConfigError(f"{_FIELD}: draws into the run directory; give fedsim.Trainer a run_dir")
        if federation.settings.evaluation.task != "retrieval":
            raise ConfigError(f"{_FIELD}: the run classifies, and ranks no galleries; leave the callback out")
        self._evaluator = sampled(
            federation.evaluator, federation.settings.evaluation, str(trainer.precision), self.sample
        )
        if not self._evaluator.global_jobs():
            raise ConfigError(
                f"{_FIELD}: shows the global model, and this run has none that can be scored on a test set; "
                "leave the callback out"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Extract features on all ranks, and draw on the first one. A missing picture does not end the run."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or self._evaluator is None or self._run is None:
            return
        self._scored += 1
        if self._scored % self.every:
            return
        evaluator, settings = self._evaluator, federation_of(pl_module).settings.evaluation
        with strategy_of(trainer).together():
            models = [
                _model_of(evaluator, job, outputs, settings)
                for job, outputs in evaluator.extractor.outputs(evaluator.global_jobs())
                if trainer.is_global_zero
            ]
        if trainer.is_global_zero:
            round_ = trainer.current_epoch + 1
            self._draw(trainer, RunFeatures(models, settings, data_of(trainer), round_), self._run, round_)

    def _draw(self, trainer: Trainer, features: RunFeatures, run: Path, round_: int) -> None:
        """Write the pictures of a round, and give them to the loggers; one that fails leaves the others."""
        folder, projections = round_folder(run, round_), list[Projection]()
        for later in rounds_with_pictures(run):
            if later >= round_:  # of rounds that a resumed run trains again
                shutil.rmtree(round_folder(run, later), ignore_errors=True)
        with _going_on(round_, "queries"):
            if self.queries is not None:
                write_queries(folder, features, self.queries, self.num_queries)
        with _going_on(round_, "confusion"):
            if self.confusion and len({model.data_set for model in features.models}) > 1:
                add_to_course(run, round_, write_confusion(folder, features))
        with _going_on(round_, "projection"):
            if self.projection is not None:
                projections += write_projections(folder, features, self.projection, self.sample)
        course = run / PICTURES / f"{COURSE}.png"
        with _going_on(round_, "loggers"):
            for path in [*sorted(folder.glob("*.png")), *([course] if course.is_file() else [])]:
                log_picture(trainer, path, round_)
        with _going_on(round_, "projector"):
            for projection in projections if has_projector(trainer) else ():
                log_embedding(trainer, _embedding(features, projection, self.sample), round_)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of scored rounds."""
        return {"scored": self._scored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._scored = state_dict["scored"]


@contextmanager
def _going_on(round_: int, pictures: str) -> Iterator[None]:
    """Log an error of the block, of any library, and go on: a missing picture does not end a run."""
    try:
        yield
    except Exception as error:
        log.warning("round %d: not all pictures are drawn (%s): %s", round_, pictures, one_line(str(error), 200))


def sampled(evaluator: Evaluator, settings: Evaluation, precision: str, num: int) -> Evaluator:
    """Return an evaluator of the same models on at most ``num`` images of each set; all ranks share each set."""
    scorer = Retrieval(settings, precision, choose=partial(sample_set, settings, num))
    # with opened images of its own: those of a sample have other positions
    extractor = replace(evaluator.extractor, scorer=scorer)
    return Evaluator(evaluator.plan, extractor, scorer, strategy=evaluator.strategy, share_from=0)


def sample_set(settings: Evaluation, num: int, images: RetrievalSet) -> RetrievalSet:
    """Return a set, or its first random split; of more than ``num`` images, those of whole people with a query.

    Raises:
        ConfigError: if each person has more than ``num`` images.
    """
    if images.splits:
        first = images.splits[0]
        images = RetrievalSet(images.gallery.take(first.query), images.gallery.take(first.gallery))
    if len(images.query) + len(images.gallery) <= num:
        return images
    labels = trials_of(images, settings.camera_aware, tuple(settings.junk_pids))[0].labels
    query, gallery = sample_people(labels, num)
    if not len(query):
        raise ConfigError(f"{_FIELD}.sample: {num} is less than the images of each person of a test set; raise it")
    return RetrievalSet(images.query.take(query), images.gallery.take(gallery))


def _model_of(evaluator: Evaluator, job: ScoringJob, outputs: Outputs, settings: Evaluation) -> ModelOnSet:
    labels = trials_of(job.data.images, settings.camera_aware, tuple(settings.junk_pids))[0].labels
    owner = job.row.arch if len(evaluator.plan.models) > 1 else ""
    query, gallery = outputs.query.cpu(), outputs.gallery.cpu()
    names = evaluator.plan.file_name(job), job.data.domain, job.row.kind, owner
    return ModelOnSet(*names, query, gallery, labels, *first_images(job.data.images))


def _embedding(features: RunFeatures, projection: Projection, num: int) -> Embedding:
    columns = ("data set", "client", "camera", "identity", "part", "image")
    rows = [
        [str({**row, "client": projection.clients[number]}[name]) for name in columns]
        for row, number in zip(projection.rows(), projection.of_set.tolist(), strict=True)
    ]
    thumbnails = draw_thumbnails(features, projection, num, _SIDE)
    return Embedding(projection.title.replace(" ", "-"), projection.features, columns, rows, thumbnails)
