"""Sweep files, read."""

from fedsim.sweep.file import read_content, sweep_of


def read_sweep(path):
    """The sweep of a file."""
    return sweep_of(read_content(path), str(path))
