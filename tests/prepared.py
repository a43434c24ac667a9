"""What forked processes would make first, made before."""

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


def prepare():
    """Make what forks find done."""
    with once.people():
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()), suppress(SystemExit):
            _begin(Path(folder))
        for text in (CONFIG, TINY):
            _draw(text)
        _step()
    logging.root.handlers.clear()  # of this process
