"""Imported last by the server of forked processes: their collectors leave alone what it has imported, and look less often."""

import gc

gc.freeze()
gc.set_threshold(20_000, 20, 20)
