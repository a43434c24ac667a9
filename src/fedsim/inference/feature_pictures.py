"""Pictures and tables from features, as files: single queries, domain confusion, and points of the plane.

``fedsim report`` writes them for a finished run, and :class:`fedsim.inference.pictures.Pictures` during a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsim.core.names import file_names
from fedsim.core.replaced_run import CONFUSION
from fedsim.evaluation.pictures import write_picture
from fedsim.inference.projection import IMAGES, project_features
from fedsim.inference.queries import ChosenQueries, choose_queries, count_first_images, word_of
from fedsim.inference.run_features import RunFeatures, each_usable
from fedsim.report.features import Chosen, Row, confusion_matrices, draw_confusion, write_rows
from fedsim.report.projection import Projection, Projector, draw_projection

_TOP = 10


def write_queries(folder: Path, features: RunFeatures, queries: Chosen, num: int) -> list[list[Row]]:
    """Write a picture and rows of chosen queries per model and test set; return the rows.

    See :func:`fedsim.inference.queries.choose_queries`, also for errors.
    """
    chosen = choose_queries(features, queries, num, _TOP)
    for model in features.models:  # of an earlier choice
        for suffix in ("csv", "png"):
            (folder / f"{model.name}.{suffix}").unlink(missing_ok=True)

    def written(lists: ChosenQueries) -> list[Row]:
        rows = _of_round(features, lists.rows(), chosen=word_of(queries))
        write_picture(folder / f"{lists.model.name}.png", lists.picture())
        write_rows(folder / f"{lists.model.name}.csv", rows)
        return rows

    return each_usable(chosen, written)


def write_confusion(folder: Path, features: RunFeatures) -> list[Row]:
    """Write the domain confusion of all models, and return its rows.

    See :func:`fedsim.inference.queries.count_first_images`, also for errors.
    """
    rows = _of_round(features, count_first_images(features))
    draw_confusion(confusion_matrices(rows), folder / f"{CONFUSION}.png")
    write_rows(folder / f"{CONFUSION}.csv", rows)
    return rows


def write_projections(folder: Path, features: RunFeatures, projector: Projector, num: int = IMAGES) -> list[Projection]:
    """Write a figure and rows per model, of at most ``num`` images of a set, beside those of the other projector.

    See :func:`fedsim.inference.projection.project_features` for errors.
    """
    projections = project_features(features, projector, num)
    owners = file_names(dict.fromkeys(p.file_owner for p in projections if p.file_owner))
    for projection in projections:
        name = "@".join(filter(None, [f"{projector}-{projection.model}", owners.get(projection.file_owner)]))
        draw_projection(projection, folder / f"{name}.png")
        write_rows(folder / f"{name}.csv", _of_round(features, projection.rows()))
    return projections


def _of_round(features: RunFeatures, rows: Sequence[Row], **about: str) -> list[Row]:
    """Return rows with the round of their model before them: a run may have gone on since."""
    return [{"round": features.round_ or "", **about, **row} for row in rows]
