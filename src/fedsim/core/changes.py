"""Settings that a run continued with other values: found at the resume, kept with the run's results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OF_A_START = ("run_dir", "ckpt_path", "overwrite", "save_ranking", "save_maps", "weights_only", "verbose")
"""settings of a start, not of the run"""
WITHOUT_EFFECT = {
    "model.threads": "speed",
    "model.client_store": "place of private tensors",
    "model.client.flat_step": "speed",
    "model.client.channels_last": "speed; rounding",
    "model.client.compile": "speed; rounding",
    "model.client.graph": "speed",
    "model.client.prefetch": "speed",
    "model.evaluation.backend": "speed",
    "model.evaluation.share_from": "speed",
    "model.evaluation.batch_size": "speed",
    "data.cache": "place of decoded images",
    "data.cache_dir": "a folder",
    "data.workers": "speed",
}
"""Setting of model or data -> the reason why no number depends on it, up to rounding."""
ANYWHERE = {
    "root": "a folder",
    "i_know_duke_is_withdrawn": "a consent",
}
"""As :data:`WITHOUT_EFFECT`, for arguments of this name of any class."""
_WITH_EFFECT = ("model", "data", "seed_everything", "trainer.precision", "trainer.limit_train_batches")
_OPEN = ("model.clients",)  # sections whose fields are names of the user's


class Change(NamedTuple):
    """A setting that has had another value from a round on."""

    after: int
    """rounds with the earlier value"""
    setting: str
    """as an option: ``model.client.optimizer.lr``"""
    old: Any
    new: Any

    @property
    def counts(self) -> bool:
        """Whether numbers of the run depend on it; those of more rounds are the numbers of a longer run."""
        is_known = _is_in(self.setting, WITHOUT_EFFECT) or self.setting.rpartition(".")[2] in ANYWHERE
        return _is_in(self.setting, _WITH_EFFECT) and not is_known

    def __str__(self) -> str:
        """Return a line for the log and for reports."""
        return f"changed since round {self.after}: {self.setting} {_text(self.old)} -> {_text(self.new)}"

    def as_json(self) -> dict[str, Any]:
        """Return the change as summary.json has it."""
        return {"after_round": self.after, "setting": self.setting, "from": self.old, "to": self.new}


def read_changes(content: Any) -> list[Change]:
    """Return the changes that :meth:`Change.as_json` has written; raise ValueError if they are none."""
    changes = content if isinstance(content, list) and _are_sections(content) else [{"after_round": content}]
    if not all(isinstance(change.get("after_round"), int) and "setting" in change for change in changes):
        raise ValueError("no changes of settings")
    return [Change(c["after_round"], str(c["setting"]), c.get("from"), c.get("to")) for c in changes]


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any], after: int) -> list[Change]:
    """Return the settings that differ between the config of a checkpoint and that of a resume.

    A field that only one of both has is of another version of fedsim, or of another class; it is no change of the
    user's, except among the names of ``model.clients``.

    Args:
        old: the resolved config of the checkpoint.
        new: the resolved config of the resume.
        after: the checkpoint's round.

    >>> [str(c) for c in changes_between({"model": {"seed": 0, "k": [1, 2]}}, {"model": {"seed": 0, "k": [1]}}, 8)]
    ['changed since round 8: model.k [1, 2] -> [1]']
    """
    return [change for change in _compare("", old, new, after) if change.setting.partition(".")[0] not in OF_A_START]


def _compare(name: str, old: Any, new: Any, after: int) -> Iterator[Change]:
    if _plain(old) == _plain(new) or name == "model.seed":  # it is seed_everything
        return
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _are_sections([*old, *new]):
        old, new = ({str(i): inner for i, inner in enumerate(values, start=1)} for values in (old, new))
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        yield Change(after, name, old, new)
        return
    if "class_path" in old and "class_path" in new:
        if _last(old) != _last(new):
            yield Change(after, name, old, new)
            return
        old, new = old.get("init_args") or {}, new.get("init_args") or {}
    is_open = name.startswith(_OPEN)
    for key in dict.fromkeys([*old, *new]):
        if is_open or (key in old and key in new):
            yield from _compare(f"{name}.{key}".removeprefix("."), old.get(key), new.get(key), after)


def _are_sections(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _is_in(name: str, sections: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{section}.") for section in sections)


def _plain(value: Any) -> Any:
    """Return a setting without what is spelled in several ways: a class by its last name, a tuple as a list."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            return {"class_path": _last(value), "init_args": _plain(value.get("init_args") or {})}
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _last(part: Mapping[str, Any]) -> str:
    return str(part["class_path"]).rpartition(".")[2]


def _text(value: Any) -> str:
    """Return a value for a line; a class by its last name, with its arguments."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            arguments = value.get("init_args") or {}
            return _last(value) + (f"({_pairs(arguments)})" if arguments else "")
        return f"{{{_pairs(value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_text(value)}" for name, value in values.items())


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """Hash the settings by which runs are comparable: model, data and rounds, but neither seed nor machine."""
    trainer = {name: config["trainer"].get(name) for name in ("max_epochs", "precision", "limit_train_batches")}
    model = {name: value for name, value in config["model"].items() if name != "seed"}
    return _digest({"model": model, "data": config["data"], "trainer": trainer})


def fingerprint_after(fingerprint: str, changes: Sequence[Change]) -> str:
    """Return the fingerprint of a run that was continued with other settings: that of no run with one setting."""
    counted = [change.as_json() for change in changes if change.counts]
    return _digest([fingerprint, counted]) if counted else fingerprint


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
