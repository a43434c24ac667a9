"""The facts of settings: names in their conditions exist, none says what is usual, and the table has them all."""

import ast
from importlib import import_module
from typing import Literal, get_args, get_origin

import pytest
from jsonargparse._parameter_resolvers import get_signature_parameters

from fedsim.methods.base import Method
from fedsim.models.groups import Group
from fedsim.settings.configuration import flat
from fedsim.settings.effects import _value_at
from fedsim.settings.facts import Facts
from fedsim.settings.table import UNKNOWN, class_at, classes_below, paths_below, section, sections, setting_at, walk
from write_settings import TABLE, hints_of, parts_of, path_of, table, text_of


def class_of(path):
    """The class at a path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.fixture(scope="module")
def content():
    return table()


@pytest.fixture(scope="module")
def declared(content):
    """Class, setting and facts, of fedsim's classes."""
    return [
        (path, setting, facts)
        for path in content["classes"] if path.startswith("fedsim.")
        for setting, hint in hints_of(class_of(path)).items()
        for facts in getattr(hint, "__metadata__", ()) if isinstance(facts, Facts)
    ]  # fmt: skip


def test_the_table_is_that_of_the_source(content):
    assert text_of(content) == TABLE.read_text(), "run make rows"


def test_no_setting_declares_what_is_usual(declared):
    assert len(declared) > 100
    assert [f"{path} {name}" for path, name, facts in declared if facts == Facts()] == []


def names_in(condition):
    """Yield the dotted names of a condition."""
    waiting = [ast.parse(condition, mode="eval").body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            yield ast.unparse(node)
        else:
            waiting += ast.iter_child_nodes(node)


def hints_at(path, name):
    """The annotations that a dotted name of a class's settings has: where there is a choice of a class, several."""
    first, *rest = name.split(".")
    if first in sections():
        return hints_at(section(first).path, ".".join(rest))
    known = class_at(path)
    if first not in known.arguments or not rest:
        return [hint for argument, hint in hints_of(class_of(path)).items() if argument == name]
    base = known.arguments[first].base
    if rest == ["shares"] and base == path_of(Method):
        return [Group]
    below = {class_at(base).path, *(inner.path for inner in classes_below(base))} if base else ()
    return [hint for inner in sorted(below) for hint in hints_at(inner, ".".join(rest))]


def unknown_in(condition, path):
    """Names and values in a condition of a setting of a class that do not exist."""
    for name in names_in(condition):
        if name.removeprefix("trainer.") not in section("trainer").arguments and not hints_at(path, name):
            yield name
    for node in ast.walk(ast.parse(condition)):
        if isinstance(node, ast.Compare) and not ast.unparse(node.left).startswith("trainer."):
            parts = [part for hint in hints_at(path, ast.unparse(node.left)) for part in parts_of(hint)]
            choices = {choice for part in parts if get_origin(part) is Literal for choice in get_args(part)}
            values = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            yield from (v for v in values if parts and v not in choices and (choices or class_at(v) is None))


def test_conditions_name_settings_and_their_values(declared):
    wrong = [f"{p} {name}: {unknown}" for p, name, facts in declared for unknown in unknown_in(facts.needs or "1", p)]
    assert wrong == []


@pytest.mark.parametrize(
    ("condition", "unknown"),
    [
        ("partitions == 'iid'", ["partitions"]),
        ("model.client.sample == 'identity'", ["model.client.sample"]),
        ("model.method.step_count", ["model.method.step_count"]),
        ("trainer.precisions", ["trainer.precisions"]),
        ("model.selection.shares", ["model.selection.shares"]),
        ("'stat' in model.method.shares", []),
        ("partition in ('iid', 'dirichlett')", ["dirichlett"]),
        ("model.method != 'FedSGDD'", ["FedSGDD"]),
        ("model.method != 'FedSGD' or model.method.steps != 1", []),
    ],
)
def test_a_wrong_name_in_a_condition_is_found(condition, unknown):
    assert [*unknown_in(condition, section("data").path)] == unknown


def given(setting):
    """A value of a setting that is null by default, and has fields or is a class; None for another one."""
    if setting.form == "names":
        return {"town0": {"accumulate": 2}}
    if not setting.base or setting.default is not None:
        return None
    return {} if len(paths_below(setting.base)) == 1 else "mine.Class"


def null_options_in_conditions():
    """Option -> a value, of those that conditions name, and that are null by default."""
    names = [
        name if name.partition(".")[0] in sections() else f"{option.rpartition('.')[0]}.{name}"
        for option, setting in walk() for name in names_in(setting.facts.needs or "1")
    ]  # fmt: skip
    values = {name: given(setting_at(name)) for name in sorted(names)}
    return [(name, value) for name, value in values.items() if value is not None]


@pytest.mark.parametrize(("option", "value"), null_options_in_conditions())
def test_a_name_in_a_condition_is_true_if_a_configuration_gives_it(option, value):
    for part in reversed(option.split(".")):
        value = {part: value}
    assert _value_at(flat(value), option)
    assert _value_at(flat(value), option) != _value_at(flat({}), option)


def test_a_null_that_stands_for_another_setting_names_it(declared):
    for path, name, facts in declared:
        is_far = facts.null_is.partition(".")[0] in sections()
        assert setting_at(facts.null_is) is not UNKNOWN if is_far else facts.null_is in ("", *class_at(path).arguments)
        assert facts.overrides == "" or class_at(setting_at(facts.overrides).base).arguments, name


def test_the_parser_knows_the_types_of_all_settings(content):
    """It evaluates the annotations in a dataclass and in its bases by the names in the module of the dataclass."""
    classes = [class_of(path) for path in content["classes"] if path.startswith("fedsim.")]
    arguments = [(cls, argument) for cls in classes for argument in get_signature_parameters(cls, "__init__")]
    unknown = [(cls, argument.name) for cls, argument in arguments if isinstance(argument.annotation, str)]
    assert unknown == []
    assert len(arguments) > 400
