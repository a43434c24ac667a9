"""Imported last by the server of forked processes: what they would make first, and a collector that leaves it alone."""

import gc
import logging
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml

import once
from failing import CONFIG
from fedsim.__main__ import main
from fedsim.data import SyntheticReID
from fedsim.models import SmallCNN
from tiny_run import TINY

for kept in (once.parsers(), once.people()):
    kept.__enter__()  # and in all forks until they end


def _begin(folder):
    """Parse and assemble as a fit does, but start no thread, for none would be there in a fork."""
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    assert main(["describe", "--config", str(config), "--run_dir", str(folder)]) == 0
    main(["fit", "--print_config"])


def _draw(text):
    """Draw the people of a config."""
    data = yaml.safe_load(text)["data"]
    for domain in SyntheticReID(**data["source"]["init_args"]).domains():
        for split in domain.parts:
            split.images.decode(tuple(data["size"]))


def _step():
    """Train for a step: torch chooses its kernels."""
    network = SmallCNN(width=4)
    network(torch.zeros(2, 3, 16, 8)).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9).step()


with TemporaryDirectory() as _folder, redirect_stdout(StringIO()), suppress(SystemExit):
    _begin(Path(_folder))
for _text in (CONFIG, TINY):
    _draw(_text)
_step()
logging.root.handlers.clear()  # of this process

gc.freeze()
gc.set_threshold(20_000, 20, 20)
