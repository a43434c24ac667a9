"""The plain values of a checkpoint: one that lacks some, or has others, is refused before anything is restored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor

from fedsim.core.errors import DataError

INITIAL_KEY = "fedsim_initial"
"""key of the clients' private states before their first session, without heads: architecture -> name -> tensor"""
_DIGEST, _SEALED = "digest", "sealed"
"""keys of fedsim's content: the digest of all keys, plain values, shapes and types; and that there must be one"""
_COUNTS = ("ready", "completed", "started", "processed")
_MOST = 2**53


def check_checkpoint(checkpoint: Mapping[str, Any], content: dict[str, Any], file: str) -> None:
    """Check keys and types of Lightning's part of a checkpoint, and of fedsim's part, its ``content``.

    In it, the texts of :func:`pack_clients` become dictionaries: client -> number of identities, and -> rank.

    Raises:
        DataError: for the first part that no fit has written so; the message names ``file``.
    """
    _check_seal(checkpoint, content, file)
    _unpack_clients(content)
    problems = (*_problems(checkpoint), *_content_problems(content))
    for name in problems or _initial_problems(checkpoint, content):
        raise DataError(f"{file}: {name} is missing, or of another kind; was it edited? copy the checkpoint again")


def seal(checkpoint: Mapping[str, Any], content: dict[str, Any]) -> None:
    """Add a digest of everything but the values of tensors to the ``content`` of a checkpoint that is to be written."""
    content[_SEALED] = True
    content.pop(_DIGEST, None)
    content[_DIGEST] = _digest(checkpoint)


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has digests, also in its files of private states; those of earlier versions have none."""
    return _SEALED in content or _DIGEST in content


def pack_clients(classes: Mapping[str, int], owners: Mapping[str, int]) -> dict[str, str]:
    r"""Return the clients' table in three texts, which take a fraction of the time and memory of dictionaries.

    ``classes``: client -> number of its identities; ``owners``: client -> the rank that wrote its state. Names have no
    line ends. In files the owners are called hosts, as in those of earlier versions.

    >>> pack_clients({"a": 3, "b": 12}, {"a": 0, "b": 1})
    {'clients': 'a\nb', 'classes': '3 12', 'hosts': '0 1'}
    """
    return {
        "clients": "\n".join(classes),
        "classes": " ".join(map(str, classes.values())),
        "hosts": " ".join(str(owners[name]) for name in classes),
    }


def _unpack_clients(content: dict[str, Any]) -> None:
    """Replace the texts by dictionaries, which format 2 has in their place; damaged texts stay, and are refused."""
    texts = [content.get(name) for name in ("clients", "classes", "hosts")]
    if not all(isinstance(text, str) for text in texts):
        return
    names, classes, owners = (str(text).split(end) for text, end in zip(texts, ("\n", " ", " "), strict=True))
    if not len(names) == len(classes) == len(owners) or not all(map(str.isdecimal, (*classes, *owners))):
        return
    content["clients"] = dict(zip(names, map(int, classes), strict=True))
    content["hosts"] = dict(zip(names, map(int, owners), strict=True))


def _check_seal(checkpoint: Mapping[str, Any], content: Mapping[str, Any], file: str) -> None:
    undigested = {name: value for name, value in content.items() if name != _DIGEST}
    parts = {name: undigested if value is content else value for name, value in checkpoint.items()}
    if is_sealed(content) and content.get(_DIGEST) != _digest(parts):
        raise DataError(f"{file}: was changed after it was written (digest); copy the checkpoint again")


def _digest(checkpoint: Mapping[str, Any]) -> str:
    return hashlib.sha256("\n".join(_lines(checkpoint, "")).encode(errors="backslashreplace")).hexdigest()


def _lines(value: Any, name: str) -> Iterator[str]:
    """Yield a line for each value, with its place."""
    if isinstance(value, Tensor):
        yield f"{name}: {list(value.shape)} {value.dtype}"
    elif isinstance(value, Mapping):
        yield f"{name}: {len(value)} keys"
        for key, inner in value.items():
            yield from _lines(inner, f"{name}/{type(key).__name__} {key}")
    elif isinstance(value, list | tuple):
        yield f"{name}: {len(value)} values"
        for number, inner in enumerate(value):
            yield from _lines(inner, f"{name}/{number}")
    else:
        yield f"{name}: {type(value).__name__} {value!r}"


def digest_of_header(header: Mapping[str, Any]) -> str:
    """Return the digest of a file of private states: tensor -> its dtype, by safetensors' name, and shape."""
    return _digest({name: [header[name]["dtype"], list(header[name]["shape"])] for name in sorted(header)})


