"""Runs of a report, each opened once, in groups that differ only in their seed: one column each; and their traffic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics_rows import metrics_files
from fedsim.core.names import metric_name, printable
from fedsim.core.paths import RUN
from fedsim.report.experiment import Experiment
from fedsim.report.layout import mean_and_spread
from fedsim.report.names import name_variants
from fedsim.report.rules import Rule
from fedsim.report.runs import KINDS, Run, read_run
from fedsim.settings.configuration import compare, is_of_experiment, text_of

_WAYS = ("down", "up", "extra")
EQUAL_WORK = 0.05
"""Largest relative difference of images trained on, or of steps, for which no line is printed."""
_ROLES = {"second": "second model", "personal": "personal", "server": "server"}
_NAMED = 3
"""Largest number of differences in a line."""

MEANING = {
    "global": "global: the server's model",
    "local": "local: a client's own after training, before averaging",
    "personalised": "personalised: the client's own model (its private parameters plus the shared ones)",
    "ensemble": "ensemble: all personalised models, their features side by side",
}


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one experiment, one per seed."""

    label: str
    runs: tuple[Run, ...]

    def values(self, key: str, rule: Rule) -> NDArray[np.float64]:
        """Return one score of each run, as fractions of 1; runs without it are left out."""
        scores = [rule.scores(run).get(key) for run in self.runs]
        return np.array([score for score in scores if score is not None])

    def cell(self, model: str, metrics: Sequence[str], rule: Rule, digits: int = 1) -> str:
        """Return scores below ``test/kind/set`` in percent, as a table shows them; ``-`` without the first.

        Scores of only some of the runs have their number behind them.
        """
        return self._cell([self.values(f"{model}/{metric}", rule) for metric in metrics], digits)

    def describe(self) -> str:
        """Return a text with the rounds and the seeds."""
        seeds = sorted({int(run.summary["seed"]) for run in self.runs})
        rounds = sorted({int(run.summary["rounds"]) for run in self.runs})
        unfinished = sum(not run.summary["finished"] for run in self.runs)
        note = f"{'/'.join(map(str, rounds))} round{'s' * (rounds != [1])}, "
        note += f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        note += f", {unfinished} not finished" if unfinished else ""
        note += "".join(f", {change}" for change in self.runs[0].changes)
        return note + (", DRY RUN on drawn stand-ins" if any(run.setting("data.dry_run") for run in self.runs) else "")

    def drops(self, kind: str, metric: str, rule: Rule) -> NDArray[np.float64]:
        """Return each run's mean over seen test sets minus that over unseen ones; runs without both are left out.

        The oracle has none: its two means may be of two rounds.
        """
        if rule.name == "oracle":
            return np.array([])
        names = [metric_name("test", kind, name, metric) for name in ("seen", "unseen")]
        pairs = [[rule.scores(run).get(name) for name in names] for run in self.runs]
        return np.array([seen - unseen for seen, unseen in pairs if seen is not None and unseen is not None])

    def drop_cell(self, kind: str, metrics: Sequence[str], rule: Rule, digits: int = 1) -> str:
        """Return :meth:`drops` in points, as :meth:`cell` shows scores."""
        return self._cell([self.drops(kind, metric, rule) for metric in metrics], digits)

    def _cell(self, values: Sequence[NDArray[np.float64]], digits: int) -> str:
        """Return the numbers of each metric, of all runs that have one, in percent."""
        percent = [100 * of_metric for of_metric in values]
        if not len(percent[0]):
            return "-"
        scored = len(percent[0])
        some = "" if scored == len(self.runs) else f" ({scored} of {len(self.runs)})"
        return " / ".join(mean_and_spread(of_metric, digits) for of_metric in percent) + some

    def costs(self, client: str) -> str:
        """Return a client's pruned share at the end, in percent, and its traffic, in GiB; ``-`` without traffic."""
        pruned, sent, density = [], [], metric_name("comm", client, "density")
        for run in self.runs:
            rounds = [run.log[round_] for round_ in sorted(run.log)]
            by_round = [[row.get(metric_name("comm", client, f"{way}_bytes"), 0.0) for way in _WAYS] for row in rounds]
            densities = [row[density] for row in rounds if density in row]
            pruned.append(100 * (1 - densities[-1]) if densities else 0.0)
            sent.append(sum(map(sum, by_round)) / 2**30)
        if not any(sent):
            return "-"
        return " / ".join(mean_and_spread(np.array(values), digits) for values, digits in ((pruned, 2), (sent, 2)))

    def totals(self, metric: str, missing: float | None = None) -> list[float]:
        """Return each run's sum of a metric over its rounds, where ``missing`` stands for a value that is not logged.

        None: there are no sums if a round of a run has not logged it.
        """
        logs = [[row for row in run.log.values() if "train/clients" in row] for run in self.runs if run.has_log]
        values = [[row.get(metric, missing) for row in rows] for rows in logs]
        sums = [sum(value for value in of_run if value is not None) for of_run in values]
        return sums if len(logs) == len(self.runs) and all(of_run and None not in of_run for of_run in values) else []

    def kinds(self, rule: Rule) -> list[str]:
        """Return the kinds of models; local is left out if another kind has the same scores (Local, Centralised)."""
        scores = self._scores_by_kind(rule)
        repeats = any(scores["local"] <= scores[model_kind] for model_kind in ("global", "personalised"))
        return [model_kind for model_kind in KINDS if scores[model_kind] and not (model_kind == "local" and repeats)]

    def _scores_by_kind(self, rule: Rule) -> dict[str, set[tuple[str, float]]]:
        metrics = rule.scores(self.runs[0]).items()
        return {
            model_kind: {(key.split("/", 2)[2], v) for key, v in metrics if key.startswith(f"test/{model_kind}/")}
            for model_kind in KINDS
        }

    def distinct_kinds(self, rule: Rule) -> list[str]:
        """Return the kinds of models without personalised, if that has the scores of the global model on every set."""
        kinds, scores = self.kinds(rule), self._scores_by_kind(rule)
        repeats = "global" in kinds and scores["personalised"] <= scores["global"]
        return [model_kind for model_kind in kinds if not (model_kind == "personalised" and repeats)]


