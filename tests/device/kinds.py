"""The parts of a kind that users can choose."""

import inspect


def kinds_of(base):
    """The names of fedsim's classes below a base that can be chosen."""
    found = set()
    for kind in base.__subclasses__():
        if kind.__module__.startswith("fedsim.") and not (inspect.isabstract(kind) or kind.__name__.startswith("_")):
            found.add(kind.__name__)
        found |= kinds_of(kind)
    return found
