"""Which test file a line of fedsim is run by: a context of coverage.py, also in the processes that a test starts."""

import os
import sys


def measure_for(test):
    """Note lines that run from now on for a test's file; ``test``: its id, as pytest writes it."""
    coverage = sys.modules.get("coverage")
    measurement = coverage.Coverage.current() if coverage else None
    if measurement is None or not test:
        return
    file = test.partition("::")[0]
    if measurement.config.context != file:
        # of a process that the test starts
        measurement.config.context = file
        os.environ["COVERAGE_PROCESS_CONFIG"] = measurement.config.serialize()
        measurement.switch_context(file)
