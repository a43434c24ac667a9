"""Weights of backbones, from files and by torchvision's names: nothing but tensors is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision.models as tv
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.paths import FILE, suffix_of
from fedsim.core.tensor_file import problem_of_weights
from fedsim.models.assembled import holds_assembled
from fedsim.models.attention import holds_attention
from fedsim.models.style import holds_style

SUFFIXES = (".pth", ".pt", ".safetensors")
"""of files; other values are names of public weights"""
_may_download: ContextVar[bool] = ContextVar("may_download", default=True)
"""false inside :func:`without_downloads`"""
_WRAPPERS = ("state_dict", "model")
"""names under which training programs store the tensors, next to epochs and optimizers"""


def load_around(
    backbone: nn.Module,
    weights: str | None,
    name: str,
    insert: Callable[[], None] = lambda: None,
    *,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Load weights, then ``insert`` attention and style layers; the other way round if the weights include such.

    ``weights``: torchvision's name, a local file (never unpickled beyond tensors), or None. ``name``: torchvision's
    name of the network. ``rename``: gives the tensors of a file torchvision's names. Raises ConfigError if the weights
    do not exist or do not fit.
    """
    state = None if weights is None else rename(read_file(weights)) if is_file(weights) else _download(weights, name)
    steps: list[Callable[[], None]] = [insert]
    if state is not None:
        steps.insert(0, partial(load_state, backbone, state, str(weights), name, is_whole=True))
    for step in reversed(steps) if state is not None and _holds_inserted(state) else steps:
        step()


def _holds_inserted(names: Iterable[str]) -> bool:
    """Whether these names of tensors are of a backbone with attention, assembled norms or style layers."""
    names = list(names)
    return holds_attention(names) or holds_assembled(names) or holds_style(names)


def load_state(
    backbone: nn.Module, state: dict[str, Tensor], weights: str, name: str, *, is_whole: bool = False
) -> None:
    """Load tensors; those of a classifier or neck are ignored. ``weights`` and ``name`` are for messages.

    ``is_whole``: a file with more tensors in the backbone's own parts is of a deeper network, and an error.
    """
    wanted = backbone.state_dict()
    if not any(key in state for key in wanted):  # files of `network.features` lack the leading "features."
        state = {f"features.{key}": value for key, value in state.items()}
    if missing := [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]:
        raise ConfigError(
            f"backbone.weights: {weights} lacks {len(missing)} tensors of {name}, first {missing[0]}; "
            "give weights of the same network, width, norm and style"
        )
    parts = {_part_of(key) for key in wanted} if is_whole else set()
    if strange := [key for key in state if key not in wanted and (_holds_inserted([key]) or _part_of(key) in parts)]:
        raise ConfigError(
            f"backbone.weights: {weights} has {strange[0]}, which {name} with this norm and style lacks; "
            "give weights of the same network, depth, width, norm and style"
        )
    if wrong := [key for key in wanted if key in state and state[key].shape != wanted[key].shape]:
        key = wrong[0]
        raise ConfigError(
            f"backbone.weights: {weights} has {key} of shape {list(state[key].shape)}, {name} needs "
            f"{list(wanted[key].shape)}; give weights of the same network and width"
        )
    counters = [key for key, tensor in wanted.items() if not tensor.is_floating_point()]
    if problem := problem_of_weights(((key, state[key]) for key in wanted if key in state), counters):
        raise ConfigError(f"backbone.weights: {weights}: {problem}; give another file")
    backbone.load_state_dict({key: state[key] for key in wanted if key in state}, strict=False)


def _part_of(key: str) -> str:
    return key.partition(".")[0]


def read_file(weights: str, setting: str = "backbone.weights") -> dict[str, Tensor]:
    """Return the tensors of a ``.pth``, ``.pt`` or ``.safetensors`` file by name; ``setting`` is for messages.

    Checkpoints of training programs are unwrapped, and the leading ``module.`` of parallel training is removed. Raises
    ConfigError if there is no such file, or no state dict in it.
    """
    try:
        path = Path(FILE.check(weights, setting, "give an existing file or a name of public weights"))
    except DataError as error:
        raise ConfigError(str(error)) from error
    if _is_script(path):
        raise ConfigError(
            f"{setting}: {path} is a TorchScript program, as OpenAI's files of CLIP are, and no program of a file is "
            "run; if you trust it, save its tensors: torch.save(torch.jit.load(FILE, 'cpu').state_dict(), 'tensors.pt')"
        )
    try:  # only tensors and plain types are unpickled, to the CPU whatever device wrote them
        state = load_file(path) if suffix_of(path) == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the readers raise many types for a damaged file
        raise ConfigError(f"{setting}: cannot read {path} ({type(error).__name__}); is it complete?") from error
    content = _unwrapped(state)
    if not isinstance(content, dict):
        raise ConfigError(f"{setting}: {path} holds no state dict but a {type(content).__name__}")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    return {key.removeprefix("module."): value for key, value in tensors.items()}


def _is_script(path: Path) -> bool:
    """Whether a file is a zip archive of TorchScript, by the member that those of torch.save lack."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except Exception:  # of many types: it is no such archive, or damaged
        return False


def _unwrapped(state: Any) -> Any:
    """Return the tensors, which training programs store under one of :data:`_WRAPPERS`."""
    names = [name for name in _WRAPPERS if isinstance(state, dict) and isinstance(state.get(name), dict)]
    return state[names[0]] if names else state


@contextmanager
def without_downloads() -> Iterator[None]:
    """Build backbones without downloading public weights; the names of weights are still checked."""
    token = _may_download.set(False)
    try:
        yield
    finally:
        _may_download.reset(token)


def _download(weights: str, name: str) -> dict[str, Tensor] | None:
    """Return torchvision's weights; None if downloads are off."""
    choices = tv.get_model_weights(name) if name in tv.list_models() else None
    if choices is None:
        raise ConfigError(
            f"backbone.weights: {weights} is no file, and torchvision has no {name}; give a file, or null"
        )
    if weights not in choices.__members__:
        names = ", ".join(choices.__members__)
        problem = f"torchvision has no weights {weights} of {name}; choose {names}, a file, or null"
        raise ConfigError(f"backbone.weights: {problem}")
    if not may_download():
        return None
    try:
        return dict(choices[weights].get_state_dict(check_hash=True))
    except Exception as error:  # no network, or a damaged file in torch's cache: many types
        raise ConfigError(
            f"backbone.weights: cannot get {choices[weights].url} ({type(error).__name__}: {error}); give a local file "
            "instead, or delete a damaged download from torch's cache"
        ) from error


def may_download() -> bool:
    """Whether weights may be downloaded here."""
    return _may_download.get()


def is_file(weights: str) -> bool:
    """Whether ``weights`` is a path, not a name in torchvision."""
    return suffix_of(weights) in SUFFIXES
