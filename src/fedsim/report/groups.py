"""Runs of a report in groups that differ only in their seed: one column each; and the names of groups.

A name is the method, and the settings that distinguish its variants.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError
from fedsim.core.metrics import KINDS, MEANS
from fedsim.core.names import metric_name, printable
from fedsim.parsing.config_files import read_config, shipped_configs
from fedsim.report.layout import mean_and_spread
from fedsim.report.run_files import OF_TEST
from fedsim.report.runs import Rule, Run, read_run
from fedsim.settings.configuration import compare, flat_part, is_of_experiment, text_of
from fedsim.settings.effects import Flat, SettingValue
from fedsim.settings.facts import Group
from fedsim.settings.table import section, sections

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
        names = [metric_name("test", kind, name, metric) for name in MEANS]
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

    def kind_scored(self, name: str, metric: str, scored: Container[str] | None = None) -> str:
        """Return the kind of model with a score on a test set: the delivered one, or global if only that has it.

        The latter is the case on unseen data sets if the delivered model is a client's own. ``scored``: the names of
        all scores; None: those of the last evaluation.
        """
        names = {key for run in self.runs for key in Rule().scores(run)} if scored is None else scored
        kinds = (self.runs[0].primary, "global")
        return next((k for k in kinds if metric_name("test", k, name, metric) in names), kinds[0])

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


def group_runs(folders: list[Path], is_tested: bool = False) -> list[RunGroup]:
    """Open run directories and group the runs that differ only in the seed, also in ``fedsim test`` if it counts."""
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    return group_opened([read_run(folder, is_tested=is_tested) for folder in folders])


def group_opened(opened: Sequence[Run], rotated: str = "") -> list[RunGroup]:
    """Group the runs that differ only in the seed, and name the groups; one that was changed on the way is marked.

    Args:
        opened: the runs.
        rotated: an option in which runs of one name may differ, as their data then do; their labels have its value.

    Raises:
        ConfigError: if the user gives a name to runs with different settings.
    """
    by_experiment: dict[tuple[object, ...], list[Run]] = {}
    for run in opened:
        by_experiment.setdefault((run.name, run.experiment), []).append(run)
    firsts = [runs[0] for runs in by_experiment.values()]
    _refuse_one_name(firsts, rotated)
    labels = name_variants(firsts)
    groups = []
    for label, runs in zip(labels, by_experiment.values(), strict=True):
        name = runs[0].name
        user_label = f"{name}, {rotated} {runs[0].setting(rotated)}" if name and rotated else name
        groups.append(RunGroup(printable(", ".join([user_label or label, *runs[0].marks])), tuple(runs)))
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


def unequal_evaluation(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line about each group whose test images are scored in another way than those of the first group."""
    first = groups[0]
    for group in groups[1:]:
        old, new = first.runs[0], group.runs[0]
        if not old.scored_by or not new.scored_by:
            continue
        texts = [text for text in _settings_that_differ(old.scored_by, new.scored_by) if text.startswith(_SCORING)]
        sizes = [run.scored_by["data.test_size"].value for run in (old, new)]  # of null: that of data.size
        if sizes[0] != sizes[1]:
            texts.append(f"the size of test images {text_of(sizes[0])} / {text_of(sizes[1])}")
        if texts:
            yield f"NOT EQUAL EVALUATION: {first.label} and {group.label} differ in {'; '.join(texts)}"


def _differences(first: Run, second: Run) -> list[str]:
    """Return the differences between two runs that make them two experiments."""
    texts = [f"settings, as {run.folder} has no config.yaml" for run in (first, second) if not run.config]
    texts = texts or _settings_that_differ(first.settings, second.settings)
    reasons = first.experiment.differs_in(second.experiment)
    if OF_TEST in reasons and first.scored_by and second.scored_by:
        reasons.remove(OF_TEST)
        texts += [f"{text} of fedsim test" for text in _settings_that_differ(first.scored_by, second.scored_by)]
    return [*texts, *reasons]


