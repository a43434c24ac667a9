"""A network that breaks between two machines: two network namespaces with a cable between them."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from failing import (
    CONFIG,
    PATIENCE,
    assert_equal,
    await_gate,
    await_true,
    finish,
    fit,
    is_of_a_launcher,
    last,
    processes_of,
    read_result,
    variable,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.cluster]
TESTS = Path(__file__).parents[1]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=PATIENCE)


def connect(spaces, cables):
    for space in spaces:
        ip("netns", "add", space)
    ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
    for space, cable, address in zip(spaces, cables, ADDRESSES, strict=True):
        ip("link", "set", cable, "netns", space)
        ip("-n", space, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", space, "link", "set", cable, "up")
        ip("-n", space, "link", "set", "lo", "up")


@pytest.fixture
def network():
    """Names of two namespaces, and of the cable's end in each."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command")
    spaces = [f"fedsim-{os.getpid()}-{side}" for side in "ab"]
    cables = [f"fs{os.getpid() % 10**6}{side}" for side in "ab"]
    try:
        try:
            connect(spaces, cables)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")
        yield spaces, cables
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=PATIENCE)


def start(folder, space, cable, rank):
    command = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
               "--nproc-per-node=1", f"--node-rank={rank}", f"--master-addr={ADDRESSES[0]}", "--master-port=29500",
               "-m", "fedsim", "fit", "--config", folder.with_suffix(".yaml"), "--run_dir", folder,
               "--trainer.strategy.silence_timeout=0:00:15", "--trainer.callbacks+=failing.Gate"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not is_of_a_launcher(name)}
    environment |= {"PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(f".{rank}.log").open("wb") as log:
        return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)


def ranks_of(folder):
    return [pid for pid in processes_of(folder) if variable(pid, "RANK") is not None]


def test_both_sides_of_a_broken_network_end_and_the_run_goes_on_from_the_last_round(network, tmp_path):
    finish(fit(tmp_path / "whole"))
    folder = tmp_path / "run"
    folder.with_suffix(".yaml").write_text(CONFIG.replace("  devices: 1\n", ""))
    agents = [start(folder, space, cable, rank) for rank, (space, cable) in enumerate(zip(*network, strict=True))]

    def logs():
        return [folder.with_suffix(f".{rank}.log").read_text() for rank in (0, 1)]

    try:
        await_gate(folder, logs)
        ip("-n", network[0][0], "link", "set", network[1][0], "down")
        await_true(lambda: not ranks_of(folder), PATIENCE, logs)
        for rank in (0, 1):  # torchrun's own agents may wait for each other longer than that
            assert f"fedsim: error: rank {1 - rank} " in logs()[rank]
    finally:
        for pid in {*(agent.pid for agent in agents), *processes_of(folder)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()
    finish(fit(folder, "--ckpt_path", "last"))
    assert_equal(read_result(last(folder)), read_result(last(tmp_path / "whole")))
