"""What the C library does with freed memory."""

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from fedsim.core.allocator import keep_freed_memory
from fedsim.data.augmentation import Augmentation
images = torch.zeros(64, 3, 256, 128, dtype=torch.uint8)
def median():  # the first batches need new memory in any case; a later one may, too
    faults = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        Augmentation(erase=0.5)(images[torch.randperm(64)[:32]], torch.Generator())
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(faults[5:])[3]
print(median(), keep_freed_memory(), median())
"""
ASKING = "from fedsim.core.allocator import keep_freed_memory; print(keep_freed_memory())"


def run(program, **environment):
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_that_is_freed_is_not_fetched_anew():
    before, said, after = run(PROGRAM)
    assert said == "True"
    assert int(before) > 1000  # pages
    assert int(after) < 100


def test_the_users_own_settings_stay():
    assert run(ASKING, MALLOC_ARENA_MAX="2") == ["False"]
