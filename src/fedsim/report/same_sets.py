"""Whether a run has the data sets of a paper's row, in the same versions, and is scored in the same way."""

from __future__ import annotations

from collections.abc import Iterator

from fedsim.papers.files import Config
from fedsim.report.differences import IGNORED, Difference, differences_from
from fedsim.report.runs import Run

_OF_SETS = ("data.source", "data.unseen", "data.public", "data.manifest", "data.partition", "data.parts", "data.labels",
            "data.generated", "data.max_images", "data.max_identities", "data.limit_client_batches", "data.on_corrupt",
            "data.dry_run", "model.evaluation")  # fmt: skip
"""Settings that say on whose images clients train, and on whose and how they are scored. Held-out people
(``data.val``), the size of images and their augmentation are ordinary differences."""
_NO_CHANGE = ("model.evaluation.test_during_fit", "model.evaluation.ensemble")
"""They add scores, or leave them out, and change none."""


def wrong_sets(row: Config, run: Run) -> Iterator[str]:
    """Yield why the data sets of a run, or how they are scored, are not those of a paper's row.

    Each reason continues a sentence about the run. ``row``: all settings of the row, which leaves one data set out.
    """
    differences = differences_from(row, run.config)
    yield from (f"has other sets than the row: {text}" for text in map(str, filter(_is_of_sets, differences.listed)))
    for name in differences.unknown:
        if _is_of_sets(Difference(name, "", "")):
            yield f"has other sets than the row, perhaps: {name} is not in its config"
    left_out = row["data"]["unseen"]
    if sorted(run.unseen) != sorted(left_out):
        yield f"was scored on other unseen sets than the row: {_names(run.unseen)} (row: {_names(left_out)})"
    if trained := sorted({*left_out} & {*run.summary["clients"]}):
        yield f"has its target among its sources: a client trained on {trained[0]}"


def _is_of_sets(difference: Difference) -> bool:
    name = difference.name
    if name in _NO_CHANGE or name in IGNORED:
        return False
    return any(name == setting or name.startswith(f"{setting}.") for setting in _OF_SETS)


def _names(names: object) -> str:
    return ", ".join(sorted(map(str, names))) if isinstance(names, list | set) and names else "none"
