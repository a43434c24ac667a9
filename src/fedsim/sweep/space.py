"""The parameters of a sweep as Optuna's distributions, and the way back from its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from fedsim.sweep.sampling import Parameter, Sample, round_to_step

_PLAIN = (bool, int, float, str, type(None))


def choices_of(parameter: Parameter) -> dict[Any, Any]:
    """Return Optuna's choice -> value of a categorical parameter: its text, unless all values are plain and distinct.

    Optuna stores only plain values, and takes 1, 1.0 and true for one choice.

    >>> choices_of(Parameter(distribution="categorical", values=(1, True, [2])))
    {'1': 1, 'True': True, '[2]': [2]}
    """
    by_text = {repr(value): value for value in parameter.values}
    is_plain = all(isinstance(value, _PLAIN) for value in parameter.values)
    if is_plain and len(set(parameter.values)) == len(by_text):
        return {value: value for value in parameter.values}
    return by_text


def distribution_of(parameter: Parameter) -> BaseDistribution:
    """Return Optuna's distribution with the same values; ``normal`` has none.

    >>> distribution_of(Parameter(distribution="q_uniform", min=0.0, max=1.0, q=0.25))
    FloatDistribution(high=1.0, log=False, low=0.0, step=0.25)
    """
    match parameter.distribution:
        case "uniform" | "log_uniform_values":
            return FloatDistribution(parameter.min, parameter.max, log=parameter.distribution != "uniform")
        case "int_uniform":
            return IntDistribution(int(parameter.min), int(parameter.max))
        case "q_uniform":
            low, high = (round(end / parameter.q) * parameter.q for end in (parameter.min, parameter.max))
            if isinstance(parameter.q, int):
                return IntDistribution(int(low), int(high), step=parameter.q)
            low, high = (round_to_step(end, parameter.q) for end in (low, high))
            return FloatDistribution(low, high, step=parameter.q)
    return CategoricalDistribution(tuple(choices_of(parameter)))


def space_of(parameters: Mapping[str, Parameter]) -> dict[str, BaseDistribution]:
    """Return the distributions of all parameters but the constant ones."""
    return {
        name: distribution_of(parameter)
        for name, parameter in parameters.items()
        if parameter.distribution != "constant"
    }


def suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> None:
    """Let a trial draw a value, unless it has one."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step)
    elif isinstance(distribution, FloatDistribution):
        low, high = distribution.low, distribution.high
        trial.suggest_float(name, low, high, step=distribution.step, log=distribution.log)


def params_of(sample: Sample, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return Optuna's values of a sample, without the constant ones."""
    return {name: _choice(parameters[name], sample[name]) for name in space_of(parameters)}


def sample_of(params: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> Sample:
    """Return the sample with Optuna's values, and the constant ones."""
    return {name: _value(parameter, params.get(name)) for name, parameter in parameters.items()}


def _choice(parameter: Parameter, value: Any) -> Any:
    by_text = {repr(original): choice for choice, original in choices_of(parameter).items()}
    return by_text[repr(value)] if parameter.values else value


def _value(parameter: Parameter, stored: Any) -> Any:
    if parameter.distribution == "constant":
        return parameter.values[0]
    if parameter.values:
        return choices_of(parameter)[stored]
    return round_to_step(stored, parameter.q) if parameter.distribution == "q_uniform" else stored
