"""Differences between a run's settings and those of a paper's row: all fields of both, but for those listed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.core.changes import ANYWHERE, WITHOUT_EFFECT
from fedsim.report.names import text_of_value

IGNORED = {
    "run_dir": "a folder",
    "ckpt_path": "a continued run is one run",
    "overwrite": "of a folder",
    "save_ranking": "output",
    "save_maps": "output",
    "weights_only": "how a checkpoint is read",
    "verbose": "output",
    "seed_everything": "seeds repeat an experiment",
    "model.seed": "it is seed_everything",
    "trainer.accelerator": "a device",
    "trainer.devices": "devices",
    "trainer.num_nodes": "devices",
    "trainer.strategy": "time limits and ranks: sums are exact, so ranks change no bit",
    "trainer.plugins": "a cluster",
    "trainer.logger": "a logger",
    "trainer.log_every_n_steps": "a logger",
    "trainer.enable_autolog_hparams": "a logger",
    "trainer.model_registry": "a logger",
    "trainer.profiler": "output",
    "trainer.enable_progress_bar": "output",
    "trainer.enable_model_summary": "output",
    "trainer.enable_checkpointing": "files",
    "trainer.default_root_dir": "a folder",
    "trainer.num_sanity_val_steps": "nothing that is kept",
    "trainer.detect_anomaly": "stops at NaN",
    "trainer.benchmark": "speed",
    "trainer.deterministic": "rounding",
    "trainer.use_distributed_sampler": "fedsim has samplers of its own",
    **WITHOUT_EFFECT,
}
"""Setting -> the reason why it is no difference. A section stands for all of its fields."""
_GROUPS = {  # the first section that a setting lies in decides; all others are of the training
    "evaluation": ("model.evaluation", "model.accounting", "data.val", "data.val_fraction", "data.test_size",
                   "trainer.check_val_every_n_epoch", "trainer.limit_val_batches", "trainer.limit_test_batches",
                   "trainer.limit_predict_batches", "trainer.val_check_interval"),
    "data": ("data",),
    "network": ("model.backbone", "model.neck", "model.module", "model.private", "model.adaptive_backbones"),
    "loss": ("model.objective", "model.client.cluster", "model.client.bottom_up"),
    "method": ("model.method", "model.bn_stats", "model.attack", "model.aggregation", "model.server_optimizer",
               "model.selection", "model.availability", "model.privacy", "model.hardware", "model.timing",
               "model.reduction", "model.on_bad_update"),
}  # fmt: skip
GROUPS = ("data", "network", "loss", "training", "method", "evaluation")
_SOURCE = "data.source"
_MISSING = object()
_OFF = (None, False, 0)
"""values of options that do nothing: an earlier version, which lacks the option, does the same"""
_LONGEST = 100


class Difference(NamedTuple):
    """A setting that a run and a row have with different values."""

    name: str
    """as an option: ``model.backbone.depth``"""
    of_run: str
    of_row: str

    @property
    def group(self) -> str:
        """One of :data:`GROUPS`."""
        if self.name.startswith("model.clients."):  # of one client: as of all clients
            _, _, _, field = (f"{self.name}...").split(".", 3)
            parts = {"backbone": "network", "cluster": "loss", "bottom_up": "loss"}
            return parts.get(field.partition(".")[0], "training")
        groups = (group for group, sections in _GROUPS.items() if _is_in(self.name, sections))
        return next(groups, "training")

    def __str__(self) -> str:
        """Return the setting with both values."""
        return f"{self.name} {self.of_run} (row: {self.of_row})"


class Differences(NamedTuple):
    """The result of a comparison."""

    listed: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """settings of the row that the run's version did not have"""

    def lines(self) -> Iterator[str]:
        """Yield a line per group."""
        for group in GROUPS:
            if members := [str(difference) for difference in self.listed if difference.group == group]:
                yield f"{group}: {'; '.join(members)}"


def differences_from(row: Mapping[str, Any], run: Mapping[str, Any]) -> Differences:
    """Return all settings in which the config of a run differs from the resolved config of a row.

    Classes count by their last names. If a part has another class, the arguments that only one of the two classes has
    are left out.
    """
    unknown: list[str] = []
    listed = tuple(_compare("", row, run, unknown))
    return Differences(listed, tuple(unknown))


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the class of a config's method; of one client with all data, ``Centralised``; None without a method."""
    if (config.get("data") or {}).get("partition") == "union":
        return "Centralised"
    method = (config.get("model") or {}).get("method")
    path = method.get("class_path") if isinstance(method, Mapping) else method
    return None if path is None else _last(str(path))


def source_classes(config: Mapping[str, Any]) -> set[str]:
    """Return the classes of a config's data sets."""
    return {name.partition(" ")[0] for name in _by_class((config.get("data") or {}).get("source"))}


