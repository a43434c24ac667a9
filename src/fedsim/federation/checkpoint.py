"""fedsim's part of a checkpoint: save it, compare it with a federation, load it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.flat import Entry
from fedsim.data.federated import ClientData
from fedsim.federation.adaptive_backbones import OTHER_LADDER, BackboneLadder
from fedsim.federation.components.clock import Clock
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.parts import Parts
from fedsim.strategy.checkpoint_content import INITIAL_KEY, SERVED_KEY, difference, naming_old_damage, pack_clients
from fedsim.strategy.checkpoint_files import CONTENT_KEY, FORMAT, SERVER_KEY, STATES_KEY, read_states
from fedsim.training.flat_model import FlatModel
from fedsim.training.private_state import kept_tensors

log = logging.getLogger(__name__)

OLD_MODELS_KEY = "fedsim_old_models"
"""key of the global models on which clients under way train: round -> architecture -> vector"""

TABLES_KEY = "fedsim_tables"
"""key of the rows that clients have added to tables: table -> float32 [n, columns]"""


ROOT_KEY = "fedsim_root"
"""key of the private state of the server's own training, by name"""


def save(parts: Parts, listeners: Sequence[RoundListener], threads: int) -> dict[str, Any]:
    """Return the federation's additions to Lightning's checkpoint, with the states of ``listeners``."""
    models = parts.models.items()
    content = {
        "format": FORMAT,
        "method": type(parts.method).__name__,
        "layouts": {arch: _layout(model.flat.shared_entries) for arch, model in models},
        "private_layouts": {arch: _layout(_private_entries(model)) for arch, model in models},
        "fixed": {arch: model.fixed_checksum for arch, model in models if model.fixed},
        "complete": {arch: model.serves("pool") for arch, model in models},
        "threads": threads,
        **({"root": [parts.root.data.name, parts.root.data.num_classes]} if parts.root is not None else {}),
        **pack_clients(parts.num_classes, parts.rank_share.placement.ranks),
    }
    states = {listener.key: listener.state_dict() for listener in listeners if listener.key}
    stored = parts.rank_share.states.clients()
    private = ((n, parts.rank_share.states.read(n)) for n in parts.rank_share.owned_clients if n in stored)
    initial = {arch: {"state": m.initial_private, **kept_tensors(m.initial_kept)} for arch, m in models}
    old_models = parts.rank_share.old_models.saved()
    return {
        CONTENT_KEY: content | states, SERVER_KEY: parts.server.kept, INITIAL_KEY: initial, STATES_KEY: private,
        **({SERVED_KEY: served} if (served := _served(parts)) else {}),
        **({OLD_MODELS_KEY: old_models} if old_models else {}),
        **({ROOT_KEY: parts.root.private_state()} if parts.root is not None else {}),
        **({TABLES_KEY: parts.server.tables} if parts.server.tables else {}),
    }  # fmt: skip


def _served(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Return the tensors, by architecture and name, that complete the server's models where clients keep layers."""
    models = {arch: model for arch, model in parts.models.items() if not model.serves("pool")}
    served = {arch: dict(parts.method.server_tensors(parts.server, arch)) for arch in models}
    return {arch: tensors for arch, tensors in served.items() if models[arch].serves("pool", tensors)}


def restore(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener], threads: int) -> None:
    """Load the additions of :func:`save` into the server, the clients and ``listeners``.

    Raises:
        ConfigError: with the first difference, if the checkpoint is of another method, federation or model.
    """
    with naming_old_damage(checkpoint[CONTENT_KEY], "ckpt_path"):
        _restore(checkpoint, parts, listeners, threads)


def _restore(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener], threads: int) -> None:
    check_checkpoint(checkpoint, parts, listeners)
    content = checkpoint[CONTENT_KEY]
    # up to version 0.1, the ledger's state was stored under two other keys
    content = {Ledger.key: {"totals": content.get("traffic"), "unpruned": content.get("kept", {})}, **content}
    _check_vectors(checkpoint, parts)
    for listener in listeners:  # before the clients' states, whose layout depends on the ladder
        listener.load_state_dict(content.get(listener.key, {}))
    _load_old_models(checkpoint, parts, listeners)
    saved = read_states(Path(content["path"]), content, parts.rank_share.owned_clients)
    for name in parts.rank_share.states.clients() & {*parts.rank_share.owned_clients} - saved.keys():
        parts.rank_share.states.write(name, {})  # of this process: they had not trained in the checkpoint's round
    for arch, tensors in checkpoint.get(INITIAL_KEY, {}).items():
        fresh_start = {"state": parts.models[arch].initial_private, **kept_tensors(parts.models[arch].initial_kept)}
        _check_tensors(tensors, fresh_start, f"the initial private state of {arch}")
        for name, tensor in fresh_start.items():
            tensor.copy_(tensors[name])
    for name, private in saved.items():
        # on a ladder, clients have changed their architecture since; digests cover the shapes there
        fresh = {} if content.get(BackboneLadder.key) else parts.clients[name].private_state()
        _check_tensors(private, fresh, f"the private state of {name}")
        parts.clients[name].load_private_state(private)
    parts.server.load_kept(checkpoint.get(SERVER_KEY, {}))
    if parts.root is not None and ROOT_KEY in checkpoint:  # else the rule is new, and its root begins here
        _check_root(content, parts.root.data)
        _check_tensors(checkpoint[ROOT_KEY], parts.root.private_state(), f"the private state of {parts.root.data.name}")
        parts.root.load_private_state(checkpoint[ROOT_KEY])
    parts.server.tables = {}
    parts.server.join(checkpoint.get(TABLES_KEY, {}))
    if content["threads"] != threads:
        log.warning("the checkpoint was written with %d threads per rank: last bits may differ", content["threads"])


