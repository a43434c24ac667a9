"""Python's garbage collector, which costs a fifth of the CPU time that PyTorch and Lightning take to be imported."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_collection() -> Iterator[None]:
    """Import PyTorch, Lightning and others without garbage collection, and exclude them from later collections.

    They make half a million objects that live as long as the process. The collector would visit them several times
    while they are imported, and again with every full collection of a run, for 0.15 s each. Does nothing if PyTorch is
    already imported: the process then has other objects, which may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries that count their objects warn at the end
        gc.enable()
