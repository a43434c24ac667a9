"""Run directories of ``fedsim fit``, and rules: each selects the evaluations of a run that a table shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import ACCURACIES, MEANS, OF_PRECISION, OF_RANKS, comparable
from fedsim.core.metrics_rows import Row, metrics_files, numbers_in, read_rows
from fedsim.core.names import metric_name, metric_parts
from fedsim.core.readable import files_in, has_file
from fedsim.core.replaced_run import QUERIES_FILE, TESTS
from fedsim.parsing.config_files import read_config
from fedsim.report.doubts import contradictions_of, doubts_about, doubts_about_log, doubts_about_test
from fedsim.report.run_files import (
    Experiment,
    Queries,
    QueryFile,
    check_summary,
    end_of,
    experiment_of,
    read_evaluation,
    read_json,
    read_queries,
    spelled,
    written_at,
)
from fedsim.settings.changes import Change, read_changes
from fedsim.settings.configuration import fingerprint_from, flat
from fedsim.settings.effects import Flat
from fedsim.settings.identity import is_as_sealed

STUDY_FILE = "trials.log"
"""in the folder of a search: Optuna's journal of its trials"""
METRICS = (*OF_PRECISION, *OF_RANKS.values(), *ACCURACIES)


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory. Files are read on first use."""

    folder: Path
    summary: dict[str, Any]
    """content of summary.json"""
    name: str = ""
    """that the user gives it in a report; empty: none"""
    is_tested: bool = False
    """whether a report shows its scores of ``fedsim test``"""
    is_whole: bool = True
    """whether summary.json is as the run wrote it, as far as that is known"""

    @cached_property
    def rows(self) -> list[list[Row]]:
        """The rows of each metrics file; raises DataError if one cannot be read."""
        return [read_rows(path) for path in metrics_files(self.folder)]

    @cached_property
    def log(self) -> dict[int, dict[str, float]]:
        """Round, from 1 -> its logged values: training, bytes, and scores (fractions of 1) if it was evaluated.

        A round that a continued run repeats counts once, with its last values.

        Raises:
            DataError: if there is no log, or it cannot be read.
        """
        if not self.has_log:
            raise DataError(f"{self.folder}: holds no metrics.csv; was the run started with another logger only?")
        rounds: dict[int, dict[str, float]] = {}
        for row in (row for file_rows in self.rows for row in file_rows):
            rounds.setdefault(int(row["epoch"]) + 1, {}).update(self._spelled(numbers_in(row)))
        return dict(sorted(rounds.items()))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved settings; empty for runs that were not started by the command line."""
        path = self.folder / "config.yaml"
        return read_config(str(path)) if has_file(path) else {}

    @cached_property
    def queries(self) -> QueryFile | None:
        """Scores of single queries at the last evaluation; None if the run has no such file."""
        return read_queries(self.folder / QUERIES_FILE)

    @cached_property
    def tested(self) -> dict[str, Any] | None:
        """The newest scores of ``fedsim test``: checkpoint, its ``kind``, round, metrics; None if there are none."""
        tests = {path: read_evaluation(path) for path in files_in(self.folder / TESTS, "*.json")}
        if not tests:
            return None
        newest = tests[max(tests, key=lambda path: written_at(tests[path]) or path.stat().st_mtime)]
        return {**newest, "metrics": self._spelled(newest["metrics"])}

    @cached_property
    def settings(self) -> Flat:
        """All settings by option, with defaults; empty without a config."""
        return flat(self.config) if self.config else {}

    @cached_property
    def scored_by(self) -> Flat:
        """The settings by which its scores were made, those of the fit or of ``fedsim test``; empty if not known."""
        if not self.is_tested:
            return self.settings
        settings = (self.tested or {}).get("settings")
        return flat(settings) if settings else {}

    @property
    def scores(self) -> Mapping[str, float]:
        """The scores of the last evaluation, or of ``fedsim test``."""
        return dict(((self.tested if self.is_tested else self.summary["final"]) or {}).get("metrics", {}))

    @cached_property
    def experiment(self) -> Experiment:
        """All in which the run equals its repetitions with other seeds."""
        test, tested = [], self.tested if self.is_tested else None
        if tested is not None:
            test = [fingerprint_from(self.scored_by), (tested.get("data") or {}).get("digest", ""), tested["kind"]]
        return experiment_of(self.summary, self.config, self.settings, self.changes, test)

    @cached_property
    def contradictions(self) -> list[str]:
        """The differences between its files; each continues a sentence about it."""
        contradictions = [] if self.is_whole else ["has a summary.json that was edited"]
        if self.config:
            contradictions += contradictions_of(self.summary, self.config, self.settings)
        log = self.log if self.has_log else {}
        if self.has_log:
            contradictions += doubts_about_log(self.summary, self.rows, log)
        if self.is_tested and self.tested is not None:
            contradictions += doubts_about_test(self.summary, self.settings, self.tested, log)
        return contradictions

    @cached_property
    def doubts(self) -> list[str]:
        """The reasons for which nothing can be certified of the run."""
        doubts = doubts_about(self.summary, self.config, self.settings, self.changes, self.has_log)
        return [*doubts, *self.contradictions]

    @property
    def marks(self) -> list[str]:
        """The reasons why it is no run of its settings: it went on with others, or ended early.

        A summary without rounds, of another program or a damaged one, gives none.
        """
        if "rounds" not in self.summary:
            return []
        end = end_of(self.summary, self.settings)
        return ["changed"] * bool(self.changes) + [f"ended {end}"] * bool(end)

    @property
    def method(self) -> str:
        """The method; one that is not fedsim's by its whole path."""
        return str(self.settings["model.method"].value if "model.method" in self.settings else self.summary["method"])

    @property
    def changes(self) -> list[Change]:
        """The settings on which its numbers depend, and that it was continued with: it is of no single setting."""
        return [change for change in read_changes(self.summary.get("changes", [])) if change.counts]

    @property
    def has_log(self) -> bool:
        """Whether there is a log: a run may have had another logger only."""
        return bool(metrics_files(self.folder))

    @property
    def primary(self) -> str:
        """The kind of model that the method delivers."""
        return str(self.summary["primary"])

    @property
    def unseen(self) -> set[str]:
        """Test sets on which no client trained."""
        return set(self.summary["unseen"])

    @property
    def test_sets(self) -> list[str]:
        """Names of all test sets of the last evaluation, and ``seen`` and ``unseen``, the means over them.

        For a run without scores from its training, those of ``fedsim test``.
        """
        keys = _test_scores(self.summary["final"]) or _test_scores(self.tested)
        return list(dict.fromkeys(metric_parts(key)[2] for key in keys if key.count("/") == 3))

    @property
    def seen(self) -> list[str]:
        """Test sets of the clients that trained."""
        return [name for name in self.test_sets if name not in (*self.unseen, *MEANS)]

    @property
    def classifies(self) -> bool:
        """Whether the run was scored by top-1 accuracy, not by retrieval."""
        return any(key.endswith("/top1") for key in (self.summary["final"] or {}).get("metrics", {}))

    def setting(self, option: str) -> Any:
        """Return a setting, classes by their names; None if it is not set."""
        return self.settings[option].value if option in self.settings else None

    def queries_of(self, name: str, model_kind: str) -> Queries | None:
        """Return a model's results on single queries at the last evaluation; None if the run has no such file."""
        if self.queries is None or self.queries.round_ != (self.summary["final"] or {}).get("round"):
            return None
        return self.queries.results.get(metric_name(model_kind, name))

    def _spelled(self, scores: Mapping[str, float]) -> dict[str, float]:
        return spelled(scores, self.summary["clients"], self.summary["unseen"])

    def check(self) -> None:
        """Read every file that a report may need; raise DataError for the first damaged one."""
        if self.has_log:
            _ = self.log
        _ = self.config, self.queries, self.tested