def _compare(name: str, row: Any, run: Any, unknown: list[str]) -> Iterator[Difference]:
    option = name.replace(".init_args", "")
    if option in IGNORED or _ignored_anywhere(name):
        return
    if row is _MISSING or run is _MISSING:
        yield from _one_sided(option, row, run, unknown)
    elif option == _SOURCE:
        yield from _compare_sources(_by_class(row), _by_class(run), unknown)
    elif _names_class(row) and (_names_class(run) or isinstance(run, str)):
        yield from _compare_classes(name, row, _fields(run), unknown)
    elif isinstance(row, Mapping) and isinstance(run, Mapping):
        for field in dict.fromkeys((*row, *run)):
            inner = f"{name}.{field}".lstrip(".")
            yield from _compare(inner, row.get(field, _MISSING), run.get(field, _MISSING), unknown)
    elif not _are_equal(row, run) and not (_is_file(row) and _is_file(run)):
        yield Difference(option, *_texts(run, row))


def _compare_classes(
    name: str, row: Mapping[str, Any], run: Mapping[str, Any], unknown: list[str]
) -> Iterator[Difference]:
    """Compare two classes; of different ones only the arguments that both have."""
    of_row, of_run = row.get("init_args") or {}, run.get("init_args") or {}
    classes = _last(str(row["class_path"])), _last(str(run["class_path"]))
    if classes[0] == classes[1]:
        yield from _compare(f"{name}.init_args", of_row, of_run, unknown)
        return
    yield Difference(name.replace(".init_args", ""), classes[1], classes[0])
    for argument in (argument for argument in of_row if argument in of_run):
        yield from _compare(f"{name}.init_args.{argument}", of_row[argument], of_run[argument], unknown)


def _compare_sources(row: Mapping[str, Any], run: Mapping[str, Any], unknown: list[str]) -> Iterator[Difference]:
    """Compare data sets by their classes; their order is that of the clients, and no setting."""
    if not row.keys() & run.keys():
        yield Difference(_SOURCE, ", ".join(run) or "none", ", ".join(row) or "none")
        return
    for name in dict.fromkeys((*row, *run)):
        if name in row and name in run:
            yield from _compare(f"{_SOURCE}.{name}", row[name], run[name], unknown)
        else:
            texts = (f"with {name}", f"without {name}")
            yield Difference(_SOURCE, *(texts if name in run else texts[::-1]))


def _one_sided(option: str, row: Any, run: Any, unknown: list[str]) -> Iterator[Difference]:
    """Yield an option that only one of the configs has; note it if only the row has it."""
    if run is not _MISSING:
        if not _is_off(run):
            yield Difference(option, _texts(run)[0], "not there")
    elif not _is_off(row):
        unknown.append(option)


def _by_class(source: Any) -> dict[str, Any]:
    """Return data sets by their classes, numbered if there are several of one class."""
    sources = source if isinstance(source, list) else [] if source is None else [source]
    by_name: dict[str, Any] = {}
    for fields in map(_fields, sources):
        name = _last(str(fields.get("class_path")))
        count = sum(key.partition(" ")[0] == name for key in by_name)
        by_name[name if not count else f"{name} {count + 1}"] = fields.get("init_args") or {}
    return by_name


def _names_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _fields(value: Any) -> Mapping[str, Any]:
    """Return class and arguments of a part that may be the name of a class only."""
    return value if isinstance(value, Mapping) else {"class_path": value}


def _are_equal(row: Any, run: Any) -> bool:
    """Return whether two values are equal; true is not 1, and classes in lists count by their last names."""
    if isinstance(row, list) and isinstance(run, list):
        return len(row) == len(run) and all(map(_are_equal, row, run))
    if isinstance(row, Mapping) and isinstance(run, Mapping):
        return not any(differences_from(row, run))
    if _without_nulls(row) in (None, {}) and _without_nulls(run) in (None, {}):
        return True  # a section with nothing in it
    return bool(row == run) and (type(row) is type(run) or (_is_number(row) and _is_number(run)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_off(value: Any) -> bool:
    """Return whether a value, with all fields below it, asks for nothing."""
    return all(map(_is_off, value.values())) if isinstance(value, Mapping) else value in _OFF


def _is_file(value: Any) -> bool:
    """Return whether a value is the path of a file: its place says nothing of its content."""
    return isinstance(value, str) and ("/" in value or value.endswith((".safetensors", ".pth", ".pt", ".ckpt", ".csv")))


def _ignored_anywhere(name: str) -> bool:
    return name.rpartition(".")[2] in ANYWHERE and (".init_args." in name or name.startswith(("data.", _SOURCE)))


def _is_in(name: str, sections: Sequence[str]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _texts(*values: Any) -> list[str]:
    """Return values as short texts, or in full if these are equal."""
    texts = [text_of_value(_without_nulls(value)) for value in values]
    short = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..." for text in texts]
    return short if len(set(short)) == len(values) else texts


def _without_nulls(value: Any) -> Any:
    """Return nested settings without those that are not set."""
    if not isinstance(value, Mapping):
        return value
    inner = {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return {name: field for name, field in inner.items() if field != {}}
