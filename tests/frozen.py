"""Imported last by the server of forked processes: what they would make first, and a collector that leaves it alone."""

import gc
import logging
from contextlib import redirect_stdout, suppress
from io import StringIO

import once
from fedsim.__main__ import main

until_the_end = once.parsers()
until_the_end.__enter__()
with redirect_stdout(StringIO()), suppress(SystemExit):
    main(["fit", "--print_config"])
logging.root.handlers.clear()  # of this process

gc.freeze()
gc.set_threshold(20_000, 20, 20)
