"""A round of the server by a method's declarations: its message to clients, tensors on ranks, rounds with a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim.methods.base import Method
from fedsim.training.messages import Download

if TYPE_CHECKING:
    from fedsim.training.server import Server


def message_to(method: Method, server: Server, arch: str, vector: Tensor | None = None) -> Download:
    """Return the server's message to the clients of an architecture: the model, and the declared tensors.

    ``vector`` [num_shared] is the model of an earlier round; None: the current one.
    """
    payload = method.payload(server, arch, server.round)
    names = (*payload.down, *payload.known, *([payload.mask] if payload.mask else []))
    message = server.send(arch, names, with_public="public_images" in method.requires, vector=vector)
    tables = {name: server.table(name, columns) for name, columns in payload.tables.items()}
    return replace(message, extras={**message.extras, **tables}) if tables else message


def tensors_on_ranks(method: Method, server: Server, arch: str) -> frozenset[str]:
    """Return the names of the server's tensors that all ranks need until the next :meth:`Method.server_step`."""
    rounds = range(server.round + 1, server.round + 1 + max(method.server_every, 1))
    payloads = [method.payload(server, arch, round_) for round_ in rounds]
    masks = {payload.mask for payload in payloads if payload.mask is not None}
    return method.reads_on_ranks.union(masks, *((*payload.down, *payload.known) for payload in payloads))


def has_server_step(method: Method, round_: int) -> bool:
    """Return whether :meth:`Method.server_step` runs after round ``round_``, from 0."""
    return method.server_every > 0 and (round_ + 1) % method.server_every == 0
