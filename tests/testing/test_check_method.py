"""check_method refuses every faulty method, names the fault, and accepts those that are sound."""

import pytest
from faulty_methods import FAULTS, SOUND

import fedsim.testing
import others
from fedsim.testing import PartRefusedError, check_method

pytestmark = [pytest.mark.slow, pytest.mark.dist]  # each check has fits in processes of their own


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_a_sound_method_is_accepted(kind):
    assert check_method(kind()) is None


@pytest.mark.parametrize("kind", others.each_third(FAULTS), ids=lambda kind: kind.__name__)
def test_a_faulty_method_is_refused_with_a_sentence_that_names_the_fault(kind):
    with pytest.raises(PartRefusedError) as caught:
        check_method(kind())
    assert any(FAULTS[kind] in finding for finding in caught.value.findings), str(caught.value)
    assert all(len(finding.splitlines()) == 1 for finding in caught.value.findings)
    assert str(caught.value).startswith(f"{kind.__name__}: ")


def test_a_class_in_place_of_an_instance_is_refused():
    with pytest.raises(AssertionError, match="derive the class"):
        check_method(SOUND[0])


def test_fedsim_does_not_import_it():
    assert "testing" in dir(fedsim)