def group_runs(folders: list[Path]) -> list[RunGroup]:
    """Open run directories and group the runs that differ only in the seed."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    return group_opened([read_run(folder) for folder in folders])


def group_opened(opened: Sequence[Run], rotated: str = "") -> list[RunGroup]:
    """Group the runs that differ only in the seed, and name the groups; one that was changed on the way is marked.

    Args:
        opened: the runs.
        rotated: an option in which runs of one name may differ, as their data then do; their labels have its value.

    Raises:
        ConfigError: if the user gives a name to runs with different settings.
    """
    by_experiment: dict[tuple[str, Experiment], list[Run]] = {}
    for run in opened:
        by_experiment.setdefault((run.name, run.experiment), []).append(run)
    firsts = [runs[0] for runs in by_experiment.values()]
    _refuse_one_name(firsts, rotated)
    labels = name_variants(firsts)
    groups = []
    for (name, experiment), label, runs in zip(by_experiment, labels, by_experiment.values(), strict=True):
        user_label = f"{name}, {rotated} {runs[0].setting(rotated)}" if name and rotated else name
        marks = [", changed"] * bool(experiment.changes) + [f", ended {experiment.end}"] * bool(experiment.end)
        groups.append(RunGroup(printable("".join([user_label or label, *marks])), tuple(runs)))
    return groups


def _refuse_one_name(runs: Sequence[Run], rotated: str) -> None:
    """Raise ConfigError if the user gives one name to different experiments, which ``runs`` has one of each."""
    by_name: dict[str, Run] = {}
    for run in runs:
        first = by_name.setdefault(run.name, run)
        if not run.name or first is run:
            continue
        reasons = _differences(first, run)
        if is_rotation := bool(rotated) and first.setting(rotated) != run.setting(rotated):
            reasons = [r for r in reasons if r != "the data" and not r.startswith(f"{rotated} ")]
        if reasons or not is_rotation:
            differing = "; ".join(reasons[:3])
            raise ConfigError(
                f"runs: {run.name} names runs with different settings ({differing}); give each its own name"
            )


def splits(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line about each group that could be further seeds of an earlier one, and about unknown settings."""
    for group in groups:
        if len(group.runs) > 1 and not group.runs[0].config:
            yield f"{group.label}: no run has a config.yaml, so the settings are equal by their fingerprint alone"
    for number, group in enumerate(groups):
        seeds = {run.summary["seed"] for run in group.runs}
        for earlier in groups[:number]:
            run, earlier_run = group.runs[0], earlier.runs[0]
            if run.method == earlier_run.method and seeds.isdisjoint(r.summary["seed"] for r in earlier.runs):
                texts = _differences(earlier_run, run)
                more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
                yield f"NOT ONE GROUP: {earlier.label} and {group.label} differ in {'; '.join(texts[:_NAMED])}{more}"
                break


