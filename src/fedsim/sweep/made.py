"""Sweeps made from a method, whose config contains the ranges, and from a paper, whose file contains its sweeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.papers.files import find_in_paper
from fedsim.parsing.config_files import shipped_configs
from fedsim.parsing.documents import parse_yaml, read_text

_METHODS = Path("configs/methods")
_ANY_METHOD = Path(__file__).with_name("any_method.yaml")
_NUM_RUNS = 24


def sweep_of_method(name: str, configs: Sequence[str], logs_to_wandb: bool = True) -> dict[str, Any]:
    """Return the sweep of a method in W&B's file format.

    It samples the client's learning rate and local epochs, and the options of lines ``# sweep: OPTION: RANGE`` in the
    method's config. The range null removes an option, ``# sweep: method: grid`` makes the sweep a grid, and
    ``# sweep: metric: NAME`` replaces the metric ``val/mAP``.

    Args:
        name: a config in ``configs/methods``, another one that comes with fedsim (``recipes/leave_one_out``), or
            a path.
        configs: configs with the data; empty: those of the quickstart.
        logs_to_wandb: whether the runs log to W&B, too, whose server needs it.

    Raises:
        ConfigError: if there is no such method.
        DataError: if its config cannot be read.
    """
    shipped = shipped_configs()
    written = Path(name) if name.endswith(".yaml") else shipped.get(name) or _METHODS / f"{name}.yaml"
    # the command keeps the short path, which means the shipped config in any folder
    path = written if written.is_file() else shipped.get(f"methods/{name}", written)
    if not path.is_file():
        methods = [config.removeprefix("methods/") for config in shipped if config.startswith("methods/")]
        close = get_close_matches(name, methods)
        remedy = f"did you mean {' or '.join(close)}?" if close else "fedsim list lists the methods."
        raise ConfigError(f"--method: there is no {written}; {remedy} The path of a config is accepted, too")
    ranges = _ranges(path)
    method, metric = ranges.pop("method", "random"), ranges.pop("metric", "val/mAP")
    of_any = parse_yaml(_ANY_METHOD.read_text(encoding="utf-8"), _ANY_METHOD.name)
    parameters = {option: range_ for option, range_ in {**of_any, **ranges}.items() if range_ is not None}
    loggers = ["configs/loggers/wandb.yaml"] if logs_to_wandb else []
    files = [*(configs or ["configs/quickstart.yaml"]), str(written), *loggers]
    sweep = _sweep(path.stem, method, metric, parameters, [f"--config={file}" for file in files])
    return sweep | ({} if method == "grid" else {"run_cap": _NUM_RUNS})


def _ranges(path: Path) -> dict[str, Any]:
    lines = re.findall(r"^# sweep: (.*)$", read_text(path, "this config"), re.MULTILINE)
    ranges = parse_yaml("\n".join(lines), f"{path}: lines # sweep: OPTION: RANGE") or {}
    if not isinstance(ranges, dict) or not all(isinstance(option, str) for option in ranges):
        raise DataError(f"{path}: a line # sweep: does not name an option; write # sweep: OPTION: RANGE")
    return ranges


def sweep_of_paper(sweep_name: str, configs: Sequence[str]) -> dict[str, Any]:
    """Return a sweep of a paper in W&B's file format: a grid of rows, of options, or of both.

    Its metric is ``oracle/rank1``, unless the sweep has another one. The prefix marks a score on test data, which must
    not be used for model selection. A row with ``left_out`` is all of its runs.

    Args:
        sweep_name: PAPER/SWEEP.
        configs: configs that override the paper's data and protocol.

    Raises:
        ConfigError: if there is no such sweep.
    """
    paper, name = find_in_paper(sweep_name, "sweeps")
    if name is None:
        raise ConfigError(f"--paper: name a sweep: {', '.join(f'{paper.key}/{name}' for name in paper.sweeps)}")
    content = paper.sweeps[name]
    rows = [f"{paper.key}/{run}" for row in content.get("rows", ()) for run in paper.runs_of(row)]
    parameters = ({"paper": {"values": rows}} if rows else {}) | dict(content.get("parameters", {}))
    options = [*([] if rows else [f"--paper={paper.key}"]), *(f"--config={file}" for file in configs)]
    return _sweep(f"{paper.key}-{name}", "grid", content.get("metric", "oracle/rank1"), parameters, options)


def _sweep(
    name: str, method: str, metric: str, parameters: Mapping[str, Any], options: Sequence[str]
) -> dict[str, Any]:
    return {
        "program": "fedsim",
        "name": name,
        "project": "fedsim",
        "method": method,
        "metric": {"name": metric, "goal": "maximize"},
        "parameters": dict(parameters),
        "command": ["${env}", "${program}", "fit", *options, "${args}"],
    }
