"""The plain values of a checkpoint: one that lacks some, or has others, is refused before anything is restored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedsim.core.errors import DataError, FedSimError

INITIAL_KEY = "fedsim_initial"
"""key of the clients' private states before their first session, without heads: architecture -> name -> tensor"""
SERVED_KEY = "fedsim_served"
"""key of the tensors that complete the server's models, which a resume does not read: architecture -> name -> tensor"""
_DIGEST, _SEALED = "digest", "sealed"
"""keys of fedsim's content: the digest of all keys, plain values, shapes and types; and that there must be one"""


def check_checkpoint(checkpoint: Mapping[str, Any], content: dict[str, Any], file: str) -> None:
    """Check the digest of a checkpoint, and unpack the texts of :func:`pack_clients` in fedsim's part, its ``content``.

    They become dictionaries: client -> number of identities, and -> rank. A checkpoint of version 0.2 has no digest.

    Raises:
        DataError: if it was changed after it was written; the message names ``file``.
    """
    _check_seal(checkpoint, content, file)
    with naming_old_damage(content, file):
        _unpack_clients(content)
        if not is_sealed(content):
            _look_at_parts(checkpoint, content)


@contextmanager
def naming_old_damage(content: Mapping[str, Any], file: str) -> Iterator[None]:
    """Name the damage of a checkpoint without a digest, which later ones do not get so far with."""
    try:
        yield
    except FedSimError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_sealed(content):
            raise
        problem = f"a part of it is missing, or of another kind ({type(error).__name__}: {error})"
        raise DataError(f"{file}: {problem}; was it edited? copy the checkpoint again, or give another one") from error


def _look_at_parts(checkpoint: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Read what commands read before a run begins; raise an error of Python where it is not there."""
    rounds, clients = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"], content["clients"]
    counts = [*rounds.values(), *clients.values(), *content["files"], checkpoint["epoch"], checkpoint["global_step"]]
    counts += [content["files"][content["hosts"][name]] for name in clients]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a count is no number from 0")
    for parts in (checkpoint["state_dict"], checkpoint["callbacks"]):
        parts.values()
    [(entry["name"], *entry["shape"], entry["offset"]) for layout in content["layouts"].values() for entry in layout]
    [len(optimizer["state"]) for optimizer in checkpoint["optimizer_states"]]


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
    """Replace the texts by dictionaries, which format 2 has in their place."""
    texts: list[Any] = [content.get(name) for name in ("clients", "classes", "hosts")]
    if not isinstance(texts[1], str):
        return
    names, classes, owners = (text.split(end) for text, end in zip(texts, ("\n", " ", " "), strict=True))
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
