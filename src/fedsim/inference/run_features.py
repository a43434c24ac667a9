"""The features that ``fedsim predict`` has left in a run directory, with the images that they are of."""

from __future__ import annotations

import glob
import logging
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jsonargparse import ArgumentParser
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import file_names, metric_name
from fedsim.core.readable import files_in, has_file
from fedsim.core.replaced_run import FEATURES, files_of_sets, read_round
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import FederatedData
from fedsim.data.images import Images
from fedsim.evaluation.feature_file import read_features
from fedsim.evaluation.pictures import first_images
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.evaluation.retrieval import trials_of
from fedsim.evaluation.settings import Evaluation
from fedsim.parsing.class_names import missing_class
from fedsim.report.runs import Run

log = logging.getLogger(__name__)
Part = TypeVar("Part")
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, eq=False)
class ModelOnSet:
    """The features of one test set by one model: Q queries, and G gallery images."""

    name: str
    """of the file, without its suffix"""
    data_set: str
    kind: str
    """of the model: global, personalised or ensemble"""
    owner: str
    """the client of a personalised model, the architecture of a global one; empty if there is only one"""
    query: Tensor
    """[Q, D]"""
    gallery: Tensor
    """[G, D]"""
    labels: RetrievalLabels
    """with the run's rules for junk"""
    query_images: Images
    gallery_images: Images

    @property
    def title(self) -> str:
        """The model as a text."""
        return f"{self.kind} {self.owner}".strip()


@dataclass(frozen=True, eq=False)
class RunFeatures:
    """All features of a run."""

    models: list[ModelOnSet]
    settings: Evaluation
    data: FederatedDataModule
    """kept, as the drawn images of a dry run lie in a folder of its own"""
    round_: int | None = None
    """of the models, from 1; None: unknown"""


def read_run_features(run: Run) -> RunFeatures:
    """Read the features of a run's test sets, and list the images that they are of, by the run's config.

    Raises:
        DataError: if the run has no config or no features, or the images of all sets are gone or others.
        ConfigError: if the run classifies.
    """
    if not run.config:
        raise DataError(f"{run.folder}: holds no config.yaml, so its images are unknown; give a run of fedsim fit")
    settings = Evaluation(**_section(run.config, "model").get("evaluation", {}))
    if settings.task != "retrieval":
        raise ConfigError(f"{run.folder}: the run classifies, and ranks no galleries; give a run of retrieval")
    folder, data = run.folder / FEATURES, _data_of(run)
    models = each_usable(_files(folder, data.federated, run), lambda file: _opened(file, data.federated, settings))
    if not models:
        raise DataError(
            f"{folder}: holds no features of test sets; write them by "
            f"fedsim predict --ckpt_path {quote(str(run.folder))}"
        )
    return RunFeatures(models, settings, data, read_round(folder))


def each_usable(parts: Iterable[Part], draw: Callable[[Part], Drawn]) -> list[Drawn]:
    """Draw each part, and return the results; a part whose data cannot be used is left out, with a line.

    Raises:
        DataError: of the first one, if none can be used.
    """
    drawn, errors = list[Drawn](), list[DataError]()
    for part in parts:
        try:
            drawn.append(draw(part))
        except DataError as error:
            errors.append(error)
    if errors and not drawn:
        raise errors[0]
    for left_out in errors:
        log.warning("left out: %s", left_out)
    return drawn


def names_of(images: Images, word: str) -> list[str]:
    """Return the names of image files; an image without a file is named by ``word`` and its position, from 0.

    >>> from fedsim.data.images import ImageFiles
    >>> names_of(ImageFiles([Path("query/0001_c1.jpg")]), "query")
    ['0001_c1.jpg']
    """
    return [f"{word} {number}" if path is None else path.name for number, path in enumerate(images.locations())]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _data_of(run: Run) -> FederatedDataModule:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedDataModule, "data")
    try:
        arguments = parser.parse_object({"data": dict(_section(run.config, "data"))})
    except ArgumentError as error:  # the class of a source may be gone
        reason = " ".join(str(error).split())
        problem = missing_class("data.source", reason, "this") or reason[:200]
        raise ConfigError(f"{run.folder / 'config.yaml'}: data: {problem}") from error
    data: FederatedDataModule = parser.instantiate(arguments)["data"]
    if data.on_corrupt == "skip":
        data.prepare_data()  # its images have no features
    return data


class _File(NamedTuple):
    """A file of features; see :class:`ModelOnSet`."""

    path: Path
    data_set: str
    kind: str
    owner: str


def _files(folder: Path, federated: FederatedData, run: Run) -> Iterator[_File]:
    """Yield the files of features of the run's test sets."""
    scores = (run.summary["final"] or {}).get("metrics", {})
    clients = {file: name for name, file in file_names([client.name for client in federated.clients]).items()}
    for data_set, stem in files_of_sets(federated.tests).items():
        if has_file(path := folder / f"{stem}.npz"):
            owners = [client.name for client in federated.clients if data_set in client.tests]
            if run.primary == "personalised" and data_set not in federated.unseen:
                yield _File(path, data_set, "personalised", owners[0] if len(owners) == 1 else "")
            else:
                has_ensemble = any(key.startswith(f"{metric_name('test', 'ensemble', data_set)}/") for key in scores)
                is_global = run.primary == "global" or not has_ensemble
                yield _File(path, data_set, "global" if is_global else "ensemble", "")
        for path in files_in(folder, f"{glob.escape(stem)}@*.npz"):
            owner = path.stem.removeprefix(f"{stem}@")
            kind = "personalised" if owner in clients else "global"
            yield _File(path, data_set, kind, clients.get(owner, owner))


def _opened(file: _File, federated: FederatedData, settings: Evaluation) -> ModelOnSet:
    """Open a file of features, and find its images; raise DataError if these are others than when it was written."""
    path, sets = file.path, federated.tests[file.data_set]
    labels = trials_of(sets, settings.camera_aware, tuple(settings.junk_pids))[0].labels
    query, gallery, written = read_features(path)
    images = first_images(sets)
    pairs = [
        (written.query_pids, labels.query_pids), (written.query_camids, labels.query_camids),
        (written.gallery_pids, labels.gallery_pids), (written.gallery_camids, labels.gallery_camids),
    ]  # fmt: skip
    if not all(np.array_equal(*pair) for pair in pairs) or not _have_names(path, *images):
        raise DataError(
            f"{path}: is of other images than {file.data_set} has now: {len(query)} queries and {len(gallery)} gallery "
            f"images, now {len(images[0])} and {len(images[1])}; bring the images back, or repeat fedsim predict"
        )
    model = ModelOnSet(path.stem, *file[1:], query, gallery, labels, *images)
    if not (query.isfinite().all() and gallery.isfinite().all()):
        raise DataError(f"{model.name}: features of {model.title} are not finite; did the training diverge?")
    return model


def _have_names(path: Path, query: Images, gallery: Images) -> bool:
    """Whether images have the names of files that a file of features holds, in whatever folder they are now."""
    with np.load(path) as file:
        if "query_files" not in file.files:
            return True
        pairs = [(file["query_files"], query), (file["gallery_files"], gallery)]
    return all(
        [Path(name).name for name in names.tolist()] == [path.name if path else "" for path in images.locations()]
        for names, images in pairs
    )
