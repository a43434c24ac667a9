"""Sweeps that are made: of a method, whose config says what to draw, and of a paper, whose file has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import ConfigError, DataError
from fedsim.papers.files import find_in_paper
from fedsim.parsing.config_files import shipped_configs
from fedsim.parsing.error_lines import one_line

_METHODS = Path("configs/methods")
_ANY_METHOD = {
    "model.client.optimizer.init_args.lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2},
    "model.client.local_epochs": {"values": [1, 2, 5]},
}
_NUM_DRAWS = 24


def sweep_of_method(name: str, configs: Sequence[str]) -> dict[str, Any]:
    """Return the sweep of a method, normally judged by ``val/mAP``, as W&B's file format has it.

    It draws the client's rate and local epochs, and what lines ``# sweep: OPTION: RANGE`` in the method's config say;
    null leaves an option out, ``# sweep: method: grid`` makes it a grid, and ``# sweep: metric: NAME`` has it judged
    otherwise. ``name`` is of a config in ``configs/methods``, of another one that comes with fedsim
    (``recipes/leave_one_out``), or the path of one; ``configs`` hold the data, none: those of the quickstart.

    Raises:
        ConfigError: if there is no such method.
        DataError: if its config cannot be read.
    """
    shipped = shipped_configs().get(name)
    path = Path(name) if name.endswith(".yaml") else shipped or _METHODS / f"{name}.yaml"
    if not path.is_file():
        close = get_close_matches(name, sorted(found.stem for found in _METHODS.glob("*.yaml")))
        meant = f"did you mean {' or '.join(close)}?" if close else "call fedsim in the folder that holds configs"
        raise ConfigError(f"--method: there is no {path}; {meant} A path is taken as well")
    own = _ranges(path)
    method, metric = own.pop("method", "random"), own.pop("metric", "val/mAP")
    parameters = {option: range_ for option, range_ in {**_ANY_METHOD, **own}.items() if range_ is not None}
    files = [*(configs or ["configs/quickstart.yaml"]), str(path), "configs/loggers/wandb.yaml"]
    sweep = _sweep(path.stem, method, metric, parameters, [f"--config={file}" for file in files])
    return sweep | ({"run_cap": _NUM_DRAWS} if method == "random" else {})


def _ranges(path: Path) -> dict[str, Any]:
    lines = re.findall(r"^# sweep: (.*)$", path.read_text(), re.MULTILINE)
    try:
        found = yaml.safe_load("\n".join(lines))
    except yaml.YAMLError as error:
        raise DataError(f"{path}: a line # sweep: is not OPTION: RANGE ({one_line(str(error))})") from error
    return dict(found or {})


def sweep_of_paper(which: str, configs: Sequence[str]) -> dict[str, Any]:
    """Return a sweep of a paper as W&B's file format has it: a grid, of rows, of options, or of both.

    It is judged by ``oracle/rank1``: its name says that it is of test data, and that nothing is to be chosen by it.
    ``configs`` come after the paper's own data and protocol.

    Raises:
        ConfigError: if there is no such sweep.
    """
    paper, name = find_in_paper(which, "sweeps")
    if name is None:
        raise ConfigError(f"--paper: say which sweep: {', '.join(f'{paper.key}/{name}' for name in paper.sweeps)}")
    said = paper.sweeps[name]
    rows = [f"{paper.key}/{row}" for row in said.get("rows", ())]
    parameters = ({"paper": {"values": rows}} if rows else {}) | dict(said.get("parameters", {}))
    options = [*([] if rows else [f"--paper={paper.key}"]), *(f"--config={file}" for file in configs)]
    return _sweep(f"{paper.key}-{name}", "grid", "oracle/rank1", parameters, options)


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
