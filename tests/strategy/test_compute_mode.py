"""GPUs that take one process only: nvidia-smi's list is read, and MPS makes a difference."""

import os

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.strategy import sharing
from fedsim.strategy.compute_mode import exclusive_gpus, has_mps, read_listing, why_not_shared

LISTING = """\
00000000:1B:00.0, Exclusive_Process
00000000:43:00.0, Default
00000001:C3:00.0, Prohibited
"""
FIRST, SECOND, THIRD = 0x1B << 8, 0x43 << 8, (1 << 16) | (0xC3 << 8)


def test_gpus_are_told_apart_by_their_place_in_the_machine():
    assert exclusive_gpus(LISTING) == {FIRST: "Exclusive_Process", THIRD: "Prohibited"}


@pytest.mark.parametrize("listing", ["", "Failed to initialize NVML", "no, Exclusive_Process", "[N/A], [N/A]\n\n,"])
def test_other_texts_say_nothing(listing):
    assert exclusive_gpus(listing) == {}


def test_mps_is_one_process():
    assert "start NVIDIA's MPS" in why_not_shared(FIRST, LISTING, with_mps=False)
    assert why_not_shared(FIRST, LISTING, with_mps=True) is None
    assert why_not_shared(SECOND, LISTING, with_mps=False) is None
    assert "takes no process" in why_not_shared(THIRD, LISTING, with_mps=True)


def test_mps_is_known_by_a_daemon_that_reads_its_pipe(tmp_path):
    environ, pipe = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}, tmp_path / "control"
    assert not has_mps(environ)
    os.mkfifo(pipe)
    assert not has_mps(environ)  # left by a daemon that was killed
    daemon = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert has_mps(environ)
    os.close(daemon)
    assert not has_mps(environ)


def test_the_pipe_of_another_user_counts(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert has_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported later"
REMEDY = "start NVIDIA's MPS (nvidia-cuda-mps-control -d), set the mode to Default (nvidia-smi -c DEFAULT), or "


@pytest.mark.parametrize(
    ("share", "has_it", "instead"),
    [
        (2, "another rank", "leave ranks_per_device out"),
        (1, "another process", "choose other GPUs with trainer.devices"),
    ],
)
def test_without_nvidia_smi_the_refusal_of_cuda_is_the_same_line(share, has_it, instead):
    with pytest.raises(ConfigError) as refused, sharing.naming_the_mode(torch.device("cuda", 1), share):
        raise RuntimeError(BUSY)
    assert str(refused.value) == (
        f"trainer.strategy.ranks_per_device: {share}, but cuda:1 is busy or unavailable: its compute mode may take one "
        f"process, and {has_it} has it; {REMEDY}{instead}"
    )
    with pytest.raises(RuntimeError, match="another error"), sharing.naming_the_mode(torch.device("cuda", 1), 2):
        raise RuntimeError("another error")


@pytest.mark.parametrize(
    ("program", "wanted"), [(None, ""), ("echo '0, Default'", "0, Default\n"), ("echo no driver; exit 9", "")]
)
def test_nvidia_smi_is_asked_if_it_is_there(program, wanted, tmp_path, monkeypatch):
    if program is not None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{program}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    assert read_listing() == wanted


def test_ranks_that_would_share_such_a_gpu_are_refused_in_one_line(monkeypatch):
    gpus = [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    monkeypatch.setattr(sharing, "read_listing", lambda: LISTING)
    monkeypatch.setattr(sharing, "has_mps", lambda: False)
    monkeypatch.setattr(sharing, "address_of", lambda device: (SECOND, FIRST)[device.index])
    with pytest.raises(ConfigError) as refused:
        sharing.check_shared_gpus(gpus, 2)
    assert str(refused.value) == (
        "trainer.strategy.ranks_per_device: 2, but ranks cannot share cuda:1: its compute mode is Exclusive_Process, "
        "which takes one process; start NVIDIA's MPS (nvidia-cuda-mps-control -d), set the mode to Default "
        "(nvidia-smi -c DEFAULT), or leave ranks_per_device out"
    )
    sharing.check_shared_gpus(gpus[:1], 2)
