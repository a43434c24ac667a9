"""What is made once per process, as many tests have the same: people, and stand-ins of data sets."""

from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from fedsim.data import datamodule
from fedsim.data.synthetic import SyntheticImages

_MOST, _SMALL = 20_000, 64 * 32  # pictures that are kept, and their pixels: 6 KB each
_draw, _pictures = SyntheticImages.decode, {}


def _decode(self, size):
    own = zip(self.identities.tolist(), self.cameras.tolist(), self.shots.tolist(), strict=True)
    keys = [(self.seed, self.domain, *size, *key) for key in own]
    if type(self) is not SyntheticImages or not keys or size[0] * size[1] > _SMALL:
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


@cache
def _folder():
    return TemporaryDirectory(prefix="fedsim-tests-standins-")


def standins():
    """Take the stand-ins of data sets that this process has written already, until the end of the block."""
    kept = SimpleNamespace(name=_folder().name)  # removed at the end of the process
    return mock.patch.object(datamodule, "TemporaryDirectory", return_value=kept)