def _differences(first: Run, second: Run) -> list[str]:
    """Return the differences between two runs that make them two experiments."""
    unknown = [f"settings, as {run.folder} has no config.yaml" for run in (first, second) if not run.config]
    settings = () if unknown else (d for d in compare(first.settings, second.settings) if is_of_experiment(d))
    texts = [f"{d.option} {text_of(d.old)} / {text_of(d.new)}" for d in settings]
    return [*unknown, *texts, *first.experiment.differs_in(second.experiment)]


def traffic(groups: Sequence[RunGroup]) -> str:
    """Return a line with the bytes that runs have sent, in GB (1e9 bytes), and their simulated time if there is one."""
    parts = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        gigabytes = _range([sum(s.get(f"bytes_{way}", 0) for way in _WAYS) / 1e9 for s in summaries])
        seconds = [s["simulated_seconds"] for s in summaries if "simulated_seconds" in s]
        simulated = f" in {_range(seconds)} simulated seconds" if seconds else ""
        parts.append(f"{group.label} {gigabytes} GB{simulated}")
    return f"sent by server and clients: {', '.join(parts)}"


def work(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line with the images and steps of the runs' training, and one for each of both that is not equal.

    A run whose log lacks them, of an earlier version, is left out; of several seeds the mean is compared.
    """
    images, steps = (
        {group: counts for group in groups if (counts := group.totals(f"train/{unit}"))} for unit in ("images", "steps")
    )
    texts = []
    for group, counts in images.items():
        of_roles = {role: [group.totals(f"train/{u}_{role}", 0.0) for u in ("images", "steps")] for role in _ROLES}
        roles = [
            f"{_ROLES[role]} {_counts(first)} in {_counts(second)}"
            for role, (first, second) in of_roles.items()
            if any(first + second)
        ]
        in_steps = f" in {_counts(steps[group])} steps" if group in steps else ""
        texts.append(f"{group.label} {_counts(counts)} images{in_steps}" + (f" ({'; '.join(roles)})" if roles else ""))
    if texts:
        yield f"trained on: {', '.join(texts)}"
    yield from _unequal(images, "trained on", "images")
    yield from _unequal(steps, "took", "steps")


def _unequal(totals: Mapping[RunGroup, Sequence[float]], verb: str, unit: str) -> Iterator[str]:
    """Yield a line if the means of two groups differ by more than :data:`EQUAL_WORK`."""
    means = {group.label: float(np.mean(counts)) for group, counts in totals.items()}
    if means and (most := max(means.values())) > (1 + EQUAL_WORK) * (least := min(means.values())):
        names = {value: label for label, value in means.items()}
        more = f"{most / least - 1:.0%} more" if least else "more"
        yield f"NOT EQUAL WORK: {names[most]} {verb} {more} {unit} than {names[least]}; this may change scores"


def _counts(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))))


def _range(values: Sequence[float]) -> str:
    """Return one number, or the smallest and the largest if seeds differ."""
    texts = [f"{v:,.1f}" if v >= 100 else f"{v:.3g}" for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))


def named_folder(argument: str) -> tuple[Path, str]:
    """Return the folder that an argument of a report names, and the name that it gives the run: ``Mine=runs/b``.

    A folder whose own name has the sign is meant as it is.

    Raises:
        ConfigError: if name or folder is empty.
    """
    name, sign, folder = argument.partition("=")
    if not sign or Path(argument).exists() or "/" in name:
        return Path(RUN.check(argument, "runs")), ""
    if not name.strip() or not folder:
        raise ConfigError(f"runs: {argument} is no run directory, and no name with one, such as Mine=runs/b")
    return Path(RUN.check(folder, "runs")), name.strip()


def open_runs(
    folders: Sequence[Path], unfinished: bool = False, names: Sequence[str] = ()
) -> tuple[list[Run], list[str]]:
    """Open run directories; return the runs, and a line for each folder that is left out.

    ``names`` are those of the runs in a report, one per folder, empty for none.

    Left out are runs without scores, unfinished runs if other runs are finished (``unfinished`` keeps them), and
    repeated runs with the same settings and seed: a repetition is the same run, not another sample.

    Raises:
        ConfigError: if no folder is given.
        DataError: if a folder is not a run directory, or no run is left.
    """
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    runs, lines, seen, damaged = list[Run](), list[str](), set[str](), list[DataError]()
    for folder, name in zip(folders, names or [""] * len(folders), strict=True):
        if os.path.realpath(folder) in seen:
            lines.append(f"left out: {folder} is given twice; it counts once")
        elif is_begun(folder):
            lines.append(f"left out: {folder} has not finished its first round")
        else:
            runs += _whole(folder, name, lines, damaged)
        seen.add(os.path.realpath(folder))
    lines += [f"left out: {run.folder} has no scores yet" for run in runs if not run.test_sets]
    scored = [run for run in runs if run.test_sets]
    done = [run for run in scored if run.summary["finished"]]
    if done and not unfinished:
        for run in (run for run in scored if not run.summary["finished"]):
            so_far = f"is not finished, it has {run.summary['rounds']} rounds so far"
            lines.append(f"left out: {run.folder} {so_far}; --unfinished includes it")
        scored = done
    kept = _once(scored, lines)
    if not kept and damaged:
        raise damaged[0]
    if not kept:
        message = f"{folders[0]}: the run has no scores yet; wait for its first evaluation"
        raise DataError(message if len(folders) == 1 else f"{message}; the other runs have none either")
    return kept, lines


def _whole(folder: Path, name: str, lines: list[str], damaged: list[DataError]) -> list[Run]:
    """Return the run in a folder; nothing and a line for a damaged run or a file. A folder of no run is an error."""
    if folder.is_file():
        damaged.append(DataError(f"{folder}: is a file; give the run directories of fedsim fit"))
        lines.append(f"left out: {folder} is a file, not a run directory")
        return []
    if not (folder / "summary.json").is_file():
        return [read_run(folder, name)]
    try:
        run = read_run(folder, name)
        run.check()
    except DataError as error:
        damaged.append(error)
        lines.append(f"left out: {folder} is damaged ({error})")
        return []
    return [run]


def is_begun(folder: Path) -> bool:
    """Whether a folder belongs to a run that has no results yet, or ended before its first ones."""
    has_begun = (folder / "config.yaml").is_file() or bool(metrics_files(folder))
    return has_begun and not (folder / "summary.json").is_file()


def _once(runs: Sequence[Run], lines: list[str]) -> list[Run]:
    """Return one run of each configuration and seed, a finished and long one; add a line about each repetition."""
    kept: dict[tuple[Experiment, int], Run] = {}
    for run in sorted(runs, key=lambda run: (not run.summary["finished"], -run.summary["rounds"])):
        first = kept.setdefault((run.experiment._replace(end=""), run.summary["seed"]), run)
        if first is not run:
            seed = run.summary["seed"]
            lines.append(
                f"left out: {run.folder} has the settings and the seed {seed} of {first.folder}; both count as one run"
            )
    return [run for run in runs if run in kept.values()]


def shown_metrics(metric: str) -> list[str]:
    """Return the metrics of a cell: ``metric``, then rank-1 unless ``metric`` is rank-1 or top-1."""
    return [metric] if metric in ("rank1", "top1") else [metric, "rank1"]
