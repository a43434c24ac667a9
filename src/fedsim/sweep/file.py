"""Sweeps in W&B's file format, sampled without its server: read a file, sample settings, and make command lines.

Format, names of distributions and macros: https://docs.wandb.ai/guides/sweeps/sweep-config-keys. Samples depend only on
the file and a seed; they differ from those of W&B's server.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.parsing.documents import as_yaml, parse_yaml, read_text
from fedsim.parsing.typed_names import with_quotes
from fedsim.settings.table import setting_at
from fedsim.sweep.early_stop import EarlyStop, early_stop_of

Sample = dict[str, Any]
"""Settings of one run of a sweep: option name without hyphens -> value."""

DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
"""W&B's default."""

_KEYS = {"method", "parameters", "metric", "command", "program", "name", "description", "project", "entity", "run_cap",
         "early_terminate"}  # fmt: skip
_RANGES = dict.fromkeys(("uniform", "log_uniform_values", "q_uniform", "int_uniform"), ("min", "max"))
_NEEDS = {"constant": ("value",), "categorical": ("values",), **_RANGES, "normal": ()}
_MAY_HAVE = {"categorical": ("probabilities",), "q_uniform": ("q",), "normal": ("mu", "sigma")}
_MACROS = (*DEFAULT_COMMAND, "${args_no_hyphens}")
_MOST = 100_000
"""largest number of runs of a call, and of values of a parameter of a grid: more would fill the memory"""
_MOST_STEPS = 2.0**53
"""of a range: beyond, floating numbers have no such steps"""
_OPTION = re.compile(r"[^\s=-]([^=\n]*[^\s=])?")
"""inner hyphens and spaces may be those of a client's name"""
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One option of a sweep, with W&B's fields."""

    distribution: str
    """W&B's name, also if the file leaves it out"""
    values: tuple[Any, ...] = ()
    """for categorical; for constant a single one"""
    probabilities: tuple[float, ...] | None = None
    """of ``values``; None: uniform"""
    min: float = 0.0
    max: float = 0.0
    q: float = 1.0
    """step of q_uniform"""
    mu: float = 0.0
    sigma: float = 1.0

    @property
    def grid(self) -> tuple[Any, ...]:
        """All values in order; empty if there are infinitely many."""
        if self.distribution == "int_uniform":
            return tuple(range(int(self.min), int(self.max) + 1))
        if self.distribution == "q_uniform":
            steps = range(round(self.min / self.q), round(self.max / self.q) + 1)
            return tuple(dict.fromkeys(_step(step * self.q, self) for step in steps))
        return self.values

    @property
    def grid_size(self) -> float:
        """Number of values in :attr:`grid`, or a little more, without a list of them."""
        if self.distribution in ("int_uniform", "q_uniform"):
            return (self.max - self.min) / (self.q if self.distribution == "q_uniform" else 1) + 1
        return len(self.values)

    def sample(self, uniform: float, normal: float) -> Any:
        """Return a value for a uniform number in [0, 1) and a standard normal one."""
        low, high = self.min, self.max
        match self.distribution:
            case "uniform":
                return low + uniform * (high - low)
            case "log_uniform_values":
                return low * (high / low) ** uniform
            case "q_uniform":
                return _step(round((low + uniform * (high - low)) / self.q) * self.q, self)
            case "int_uniform":
                return int(low + math.floor(uniform * (high - low + 1)))
            case "normal":
                return self.mu + self.sigma * normal
        shares = self.probabilities or (1 / len(self.values),) * len(self.values)
        return self.values[min(sum(uniform >= bound for bound in itertools.accumulate(shares)), len(self.values) - 1)]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The content of a sweep file."""

    name: str
    """name of the file"""
    method: Literal["grid", "random", "bayes"]
    parameters: Mapping[str, Parameter]
    metric: str
    """its name in summary.json, such as ``val/mAP``"""
    maximize: bool
    command: tuple[str, ...]
    program: str
    run_cap: int | None
    """W&B's limit on the number of runs"""
    target: float | None = None
    """score after which no other run starts"""
    early_stop: EarlyStop | None = None
    """W&B's early_terminate"""

    @property
    def is_search(self) -> bool:
        """Whether results decide about later runs, or about the end of running ones."""
        return self.method == "bayes" or self.early_stop is not None or self.target is not None

    @property
    def ignored(self) -> list[str]:
        """A line for each field that has no meaning on this machine."""
        lines = ["early_terminate.strict: has no effect here"] if self.early_stop and self.early_stop.strict else []
        if self.method == "bayes":
            shared = [name for name, parameter in self.parameters.items() if parameter.probabilities]
            lines += [f"parameters.{name}.probabilities: has no effect with bayes" for name in shared]
        return [f"{self.name}: {line}" for line in lines]


