"""fedsim's part of a checkpoint: save it, compare it with a federation, load it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.flat import Entry
from fedsim.federation.adaptive_backbones import OTHER_LADDER, BackboneLadder
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.parts import Parts
from fedsim.strategy.checkpoint_files import CONTENT_KEY, FORMAT, SERVER_KEY, STATES_KEY, read_states
from fedsim.training.flat_model import FlatModel

log = logging.getLogger(__name__)


def save(parts: Parts, listeners: Sequence[RoundListener], threads: int) -> dict[str, Any]:
    """Return the federation's additions to Lightning's checkpoint, with the states of ``listeners``."""
    models = parts.models.items()
    content = {
        "format": FORMAT,
        "method": type(parts.method).__name__,
        "layouts": {arch: _layout(model.flat.shared_entries) for arch, model in models},
        "private_layouts": {arch: _layout(_private_entries(model)) for arch, model in models},
        "fixed": {arch: model.fixed_checksum for arch, model in models if model.fixed},
        "complete": {arch: model.is_complete for arch, model in models},
        "clients": dict(parts.num_classes),
        "hosts": dict(parts.rank_share.placement.ranks),
        "threads": threads,
    }
    states = {listener.key: listener.state_dict() for listener in listeners if listener.key}
    private = ((name, parts.rank_share.states.read(name)) for name in parts.rank_share.hosted_clients)
    return {CONTENT_KEY: content | states, SERVER_KEY: parts.server.kept, STATES_KEY: private}


def restore(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener], threads: int) -> None:
    """Load the additions of :func:`save` into the server, the clients and ``listeners``.

    Raises:
        ConfigError: with the first difference, if the checkpoint is of another method, federation or model.
    """
    check_checkpoint(checkpoint, parts, listeners)
    content = checkpoint[CONTENT_KEY]
    # up to version 0.1, the ledger's state was stored under two other keys
    content = {Ledger.key: {"totals": content.get("traffic"), "unpruned": content.get("kept", {})}, **content}
    for listener in listeners:  # before the clients' states, whose layout depends on the ladder
        listener.load_state_dict(content.get(listener.key, {}))
    for name, state in read_states(Path(content["path"]), content, parts.rank_share.hosted_clients).items():
        parts.clients[name].load_private_state(state)
    parts.server.load_kept(checkpoint.get(SERVER_KEY, {}))
    if content["threads"] != threads:
        log.warning("the checkpoint was written with %d threads per rank: last bits may differ", content["threads"])


def check_checkpoint(checkpoint: Mapping[str, Any], parts: Parts, listeners: Sequence[RoundListener]) -> None:
    """Raise ConfigError, with the first difference, if a checkpoint is of another method, federation or model."""
    content = checkpoint[CONTENT_KEY]
    _check_content(content, parts)
    has_ladder = any(isinstance(listener, BackboneLadder) for listener in listeners)
    if bool(content.get(BackboneLadder.key)) != has_ladder:
        raise ConfigError(OTHER_LADDER)


def _check_content(content: Mapping[str, Any], parts: Parts) -> None:
    name, classes = type(parts.method).__name__, parts.num_classes
    if content["method"] != name:
        raise ConfigError(f"ckpt_path: the checkpoint is of method {content['method']}, model.method is {name}")
    if classes.keys() != content["clients"].keys():
        names, saved_names = ", ".join(classes), ", ".join(content["clients"])
        raise ConfigError(f"ckpt_path: the checkpoint's clients are {saved_names}; this federation's are {names}")
    for arch in sorted({*parts.models, *content["layouts"]}):
        model = parts.models.get(arch)
        _compare(arch, "shares", model.flat.shared_entries if model else [], content["layouts"].get(arch, []))
        private = _private_entries(model) if model else []
        _compare(arch, "keeps private", private, content["private_layouts"].get(arch, []))
        if model and content.get("fixed", {}).get(arch) != model.fixed_checksum:
            raise ConfigError(
                f"ckpt_path: the adapters of {arch} were trained on other fixed weights; give model.backbone's weights "
                "and seed_everything as in the run that wrote it"
            )
    for client, number in content["clients"].items():
        if number != classes[client]:
            raise ConfigError(
                f"ckpt_path: client {client} has {number} identities in the checkpoint, {classes[client]} here; "
                "use the config of the run that wrote it (data and data.val decide the number of identities)"
            )


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
