"""check_module refuses modules that cannot be clients, says why, and accepts sound ones."""

from functools import partial
from importlib import import_module

import pytest
import torch
from faulty_modules import MODULES, LogitsInTraining, MixesImages, Normed, Sound, StepsPastLightning

from fedsim.testing import PartRefusedError, check_module
from shared_fixtures import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.dist]  # each check has fits in processes of their own


@pytest.mark.parametrize(
    "kind", [Sound, MixesImages, LogitsInTraining, StepsPastLightning], ids=lambda kind: kind.__name__
)
def test_a_sound_module_is_accepted_and_stays_as_it_is(kind):
    module = kind()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_module(module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_faulty_module_is_refused_with_the_reason(kind):
    with pytest.raises(PartRefusedError) as caught:
        check_module(kind())
    assert any(MODULES[kind] in finding for finding in caught.value.findings), str(caught.value)
    assert all(len(finding.splitlines()) == 1 for finding in caught.value.findings)


@pytest.mark.parametrize("make", [Normed, partial(Normed, num_classes=7)], ids=["class", "partial"])
def test_what_makes_a_module_is_checked_as_the_module(make):
    check_module(make)


@pytest.mark.parametrize("wrong", [torch.nn.Linear(1, 1), 3, torch.nn.ReLU])
def test_what_is_no_module_is_refused(wrong):
    with pytest.raises(PartRefusedError, match="no LightningModule"):
        check_module(wrong)


def test_the_module_of_the_documentation_is_sound(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))  # its fits have processes of their own
    check_module(import_module("own_module").TripletNet(num_classes=8))
