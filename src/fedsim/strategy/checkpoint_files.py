"""Checkpoints: directories that all ranks write together, and that any number of ranks can read.

``NAME.ckpt/vN/`` holds

- ``global.ckpt``: Lightning's checkpoint (the global vectors, the server optimizer, callbacks, loops), the method's
  tensors on the server and, under the key ``fedsim``, the table of contents: format, method, layouts, clients' files;
- ``clients-R-I.safetensors``: the private states of the clients that rank R owned, each tensor named CLIENT/NAME;
- ``config.yaml``: the resolved configuration, if the run was started from the command line.

Only tensors and plain types are unpickled.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.files import flush_file
from fedsim.core.readable import has_file
from fedsim.core.store import STORABLE
from fedsim.core.tensor_file import write_tensors
from fedsim.core.versions import begin_version, current_version
from fedsim.strategy.checkpoint_content import INITIAL_KEY, check_checkpoint, digest_of_header, is_sealed, seal

CONTENT_KEY = "fedsim"
CONFIG_KEY = "fedsim_config"
"""key of the text of the resolved configuration, for the writer"""
SERVER_KEY = "fedsim_server"
"""key of the method's tensors on the server: architecture -> name -> tensor"""
STATES_KEY = "fedsim_states"
"""key of a rank's private states, for the writer: an iterator over (client, state)"""
FORMAT = 3
"""of new checkpoints. Format 2 has a private state of every client, and can be read"""

MODEL_FILE = "model.safetensors"
"""the weights of a model that was exported into a folder"""
_REMOVED = "{}: was removed while the run wrote it; leave a run directory as it is until the run ends"
_TOKEN = "token"  # file of a partial version by which all ranks recognise it
_LAYOUT = "layout"  # key in the metadata of a file of private states: the digest of its tensors' names and shapes
_SHARD_BYTES = 2**29  # size of the private states in memory at which they are written


def begin_with_token(folder: Path) -> list[str]:
    """Create a partial version of a checkpoint; return its name, and the token in it for :func:`has_token`."""
    partial, token = begin_version(folder), secrets.token_hex(8)
    (partial / _TOKEN).write_text(token)
    return [partial.name, token]


def has_token(partial: Path, token: str) -> bool:
    """Return whether this process can read a partial version that another one began."""
    try:
        return (partial / _TOKEN).read_text() == token
    except OSError:
        return False


def unreadable(partial: Path, rank: int) -> str:
    """Return a message about a partial version that rank 0 began, and that ``rank`` cannot read."""
    if rank == 0:  # it wrote it itself
        return _REMOVED.format(partial)
    return (
        f"{partial.parent}: rank {rank} on {socket.gethostname()} cannot read the files of rank 0; put --run_dir on a "
        "file system that all machines share"
    )


def unwritten(path: Path, error: OSError) -> str:
    """Return a message about a checkpoint that could not be written."""
    if isinstance(error, FileNotFoundError):  # its folder was there
        return _REMOVED.format(error.filename or path)
    return f"{path}: the checkpoint cannot be written ({error}); the last one stays"


def write_global(version: Path, checkpoint: dict[str, Any], written: Sequence[Written]) -> None:
    """Write and flush all of a checkpoint except the clients' private states; remove the token, no part of it.

    ``written``: the files of private states of each rank.
    """
    (version / _TOKEN).unlink()
    if (config := checkpoint.pop(CONFIG_KEY, None)) is not None:
        (version / "config.yaml").write_text(config)
        flush_file(version / "config.yaml")
    if CONTENT_KEY in checkpoint:
        content = checkpoint[CONTENT_KEY]
        content |= {"files": [rank.files for rank in written], "states": [rank.states for rank in written]}
        if sum(content["states"]) == content["clients"].count("\n") + 1:
            checkpoint.pop(INITIAL_KEY, None)  # every client has trained
        seal(checkpoint, checkpoint[CONTENT_KEY])
    try:
        torch.save(checkpoint, version / "global.ckpt")
    except RuntimeError as error:  # torch's error for a full disk, and for a folder that is missing
        if not version.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(version)) from error
        raise OSError("is the disk full?") from error
    flush_file(version / "global.ckpt")


class Written(NamedTuple):
    """The files of private states of a rank."""

    files: int
    """number of files"""
    states: int
    """number of clients in them"""


