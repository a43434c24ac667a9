"""Facts of settings against runs: a setting without effect changes no bit.

``benchmarks/settings_effect.py`` examines all settings, this a drawn one of each of its configurations.
"""

import math
import random
import sys
from pathlib import Path

import pytest
import torch

import once
import others

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import settings_effect as effects

FEW = ("no affine", "FedSGD", "DACS without expert", "cross without boxes")


@pytest.fixture(scope="module")
def usual():
    with once.people():
        return effects.run(effects.config_of("usual"))


@pytest.mark.parametrize("name", others.some([*effects.CONTEXTS], FEW))
def test_a_setting_without_effect_changes_no_bit(name, usual):
    with once.people():
        first = effects.run(effects.config_of(name))
        idle = [o for o in effects.options_of(first.entries, None, set()) if first.entries[o].effect == "nothing"]
        idle = [o for o in idle if name == "usual" or usual.entries.get(o, first.entries[o]).effect != "nothing"]
        for option in random.Random(name).sample(idle, min(1, len(idle))):
            text = effects.examine_one(effects.config_of(name), first, option)[1]
            assert text.startswith(("right", "refused", "no other value")), f"{option}: {text}"


def test_a_changed_result_is_found(usual):
    with once.people():
        changed = effects.run(effects.with_value(effects.config_of("usual"), "model.neck.dim", 9, usual.entries))
    apart, columns = effects.difference(usual, changed)
    assert apart == math.inf
    assert any("mAP" in name for name in columns)
    one = next(iter(usual.tensors))
    tensors = {**usual.tensors, one: usual.tensors[one].nextafter(torch.tensor(9.0))}
    apart, columns = effects.difference(usual, usual._replace(tensors=tensors))
    assert 0 < apart < 1e-6
    assert columns == []
    assert effects.verdict("nothing", apart, columns) == "wrong"
    assert effects.verdict("rounding", apart, columns) == "right"
    assert effects.verdict("results", 0.0, []) == "no effect seen"
    assert effects.verdict("nothing", 0.0, ["1.0 train/loss"]) == "wrong"
