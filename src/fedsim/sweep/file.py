"""Read and check sweep files, which are in W&B's format: https://docs.wandb.ai/guides/sweeps/sweep-config-keys."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fedsim.core.errors import ConfigError
from fedsim.parsing.documents import as_yaml, parse_yaml, read_text
from fedsim.parsing.typed_names import with_quotes
from fedsim.settings.table import setting_at
from fedsim.sweep.early_stop import early_stop_of
from fedsim.sweep.sampling import DEFAULT_COMMAND, MACROS, MOST_RUNS, VARIABLE, Parameter, Sweep

_KEYS = {"method", "parameters", "metric", "command", "program", "name", "description", "project", "entity", "run_cap",
         "early_terminate"}  # fmt: skip
_RANGES = dict.fromkeys(("uniform", "log_uniform_values", "q_uniform", "int_uniform"), ("min", "max"))
_NEEDS = {"constant": ("value",), "categorical": ("values",), **_RANGES, "normal": ()}
_MAY_HAVE = {"categorical": ("probabilities",), "q_uniform": ("q",), "normal": ("mu", "sigma")}
_MOST_STEPS = 2.0**53
"""of a range: beyond, floating numbers have no such steps"""
_OPTION = re.compile(r"[^\s=-]([^=\n]*[^\s=])?")
"""inner hyphens and spaces may be those of a client's name"""


def read_content(path: Path) -> Any:
    """Return the content of a sweep file; raise DataError if it cannot be read."""
    return parse_yaml(with_quotes(read_text(path, "this sweep")), str(path))


def sweep_of(content: object, name: str) -> Sweep:
    """Return the sweep that a file's content describes; raise ConfigError with the field's name if it is wrong."""
    return _Reader(name).read(content)


