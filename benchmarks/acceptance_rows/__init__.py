"""The rows of ``benchmarks/acceptance.py``: functions that take a bench and return an outcome."""
