"""Sweeps and seeds: files in W&B's format, their runs on this machine, and tables of the results."""
