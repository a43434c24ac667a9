"""The card of a model: what it was trained on, how, what it scores, and what it is not for.

The metadata are those of the Hugging Face hub's model cards (docs of ``huggingface_hub.ModelCardData``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from tabulate import tabulate

from fedsim.core.metrics import LABELS
from fedsim.core.names import metric_name
from fedsim.report.run_files import Queries
from fedsim.report.runs import Run
from fedsim.report.significance import over_people

UNKNOWN = "unknown"
"""the hub's word for a licence that is not given"""

_LIMITS = """\
- The scores are of the test sets above. On people and cameras that no client has seen, expect less.
- Features are compared within one model; those of another model, or of another round, are not comparable.
- Who is rarely in the training images, by clothing, light, or view, may be recognised less often: test on your own
  images before use.
- Recognising people needs their consent or another legal ground. The owners of the data sets may restrict the use of
  models that are trained on them: see their terms."""


class Score(NamedTuple):
    """A metric of the model on one test set; fractions of 1."""

    data_set: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    """95 % interval over people; None if there are no scores of single queries"""


def model_card(run: Run | None, about: Mapping[str, Any], config: Mapping[str, Any], licence: str | None) -> str:
    """Return the content of a card.

    Args:
        run: the model's run; None: there are no scores, and no data sets are known.
        about: method, model and round.
        config: of the run.
        licence: the hub's word for the licence; None: it is to be filled in.
    """
    scores = [] if run is None else list(scores_of(run, about))
    metadata = {
        "library_name": "fedsim",
        "license": licence or UNKNOWN,
        "pipeline_tag": "image-feature-extraction",
        "tags": ["person-re-identification", "federated-learning"],
        **({"model-index": [_index(about, scores)]} if scores else {}),
    }
    height, width = config["data"].get("test_size") or config["data"]["size"]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---",
        f"# {about['method']}: features of people\n",
        f"The {about['model']} model of {about['method']} after round {about['round']}, trained by federated learning "
        f"with fedsim. It maps an image of {height} x {width} pixels to features; the same person has similar ones, by "
        f"{config['model']['evaluation']['distance']} distance.\n",
        "```python\nimport fedsim\n\n"
        'features = fedsim.load_model("FOLDER").embed(["a.jpg", "b.jpg"])  # [2, D] float32\n```',
        f"\n## Licence\n\n{licence or 'Not given: fill it in. The terms of the data sets limit the choice.'}",
    ]
    if run is not None:
        parts += [f"\n## Training\n\n{_training(run, config)}", f"\n## Data\n\n{_data(run)}"]
    table = _table(scores) if scores else "There are no test scores of this model."
    parts += [f"\n## Scores\n\n{table}", f"\n## Limits\n\n{_LIMITS}\n"]
    return "\n".join(parts)


def scores_of(run: Run, about: Mapping[str, Any]) -> Iterator[Score]:
    """Yield mAP and rank-1, or the accuracy, of the model on each test set, if the run has scored this very model."""
    kind, _, client = str(about["model"]).partition(" ")
    kind = {"global": "global", "client": "personalised"}.get(kind, "")
    evaluations = [part for part in (run.summary.get("final"), run.summary.get("best")) if part]
    evaluation = next((part for part in evaluations if part["round"] == about["round"]), None)
    if evaluation is None or not kind:
        return
    queries = run.queries.results if run.queries and run.queries.round_ == about["round"] else {}
    for name in [client] if client else [name for name in run.test_sets if name not in ("seen", "unseen")]:
        for metric in ("top1",) if run.classifies else ("mAP", "rank1"):
            value = evaluation["metrics"].get(metric_name("test", kind, name, metric))
            if value is not None:
                yield Score(name, metric, value, _interval(queries.get(metric_name(kind, name)), metric))


def _interval(queries: Queries | None, metric: str) -> tuple[float, float] | None:
    if queries is None or metric not in queries.scores or queries.num_splits > 1:
        return None
    estimate = over_people(queries.scores[metric], queries.pids)
    return estimate.low, estimate.high


def _index(about: Mapping[str, Any], scores: list[Score]) -> dict[str, Any]:
    """Return the scores as an entry of the hub's ``model-index``."""
    of_sets: dict[str, list[Score]] = {}
    for score in scores:
        of_sets.setdefault(score.data_set, []).append(score)
    results = [
        {
            "task": {"type": "image-feature-extraction", "name": "person re-identification"},
            "dataset": {"type": name, "name": name, "split": "test"},
            "metrics": [
                {"type": s.metric, "name": LABELS.get(s.metric, s.metric), "value": round(s.value, 4)} for s in of_set
            ],
        }
        for name, of_set in of_sets.items()
    ]
    return {"name": str(about["method"]), "results": results}


def _training(run: Run, config: Mapping[str, Any]) -> str:
    backbone = str(config["model"]["backbone"]["class_path"]).rpartition(".")[2]
    lines = [
        f"- Method: {run.method}; {run.summary['rounds']} rounds; seed {run.summary['seed']}.",
        f"- Clients: {', '.join(run.summary['clients'])}.",
        f"- Backbone: {backbone}.",
        f"- Fingerprint of the settings: {run.summary['fingerprint']}.",
        f"- Software: {', '.join(f'{name} {version}' for name, version in run.summary['versions'].items())}.",
    ]
    return "\n".join(lines)


def _data(run: Run) -> str:
    """Return a table of the data sets: their role, and their people, cameras and images."""
    sets = (run.summary.get("data") or {}).get("sets") or {}
    if not sets:
        return "The run did not record its data."
    rows = []
    for name, parts in sets.items():
        role = "unseen" if name in run.unseen else "client"
        rows.append([_cell(name), role, *(_counts(parts.get(split)) for split in ("train", "query", "gallery"))])
    table = tabulate(rows, ["data set", "role", "training", "queries", "gallery"], "github", disable_numparse=True)
    return f"People / cameras / images.\n\n{table}"


def _cell(name: str) -> str:
    return name.replace("|", "\\|")  # which would end the cell


def _counts(part: Mapping[str, Any] | None) -> str:
    return "-" if not part else f"{part['people']} / {part['cameras']} / {part['images']}"


def _table(scores: list[Score]) -> str:
    rows = []
    for score in scores:
        interval = "-" if score.interval is None else f"{100 * score.interval[0]:.1f} to {100 * score.interval[1]:.1f}"
        rows.append(
            [_cell(score.data_set), LABELS.get(score.metric, score.metric), f"{100 * score.value:.1f}", interval]
        )
    table = tabulate(rows, ["data set", "score", "percent", "95 % interval"], "github", disable_numparse=True)
    return f"{table}\n\nIntervals are bootstrapped over people, each with all their queries; one training, one seed."