@dataclass(frozen=True)
class _Reader:
    """Checks a sweep file; every error names the file and the field."""

    name: str

    def read(self, content: object) -> Sweep:
        """Return the sweep that ``content`` describes."""
        fields = self._mapping(content, "the file")
        self._check_keys(fields, _KEYS, "")
        method = fields.get("method")
        if method not in ("bayes", "grid", "random"):
            self._refuse("method", f"{method} is unknown; choose from bayes, grid, random")
        metric, maximize, target = self._metric(fields.get("metric"))
        parameters = self._parameters(fields.get("parameters"), method)
        self._refuse_test_scores(metric, parameters)
        command, program = self._command(fields)
        if (cap := fields.get("run_cap")) is not None and (type(cap) is not int or cap < 1):
            self._refuse("run_cap", f"{cap} is not a number of runs")
        stop = fields.get("early_terminate")
        early_stop = None if stop is None else early_stop_of(self._mapping(stop, "early_terminate"), self._refuse)
        sweep = Sweep(name=self.name, method=method, parameters=parameters, metric=metric, maximize=maximize,
                      command=command, program=program, run_cap=cap, target=target, early_stop=early_stop)  # fmt: skip
        for name in parameters if sweep.is_search else ():
            if parameters[name].distribution == "normal":
                remedy = "give min and max with uniform or log_uniform_values"
                self._refuse(f"parameters.{name}.distribution", f"normal has no bounds, which Optuna needs; {remedy}")
        return sweep

    def _refuse(self, field: str, message: str) -> NoReturn:
        raise ConfigError(f"{self.name}: {field}: {message}")

    def _mapping(self, value: object, field: str) -> dict[str, Any]:
        if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
            self._refuse(field, "expected names with values (see fedsim sweep --method fedpav --print)")
        return value

    def _check_keys(self, fields: Mapping[str, Any], names: set[str], prefix: str, of_field: str = "") -> None:
        for key in fields:
            if key not in names:
                self._refuse(
                    f"{prefix}{key}", f"there is no such field{of_field}; choose from {', '.join(sorted(names))}"
                )

    def _metric(self, metric: object) -> tuple[str, bool, float | None]:
        if metric is None:
            self._refuse("metric", "is missing; give its name, such as val/mAP, and its goal, such as maximize")
        fields = self._mapping(metric, "metric")
        self._check_keys(fields, {"name", "goal", "target"}, "metric.")
        if not isinstance(fields.get("name"), str) or not fields["name"].strip():
            self._refuse("metric.name", "is missing; give a metric, such as val/mAP, by which models are selected")
        goal = fields.get("goal", "minimize")
        if goal not in ("minimize", "maximize"):
            self._refuse("metric.goal", f"{goal} is unknown; choose from maximize, minimize")
        target = fields.get("target")
        if target is not None and not _is_number(target):
            self._refuse("metric.target", f"{target} is not a number")
        return fields["name"], goal == "maximize", target

    def _refuse_test_scores(self, metric: str, parameters: Mapping[str, Parameter]) -> None:
        """Refuse to order settings by a test score: what is chosen by it is chosen on the target.

        Names of test scores begin with ``test``, those of honest clients with ``attack/test``, and spreads of them have
        ``spread/`` before. The mean over the clients' own test sets has the name ``oracle/METRIC``, which declares the
        use of test data.
        """
        words = metric.strip().lower().removeprefix("spread/").removeprefix("attack/").split("/")
        if words[0] != "test":
            return
        for name, parameter in parameters.items():
            facts = setting_at(name).facts
            if not (facts.is_protocol or facts.is_repeated or _is_constant(parameter)):
                remedy = "set it to val/mAP, of people that the sources hold out (data.val: identities)"
                self._refuse("metric.name", f"{metric} is a test score, and would choose {name}; {remedy}")

    def _command(self, fields: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        command = fields.get("command", list(DEFAULT_COMMAND))
        if not isinstance(command, list) or not command:
            self._refuse("command", "expected a list of words")
        words = tuple(str(word) for word in command)
        for word, value in zip(words, command, strict=True):
            if not (isinstance(value, str) or _is_number(value)) or not word.strip():
                self._refuse("command", f"{as_yaml(value)} is no word; write it in quotes, or leave it out")
            if word.startswith("${") and word not in MACROS and not VARIABLE.search(word):
                self._refuse("command", f"{word} is not a known macro; choose from {', '.join(MACROS)}")
            if (option := word.partition("=")[0]) in ("--run_dir", "--overwrite"):
                self._refuse("command", f"leave {option} out: every run gets its own run directory")
        if not {"${args}", "${args_no_hyphens}"} & set(words):
            self._refuse("command", "${args} is missing, so all runs would have the same settings")
        program = fields.get("program")
        if not isinstance(program, str):
            self._refuse("program", "is missing, but W&B's agent needs it; set it to fedsim")
        return words, program

    def _parameters(self, parameters: object, method: str) -> dict[str, Parameter]:
        options = {}
        for name, fields in self._mapping(parameters, "parameters").items():
            field = f"parameters.{name}"
            if not _OPTION.fullmatch(name):
                remedy = "write its name alone, such as model.client.batch_size: the command line gets the two hyphens"
                self._refuse(field, f"is no name of an option; {remedy}")
            if name in ("run_dir", "ckpt_path", "overwrite"):
                self._refuse(field, "leave it out: every run gets its own run directory")
            options[name] = self._parameter(self._mapping(fields, field), field)
            if method == "grid" and (size := options[name].grid_size) > MOST_RUNS:
                remedy = f"a grid takes up to {MOST_RUNS}; give values, a larger q, or set method to random"
                self._refuse(field, f"has {size:.3g} values; {remedy}")
            if method == "grid" and (not options[name].grid or options[name].probabilities):
                distribution = options[name].distribution
                self._refuse(field, f"a grid cannot be made of {distribution}; give values, or set method to random")
        return options

    def _parameter(self, fields: dict[str, Any], field: str) -> Parameter:
        if "parameters" in fields:
            self._refuse(field, "nested parameters are not supported; write the full name of the option, a.b.c")
        name = str(fields.get("distribution", _default_distribution(fields)))
        if name not in _NEEDS:
            self._refuse(f"{field}.distribution", f"{name} is unknown; choose from {', '.join(_NEEDS)}")
        fields_of_it = {"distribution", *_NEEDS[name], *_MAY_HAVE.get(name, ())}
        self._check_keys(fields, fields_of_it, f"{field}.", f" with {name}")
        for needed in _NEEDS[name]:
            if needed not in fields:
                self._refuse(f"{field}.{needed}", f"is missing, but {name} needs it")
        if name == "constant":
            return Parameter(distribution=name, values=(fields["value"],))
        return self._categorical(fields, field) if name == "categorical" else self._range(name, fields, field)

    def _categorical(self, fields: dict[str, Any], field: str) -> Parameter:
        values, shares = fields["values"], fields.get("probabilities")
        if not isinstance(values, list) or not values or any(value != value for value in values):
            self._refuse(f"{field}.values", "expected a list of at least one value, without .nan")
        if shares is not None and (
            not isinstance(shares, list)
            or len(shares) != len(values)
            or not all(_is_number(share) and share >= 0 for share in shares)
            or not math.isclose(sum(shares), 1, abs_tol=1e-6)
        ):
            self._refuse(f"{field}.probabilities", "expected one number >= 0 per value, with a sum of 1")
        return Parameter(distribution="categorical", values=tuple(values), probabilities=tuple(shares or ()) or None)

    def _range(self, name: str, fields: dict[str, Any], field: str) -> Parameter:
        numbers = {key: fields[key] for key in ("min", "max", "q", "mu", "sigma") if key in fields}
        for key, value in numbers.items():
            if not _is_number(value):
                self._refuse(f"{field}.{key}", f"{value} is not a number (in YAML write 1.0e-4, not 1e-4)")
            if name == "int_uniform" and type(value) is not int:
                self._refuse(f"{field}.{key}", f"{value} is not an integer")
        parameter = Parameter(distribution=name, **{"q": 1, **numbers})
        for positive in ("q", "sigma", *(["min"] if name == "log_uniform_values" else [])):
            if getattr(parameter, positive) <= 0:
                self._refuse(f"{field}.{positive}", f"must be positive, got {getattr(parameter, positive)}")
        if name != "normal" and parameter.min >= parameter.max:
            self._refuse(f"{field}.max", f"{parameter.max} is not larger than min, {parameter.min}")
        with_ratio = name == "log_uniform_values" and math.isinf(float(parameter.max) / float(parameter.min))
        if with_ratio or not math.isfinite(float(parameter.max) - float(parameter.min)):
            self._refuse(f"{field}.max", f"{parameter.max} is too far from min, {parameter.min}, for a floating number")
        largest = max(abs(parameter.min), abs(parameter.max))
        if name == "q_uniform" and float(largest) > _MOST_STEPS * parameter.q:
            self._refuse(f"{field}.q", f"{parameter.q} is too small a step for values up to {parameter.max}")
        return parameter


def _default_distribution(fields: Mapping[str, Any]) -> str:
    """W&B's default for a parameter without a distribution."""
    kinds = {"value": "constant", "values": "categorical", "mu": "normal", "sigma": "normal"}
    if names := [name for name in kinds if name in fields]:
        return kinds[names[0]]
    are_integers = type(fields.get("min")) is int and type(fields.get("max")) is int
    return "int_uniform" if are_integers else "uniform"


def _is_constant(parameter: Parameter) -> bool:
    """Return whether all runs of a sweep have one value."""
    return len({repr(value) for value in parameter.values}) == 1


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
