"""A fit on a simulated GPU names it, and trains by the recipe for large ones."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import simulated
from fedsim.__main__ import main
from fedsim.core import devices
from fedsim.core.devices import check_accelerator
from fedsim.core.errors import ConfigError
from fedsim.strategy.start_line import start_line
from runs import HAS_GRAPHS, fit, options
from small import refuse

OLD_DRIVER = "the NVIDIA driver 535.104.05 is too old for CUDA 13.2, with which torch is built"


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    """The folder of eight GPUs that torch cannot use."""
    for number in range(8):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(devices, "nvidia_driver", lambda: "535.104.05")
    monkeypatch.setattr(devices.check_accelerator, "__defaults__", (True, tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


@pytest.mark.usefixtures("old_driver")
def test_gpus_that_cannot_be_used_are_a_loud_line(caplog):
    check_accelerator("auto")
    [line] = caplog.messages
    assert line.startswith(
        f"THIS RUN IS ON THE CPU. 8 NVIDIA GPUs here cannot be used: {OLD_DRIVER}; update the driver"
    )
    assert "fedsim doctor" in line


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_to_require_them_is_an_error(accelerator):
    with pytest.raises(ConfigError) as caught:
        check_accelerator(accelerator)
    line = str(caught.value)
    assert line.startswith(f"trainer.accelerator: {accelerator}, but 8 NVIDIA GPUs here cannot be used: {OLD_DRIVER}; ")
    assert line.endswith("fedsim doctor shows more")


@pytest.mark.usefixtures("old_driver")
def test_a_command_ends_with_that_line(capsys, tmp_path):
    line = refuse(capsys, *options(tmp_path / "run", "fedavg", "--trainer.accelerator=gpu", "--trainer.devices=auto"))
    assert "trainer.accelerator: gpu, but 8 NVIDIA GPUs here cannot be used" in line


def test_nothing_is_said_of_cpus_hidden_gpus_and_machines_without(old_driver, caplog, monkeypatch, tmp_path):
    check_accelerator("cpu")
    check_accelerator("auto", warns=False)
    check_accelerator("gpu", gpus=tmp_path / "none")  # Lightning refuses that
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_accelerator("auto")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "why_cuda_fails", lambda cuda: None)
    check_accelerator("auto")
    assert caplog.messages == []


def first_line(caplog):
    return next(message for message in caplog.messages if message.startswith("on "))


def test_the_first_line_names_the_place(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fedsim")
    fit(tmp_path / "cpu", "fedavg", rounds=1, scored=False)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fedsim")]
    assert lines[0] == f"on 1 x cpu, 1 rank, 32-true, torch {torch.__version__}"
    caplog.clear()
    with simulated.cuda(1):
        fit(tmp_path / "gpu", "fedavg", gpus=1, rounds=1, scored=False, precision="bf16-mixed")
    assert first_line(caplog) == f"on 1 x Simulated H100, 1 rank, bf16-mixed, torch {torch.__version__}"


@pytest.mark.parametrize(
    ("names", "share", "machines", "said"),
    [("H", 1, 1, "1 x H, 1 rank"), ("HH", 2, 1, "2 x H, 4 ranks"), ("HHA", 1, 1, "2 x H, 1 x A, 3 ranks"),
     ("HA", 2, 3, "3 x H, 3 x A of 3 machines, 12 ranks"), ("H", 1, 2, "2 x H of 2 machines, 2 ranks")],
)  # fmt: skip
def test_the_first_line_counts_gpus_by_their_names(names, share, machines, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    devices = [torch.device("cuda", index) for index in range(len(names))] * share
    strategy = SimpleNamespace(root_device=devices[0], parallel_devices=devices, ranks_per_device=share)
    trainer = SimpleNamespace(world_size=len(devices) * machines, num_nodes=machines, precision="32-true")
    assert start_line(strategy, trainer) == f"on {said}, 32-true, torch {torch.__version__}"


def test_a_launcher_that_shows_each_rank_its_own_gpu_alone_counts_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    [device] = devices = [torch.device("cuda", 0)]
    strategy = SimpleNamespace(root_device=device, parallel_devices=devices * 4, ranks_per_device=1)
    trainer = SimpleNamespace(world_size=8, num_nodes=2, precision="32-true")
    assert start_line(strategy, trainer).startswith("on 8 x H of 2 machines, 8 ranks, ")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GRAPHS, reason="graphs are refused")
def test_the_recipe_trains_with_recorded_steps(tmp_path):
    more = ["--config", "recipes/h100", "--trainer.devices=1", "--data.limit_client_batches=6"]
    command = options(tmp_path / "run", "fedprox", *more, "--model.objective.center={}", rounds=1)
    command = [word for word in command if not word.startswith("--trainer.accelerator")]
    before = torch.backends.cudnn.benchmark
    try:
        with simulated.cuda(1) as gpu:
            assert main(command) == 0
    finally:
        torch.backends.cudnn.benchmark = before
    assert gpu.reading().kernels > 100


@pytest.mark.parametrize(("tf32", "before"), [(True, True), (False, True), (False, False)])
def test_convolutions_are_in_tf32_unless_a_setting_forbids_it(tf32, before, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    seen = []
    forward = torch.nn.Conv2d.forward

    def watched(self, images):
        seen.append(torch.backends.cudnn.allow_tf32)
        return forward(self, images)

    with mock.patch.object(torch.nn.Conv2d, "forward", watched):
        fit(tmp_path / "run", "fedavg", f"--model.tf32={str(tf32).lower()}", rounds=1)
    assert set(seen[-50:]) == {tf32}
    assert torch.backends.cudnn.allow_tf32 == before, "a setting of this run alone"
