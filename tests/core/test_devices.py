import pytest
import torch

from fedsim.core import devices
from fedsim.core.devices import device_named, devices_here
from fedsim.core.errors import ConfigError

TWO = "cpu, cuda:0 (NVIDIA H100), cuda:1 (NVIDIA H100)"


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(devices, "why_cuda_fails", lambda cuda: None)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_devices_that_are_here_are_taken(two_gpus, name):
    assert device_named(name) == torch.device(name)


@pytest.mark.parametrize(
    ("name", "what"),
    [("cuda:2", "cuda:2 is not here"), ("cuda:9", "cuda:9 is not here"), ("abacus", "there is no device abacus"),
     ("meta", "there is no device meta"), ("cuda:-1", "there is no device cuda:-1")],
)  # fmt: skip
def test_others_are_refused_with_the_list_of_those_that_are(two_gpus, name, what):
    with pytest.raises(ConfigError) as caught:
        device_named(name)
    assert str(caught.value) == f"--device: {what}; choose from {TWO}"


def test_without_gpus_the_list_says_who_knows_more(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"cuda:0 is not here; choose from cpu alone \(torch sees no GPU; fedsim doctor"
    ):
        device_named("cuda:0")


def test_a_gpu_that_does_not_start_is_listed_without_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def fail(index):
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    assert devices_here() == "cpu, cuda:0"
