"""Forged runs and honest ones for ``forgeries.py``."""
