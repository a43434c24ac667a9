"""Sweeps in the fields of W&B's file format, sampled without its server: settings of each run, and its command line.

Names of distributions and macros: https://docs.wandb.ai/guides/sweeps/sweep-config-keys. Samples depend only on the
file and a seed; they differ from those of W&B's server.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.parsing.documents import as_yaml
from fedsim.sweep.early_stop import EarlyStop

Sample = dict[str, Any]
"""Settings of one run of a sweep: option name without hyphens -> value."""

DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
"""W&B's default."""

MACROS = (*DEFAULT_COMMAND, "${args_no_hyphens}")
MOST_RUNS = 100_000
"""largest number of runs of a call, and of values of a parameter of a grid: more would fill the memory"""
VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


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
    if min(limits) > MOST_RUNS:
        raise ConfigError(f"--count: {sweep.name} has {min(limits)} runs; give a number up to {MOST_RUNS}")
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
        command += macros.get(word) or [VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), word)]
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