def _problems(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of wrong parts of Lightning's dictionary."""
    for name in ("epoch", "global_step"):
        if not is_count(checkpoint.get(name)):
            yield name
    vectors = checkpoint.get("state_dict")
    if not isinstance(vectors, dict) or not all(isinstance(vector, Tensor) for vector in vectors.values()):
        yield "state_dict"
    for name, expected_type in (("callbacks", dict), ("optimizer_states", list), ("lr_schedulers", list)):
        if not isinstance(checkpoint.get(name), expected_type):
            yield name
    yield from _loop_problems(checkpoint.get("loops"))


def _loop_problems(loops: Any) -> Iterator[str]:
    try:
        progress = loops["fit_loop"]["epoch_progress"]["current"]
        if not all(is_count(progress[name]) for name in _COUNTS):
            yield "loops: fit_loop.epoch_progress"
    except (KeyError, TypeError, IndexError):
        yield "loops: fit_loop.epoch_progress"
        return
    if not all(isinstance(value, bool) or is_count(value) for value in _leaves(loops)):
        yield "loops"


def _content_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of wrong parts of fedsim's dictionary."""
    if not isinstance(content.get("method"), str):
        yield "method"
    if not is_count(content.get("threads")):
        yield "threads"
    yield from _client_problems(content)
    for name in ("layouts", "private_layouts"):
        if not _is_named(content.get(name), partial(_is_list_of, test=_is_entry)):
            yield name
    for name in ("fixed", "complete"):
        if not isinstance(content.get(name, {}), dict):
            yield name


def _client_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of wrong tables of clients, and of their files."""
    files = content.get("files")
    if not _is_list_of(files, is_count):
        yield "files"
        files = []
    states = content.get("states")
    if content.get("format") != 2 and not (_is_list_of(states, is_count) and len(states) == len(files)):
        yield "states"
    clients, owners = content.get("clients"), content.get("hosts")
    if not isinstance(clients, dict) or not _is_named(clients, is_count):
        yield "clients"
    elif (
        not isinstance(owners, dict)
        or not _is_named(owners, lambda rank: is_count(rank) and rank < len(files))
        or owners.keys() != clients.keys()
    ):
        yield "hosts"


def _initial_problems(checkpoint: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key of the initial states if they are damaged, or missing though some clients have no state."""
    is_needed = "states" in content and sum(content["states"]) < len(content["clients"])
    initial = checkpoint.get(INITIAL_KEY)
    if initial is None and not is_needed:
        return
    are_tensors = partial(_is_named, test=lambda value: isinstance(value, Tensor))
    if (
        not isinstance(initial, dict)
        or not _is_named(initial, are_tensors)
        or initial.keys() != content["layouts"].keys()
    ):
        yield INITIAL_KEY


def _is_list_of(values: Any, test: Callable[[Any], bool]) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(map(test, values))


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"name", "shape", "offset"}:
        return False
    shape = entry["shape"]
    return isinstance(entry["name"], str) and _is_list_of(shape, is_count) and is_count(entry["offset"])


def _is_named(values: Any, test: Any) -> bool:
    return (
        isinstance(values, dict) and all(isinstance(name, str) for name in values) and all(map(test, values.values()))
    )


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def difference(saved: Any, expected: Tensor) -> str | None:
    """Return how type, shape or dtype of a saved tensor differ from the expected ones; None if they do not.

    >>> import torch
    >>> difference(torch.zeros(2), torch.zeros(3)), difference(torch.zeros(2), torch.ones(2))
    ('is [2], not [3]', None)
    """
    if not isinstance(saved, Tensor):
        return f"is {type(saved).__name__}, not a tensor"
    if saved.shape != expected.shape:
        return f"is {list(saved.shape)}, not {list(expected.shape)}"
    if saved.dtype != expected.dtype:
        return f"is {str(saved.dtype)[6:]}, not {str(expected.dtype)[6:]}"
    return None


def unlike(saved: Any, fresh: Any, name: str) -> str | None:
    """Return the name of the first value of a saved state that is of another kind than in a ``fresh`` one, or None.

    A mapping that is empty in the fresh state, such as that of rewards by client, may have any keys, and numbers.

    >>> unlike({"H": {"town0": 0.5}}, {"H": {}}, "state"), unlike({"H": {"town0": "x"}}, {"H": {}}, "state")
    (None, 'state.H.town0')
    """
    if isinstance(fresh, Mapping):
        if not isinstance(saved, Mapping):
            return name
        if fresh and saved.keys() != fresh.keys():
            return f"{name}.{min(map(str, saved.keys() ^ fresh.keys()))}"
        parts = (unlike(inner, fresh.get(key, 0.0), f"{name}.{key}") for key, inner in saved.items())
        return next(filter(None, parts), None)
    if isinstance(fresh, str):
        return None if isinstance(saved, str) else name
    is_number = isinstance(saved, int | float) and not isinstance(saved, bool) and math.isfinite(saved)
    return None if is_number else name