def read_run(folder: Path, name: str = "", is_tested: bool = False) -> Run:
    """Open a run directory; raise DataError if the folder is not one, or its summary is damaged."""
    path = folder / "summary.json"
    if has_file(folder / STUDY_FILE):
        raise DataError(f"{folder}: is the folder of a search; give it alone, without a name, or run directories in it")
    if not has_file(path):
        raise DataError(f"{folder}: holds no summary.json; give the run directories of fedsim fit")
    summary = read_json(path)
    check_summary(summary, str(path))
    is_whole = is_as_sealed(summary)  # before names of an earlier version are replaced
    for part in ("final", "best"):
        if summary[part] is not None:
            summary[part]["metrics"] = spelled(summary[part]["metrics"], summary["clients"], summary["unseen"])
    return Run(folder, summary, name, is_tested, is_whole)


def _test_scores(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    metrics = (evaluation or {}).get("metrics", {})
    return {name: value for name, value in metrics.items() if name.startswith("test/")}


RuleName = Literal["last", "best", "best3", "oracle", "tested"]
CHOSEN_BY = {
    "last": "last: the last evaluation; nothing is chosen",
    "best": "best: the round with the best val/mAP (val/top1 of a classifier), on held-out images of the clients",
    "best3": "best3: the mean over three rounds that are chosen on test data",
    "oracle": "oracle: the best round on the test set itself; this choice needs the test labels",
    "tested": "tested: the checkpoint that fedsim test has scored",
}
"""Rule -> the round whose scores it shows, and by what it is chosen: for the notes of tables."""
BIG_SETS = ("market1501", "dukemtmc", "cuhk03np", "msmt17")
"""By these test sets, the authors of paper 003 choose rounds (from their code)."""
_NUM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule, applied to any run."""

    name: RuleName = "last"
    """last: the last evaluation; best: the one with the best val/mAP; best3: paper 003's, see :func:`best_rounds`;
    oracle: the best one of each model and test set, see :func:`best_of_each`; tested: the scores of ``fedsim test``"""
    sets: tuple[str, ...] = ()
    """for best3: the test sets whose rank-1 chooses; if empty: those of BIG_SETS that have clients in the run, or else
    all test sets that have clients"""
    horizon: int = 300
    """for best3: the last round that may be chosen"""
    by: Literal["rank1", "mAP"] = "rank1"
    """for oracle: the score by which a round is best"""

    def scores(self, run: Run) -> Mapping[str, float]:
        """Return a run's scores under this rule: ``test/kind/set/metric`` -> fraction of 1; empty before it has any."""
        if self.name == "best3":
            return mean_over_rounds(run.log, self.chosen(run))
        if self.name == "oracle":
            return best_of_each(run.log, run.seen, run.unseen, self.by)
        if self.name == "tested":
            if run.tested is None:
                raise DataError(f"{run.folder}: --rule tested needs the scores of fedsim test --ckpt_path {run.folder}")
            return dict(run.tested["metrics"])
        scores: Mapping[str, float] = (run.summary["best" if self.name == "best" else "final"] or {}).get("metrics", {})
        return scores

    def choosing_sets(self, run: Run) -> list[str]:
        """Return the test sets by which best3 chooses among a run's rounds.

        Raises:
            ConfigError: if the run lacks one of the requested test sets.
        """
        if missing := [name for name in self.sets if name not in run.test_sets]:
            raise ConfigError(
                f"--sets: {run.folder} has no test set {missing[0]}; choose from {', '.join(run.test_sets)}"
            )
        return list(self.sets) or [name for name in BIG_SETS if name in run.seen] or run.seen

    def evaluated(self, run: Run) -> list[int]:
        """Return the rounds that best3 may choose."""
        keys = [metric_name("test", run.primary, name, "rank1") for name in self.choosing_sets(run)]
        return [round_ for round_, row in run.log.items() if round_ <= self.horizon and all(key in row for key in keys)]

    def can_choose(self, run: Run) -> bool:
        """Return whether a run has enough evaluations; only best3 needs more than one."""
        return self.name != "best3" or len(self.evaluated(run)) >= _NUM_ROUNDS

    def chosen(self, run: Run) -> list[int]:
        """Return the three rounds of best3, the best one first.

        Raises:
            ConfigError: if the run was not scored by retrieval.
            DataError: if fewer than three rounds were evaluated.
        """
        if run.classifies:
            raise ConfigError(f"--rule: best3 chooses by rank-1, and {run.folder} classifies; give last or best")
        rounds = self.evaluated(run)
        if not self.can_choose(run):
            raise DataError(
                f"{run.folder}: --rule best3 needs three evaluations of its test sets up to round {self.horizon}, and "
                f"its logs hold {len(rounds)}; lower trainer.check_val_every_n_epoch, or give --rule last"
            )
        return best_rounds({r: run.log[r] for r in rounds}, run.primary, self.choosing_sets(run))

    def describe(self, run: Run) -> str:
        """Return a sentence about the rounds of best3: their number, all candidates, and the test sets that chose."""
        rounds = ", ".join(map(str, sorted(self.chosen(run))))
        return (
            f"best3 is the mean over rounds {rounds}: of the {len(self.evaluated(run))} rounds evaluated up to round "
            f"{self.horizon}, these have the highest mean rank-1 on {', '.join(self.choosing_sets(run))}"
        )


def best_rounds(evaluations: Mapping[int, Mapping[str, float]], model_kind: str, sets: Sequence[str]) -> list[int]:
    """Return the three rounds with the highest mean rank-1 over ``sets``, the highest first, then the earlier.

    Paper 003, Section 4.2: "we average the performance of three best-federated models from different epochs". Only
    the authors' code defines "best": by the mean rank-1 over the four large data sets. The choice is made on test data,
    so such numbers are optimistic. ``evaluations``: round -> scores of all models, by name. The scores of the model of
    ``model_kind`` on the test ``sets`` make the choice.

    >>> scores = {10: 0.3, 20: 0.5, 30: 0.4, 40: 0.5}
    >>> best_rounds({r: {"test/global/viper/rank1": s} for r, s in scores.items()}, "global", ["viper"])
    [20, 40, 30]
    """
    mean = {
        round_: sum(scores[metric_name("test", model_kind, name, "rank1")] for name in sets) / len(sets)
        for round_, scores in evaluations.items()
    }
    return sorted(mean, key=lambda round_: (-comparable(mean[round_]), round_))[:_NUM_ROUNDS]


def best_of_each(
    log: Mapping[int, Mapping[str, float]],
    seen: Collection[str],
    unseen: Collection[str],
    by: Literal["rank1", "mAP"] = "rank1",
) -> dict[str, float]:
    """Return the scores of each model on each test set in the round of its highest rank-1, the earliest of equals.

    The code behind the baseline numbers of paper 004 chooses in this way among the local epochs of its last round;
    here, the choice is among the evaluated rounds. It uses the test labels, so it cannot be made in practice.

    ``log``: round -> scores by name. ``seen`` are the test sets of clients that trained, ``unseen`` all others; the
    means over both are computed from the chosen scores. ``by``: mAP in place of rank-1; classifiers have top-1.

    >>> of = {1: {"test/local/a/rank1": 0.5, "test/local/a/mAP": 0.4}, 2: {"test/local/a/rank1": 0.2}}
    >>> best_of_each(of, ["a"], [])["test/local/a/mAP"]
    0.4
    """
    names = (name for row in log.values() for name in row if name.startswith("test/") and name.count("/") == 3)
    curves = dict.fromkeys(tuple(metric_parts(name)[1:3]) for name in names)
    best: dict[tuple[str, str], dict[str, float]] = {}
    for model_kind, domain in curves:
        if domain not in MEANS:
            rows = [_scores_below(row, f"{metric_name('test', model_kind, domain)}/") for row in log.values()]
            key = next(metric for metric in (by, "top1") if any(metric in row for row in rows))
            best[model_kind, domain] = max((row for row in rows if key in row), key=lambda row: comparable(row[key]))
    for mean, domains in (("seen", seen), ("unseen", unseen)):
        for model_kind in dict.fromkeys(model_kind for model_kind, _ in curves):
            rows = [best[model_kind, domain] for domain in domains if (model_kind, domain) in best]
            shared = [metric for metric in (rows[0] if rows else ()) if all(metric in row for row in rows)]
            best[model_kind, mean] = {metric: sum(row[metric] for row in rows) / len(rows) for metric in shared}
    return {
        metric_name("test", model_kind, domain, metric): v
        for (model_kind, domain), row in best.items()
        for metric, v in row.items()
    }


def _scores_below(scores: Mapping[str, float], prefix: str) -> dict[str, float]:
    below = {name.removeprefix(prefix): value for name, value in scores.items() if name.startswith(prefix)}
    return {name: value for name, value in below.items() if "/" not in name}  # not those of single clients


def mean_over_rounds(log: Mapping[int, Mapping[str, float]], rounds: Sequence[int]) -> dict[str, float]:
    """Return the mean of every test score that all these rounds have.

    >>> mean_over_rounds({1: {"test/mAP": 0.2}, 2: {"test/mAP": 0.4, "test/mINP": 0.1}}, [1, 2])
    {'test/mAP': 0.30000000000000004}
    """
    names = [name for name in log[rounds[0]] if name.startswith("test/") and all(name in log[r] for r in rounds)]
    return {name: sum(log[r][name] for r in rounds) / len(rounds) for name in names}
