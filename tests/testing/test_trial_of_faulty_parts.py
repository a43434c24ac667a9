"""The checks find the parts of ``benchmarks/faulty`` that the record says, and accept the sound ones."""

import sys

import pytest

from shared_fixtures import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from faulty import first, second
from faulty_trial import verdict

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.others]  # each check has fits in processes of their own

LEFT_OUT = {
    "ProductOverASet": "it slips where two orders give the same last bit",
    "all_reduce_in_a_loss": "two ranks wait for each other for five minutes",
}
PARTS = {part.name: part for part in (*first.PARTS, *second.PARTS) if part.name not in LEFT_OUT}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_gets_the_verdict_of_the_record(name):
    part = PARTS[name]
    expected = "harmless" if part.harmless else "found" if part.about else "sound"
    assert verdict(part)[0] == expected
