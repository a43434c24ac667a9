"""Names of runs in tables and pictures: the method, and what tells its variants apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from fedsim.parsing.class_arguments import defaults_of_class
from fedsim.parsing.config_files import read_config, shipped_configs
from fedsim.report.runs import Run

_MOST = 3
"""Settings in a name."""
_CANDIDATES = 16
"""Differing settings among which those of a name are chosen."""
_MISSING = "-"
_CENTRALISED = "Centralised"
"""The name of runs with one client. Which method it trains by hardly matters, so that has no part in the name."""
_COMPARED = {"model": None, "data": None, "trainer": ("max_epochs", "precision", "limit_train_batches")}


def name_variants(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its method, and the settings that make it a variant.

    These are its own settings that all runs of it share and that are not the usual ones, and the settings in
    which it differs from other runs of that method.
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
    """Return the settings in which runs differ: dotted name -> value of each run, ``-`` where it has none.

    Of parts that are of different classes the class is told, and what differs within a class. Seeds, folders and
    machines are no settings.
    """
    settings = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for of in settings for name in of)
    found = {name: [_text(of[name]) if name in of else _MISSING for of in settings] for name in names}
    differing = {name: values for name, values in found.items() if len(set(values)) > 1}
    classes = {name.removesuffix("class_path"): of for name, of in differing.items() if name.endswith(".class_path")}

    def is_told(name: str, values: Sequence[str]) -> bool:
        """Whether a setting differs within a class, where it is one of a class."""
        of = next((of for part, of in classes.items() if name.startswith(f"{part}init_args.")), [""] * len(runs))
        return len(set(zip(of, values, strict=True))) > len(set(of))

    return {name: values for name, values in differing.items() if is_told(name, values)}


def settings_of(run: Run) -> dict[str, Any]:
    """Return dotted names of the settings that a run's numbers depend on -> values."""
    found: dict[str, Any] = {}
    for section, names in _COMPARED.items():
        content = run.config.get(section)
        if isinstance(content, Mapping):
            kept = {name: value for name, value in content.items() if names is None or name in names}
            found |= _flat(kept, section)
    found.pop("model.seed", None)
    return found


def _names(method: str, runs: Sequence[Run]) -> list[str]:
    """Return names of a method's variants: by the fewest settings that tell all apart, or by their folders."""
    shared = [] if method == _CENTRALISED else _unusual(runs)
    if len(runs) == 1:
        return [_name(method, shared)]
    found = differences(runs)
    if 0 < len(found) <= _MOST and len(set(zip(*found.values(), strict=True))) == len(runs):
        return _with(method, shared, found)
    for count in range(1, _MOST + 1):
        for chosen in combinations(list(found)[:_CANDIDATES], count):
            some = {name: found[name] for name in chosen}
            if len(set(zip(*some.values(), strict=True))) == len(runs):
                return _with(method, shared, some)
    names = [run.folder.name for run in runs]
    folders = [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs, strict=True)]
    return [_name(method, [*shared, folder]) for folder in folders]


def _unusual(runs: Sequence[Run]) -> list[str]:
    """Return settings of the method that all runs share and that are neither its defaults nor its shipped config's.

    Numbers make no variant: they are tuned. Where the others are many, the first ones. A setting that has fields of its
    own has no value here. Papers name methods after their server's optimizer, too (FedAdam): a shared one comes last.
    """
    models = [run.config.get("model") or {} for run in runs]
    chosen = [_arguments(model.get("method")) for model in models]
    optimizers = {_arguments(model.get("server_optimizer"))[0] for model in models}
    (path, first), usual = chosen[0], _usual(chosen[0][0])
    told = [
        name if isinstance(value, Mapping) else f"{name} {_text(value)}"
        for name, value in first.items()
        if name in usual and value not in usual[name] and not _is_number(value)
        if all(other == path and arguments.get(name) == value for other, arguments in chosen)
    ]
    told = told if len(told) <= _MOST else [*told[:_MOST], "..."]
    return told + [f"server_optimizer {_text(path)}" for path in optimizers if path and len(optimizers) == 1]


def _usual(path: str) -> dict[str, list[Any]]:
    """Return the values that a plain run of a method has: setting -> its default, and that of configs/methods."""
    name = path.rpartition(".")[2].lower()
    found = {setting: [_as_listed(value)] for setting, value in defaults_of_class(path).items()}
    for config, file in shipped_configs().items():
        if config.replace("_", "") == f"methods/{name}" and found:
            _, shipped = _arguments(read_config(str(file))["model"]["method"])
            for setting in shipped.keys() & found.keys():
                found[setting].append(shipped[setting])
    return found


def _arguments(part: Any) -> tuple[str, Mapping[str, Any]]:
    """Return class_path and arguments of a setting that is a class; an empty path where it names none."""
    part = {"class_path": part} if isinstance(part, str) else part if isinstance(part, Mapping) else {}
    return str(part.get("class_path") or ""), part.get("init_args") or {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_listed(value: Any) -> Any:
    """A default as a config has it, which knows no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _name(method: str, told: Sequence[str]) -> str:
    return f"{method} {', '.join(told)}".rstrip()


def _with(method: str, shared: Sequence[str], settings: Mapping[str, Sequence[str]]) -> list[str]:
    short, names = _short(list(settings)), []
    for values in zip(*settings.values(), strict=True):
        told = [f"{name} {value}" for name, value in zip(short, values, strict=True) if value != _MISSING]
        names.append(_name(method, [*shared, *told]))
    return names


def _short(names: Sequence[str]) -> list[str]:
    """The last part of each name, or two where that is ambiguous; a class has the name of its part."""
    parts = [[part for part in name.split(".") if part not in ("class_path", "init_args")] for name in names]
    last = [of[-1] for of in parts]
    return [of[-1] if last.count(of[-1]) == 1 else ".".join(of[-2:]) for of in parts]


def _flat(content: Any, prefix: str) -> dict[str, Any]:
    """Return dotted names of settings -> values."""
    if not isinstance(content, Mapping):
        return {prefix: content}
    return {k: v for name, value in content.items() for k, v in _flat(value, f"{prefix}.{name}").items()}


def _text(value: Any) -> str:
    """A value as people write it; a class by its last name."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items()) or "{}"
    return value.rpartition(".")[2] if isinstance(value, str) and value.replace(".", "").isidentifier() else str(value)
