"""Settings given in Python: each class refuses what its annotations exclude, in the command line's words."""

import dataclasses
import importlib
import inspect
import json
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from lightning import LightningModule

import fedsim
from fedsim.core.annotations import hints_of, python_number
from fedsim.core.arguments import ChecksArguments, Section, members_of
from fedsim.core.errors import ConfigError
from fedsim.core.written import written
from fedsim.federation.callbacks import LiveTable
from fedsim.methods import FedPav
from fedsim.models.backbones import SmallCNN
from fedsim.settings.table import argument_of, setting_at
from fedsim.training.settings import ClientOverride
from write_settings import TABLE

WRONG = {bool: ["false", 1, None], int: [1.5, "3", True, None], float: ["x", True, float("nan"), None], str: [3, None]}
"""type -> values that are none"""
CLASSES = json.loads(TABLE.read_text())["classes"]
OTHERS = {
    "RunLock", "HeldLoggers", "RunBeginning", "FolderStart", "KeepConfig", "MetricsFile", "RunSummary",
    "TensorBoardPages", "Describes", "Tracking", "Change", "StartOptions",
}  # fmt: skip
"""classes of the table that fedsim itself makes, or that no one does"""


def of_settings():
    """Yield each class of settings."""
    for path, entry in CLASSES.items():
        module, _, name = path.rpartition(".")
        is_optimizer = "torch.optim.optimizer.Optimizer" in entry["bases"]  # checked where one is made
        if module.startswith("fedsim") and name not in OTHERS and not is_optimizer:
            yield getattr(importlib.import_module(module), name)


def plain(hint):
    """Return an annotation without facts and kinds."""
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def wrong_values(hint):
    """Yield values of which an annotation excludes each."""
    members = [plain(member) for member in members_of(plain(hint))]
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if words:
        yield from ("x", str(words[0]).upper(), 1.5, [words[0]])
    if set(members) <= {*WRONG, NoneType}:
        excluded = [value for member in members if member is not NoneType for value in WRONG[member]]
        allowed = [NoneType if NoneType in members else ..., int if {int, float} & set(members) else ...]
        allowed += [str if str in members else ..., bool if bool in members else ...]
        yield from (value for value in excluded if type(value) not in allowed)
    if any(isinstance(member, type) and issubclass(member, Section | ChecksArguments) for member in members):
        yield from ("x", 3)


def hints_of_arguments(cls):
    """Return argument -> annotation, of those that the class itself declares."""
    made_of = cls if dataclasses.is_dataclass(cls) else cls.__init__
    return {n: h for n, h in hints_of(made_of, True).items() if n in inspect.signature(cls.__init__).parameters}


CASES = [
    (cls, name, value)
    for cls in of_settings()
    for name, hint in hints_of_arguments(cls).items()
    if name != "backbone"  # may be a user's module, or a class of one
    for value in wrong_values(hint)
]


def line_of(cls, name, value):
    """Return the line with which a class refuses an argument; empty if it takes it."""
    try:
        cls.__new__(cls, **{name: value})
    except ConfigError as error:
        return str(error)
    return ""


def test_each_class_of_settings_refuses_what_its_annotations_exclude():
    taken = [case for case in CASES if f".{case[1]}: " not in line_of(*case)]
    assert taken == []
    assert {cls.__name__ for cls, _, _ in CASES} > {"Neck", "LocalTraining", "FederatedDataModule", "MarketFolders"}
    assert len(CASES) > 1000


def test_the_option_of_a_class_is_that_of_the_table():
    for cls in filter(hints_of_arguments, of_settings()):
        option = cls._option
        paths = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
        section, _, name = option.rpartition(".")
        found = setting_at(option).base or argument_of(setting_at(section).base, name).base
        assert found in paths or option == "trainer.callbacks", (cls, option, found)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: fedsim.Neck(pooling="GeM"), "model.neck.pooling: GeM is not one of 'average', 'gem'"),
        (lambda: fedsim.LocalTraining(drop_partial="false"), "model.client.drop_partial: expected bool, got false"),
        (lambda: fedsim.LocalTraining(batch_size=8.5), "model.client.batch_size: expected int or null, got 8.5"),
        (lambda: fedsim.LocalTraining(grad_clip=float("inf")), "model.client.grad_clip: inf is no finite number"),
        (lambda: fedsim.LocalTraining(schedule=None), "model.client.schedule: expected RateSchedule, got None"),
        (lambda: ClientOverride(batch_size="8"), "model.clients.NAME.batch_size: expected int or null, got 8"),
        (lambda: fedsim.Evaluation(junk_pids=[1.5]), r"model.evaluation.junk_pids: expected tuple\[int\], got \[1.5\]"),
        (lambda: fedsim.SyntheticReID(identities=(1, 2)), "data.source.identities: expected int or null, got"),
        (lambda: fedsim.FederatedDataModule("x"), "data.source: expected ReIDSource, list.ReIDSource. or null"),
        (lambda: fedsim.FederatedDataModule(fedsim.SyntheticReID(), unseen="a"), "data.unseen: expected .*list.str."),
        (lambda: fedsim.Federation(FedPav(), SmallCNN(), seed=-1), "model.seed: -1 is not in"),
        (lambda: fedsim.Federation("FedPav", SmallCNN()), "model.method: expected Method, got FedPav"),
        (lambda: fedsim.Federation(FedPav(), "SmallCNN"), "model.backbone: expected a network, or a class of"),
        (lambda: fedsim.Federation(FedPav(), SmallCNN(), neck={"dim": 8}), "model.neck: expected Neck, got {'dim"),
        (lambda: LiveTable(max_rows=1.5), "trainer.callbacks.max_rows: expected int, got 1.5"),
        (lambda: fedsim.Trainer(run_dir=3), "run_dir: expected str, Path or null, got 3"),
        (lambda: fedsim.Trainer(run_dir=b"x"), "run_dir: expected str, Path or null, got b'x'"),
        (lambda: fedsim.Trainer(run_dir="r", resume="yes"), "resume: expected bool, got yes"),
    ],
)  # fmt: skip
def test_the_line_is_that_of_the_command_line(make, line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        make()


def test_numbers_of_numpy_are_numbers_and_are_written_as_such():
    training = fedsim.LocalTraining(batch_size=np.int64(8), head_lr=np.float32(0.5), drop_partial=np.bool_(True))
    content = {name: written(getattr(training, name)) for name in ("batch_size", "head_lr", "drop_partial")}
    assert json.dumps(content) == '{"batch_size": 8, "head_lr": 0.5, "drop_partial": true}'
    assert python_number(np.arange(2)).tolist() == [0, 1]


def test_paths_lists_and_classes_of_the_users_are_taken(tmp_path):
    class Mine(LightningModule):
        pass

    class Loose(FedPav):
        def __init__(self, rate: int = None, scale: float = 1.0, **others: Any) -> None:  # noqa: RUF013 - a user's
            super().__init__(**others)

    assert fedsim.MarketFolders(tmp_path, names=("a",)).root == tmp_path
    assert Loose(None, float("inf"), weighting="size").weighting == "size"
    assert fedsim.Federation(Loose(), Mine).settings.module is Mine
    assert fedsim.Evaluation(junk_pids=[-1, -2]).junk_pids == [-1, -2]
    assert fedsim.LocalTraining(optimizer=torch.optim.SGD).optimizer is torch.optim.SGD
