"""``check_method``: whether a federated method keeps what the round, other ranks and checkpoints need of it."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from fedsim.data import ReIDSource
from fedsim.methods.base import Delivered, Method, Need
from fedsim.models.groups import Group
from fedsim.testing.comparisons import compare, findings_on_a_gpu, scores_of
from fedsim.testing.findings import Findings
from fedsim.testing.trials import ROUNDS, Fit


def check_method(
    method: Method, *, fixed_point: bool | None = None, source: ReIDSource | None = None, **settings: Any
) -> None:
    """Refuse a method that is not fit for a federation, with a sentence for each finding.

    Small fits, in processes of their own, on the CPU, take some seconds; one more is on a GPU, if there is one. All
    hooks are watched: types, shapes, names and dtypes of what they return, random streams, state that is kept on
    the method, its classes, its module, a client or the server, tensors of the server that are read without being
    declared, and declared ones that are not read. The checkpoints after each round are compared bit by bit: of one
    rank and of two, and of a run that goes on after a pause. With a learning rate of 0 the global model must stay.

    Args:
        method: an instance with the settings that are checked.
        fixed_point: whether equal uploads must leave the global model as it is; None: unless the method prunes, or
            trains on public images.
        source: data sets to train on; None: synthetic people, five clients of unequal size, one with one camera.
        settings: further arguments of Federation, such as ``client=LocalTraining(...)``, ``backbone=...`` or
            ``hardware=...``.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(type(method).__name__)
    _check_declared(method, findings)
    findings.settle()
    with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
        _check_fits(method, fixed_point, source, settings, Path(folder), findings)
    findings.settle()


def _check_declared(method: Method, findings: Findings) -> None:
    if not isinstance(method, Method):
        findings.add(f"{type(method).__name__} is no fedsim.methods.base.Method; derive the class from it")
        return
    with findings.trying("a declaration"):
        if not {*method.shared_groups} <= {*Group}:
            findings.add(f"shared_groups has {_first({*method.shared_groups} - {*Group})}, which is no Group")
        if method.delivers not in get_args(Delivered):
            findings.add(f"delivers is {method.delivers}; choose one of {', '.join(get_args(Delivered))}")
        if unknown := {*method.requires} - {*get_args(Need)}:
            findings.add(f"requires has {_first(unknown)}; the needs are {', '.join(get_args(Need))}")
        if kinds := {*method.measures.values()} - {"client", "tensor"}:
            findings.add(f"measures has {_first(kinds)}; a signal is of the client or of each tensor")
        if not isinstance(method.server_every, int) or method.server_every < 0:
            findings.add(f"server_every is {method.server_every}; it is a number of rounds, or 0")
        _check_hooks(method, findings)


def _check_hooks(method: Method, findings: Findings) -> None:
    """Note hooks of the method that no round would call."""
    written = {name for name in dir(type(method)) if getattr(type(method), name) is not getattr(Method, name, None)}
    chosen = {name for name in written if isinstance(getattr(type(method), name), property)}  # by the method's settings
    if "server_step" in written and method.server_every == 0 and "server_every" not in chosen:
        findings.add("server_step is never called: server_every is 0; let it return a number of rounds, such as 1")
    if "aggregate" in written and "uploads" not in method.requires and "requires" not in chosen:
        findings.add('aggregate is never called: let requires have "uploads"')
    hooks = {name for name in vars(Method) if not name.startswith("_")}
    functions = [getattr(type(method), name) for name in written]
    called = {name for function in functions if inspect.isfunction(function) for name in function.__code__.co_names}
    for name in sorted(name for name in written - hooks - called if not name.startswith("_")):
        if callable(getattr(method, name)) and (meant := get_close_matches(name, hooks, n=1, cutoff=0.85)):
            findings.add(f"{name} is no hook, so no round calls it; {meant[0]} is one: take that name, or another")


def _first(values: set[Any]) -> Any:
    return min(values, key=str)


def _check_fits(
    method: Method, fixed_point: bool | None, source: ReIDSource | None, settings: Mapping[str, Any], folder: Path,
    findings: Findings,
) -> None:  # fmt: skip
    whole = Fit(method, folder / "one rank", settings, source, is_drawn="backbone" in settings)
    pair = replace(whole, folder=folder / "two ranks", ranks=2, has_other_hashes=True)
    findings.add_all(sentences := whole.run())
    if not whole.has_ended:
        return
    problems = compare(whole, pair, _PAIR, sentences, range(1, ROUNDS + 1))
    findings.add_all(problems)
    if pair.has_ended and not problems and scores_of(whole) != scores_of(pair):
        findings.add(
            "the models are equal on one rank and on two, and their scores differ: personalise or server_tensors "
            "depends on the rank"
        )
    pause = whole.checkpoint(ROUNDS - 1)
    if pause.exists():
        resumed = replace(whole, folder=folder / "resumed", resumed_from=pause, has_other_hashes=True)
        findings.add_all(compare(whole, resumed, _RESUMED, sentences))
    findings.add_all(findings_on_a_gpu(whole))
    if fixed_point or (fixed_point is None and not ({"masks", "public_images"} & method.requires)):
        still = replace(whole, folder=folder / "still", rounds=3, is_still=True, must_be_still=bool(fixed_point))
        findings.add_all(still.run())


_PAIR = (
    "after round {round}, one rank and two ranks differ: {difference}; a hook must depend on its arguments alone, not "
    "on the rank, on other clients or on global random streams"
)
_RESUMED = (
    f"a run that is resumed after {ROUNDS - 1} rounds comes to another end than one without a pause: {{difference}}; "
    "what lasts from round to round must be kept by client.keep or server.keep"
)
