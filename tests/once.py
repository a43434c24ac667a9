"""What is made once per process, as many tests have the same: people, stand-ins, and the parsers of commands."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from jsonargparse import Namespace, _core, _subcommands
from jsonargparse._namespace import add_clash_mark as _mark

from fedsim.cli.fit import FedSimCLI
from fedsim.data import datamodule
from fedsim.data.synthetic import SyntheticImages

_MOST, _SMALL = 20_000, 64 * 32  # pictures that are kept, and their pixels: 6 KB each
_draw, _pictures = SyntheticImages.decode, {}
_MANY = 100  # options
_find_anew, _found = _subcommands.find_action_and_subcommand, {}
_parse_anew = Namespace._parse_key
_init, _build, _built = FedSimCLI.__init__, FedSimCLI.setup_parser, {}


def _decode(self, size):
    own = zip(self.identities.tolist(), self.cameras.tolist(), self.shots.tolist(), strict=True)
    keys = [(self.seed, self.domain, *size, *key) for key in own]
    if not keys or size[0] * size[1] > _SMALL:
        return _draw(self, size)
    new = [place for place, key in enumerate(keys) if key not in _pictures]
    made = {}
    if new:
        drawn = _draw(self.take(np.array(new)), size)
        made = {keys[place]: picture.clone() for place, picture in zip(new, drawn, strict=True)}
    pictures = torch.stack([made[key] if key in made else _pictures[key] for key in keys])
    if len(_pictures) < _MOST:
        _pictures.update(made)
    return pictures


def people():
    """Take pictures that this process has drawn already, until the end of the block."""
    return mock.patch.object(SyntheticImages, "decode", _decode)


def _setup_parser(cli, *args):
    if cli.command not in _built:
        _build(cli, *args)
        names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
        _built[cli.command] = {name: vars(cli)[name] for name in names}
    vars(cli).update(_built[cli.command])
    vars(cli.parser).pop("print_config", None)  # of a command line with a mistake behind --print_config


def _begin(cli, args):
    helps = any("help" in word for word in args)  # only then are the docstrings of settings read
    with nullcontext() if helps else mock.patch.object(FedSimCLI, "setup_parser", _setup_parser):
        _init(cli, args)


def _find(parser, dest, exclude=None):
    """The option of a name, which the library looks for among hundreds, a thousand times for a command line."""
    actions = parser._actions
    if len(actions) < _MANY:
        return _find_anew(parser, dest, exclude)
    key = id(actions), dest, exclude
    of, number, found = _found.get(key, (None, 0, None))
    if of is not actions or number != len(actions):
        found = _find_anew(parser, dest, exclude)
        _found[key] = actions, len(actions), found
    return found


def _parse_key(namespace, key):
    """The parts of a name; most have one."""
    if isinstance(key, str) and key.isidentifier():
        return _mark(key), namespace, ""
    return _parse_anew(namespace, key)


@contextmanager
def parsers():
    """Take the parser that this process has built already, until the end of the block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FedSimCLI, "__init__", _begin))
        stack.enter_context(mock.patch.object(Namespace, "_parse_key", _parse_key))
        for module in (_core, _subcommands):
            stack.enter_context(mock.patch.object(module, "find_action_and_subcommand", _find))
        yield


@cache
def _folder():
    return TemporaryDirectory(prefix="fedsim-tests-standins-")


def standins():
    """Take the stand-ins of data sets that this process has written already, until the end of the block."""
    kept = SimpleNamespace(name=_folder().name)  # removed at the end of the process
    return mock.patch.object(datamodule, "TemporaryDirectory", return_value=kept)
