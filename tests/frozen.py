"""Imported last by the server of forked processes: what forks find made, and a collector that leaves it alone."""

import gc
from contextlib import ExitStack

import once
from prepared import prepare

prepare()
_kept = ExitStack()  # in all forks until they end
_kept.enter_context(once.parsers())
_kept.enter_context(once.people())
gc.freeze()
gc.set_threshold(20_000, 20, 20)
