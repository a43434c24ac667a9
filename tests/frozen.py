"""Imported last by the server of forked processes: what they would make first, and a collector that leaves it alone."""

import gc
import logging
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import once
from failing import CONFIG
from fedsim.__main__ import main
from fedsim.data import SyntheticReID
from fedsim.models import SmallCNN

with ExitStack() as begun:
    begun.enter_context(once.parsers())
    begun.enter_context(once.people())
    begun.pop_all()  # it stays so in all forks
with TemporaryDirectory() as folder, redirect_stdout(StringIO()), suppress(SystemExit):
    config = Path(folder) / "config.yaml"
    config.write_text(CONFIG)
    assert main(["describe", "--config", str(config), "--run_dir", folder]) == 0
    main(["fit", "--print_config"])
for size, people in (((16, 8), {"clients": 3, "unseen": 1, "scale": 0.2}), ((32, 16), {"clients": 4, "unseen": 2, "scale": 0.25})):
    for domain in SyntheticReID(**people).domains():  # those of most tests
        for split in (domain.train, domain.query, domain.gallery):
            split is None or split.images.decode(size)
network = SmallCNN(width=4)
network(torch.zeros(2, 3, 16, 8)).sum().backward()
torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9).step()
logging.root.handlers.clear()  # of this process

gc.freeze()
gc.set_threshold(20_000, 20, 20)
