"""The settings that a command line and its config files give, read in one pass before the parser and without torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import yaml

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import check_text
from fedsim.parsing.config_files import read_sections
from fedsim.parsing.documents import DEEPEST, as_yaml, check_yaml, parse_yaml
from fedsim.parsing.typed_names import with_quotes
from fedsim.settings.table import setting_at

WITHIN = ("init_args", "dict_kwargs")
"""parts of a setting's name that may stand between a class and its arguments"""
_CLIENT = "--model.clients."


class Given(NamedTuple):
    """A setting with a value."""

    setting: str
    """without ``init_args``"""
    value: Any
    """as YAML has it; of a class its name"""
    is_option: bool = False
    """whether the command line names it, and neither a config file nor a value with fields of its own"""
    file: str = ""
    """the config file that has it"""


def checked(words: Sequence[str], is_kept: bool = False) -> list[str]:
    """Return a command line in which the names in lists and sections are texts; single values are texts already.

    >>> checked(["--data.unseen", "[2021]", "--data.public=no", "--model.clients={no: {batch_size: 8}}"])
    ['--data.unseen', '["2021"]', '--data.public=no', '--model.clients={"no": {batch_size: 8}}']

    Args:
        words: of the command line, without the command.
        is_kept: whether the values go into the run's config.yaml, so that they must be UTF-8.

    Raises:
        ConfigError: for the first value that is not, or that the parser would expand without end; its message names
            the option.
    """
    quoted = []
    for before, word in itertools.pairwise(["", *words]):
        option, sign, value = word.partition("=")
        if not (word.startswith("--") and sign):
            option, sign, value = before if before.startswith("-") else "", "", word
        _check_value(value, option or "the command line", is_kept)
        name = option.lstrip("-").removesuffix("+")
        if "." in name and value[:1] in ("[", "{") and value[-1] not in ("]", "}"):
            raise ConfigError(f"--{name}: {value} has no end; write the value in quotes")
        if name not in ("", "c", "config") and value.lstrip()[:1] in ("[", "{"):
            value = with_quotes(value, name)
        quoted.append(f"{option}={value}" if sign else value)
    return quoted


def _check_value(value: str, option: str, is_kept: bool) -> None:
    if is_kept:
        check_text(value, option)
    if "&" not in value and len(value) <= DEEPEST:
        return
    try:
        check_yaml(value, option)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except (yaml.YAMLError, UnicodeError):  # a value that is no YAML is a plain text, or the parser refuses it
        return


def options_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each option; the value is empty if there is none.

    >>> list(options_in(["-c", "a.yaml", "--data.unseen+=x", "--print_config", "--overwrite", "true"]))
    [('config', 'a.yaml'), ('data.unseen', 'x'), ('print_config', ''), ('overwrite', 'true')]
    """
    for word, next_word in itertools.pairwise([*words, ""]):
        name, is_joined, value = word.partition("=")
        if not is_joined:
            value = "" if next_word.startswith("--") else next_word
        if name.startswith("--") or name == "-c":
            yield "config" if name == "-c" else name[2:].removesuffix("+"), value


def given(words: Sequence[str], read: Callable[[str], Mapping[str, Any]] = read_sections) -> Iterator[Given]:
    """Yield all settings that words and their config files give, in the order in which they apply.

    ``read`` reads a config file.

    Raises:
        DataError: if a file cannot be read.
    """
    for name, value_text in options_in(words):
        if name == "config":
            file = "" if value_text.startswith("{") else value_text
            yield from (inner._replace(file=file) for inner in _inner(read(value_text), ""))
        else:
            setting = ".".join(part for part in name.split(".") if part not in (*WITHIN, "class_path"))
            value, *inner = _inner(_read(value_text, setting), setting)
            yield value._replace(is_option=True)
            yield from inner


def merged(settings: Iterable[Given]) -> dict[str, Any]:
    """Return each setting -> the value that applies, also those of classes that another one replaces."""
    return {entry.setting: entry.value for entry in settings}


def with_default_classes(words: Sequence[str], settings: Sequence[Given]) -> list[str]:
    """Name a setting's default class where options give arguments of it, and nothing names a class.

    A run that goes on with its own config, and a section in a file of its own, may have classes that are not among
    ``settings``.

    >>> words = ["--model.client.optimizer.lr=0.1"]
    >>> with_default_classes(words, list(given(words)))[0].partition(",")[0]
    '--model.client.optimizer={"class_path": "torch.optim.sgd.SGD"'
    >>> words = ["--ckpt_path=last", *words]
    >>> with_default_classes(words, list(given(words))) == words
    True
    >>> words = ["--config", "{}", *words]
    >>> with_default_classes(words, list(given(words))) == words
    False

    Args:
        words: of the command line.
        settings: that they and their config files give.
    """
    named = {entry.setting for entry in settings}
    if "ckpt_path" in named and "config" not in dict(options_in(words)):
        return list(words)
    files = tuple(f"{entry.setting}." for entry in settings if isinstance(entry.value, str))
    owners = dict.fromkeys(entry.setting.rpartition(".")[0] for entry in settings if entry.is_option)
    unnamed = [owner for owner in owners if owner and owner not in named and not f"{owner}.".startswith(files)]
    defaults = {owner: setting_at(owner).default for owner in unnamed}
    has_class = {owner: value for owner, value in defaults.items() if isinstance(value, dict) and "class_path" in value}
    return [*(f"--{owner}={as_yaml(value)}" for owner, value in has_class.items()), *words]


def _read(value_text: str, setting: str) -> Any:
    """Return a setting's value as the parser reads it; invalid YAML stays a text."""
    with suppress(DataError):
        value = parse_yaml(value_text, "a value")
        is_text = value is not None and setting_at(setting).form == "text"
        # YAML: 1:30 is 90
        return value_text if is_text or (isinstance(value, int | float) and ":" in value_text) else value
    return value_text


