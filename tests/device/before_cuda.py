"""CUDA does not start before a rank has its GPU, nor on the CPU: two GPUs are counted, and CUDA cannot start.

test_before_cuda.py runs this file in a process in which no GPU was simulated.
"""

import inspect
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from fedsim.__main__ import main
from fedsim.core.cuda_start import _CHECKS
from fedsim.federation.memory import _state_of
from fedsim.training.settings import try_optimizer
from runs import fit, judged_in_two_steps, options
from small_generators import STEPS, WIDTHS

REFUSED = ("LBFGS", "Muon", "SparseAdam")
"""of torch.optim: they need more than a gradient, or matrices alone"""
KINDS = sorted(
    name for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer and name not in REFUSED
)  # fmt: skip
CAPTURABLE = [name for name in KINDS if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters]


@pytest.fixture
def starts(monkeypatch):
    """The attempts to start CUDA on a machine where NVIDIA's library counts two GPUs."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning's import sets it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    attempts = []

    def start():
        attempts.append(1)
        raise RuntimeError("Found no NVIDIA driver on your system.")

    with mock.patch.object(torch._C, "_cuda_init", start):
        assert torch.cuda.is_available()
        yield attempts


def test_the_fixture_sees_a_start(starts):
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
        torch.zeros(1, device="cuda")
    assert len(starts) == 1


@pytest.mark.parametrize("name", KINDS)
def test_trial_steps_of_optimizers_leave_cuda_alone(starts, name):
    make = getattr(torch.optim, name)
    try_optimizer("model.client.optimizer", lambda groups: make(groups, lr=0.1))
    _state_of(lambda groups: make(groups, lr=0.1))
    assert starts == []


@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_capturable_optimizer_steps_on_the_cpu(starts, name):
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter, capturable in zip(parameters, (True, False), strict=True):
        parameter.grad = torch.ones(3)
        getattr(torch.optim, name)([parameter], lr=0.1, capturable=capturable).step()
    assert torch.equal(*parameters)
    assert starts == []


ADAM = ["--model.client.optimizer=Adam", "--model.client.optimizer.lr=0.001"]
FITS = {
    "one model": ["fedavg", *ADAM],
    "another optimizer": ["fedavg", "--model.client.optimizer=Rprop", "--model.client.optimizer.lr=0.001"],
    "a model that the server trains": ["fedavg", *ADAM, "--model.aggregation=FLTrust", "--data.public=town1"],
    "attackers who know others": ["fedavg", *ADAM, "--model.attack=MinMax", "--model.attack.attackers=[town0]"],
    "norms that stay": ["gperxan", *ADAM, "--model.backbone.init_args.norm=xan"],
    "style layers": ["fedpav", *ADAM, "--model.backbone.init_args.style={kind: diversify, p: 1.0}"],
    **{name: [name, *ADAM] for name in ("dacs", "fedcapr", "ska", "sscu", "stylebank", "text_anchors")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_fits_on_the_cpu_leave_cuda_alone(starts, name, tmp_path):
    fit(tmp_path / "run", *FITS[name], rounds=1)
    assert starts == []


def test_a_step_of_torch_s_own_starts_cuda(starts):
    """What the tests above would find."""
    name = next(name for name in _CHECKS if hasattr(torch.optim.Optimizer, name))
    checked = inspect.unwrap(getattr(torch.optim.Optimizer, name))
    with mock.patch.object(torch.optim.Optimizer, name, checked), pytest.raises(RuntimeError, match="no NVIDIA driver"):
        _state_of(lambda groups: torch.optim.Adam(groups, lr=0.1))
    assert starts


def call(*words):
    assert main([str(word) for word in words]) == 0


@pytest.mark.slow
def test_commands_on_the_cpu_leave_cuda_alone(starts, tmp_path):
    run, cpu = tmp_path / "run", "--trainer.accelerator=cpu"
    more = ["--model.client.optimizer=AdamW", "--model.client.optimizer.lr=0.001"]
    command = options(run, "fedavg", *more, "--model.server_optimizer=FedAdam", rounds=1)
    call("describe", *command[1:])
    call(*command)
    for name in ("validate", "test", "predict"):
        call(name, "--config", run / "config.yaml", f"--ckpt_path={run}", f"--run_dir={tmp_path / name}", cpu)
    call("report", run)
    call("export", "--ckpt_path", run, "--output", tmp_path / "weights.safetensors")
    call("rank", next((tmp_path / "predict").rglob("*.npz")), "--device", "cpu")
    (tmp_path / "data.yaml").write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16]}\n"
    )
    where = ["--config", tmp_path / "data.yaml", "--output", tmp_path / "generators", "--device", "cpu"]
    with judged_in_two_steps():
        call("augment", "fit", *where, *STEPS, *WIDTHS)
    for name, output in (("preview", "swaps.png"), ("write", "images")):
        folders = ["--generators", tmp_path / "generators", "--output", tmp_path / output]
        call("augment", name, "--config", tmp_path / "data.yaml", *folders, "--device", "cpu")
    call("data", "preview", "--config", tmp_path / "data.yaml", "--output", tmp_path / "people.png")
    call("sweep", "--method", "fedpav", "--config", tmp_path / "data.yaml", "--dry_run", "--run_dir", tmp_path / "runs")
    main(["doctor", cpu, "--run_dir", str(tmp_path / "doctor")])
    assert starts == []


@pytest.mark.parametrize("room", ["training", "generation"])
def test_each_room_with_optimizers_leaves_cuda_alone(room):
    code = (
        f"import fedsim.{room}\nfrom torch.optim import Optimizer\nfrom lightning.pytorch.trainer import trainer\n"
        "print(Optimizer._accelerator_graph_capture_health_check.__module__ if hasattr(Optimizer, "
        "'_accelerator_graph_capture_health_check') else '', trainer.isolate_rng.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-1] == "fedsim.core.cuda_start", done.stderr
