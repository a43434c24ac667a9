"""Names of runs in tables and pictures: the method, and the settings that distinguish its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import combinations
from typing import Any

from fedsim.parsing.class_arguments import defaults_of_class
from fedsim.parsing.config_files import read_config, shipped_configs
from fedsim.report.runs import Run

_MOST = 3
"""Largest number of settings in a name."""
_CANDIDATES = 40
"""Largest number of differing settings among which those of a name are chosen."""
_ORDER = (
    "model.method", "model.timing", "model.aggregation", "model.server_optimizer", "model.selection", "model.attack",
    "model.privacy", "model.bn_stats", "model.objective", "model.backbone", "model.neck", "model.client",
    "model.clients", "data", "model", "trainer",
)  # fmt: skip
"""Sections in the order in which names rather have their settings; ``model`` are the others of the model. What a reader
expects comes first, and the number of rounds last: it differs where runs have the same length in simulated time."""
Columns = Mapping[str, Sequence[str]]
"""dotted name of a setting -> its value in each run"""
_MISSING = "-"
_CENTRALISED = "Centralised"
"""The name of runs with one client; their method hardly matters, so it is not part of the name."""
_COMPARED = {"model": None, "data": None, "trainer": ("max_epochs", "precision", "limit_train_batches")}


def name_variants(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its method, and the settings that make it a variant.

    These are the unusual settings of the method that all its runs share, and the settings in which the run differs from
    other runs of the method.
    """
    members: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        method = _CENTRALISED if run.summary["clients"] == ["union"] else str(run.summary["method"])
        members.setdefault(method, []).append(position)
    names = [""] * len(runs)
    for method, positions in members.items():
        for position, name in zip(positions, _names(method, [runs[i] for i in positions]), strict=True):
            names[position] = name
    return names


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the settings in which runs differ: dotted name -> value of each run, ``-`` if it has none.

    If a part has different classes, the result contains the class, and the settings that differ within one class.
    Seeds, folders and machines do not count as settings.
    """
    plain = [settings_of(run) for run in runs]
    parts = {name.removesuffix(".class_path") for of_run in plain for name in of_run if name.endswith(".class_path")}
    settings = [_with_classes(of_run, parts) for of_run in plain]
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    texts = {
        name: [text_of_value(of_run[name]) if name in of_run else _MISSING for of_run in settings] for name in names
    }
    differing = {name: values for name, values in texts.items() if len(set(values)) > 1}
    paths = {name.removesuffix("class_path"): v for name, v in differing.items() if name.endswith(".class_path")}

    def differs_within_class(name: str, values: Sequence[str]) -> bool:
        """Whether a setting differs between runs with the same class of its part."""
        same_for_all = [""] * len(runs)
        classes = next((v for part, v in paths.items() if name.startswith(f"{part}init_args.")), same_for_all)
        return len(set(zip(classes, values, strict=True))) > len(set(classes))

    return {name: values for name, values in differing.items() if differs_within_class(name, values)}


def _with_classes(settings: Mapping[str, Any], parts: Set[str]) -> dict[str, Any]:
    """Return settings in which a part that is a class in other runs, and a plain value here, has it as its class."""
    return {f"{name}.class_path" if name in parts else name: value for name, value in settings.items()}


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that a run's numbers depend on: dotted name -> value."""
    settings: dict[str, Any] = {}
    for section, names in _COMPARED.items():
        content = run.config.get(section)
        if isinstance(content, Mapping):
            kept = {name: value for name, value in content.items() if names is None or name in names}
            settings |= _flat(kept, section)
    settings.pop("model.seed", None)
    return settings


def _names(method: str, runs: Sequence[Run]) -> list[str]:
    """Return names of a method's variants: by the fewest settings that distinguish all, or by their folders."""
    shared = [] if method == _CENTRALISED else _unusual(runs)
    if len(runs) == 1:
        return [_name(method, shared)]
    if chosen := choose_settings(differences(runs)):
        return _with(method, shared, chosen)
    names = [run.folder.name for run in runs]
    folders = [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs, strict=True)]
    return [_name(method, [*shared, folder]) for folder in folders]


def choose_settings(differing: Columns) -> Columns:
    """Return the fewest of some differing settings that distinguish all runs; nothing if it would take more than three.

    Of equally many, the first in the order of ``_ORDER`` are chosen. With an argument of a class comes the class, if
    runs differ in it.

    Args:
        differing: dotted name -> value of each run.
    """
    ordered = sorted(differing, key=_place)  # settings of one section stay in the order of the config
    columns = {name: {part: differing[part] for part in _with_its_class(name, differing)} for name in ordered}
    first = {_partition(list(settings.values())): name for name, settings in reversed(columns.items())}
    candidates = [name for name in ordered if name in first.values()][:_CANDIDATES]
    for count in range(1, _MOST + 1):
        sets = [names for names in combinations(candidates, count) if _distinguish(_joined(columns, names))]
        if sets:
            return _joined(columns, min(sets, key=lambda names: [_place(name) for name in names]))
    return {}