def write_shards(version: Path, rank: int, states: Iterable[tuple[str, Mapping[str, Tensor]]]) -> Written:
    """Write and flush the private states of one rank's clients, a few at a time."""
    files, waiting, size, number = 0, dict[str, Tensor](), 0, 0
    for number, (client, state) in enumerate(states, start=1):  # noqa: B007 - the last number
        waiting |= {f"{client}/{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        size += sum(tensor.nbytes for tensor in state.values())
        if size >= _SHARD_BYTES:
            _write_shard(version / _shard_name(rank, files), waiting)
            files, waiting, size = files + 1, {}, 0
    if waiting:
        _write_shard(version / _shard_name(rank, files), waiting)
        files += 1
    return Written(files, number)


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors to a safetensors file."""
    header = {n: {"dtype": STORABLE[t.dtype], "shape": list(t.shape)} for n, t in tensors.items()}
    write_tensors(path, tensors, {_LAYOUT: digest_of_header(header)})
    flush_file(path)


def _shard_name(rank: int, index: int) -> str:
    return f"clients-{rank}-{index}.safetensors"


def find_version(path: Path) -> Path:
    """Return the directory with the files of a checkpoint, or of one version of it.

    Raises:
        DataError: if there is no complete checkpoint.
    """
    version = path if has_file(path / "global.ckpt") else current_version(path)
    if version is None or not has_file(version / "global.ckpt"):
        if path.is_file():
            raise DataError(f"{path}: is a file; checkpoints of fedsim are directories (format {FORMAT})")
        if (path / MODEL_FILE).is_file():
            raise DataError(
                f"{path}: is a model of fedsim export --folder, no run; fedsim.load_model and fedsim predict --images "
                "read it"
            )
        problem = "holds no complete checkpoint" if path.is_dir() else "no such checkpoint"
        raise DataError(f"{path}: {problem}; look into the run directory's folder checkpoints")
    return version


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read all of a checkpoint except the clients' private states; see :func:`read_states`.

    Raises:
        DataError: if there is no checkpoint of fedsim.
    """
    version = find_version(path)
    file = version / "global.ckpt"
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's readers raise many types for other kinds of files
        raise DataError(f"{file}: cannot be read as a checkpoint ({type(error).__name__}); is it complete?") from error
    content = checkpoint.get(CONTENT_KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(checkpoint, dict) or not isinstance(content, dict) or "format" not in content:
        raise DataError(f"{file}: not a checkpoint of fedsim")
    if content["format"] not in (2, FORMAT):
        raise DataError(
            f"{file}: is of format {content['format']}, this version reads formats 2 and {FORMAT}; "
            "use the version of fedsim that wrote it"
        )
    check_checkpoint(checkpoint, content, str(file))
    for name in _shards(content, range(len(content["files"]))):
        if not has_file(version / name):
            raise DataError(f"{version}: {name} is missing; copy the checkpoint with all its files")
        with _opened(version / name, content):  # before anything is written: a damaged one is refused
            pass
    result: dict[str, Any] = checkpoint
    return result


def read_states(path: Path, content: Mapping[str, Any], clients: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Read the private states of ``clients`` only: client -> name -> tensor on the CPU.

    ``path`` is the checkpoint, or one version of it; ``content`` is fedsim's part of it. A client that has not trained
    has no state, except in checkpoints of format 2.

    Raises:
        DataError: if a file cannot be read, or lacks a client.
    """
    version, wanted = find_version(path), set(clients)
    states: dict[str, dict[str, Tensor]] = {}
    for rank in sorted({content["hosts"][client] for client in clients}):
        stored: set[str] = set()
        for name in _shards(content, [rank]):
            with _opened(version / name, content) as shard:
                for key in shard.keys():  # noqa: SIM118 - it is no dict
                    client, _, tensor = key.rpartition("/")
                    stored.add(client)
                    if client in wanted:
                        states.setdefault(client, {})[tensor] = shard.get_tensor(key)
        of_rank = [name for name, host in content["hosts"].items() if host == rank]
        if len(stored) != (content["states"][rank] if "states" in content else len(of_rank)):
            lacking = next((name for name in of_rank if name not in stored), "some clients")
            raise DataError(f"{version}: holds no private state of {lacking}; is it complete?")
    return states


@contextmanager
def _opened(file: Path, content: Mapping[str, Any]) -> Iterator[Any]:
    """Open a file of private states; raise DataError if it cannot be read, or was changed after it was written."""
    try:
        with safe_open(file, framework="pt") as shard:
            _check_layout(file, shard, is_sealed(content))
            yield shard
    except DataError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, MemoryError) as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__}); is it complete?") from error


def _check_layout(file: Path, shard: Any, sealed: bool) -> None:
    """Raise DataError if the tensors of an open file are not those that were written."""
    digest = (shard.metadata() or {}).get(_LAYOUT)
    if digest is None and not sealed:
        return  # written by an earlier version
    pieces = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118 - it is no dict
    header = {key: {"dtype": piece.get_dtype(), "shape": piece.get_shape()} for key, piece in pieces.items()}
    if digest != digest_of_header(header):
        raise DataError(f"{file}: was changed after it was written (digest); copy the checkpoint again")


def _shards(content: Mapping[str, Any], ranks: Iterable[int]) -> list[str]:
    return [_shard_name(rank, index) for rank in sorted(ranks) for index in range(content["files"][rank])]


def relocate_callbacks(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Change paths in the states of ModelCheckpoint callbacks to ``folder``, where the checkpoint is after a move."""
    for state in checkpoint.get("callbacks", {}).values():
        old = state.get("dirpath") if isinstance(state, dict) else None
        if not isinstance(old, str) or Path(old).name != folder.name:
            continue
        for key, value in state.items():
            if isinstance(value, str) and value.startswith(old):
                state[key] = str(folder) + value.removeprefix(old)
            elif key == "best_k_models":
                state[key] = {str(folder) + path.removeprefix(old): score for path, score in value.items()}


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory; a kill leaves it whole, or under the name of a temporary one."""
    doomed = path.with_name(path.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)  # left over by a killed removal
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