def _settings_that_differ(old: Flat, new: Flat) -> list[str]:
    """Return the settings that make two experiments, with both values."""
    differing = (difference for difference in compare(old, new) if is_of_experiment(difference))
    return [f"{d.option} {text_of(d.old)} / {text_of(d.new)}" for d in differing]


def shown_metrics(metric: str) -> list[str]:
    """Return the metrics of a cell: ``metric``, then rank-1 unless ``metric`` is rank-1 or top-1."""
    return [metric] if metric in ("rank1", "top1") else [metric, "rank1"]


_MOST = 3
"""Largest number of settings in a name."""
_CANDIDATES = 40
"""Largest number of differing settings among which those of a name are chosen."""
_GROUPS = ("method", "loss", "network", "training", "data", "images", "evaluation")
"""Groups in the order in which names rather have their settings: that in which a reader expects them."""
Columns = Mapping[str, Sequence[str]]
"""option -> its value in each run"""
_MISSING = "-"
_CENTRALISED = "Centralised"
"""The name of runs with one client; their method hardly matters, so it is not part of the name."""
assert {*_GROUPS} == {*get_args(Group)}


def name_variants(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its method, and the settings that make it a variant.

    These are the unusual settings of the method that all its runs share, and the settings in which the run differs from
    other runs of the method.
    """
    members: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        method = _CENTRALISED if run.summary["clients"] == ["union"] else run.method
        members.setdefault(method, []).append(position)
    names = [""] * len(runs)
    for method, positions in members.items():
        for position, name in zip(positions, _names(method, [runs[i] for i in positions]), strict=True):
            names[position] = name
    return names


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings in which runs are different experiments: option -> value of each run, ``-`` if it has none.

    If a part has different classes, the result contains the class, and the settings that differ within one class.
    """
    settings = [run.settings for run in runs]
    places = {
        name: _place(name, entry) for values in settings for name, entry in values.items() if is_of_experiment(entry)
    }
    texts = {name: [_text(values.get(name)) for values in settings] for name in places}
    differing = {name: values for name, values in texts.items() if len(set(values)) > 1}

    def differs_within_class(name: str) -> bool:
        """Whether a setting differs between runs with the same class of its part."""
        part = next((above for above in _parts_around(name) if above in differing), None)
        classes = differing[part] if part else [""] * len(runs)
        return len(set(zip(classes, differing[name], strict=True))) > len(set(classes))

    return {name: differing[name] for name in sorted(differing, key=places.__getitem__) if differs_within_class(name)}


def _text(entry: SettingValue | None) -> str:
    if entry is None:
        return _MISSING
    return text_of(None if entry.is_null else entry.value)


def _place(name: str, entry: SettingValue) -> tuple[bool, int, bool, int]:
    """Return the place of a setting in names: the length of a run comes last, and the trainer after the federation."""
    part, *fields = name.split(".")
    declared = [*section(part).arguments] if part in sections() else []
    position = declared.index(fields[0]) if fields and fields[0] in declared else len(declared)
    return entry.setting.facts.is_length, _GROUPS.index(entry.group), part == "trainer", position


def _parts_around(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _names(method: str, runs: Sequence[Run]) -> list[str]:
    """Return names of a method's variants: by the fewest settings that distinguish all, or by their folders."""
    shared = [] if method == _CENTRALISED else _non_default_settings(runs)
    if len(runs) == 1:
        return [_name(method, shared)]
    if chosen := choose_settings(differences(runs)):
        return _with(method, shared, chosen)
    names = [run.folder.name for run in runs]
    folders = [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs, strict=True)]
    return [_name(method, [*shared, folder]) for folder in folders]


def choose_settings(differing: Columns) -> Columns:
    """Return the fewest of some differing settings that distinguish all runs; nothing if it would take more than three.

    Of equally many, the first are chosen. With an argument of a class comes the class, if runs differ in it.

    Args:
        differing: option -> value of each run, in the order of preference.
    """
    columns = {name: {part: differing[part] for part in _with_its_class(name, differing)} for name in differing}
    rows = {name: list(zip(*settings.values(), strict=True)) for name, settings in columns.items()}
    # of settings that part the runs alike, one is enough
    first = {tuple(map(of_runs.index, of_runs)): name for name, of_runs in reversed(rows.items())}
    candidates = [name for name in differing if name in first.values()][:_CANDIDATES]
    for names in chain.from_iterable(combinations(candidates, count) for count in range(1, _MOST + 1)):
        joined = {part: values for name in names for part, values in columns[name].items()}
        if len(set(zip(*joined.values(), strict=True))) == len(rows[names[0]]):
            return joined
    return {}


def _with_its_class(name: str, differing: Columns) -> list[str]:
    """Return the classes that a setting is an argument of, if they differ between runs, and the setting."""
    return [*(part for part in [*_parts_around(name)][::-1] if part in differing), name]


def _non_default_settings(runs: Sequence[Run]) -> list[str]:
    """Return settings of the method that all runs share and that are neither its defaults nor its shipped config's.

    Numbers are left out, since they are tuned. If many settings remain, the result has the first ones. For a setting
    with fields, the result has its name only. A shared server optimizer comes last, since papers name methods after it,
    such as FedAdam.
    """
    of_first, *of_others = [_of_method(run.settings) for run in runs]
    usual = _common_values(runs[0].settings)
    untuned = {
        name: e for name, e in of_first.items() if isinstance(e.value, bool) or not isinstance(e.value, int | float)
    }
    texts = [
        name if entry.setting.base else f"{name} {text_of(entry.value)}"
        for name, entry in untuned.items()
        if "." not in name and entry.value not in usual.get(name, [entry.value])
        if all(name in values and values[name].value == entry.value for values in of_others)
    ]
    texts = texts if len(texts) <= _MOST else [*texts[:_MOST], "..."]
    optimizers = {text_of(run.settings[_SERVER].value) for run in runs if _SERVER in run.settings}
    return texts + [f"server_optimizer {name}" for name in optimizers - {"none"} if len(optimizers) == 1]


_METHOD, _SERVER, _SCORING = "model.method", "model.server_optimizer", "model.evaluation."


def _of_method(settings: Flat) -> Flat:
    begin = f"{_METHOD}."
    return {name.removeprefix(begin): entry for name, entry in settings.items() if name.startswith(begin)}


def _common_values(settings: Flat) -> dict[str, list[Any]]:
    """Return the usual values of a method's settings: setting -> its default, and the value in configs/methods."""
    if _METHOD not in settings:
        return {}
    method = settings[_METHOD].value
    usual = {name: [e.value] for name, e in _of_method(flat_part(_METHOD, method)).items()}
    for config, file in shipped_configs().items():
        if config.replace("_", "") == f"methods/{str(method).lower()}":
            of_file = read_config(str(file)).get("model", {}).get("method")
            for name, entry in _of_method(flat_part(_METHOD, of_file)).items():
                usual.setdefault(name, []).append(entry.value)
    return usual


def _name(method: str, settings: Sequence[str]) -> str:
    return f"{method} {', '.join(settings)}".rstrip()


def _with(method: str, shared: Sequence[str], settings: Columns) -> list[str]:
    short, names = _short(list(settings)), []
    for values in zip(*settings.values(), strict=True):
        texts = [f"{name} {value}" for name, value in zip(short, values, strict=True) if value != _MISSING]
        names.append(_name(method, [*shared, *texts]))
    return names


def _short(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or as many parts as make them differ."""
    dotted = [f".{name}" for name in names]

    def end(name: str) -> str:
        """Return the shortest end of a name that no other name has."""
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words)))
        return next((e for e in ends if sum(option.endswith(f".{e}") for option in dotted) == 1), name)

    return [end(name) for name in names]