def _joined(columns: Mapping[str, Columns], names: Sequence[str]) -> Columns:
    return {part: values for name in names for part, values in columns[name].items()}


def _place(name: str) -> int:
    """Return the place of a setting in ``_ORDER``: that of the longest name that it begins with."""
    begins = [section for section in _ORDER if f"{name}.".startswith(f"{section}.")]
    return _ORDER.index(max(begins, key=len)) if begins else len(_ORDER)


def _with_its_class(name: str, differing: Columns) -> list[str]:
    """Return the classes that a setting is an argument of, if they differ between runs, and the setting."""
    places = [place for place in range(len(name)) if name.startswith(".init_args.", place)]
    classes = [f"{name[:place]}.class_path" for place in places]
    return [*(path for path in classes if path in differing), name]


def _distinguish(settings: Columns) -> bool:
    """Return whether no two runs have the same values of all settings."""
    rows = list(zip(*settings.values(), strict=True))
    return len(set(rows)) == len(rows)


def _partition(columns: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return for each run the first one with the same values; of settings with equal partitions one is enough."""
    rows = list(zip(*columns, strict=True))
    return tuple(rows.index(row) for row in rows)


def _unusual(runs: Sequence[Run]) -> list[str]:
    """Return settings of the method that all runs share and that are neither its defaults nor its shipped config's.

    Numbers are left out, since they are tuned. If many settings remain, the result has the first ones. For a setting
    with fields, the result has its name only. A shared server optimizer comes last, since papers name methods after it,
    too (FedAdam).
    """
    models = [run.config.get("model") or {} for run in runs]
    chosen = [_arguments(model.get("method")) for model in models]
    optimizers = {_arguments(model.get("server_optimizer"))[0] for model in models}
    (path, first), usual = chosen[0], _usual(chosen[0][0])
    texts = [
        name if isinstance(value, Mapping) else f"{name} {text_of_value(value)}"
        for name, value in first.items()
        if name in usual and value not in usual[name] and not _is_number(value)
        if all(class_path == path and arguments.get(name) == value for class_path, arguments in chosen)
    ]
    texts = texts if len(texts) <= _MOST else [*texts[:_MOST], "..."]
    return texts + [f"server_optimizer {text_of_value(path)}" for path in optimizers if path and len(optimizers) == 1]


def _usual(path: str) -> dict[str, list[Any]]:
    """Return the usual values of a method's settings: setting -> its default, and the value in configs/methods."""
    name = path.rpartition(".")[2].lower()
    usual = {setting: [_as_listed(value)] for setting, value in defaults_of_class(path).items()}
    for config, file in shipped_configs().items():
        if config.replace("_", "") == f"methods/{name}" and usual:
            _, shipped = _arguments(read_config(str(file))["model"]["method"])
            for setting in shipped.keys() & usual.keys():
                usual[setting].append(shipped[setting])
    return usual


def _arguments(part: Any) -> tuple[str, Mapping[str, Any]]:
    """Return class_path and arguments of a setting that is a class; an empty path if it names no class."""
    part = {"class_path": part} if isinstance(part, str) else part if isinstance(part, Mapping) else {}
    return str(part.get("class_path") or ""), part.get("init_args") or {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_listed(value: Any) -> Any:
    """Return a default as a config contains it: lists instead of tuples."""
    return list(value) if isinstance(value, tuple) else value


def _name(method: str, settings: Sequence[str]) -> str:
    return f"{method} {', '.join(settings)}".rstrip()


def _with(method: str, shared: Sequence[str], settings: Columns) -> list[str]:
    short, names = _short(list(settings)), []
    for values in zip(*settings.values(), strict=True):
        texts = [f"{name} {value}" for name, value in zip(short, values, strict=True) if value != _MISSING]
        names.append(_name(method, [*shared, *texts]))
    return names


def _short(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or as many parts as make them differ; ``class_path`` does not count."""
    parts = [[part for part in name.split(".") if part not in ("class_path", "init_args")] for name in names]

    def end(words: list[str]) -> str:
        """Return the shortest end of a name that no other name has."""
        ends = (".".join(words[-count:]) for count in range(1, len(words)))
        dotted = [f".{'.'.join(of_name)}" for of_name in parts]
        counts = {ending: sum(name.endswith(f".{ending}") for name in dotted) for ending in ends}
        return next((ending for ending, number in counts.items() if number == 1), ".".join(words))

    return [end(words) for words in parts]


def _flat(content: Any, prefix: str) -> dict[str, Any]:
    """Return nested settings as dotted name -> value."""
    if not isinstance(content, Mapping):
        return {prefix: content}
    return {k: v for name, value in content.items() for k, v in _flat(value, f"{prefix}.{name}").items()}


def text_of_value(value: Any) -> str:
    """Return a value as text for readers; a class by its last name."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(text_of_value, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of_value(inner)}" for name, inner in value.items()) or "{}"
    return value.rpartition(".")[2] if isinstance(value, str) and value.replace(".", "").isidentifier() else str(value)
