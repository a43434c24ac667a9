"""What is made once per process, as many tests have the same: people, and the parsers of commands."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import torch
from jsonargparse import _subcommands as _library

from fedsim.cli.fit import FedSimCLI
from fedsim.data.synthetic import SyntheticImages

_MOST, _SMALL = 20_000, 64 * 32  # pictures that are kept, and their pixels: 6 KB each
_draw, _pictures = SyntheticImages.decode, {}
_MANY = 100  # options
_NAME = "filter_non_parsing_actions"
_filter_anew, _filtered = getattr(_library, _NAME), {}
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


def _filter(actions):
    """What the library looks up three thousand times for a command line; of a list of hundreds it is kept."""
    if not isinstance(actions, list) or len(actions) < _MANY:
        return _filter_anew(actions)
    of, number, found = _filtered.get(id(actions), (None, 0, None))
    if of is not actions or number != len(actions):
        found = _filter_anew(actions)
        _filtered[id(actions)] = actions, len(actions), found
    return found


@contextmanager
def parsers():
    """Take the parser that this process has built already, until the end of the block."""
    with mock.patch.object(FedSimCLI, "__init__", _begin), mock.patch.object(_library, _NAME, _filter):
        yield
