"""Checks of methods that a script without a main guard defines, or a notebook: after a fit, too."""

import os
import subprocess
import sys

import pytest

from environment import is_of_a_launcher

SCRIPT = """
import threading

from fedsim.federation.federation import Federation
from fedsim.data import FederatedDataModule, SyntheticReID
from fedsim.federation.trainer import Trainer
from fedsim.methods import FedAvg
from fedsim.models import Neck, SmallCNN
from fedsim.testing import check_method

print("the script runs")
downloads = 0

class Mine(FedAvg):
    pass

class Counts(FedAvg):
    def download(self, client):
        global downloads
        downloads += 1
        super().download(client)

class Locked(FedAvg):
    # cannot be sent: it is tried in a fork of this process, and must find its main module there
    lock = threading.Lock()

    def download(self, client):
        import __main__
        assert __main__.Locked.__name__ == "Locked"
        super().download(client)

check_method(Locked())
if {trains}:
    data = FederatedDataModule(SyntheticReID(clients=2, scale=0.1), size=(16, 8), val="none")
    trainer = Trainer(max_epochs=1, accelerator="cpu", default_root_dir={folder!r})
    trainer.fit(Federation(FedAvg(), SmallCNN(width=8), Neck(dim=8)), datamodule=data)
check_method(Mine())
try:
    check_method(Counts())
except AssertionError as error:
    print(*error.findings, sep="\\n")
"""

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.parametrize(("is_file", "trains"), [(True, False), (False, True)])
def test_a_method_of_the_main_module_is_checked(is_file, trains, tmp_path):
    text = SCRIPT.format(trains=trains, folder=str(tmp_path))
    (tmp_path / "script.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
    command = [sys.executable, *(["script.py"] if is_file else ["-"])]  # from a pipe it has no file, as in a notebook
    run = subprocess.run(
        command,
        input=None if is_file else text,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    said, *findings = run.stdout.splitlines()
    assert said == "the script runs"  # once
    assert any("downloads" in finding for finding in findings), run.stdout
