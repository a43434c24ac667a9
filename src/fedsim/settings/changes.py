"""Settings that a run continued with other values: found at the resume, kept with the run's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.settings.configuration import compare, digest, flat, text_of
from fedsim.settings.effects import COUNTED
from fedsim.settings.table import MISSING, setting_at


class Change(NamedTuple):
    """A setting that has had another value from a round on."""

    after: int
    """rounds with the earlier value"""
    setting: str
    """as an option: ``model.client.optimizer.lr``"""
    old: Any
    new: Any
    counts: bool = True
    """whether numbers of the run depend on it; those of more rounds are the numbers of a longer run"""

    def __str__(self) -> str:
        """Return a line for the log and for reports."""
        return f"changed since round {self.after}: {self.setting} {text_of(self.old)} -> {text_of(self.new)}"

    def as_json(self) -> dict[str, Any]:
        """Return the change as summary.json has it."""
        content = {"after_round": self.after, "setting": self.setting, "from": self.old, "to": self.new}
        return content | {"counts": self.counts}


def read_changes(content: Any) -> list[Change]:
    """Return the changes that :meth:`Change.as_json` has written; raise ValueError if they are none."""
    changes = content if isinstance(content, list) else [content]
    if not all(isinstance(c, Mapping) and isinstance(c.get("after_round"), int) and "setting" in c for c in changes):
        raise ValueError("no changes of settings")
    return [Change(c["after_round"], str(c["setting"]), c.get("from"), c.get("to"), _counts(c)) for c in changes]


def _counts(change: Mapping[str, Any]) -> bool:
    """Return whether numbers depend on a change; an earlier version did not write it."""
    if "counts" in change:
        return bool(change["counts"])
    setting = setting_at(str(change["setting"]))
    return setting.facts.effect in COUNTED and not setting.facts.is_length


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any], after: int) -> list[Change]:
    """Return the settings that differ between the config of a checkpoint and that of a resume.

    A setting that only one of both gives is no change if it has the default that its class declares: it is one of
    another version of fedsim. One without effect is none, either: a program leaves out what the parser writes.

    Args:
        old: the resolved config of the checkpoint.
        new: the resolved config of the resume.
        after: the checkpoint's round.

    >>> old, new = ({"model": {"method": "fedsim.methods.FedAvg", "threads": n}} for n in (1, 2))
    >>> [str(change) for change in changes_between(old, new, 8)]
    ['changed since round 8: model.threads 1 -> 2']
    """
    before, now = flat(old), flat(new)
    return [
        Change(after, d.option, _plain(d.old), _plain(d.new), d.effect in COUNTED and not d.setting.facts.is_length)
        for d in compare(before, now)
        if "." in d.option or d.setting.facts.is_repeated
        if d.effect != "nothing" or all(d.option in config and config[d.option].is_given for config in (before, now))
    ]


def _plain(value: Any) -> Any:
    return None if value is MISSING else value


def fingerprint_after(fingerprint: str, changes: Sequence[Change]) -> str:
    """Return the fingerprint of a run that was continued with other settings: that of no run with one setting."""
    counted = [change.as_json() for change in changes if change.counts]
    return digest([fingerprint, counted]) if counted else fingerprint