def read_content(path: Path) -> Any:
    """Return the content of a sweep file; raise DataError if it cannot be read."""
    return parse_yaml(with_quotes(read_text(path, "this sweep")), str(path))


def sweep_of(content: object, name: str) -> Sweep:
    """Return the sweep that a file's content describes; raise ConfigError with the field's name if it is wrong."""
    return _Reader(name).read(content)


def samples(sweep: Sweep, count: int | None = None, seed: int = 0) -> Iterator[Sample]:
    """Yield the settings of each run of a sweep.

    Args:
        sweep: method grid: all combinations, the last parameter changes fastest; random: independent samples.
        count: maximum number; a random sweep without ``run_cap`` needs it.
        seed: seed of random samples. The first samples do not depend on ``count``.

    Raises:
        ConfigError: if ``count`` is missing or less than 1, or there would be too many runs.
    """
    number_of_runs = num_runs(sweep, count)
    if sweep.method == "grid":
        grids = [parameter.grid for parameter in sweep.parameters.values()]
        runs: Iterator[Sample] = (dict(zip(sweep.parameters, v, strict=True)) for v in itertools.product(*grids))
    else:
        runs = (_sample(sweep, number, seed) for number in itertools.count())
    yield from itertools.islice(runs, number_of_runs)


def num_runs(sweep: Sweep, count: int | None = None) -> int:
    """Return the number of runs of a sweep; arguments and errors as those of :func:`samples`."""
    if count is not None and count < 1:
        raise ConfigError(f"--count: {count} is less than 1")
    limits = [limit for limit in (count, sweep.run_cap) if limit is not None]
    if sweep.method == "grid":
        limits.append(math.prod(len(parameter.grid) for parameter in sweep.parameters.values()))
    elif not limits:
        raise ConfigError(f"--count: {sweep.name} is a {sweep.method} sweep without run_cap; give the number of runs")
    if min(limits) > _MOST:
        raise ConfigError(f"--count: {sweep.name} has {min(limits)} runs; give a number up to {_MOST}")
    return min(limits)


def command_of(sweep: Sweep, sample: Sample) -> list[str]:
    """Return the command line of a run, as W&B's agent makes it.

    >>> sweep = Sweep(name="s.yaml", method="grid", parameters={}, metric="val/mAP", maximize=True,
    ...               command=("${program}", "fit", "${args}"), program="fedsim", run_cap=None)
    >>> command_of(sweep, {"model.client.grad_clip": None, "model.client.batch_size": 8})
    ['fedsim', 'fit', '--model.client.grad_clip=None', '--model.client.batch_size=8']
    """
    plain = [f"{name}={_as_text(value)}" for name, value in sample.items()]
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": ["python"],
        "${program}": [sweep.program],
        "${args}": [f"--{option}" for option in plain],
        "${args_no_hyphens}": plain,
    }
    command = []
    for word in sweep.command:
        command += macros.get(word) or [_VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), word)]
    return command


def _as_text(value: Any) -> str:
    """Return a value as W&B's agent writes it, in Python's syntax; as JSON where YAML reads that otherwise."""
    return as_yaml(value) if isinstance(value, list | dict) and "\\" in repr(value) else str(value)


def _sample(sweep: Sweep, number: int, seed: int) -> Sample:
    """Sample each value with its own generator, so that other parameters in the file do not change it."""
    streams = {name: numpy_generator(seed, number, name, "sweep") for name in sweep.parameters}
    draws = {name: (float(stream.random()), float(stream.standard_normal())) for name, stream in streams.items()}
    return {name: parameter.sample(*draws[name]) for name, parameter in sweep.parameters.items()}


def _step(value: float, parameter: Parameter) -> float:
    """Convert to int if ``q`` is an int, as W&B does; otherwise round: 3 * 0.1 would be 0.30000000000000004."""
    return int(value) if isinstance(parameter.q, int) else round_to_step(value, parameter.q)


def round_to_step(value: float, q: float) -> float:
    """Round to a millionth of a millionth of the step ``q``, which has no digits beyond.

    >>> round_to_step(3 * 0.1, 0.1), round_to_step(3 * 1e-13, 1e-13)
    (0.3, 3e-13)
    """
    return round(value, 12 - math.floor(math.log10(q)))


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
            if word.startswith("${") and word not in _MACROS and not _VARIABLE.search(word):
                self._refuse("command", f"{word} is not a known macro; choose from {', '.join(_MACROS)}")
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
            if method == "grid" and (size := options[name].grid_size) > _MOST:
                remedy = f"a grid takes up to {_MOST}; give values, a larger q, or set method to random"
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
