"""What the C library does with freed memory."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from fedsim.core.allocator import keep_freed_memory
from fedsim.data.augmentation import Augmentation
said = keep_freed_memory() if {keeps} else None
images = torch.zeros(64, 3, 256, 128, dtype=torch.uint8)
faults = []
for _ in range(24):  # the first batches need new memory in any case; a later one may, too: the median counts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    Augmentation(erase=0.5)(images[torch.randperm(64)[:32]], torch.Generator())
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(said, sorted(faults[8:])[8])
"""


def run(keeps, **environment):
    program = PROGRAM.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    said, faults = done.stdout.split()
    return said, int(faults)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_that_is_freed_is_not_fetched_anew():
    said, faults = run(True)
    assert said == "True"
    assert faults < 100  # pages; without it, thousands
    assert run(False)[1] > 1000


def test_the_users_own_settings_stay():
    assert run(True, MALLOC_ARENA_MAX="2")[0] == "False"