def check_checkpoint(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener]) -> None:
    """Raise ConfigError, with the first difference, if a checkpoint is of another method, federation or model."""
    content = checkpoint[CONTENT_KEY]
    with naming_old_damage(content, "ckpt_path"):
        _check_content(content, parts)
    has_ladder = any(isinstance(listener, BackboneLadder) for listener in listeners)
    if bool(content.get(BackboneLadder.key)) != has_ladder:
        raise ConfigError(OTHER_LADDER)


def _check_content(content: Mapping[str, Any], parts: Parts) -> None:
    name, classes = type(parts.method).__name__, parts.num_classes
    if content["method"] != name:
        raise ConfigError(f"ckpt_path: the checkpoint is of method {content['method']}, model.method is {name}")
    if classes.keys() != content["clients"].keys():
        raise ConfigError(_other_clients([*content["clients"]], [*classes]))
    for arch in sorted({*parts.models, *content["layouts"]}):
        model = parts.models.get(arch)
        _compare(arch, "shares", model.flat.shared_entries if model else [], content["layouts"].get(arch, []))
        private = _private_entries(model) if model else []
        _compare(arch, "keeps private", private, content["private_layouts"].get(arch, []))
        if model and content.get("fixed", {}).get(arch) != model.fixed_checksum:
            raise ConfigError(
                f"ckpt_path: the trained tensors of {arch} belong to other fixed weights; give model.backbone's "
                "weights and seed_everything as in the run that wrote it"
            )
    for client, number in content["clients"].items():
        if number != classes[client]:
            raise ConfigError(
                f"ckpt_path: client {client} has {number} identities in the checkpoint, {classes[client]} here; "
                "use the config of the run that wrote it (data and data.val decide the number of identities)"
            )


def _other_clients(saved: Sequence[str], names: Sequence[str]) -> str:
    """Return a line with the first client that only one of two federations has, of however many."""
    all_names, all_saved = {*names}, {*saved}
    first = next((f"has {name}, which this federation lacks" for name in saved if name not in all_names), None)
    first = first or next(f"lacks {name}, which this federation has" for name in names if name not in all_saved)
    return (
        f"ckpt_path: the checkpoint has {len(saved)} clients and this federation {len(names)}; it {first}; use the "
        "data of the run that wrote it"
    )


def _check_vectors(checkpoint: Mapping[str, Any], parts: Parts) -> None:
    """Check the global models, and the method's tensors on the server."""
    saved = {name.removeprefix("server."): vector for name, vector in checkpoint["state_dict"].items()}
    _check_tensors(saved, parts.server.state_dict(), "the global model")
    for arch, fresh in parts.server.kept.items():
        _check_tensors(checkpoint.get(SERVER_KEY, {}).get(arch, {}), fresh, f"the server's part of {arch}")


def _check_root(content: Mapping[str, Any], data: ClientData) -> None:
    """Refuse other people on the server: its head is that of the people before."""
    before, now = content["root"], [data.name, data.num_classes]
    if before != now:
        raise ConfigError(
            f"ckpt_path: the server trained on {before[0]} with {before[1]} people in the checkpoint's run, and on "
            f"{now[0]} with {now[1]} here; use the data.public of that run"
        )


def _load_old_models(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener]) -> None:
    saved, next_round = checkpoint.get(OLD_MODELS_KEY, {}), checkpoint["epoch"] + 1
    needed = {r for listener in listeners if isinstance(listener, Clock) for r in listener.old_rounds(next_round)}
    vectors = {arch: parts.server.vector(arch) for arch in parts.models}
    for round_ in sorted(needed):
        if round_ not in saved:
            raise _damaged(f"{OLD_MODELS_KEY} lacks the global model with which round {round_ + 1} began")
        _check_tensors(saved[round_], vectors, f"the global model of round {round_ + 1}")
    parts.rank_share.old_models.load({round_: saved[round_] for round_ in sorted(needed)})


def _check_tensors(saved: Mapping[str, Any], fresh: Mapping[str, Tensor], owner: str) -> None:
    """Check that each tensor of a ``fresh`` federation is among the saved ones, of the same shape and dtype."""
    for name, expected in fresh.items():
        if name not in saved:
            raise _damaged(f"{owner} lacks {name}")
        if problem := difference(saved[name], expected):
            raise _damaged(f"of {owner}, {name} {problem}")
    for name, tensor in saved.items():
        if not isinstance(tensor, Tensor) or (tensor.is_floating_point() and not tensor.isfinite().all()):
            raise _damaged(f"of {owner}, {name} is not finite, or no tensor")


def _damaged(problem: str) -> DataError:
    return DataError(f"ckpt_path: {problem}; the checkpoint was edited or damaged: copy it again, or give another one")


def _compare(arch: str, verb: str, entries: Sequence[Entry], saved_layout: list[dict[str, Any]]) -> None:
    for entry, saved in itertools.zip_longest(_layout(entries), saved_layout):
        if entry != saved:
            raise ConfigError(
                f"ckpt_path: of {arch}, the checkpoint {verb} {_name(saved)} where this config {verb} {_name(entry)}; "
                "use the config of the run that wrote it"
            )


def _private_entries(model: FlatModel) -> list[Entry]:
    return [entry for entry in model.flat.entries if not entry.shared]


def _layout(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the place of each tensor in the flat buffer, in plain types."""
    return [{"name": e.name, "shape": list(e.shape), "offset": e.offset} for e in entries]


def _name(entry: Mapping[str, Any] | None) -> str:
    return "nothing" if entry is None else f"{entry['name']} {entry['shape']}"
