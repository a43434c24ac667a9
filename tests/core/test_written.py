"""Objects as configs have them: plain values, sections, classes, optimizers; what has no form is refused."""

import random
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.arguments import KeepsArguments, arguments_of
from fedsim.core.written import NotInConfigError, written, written_fields
from fedsim.federation.components.selection import AllClients
from fedsim.methods import FedPav
from fedsim.models import SmallCNN
from fedsim.training.server_optimizers import FedAdam


@dataclass(frozen=True)
class Size:
    """A section."""

    height: int = 4
    pair: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Tall(Size):
    """A class in its place."""

    factor: float = 2.0


class Box(KeepsArguments):
    """Knows its arguments."""

    def __init__(self, size: Size | None, *names: str, lid: bool = True, **others: int) -> None:
        self.size = None


@dataclass(frozen=True)
class Settings:
    """All kinds."""

    size: Size = field(default_factory=Size)
    by_name: dict[str, Size] | None = None
    box: Box | None = None
    path: Path | None = None


def test_sections_have_their_fields_and_classes_their_paths():
    settings = Settings(Tall(5), {"a": Size(1)}, Box(Size(2), lid=False, x=3), Path("a/b"))
    assert written_fields(settings, "model") == {
        "size": {"class_path": f"{__name__}.Tall", "init_args": {"height": 5, "pair": [1, 2], "factor": 2.0}},
        "by_name": {"a": {"height": 1, "pair": [1, 2]}},
        "box": {
            "class_path": f"{__name__}.Box",
            "init_args": {"size": {"height": 2, "pair": [1, 2]}, "lid": False, "x": 3},
        },
        "path": "a/b",
    }
    assert arguments_of(Box(None)) == {"size": None, "lid": True}


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": False}),
        (lambda p: torch.optim.AdamW(p, lr=0.2, betas=(0.5, 0.6)), "AdamW", {"lr": 0.2, "betas": [0.5, 0.6]}),
        (torch.optim.Adam, "Adam", {"lr": 0.001, "weight_decay": 0}),
        (partial(FedAdam, tau=0.5), "FedAdam", {"tau": 0.5, "betas": [0.9, 0.99]}),
    ],
)
def test_an_optimizer_is_what_its_function_makes(make, name, values):
    found = written(make)
    assert found["class_path"].rpartition(".")[2] == name
    assert values.items() <= found["init_args"].items()


def test_a_class_of_modules_and_a_partial_of_one_are_its_path():
    assert written(nn.Flatten) == {"class_path": "torch.nn.modules.flatten.Flatten"}
    assert written(MappingProxyType({"a": 1})) == {"a": 1}
    given = {"in_features": 3, "bias": False}
    assert written(partial(nn.Linear, **given)) == {"class_path": "torch.nn.modules.linear.Linear", "init_args": given}
    assert written(partial(nn.Linear, 3, bias=False)) == written(partial(nn.Linear, **given))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            lambda p: torch.optim.SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}], lr=0.1),
            "no function",
        ),
        (lambda p: torch.optim.SGD([{"params": p, "lr": 1.0}], lr=0.1), "not decided by its arguments"),
        (len, "no function"),
        (nn.Conv2d(3, 8, 3), "the arguments of Conv2d are not known"),
        (nn.ReLU(), "the arguments of ReLU are not known"),
        ([Size(), object], "no function"),
        (partial(nn.Sequential, nn.ReLU()), "takes arguments without a name"),
        (partial(nn.Linear, in_features=OrderedDict(x=1)), "the arguments of OrderedDict are not known"),
    ],
)
def test_what_has_no_form_is_refused_with_its_place(value, reason):
    with pytest.raises(NotInConfigError, match=f"model.part.*: .*{reason}"):
        written(value, None, "model.part")


class Plain(KeepsArguments):
    """Has no constructor of its own."""


@pytest.mark.parametrize("kind", [Plain, AllClients])
def test_a_class_without_a_constructor_takes_no_arguments(kind):
    assert arguments_of(kind()) == {}
    for wrong in (lambda: kind(1), lambda: kind(None), lambda: kind(fraction=0.5)):
        with pytest.raises(TypeError, match=r"takes no arguments"):
            wrong()


class Mixin:
    """Not fedsim's, and first in the order of the bases."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Mixed(Mixin, SmallCNN):
    """Its constructor is a mixin's."""


class Counts(KeepsArguments):
    """Keeps state that does not begin empty."""

    def __init__(self, names=()):
        self.names, self.seen = tuple(names), -1


@dataclass(frozen=True, kw_only=True)
class Drawn(FedPav):
    """Draws numbers of its own."""

    def __post_init__(self):
        object.__setattr__(self, "rng", random.Random(0))


class OfOwnArguments(FedPav):
    """Its constructor takes no fields."""

    def __init__(self, mu=0.1):
        super().__init__()
        object.__setattr__(self, "mu", mu)


def test_state_is_no_change_and_a_list_of_the_callers_is_copied():
    names = ["a"]
    counts = Counts(names)
    counts.seen = 3
    names.append("b")
    assert written(counts)["init_args"] == {"names": ["a"]}
    assert written(Drawn())["init_args"] == written(FedPav())["init_args"]


def test_the_constructor_of_a_mixin_notes_the_object():
    mixed = Mixed(width=8)
    assert written(mixed)["class_path"].endswith(".Mixed")
    mixed.conv1.weight.data.zero_()
    with pytest.raises(NotInConfigError, match=r"conv1\.weight: was changed"):
        written(mixed, None, "model.backbone")


def test_a_method_with_arguments_of_its_own_is_refused_in_one_line():
    with pytest.raises(NotInConfigError, match="OfOwnArguments takes other arguments than its fields"):
        written(OfOwnArguments(), None, "model.method")


class Mode(StrEnum):
    FAST = "fast"


def test_an_enum_is_its_value():
    assert written(Mode.FAST) == "fast"
    assert type(written(Mode.FAST)) is str


class Named(str):
    """A text of another class."""


@pytest.mark.parametrize(
    "value",
    [b"a", range(3), frozenset(), np.zeros(2), torch.zeros(2), torch.zeros(()), torch.float32, Fraction(1, 2),
     re.compile("a"), timedelta(1), 1j, slice(2), Decimal(1), torch.device("cpu"), torch.Size([1]), Named("a"), {1}],
    ids=repr,
)  # fmt: skip
def test_an_object_whose_class_takes_arguments_that_are_not_known_has_no_form(value):
    if isinstance(value, torch.Size):  # a tuple of plain numbers
        assert written(value) == [1]
        return
    with pytest.raises(NotInConfigError):
        written(value)


def test_a_public_attribute_is_an_argument_of_an_object_without_a_constructor():
    class Plain:
        pass

    made = Plain()
    made.strength = 1
    with pytest.raises(NotInConfigError, match="the arguments of Plain are not known"):
        written(made)