def with_clients(words: Sequence[str]) -> list[str]:
    """Let each config, and each option of a client, add to the clients before it, field by field.

    The parser would replace the clients of one config by those of the next, and adds an option's field only to a
    mapping that exists.

    >>> with_clients(["--model.clients.viper.batch_size=8"])
    ['--model.clients={}', '--model.clients.viper.batch_size=8']
    >>> config = '{"model": {"clients": {"%s": {"batch_size": 8}}}}'
    >>> with_clients(["--config", config % "a", "--config", config % "b"])[-1]
    '--model.clients={"a": {"batch_size": 8}, "b": {"batch_size": 8}}'
    """
    inserted, clients, option = list[str](), dict[str, Any](), ""
    for before, word in itertools.pairwise(["", *words]):
        if word.startswith(_CLIENT):
            inserted += ["--model.clients={}"] * (not clients and not option)
            option = word.partition("=")[0]
        inserted.append(word)
        name, is_joined, value = word.partition("=") if word.startswith("-") else (before, before[:1] == "-", word)
        given_here = _clients_in(name, value) if is_joined else None
        if given_here and name != "--model.clients" and (clients or option):
            if option:
                raise ConfigError(f"{option}: a config after it has model.clients, too; give options after configs")
            given_here = clients | {
                client: {**clients.get(client, {}), **fields} for client, fields in given_here.items()
            }
            inserted.append(f"--model.clients={as_yaml(given_here)}")
        if given_here is not None:
            clients, option = given_here, ""
    return inserted


def _clients_in(name: str, value: str) -> dict[str, Any] | None:
    """Return the clients that a config or ``--model.clients`` gives; None without any, and of a wrong value."""
    if name in ("--config", "-c"):
        model = read_sections(value).get("model")
        if not isinstance(model, dict) or "clients" not in model:
            return None
        clients = model["clients"]
    elif name == "--model.clients":
        clients = _read(value, name[2:])
    else:
        return None
    is_right = isinstance(clients, dict) and all(isinstance(fields, dict) for fields in clients.values())
    return dict(clients) if is_right else None if clients else {}


def _inner(value: Any, setting: str) -> Iterator[Given]:
    """Yield a value, and those below it."""
    if not isinstance(value, Mapping):
        yield Given(setting, value)
        return
    yield Given(setting, value.get("class_path", value))
    for name, inner in value.items():
        if name in WITHIN and isinstance(inner, Mapping):
            for argument, of_argument in inner.items():
                yield from _inner(of_argument, f"{setting}.{argument}")
        elif name != "class_path":
            yield from _inner(inner, f"{setting}.{name}".lstrip("."))
