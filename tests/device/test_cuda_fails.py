"""GPUs that NVIDIA's library counts, and CUDA cannot use: each command ends in one line, and the CPU always works."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedsim.__main__ import main
from fedsim.core import nvidia
from fedsim.core.errors import ConfigError
from fedsim.core.nvidia import failure_in, why_cuda_fails
from fedsim.strategy.sharing import naming_the_mode
from runs import options
from small import refuse

CASES = {  # case -> the driver's answer: result of cuInit and its newest CUDA; the words that a line must have
    "old driver": ("0 12", "driver is too old for torch's CUDA (CUDA's error 35); update it"),
    "no gpu": ("100 13", "gives this process no GPU (CUDA's error 100); give the job"),
    "no fabric manager": ("802 13", "fabric manager does not run (CUDA's error 802); start it"),
    "driver mismatch": ("803 13", "different versions (CUDA's error 803); restart"),
    "compatibility": ("804 13", "do not support this GPU (CUDA's error 804); remove cuda-compat"),
    "unknown": ("999 13", "driver fails (CUDA's error 999); restart"),
    "no code that is known": ("46 13", "driver fails (CUDA's error 46); restart"),
    "no driver": (nvidia._NO_LIBRARY, "libcuda.so.1 is missing; install the driver"),
}


@pytest.fixture
def counted(monkeypatch):
    """Let NVIDIA's library count two GPUs, and CUDA's driver give an answer."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    why_cuda_fails.cache_clear()
    yield lambda answer: monkeypatch.setattr(nvidia, "_START", f"print('{answer}')")
    why_cuda_fails.cache_clear()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", [["auto", "auto"], ["gpu", "auto"], ["cuda", "2"], ["gpu", "[1]"]])
def test_a_fit_ends_in_a_line(case, where, counted, capsys, tmp_path):
    answer, words = CASES[case]
    counted(answer)
    accelerator, number = where
    line = refuse(
        capsys,
        *options(tmp_path, "fedavg", f"--trainer.accelerator={accelerator}", f"--trainer.devices={number}"),
    )
    assert f"trainer.accelerator: {accelerator}, but GPUs cannot be used: " in line
    assert words in line
    assert line.rstrip().endswith(", or set trainer.accelerator to cpu")


def test_every_command_ends_in_a_line(counted, capsys, tmp_path):
    counted("802 13")
    arrays = {"query": np.ones((2, 2), np.float32), "gallery": np.ones((2, 2), np.float32)}
    labels = {f"{part}_pids": np.arange(2) for part in arrays} | {"query_camids": [0, 0], "gallery_camids": [1, 1]}
    np.savez(tmp_path / "features.npz", **arrays, **labels)
    (tmp_path / "data.yaml").write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16]}\n"
    )
    config = ["--config", str(tmp_path / "data.yaml")]
    run = tmp_path / "run"
    assert main(options(run, "fedavg", rounds=1)) == 0
    of_run = ["--config", str(run / "config.yaml"), f"--ckpt_path={run}", f"--run_dir={run}"]
    auto = "--trainer.accelerator=auto"
    _, *common = options(run, "fedavg", auto)
    for command in (
        ["describe", *common],
        *([name, *of_run, auto] for name in ("validate", "test", "predict")),
        ["fit", "--ckpt_path", str(run), auto, "--trainer.max_epochs=2"],
        ["rank", str(tmp_path / "features.npz"), "--device", "cuda"],
        ["augment", "fit", *config, "--output", str(tmp_path / "generators")],
        ["augment", "fit", *config, "--output", str(tmp_path / "generators"), "--device", "cuda:1"],
    ):
        assert "fabric manager does not run (CUDA's error 802); start it" in refuse(capsys, *command), command


def test_the_cpu_always_works(counted, tmp_path):
    counted("0 12")
    more = ["--model.client.optimizer=AdamW", "--model.client.optimizer.lr=0.001"]
    assert main(options(tmp_path / "run", "fedavg", *more, rounds=1)) == 0


def test_a_driver_that_starts_is_no_failure(counted):
    counted("0 13")
    assert why_cuda_fails("13.2") is None
    assert why_cuda_fails("12.6") is None
    assert "too old" in why_cuda_fails("14.0").cause


def test_a_driver_that_ends_the_process_or_hangs_has_failed(monkeypatch, counted):
    monkeypatch.setattr(nvidia, "_START", "import os; os.abort()")
    assert why_cuda_fails("13.2").cause.startswith("the NVIDIA driver fails")
    monkeypatch.setattr(nvidia, "_START", "import time; time.sleep(60)")
    monkeypatch.setattr(nvidia, "_PATIENCE", 0.2)
    assert why_cuda_fails("12.0").cause.startswith("the NVIDIA driver fails")


@pytest.mark.parametrize(
    ("message", "words"),
    [("The NVIDIA driver on your system is too old (found version 12020).", "update it"),
     ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "fabricmanager"),
     ("Found no NVIDIA driver on your system.", "give the job"), ("CUDA error 7: too many", None), ("busy", None)],
)  # fmt: skip
def test_torchs_messages_have_the_same_remedies(message, words):
    failure = failure_in(message)
    assert failure is None if words is None else words in failure.remedy


def test_a_rank_that_cannot_take_its_gpu_ends_in_a_line():
    line = r"trainer\.devices: cuda:1 cannot be used: .* \(CUDA's error 999\); restart"
    with pytest.raises(ConfigError, match=line), naming_the_mode(torch.device("cuda", 1), 1):
        raise RuntimeError("CUDA failure, Error 999: unknown error")


STUBS = {
    "libnvidia-ml.so.1": "int nvmlInit() {return 0;} int nvmlDeviceGetCount_v2(int* n) {*n = 2; return 0;}",
    "libcuda.so.1": "int cuInit(unsigned f) {return CODE;} int cuDriverGetVersion(int* v) {*v = 13020; return 0;}",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="the stubs of NVIDIA's libraries need a compiler")
def test_doctor_and_fit_beside_libraries_that_fail(tmp_path):
    for name, source in STUBS.items():
        (tmp_path / "stub.c").write_text(source)
        subprocess.run(["cc", "-shared", "-DCODE=802", "-o", tmp_path / name, tmp_path / "stub.c"], check=True)
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    said = {}
    for command in (["doctor"], ["fit", "--config", "quickstart", "--trainer.accelerator=auto"]):
        words = [sys.executable, "-m", "fedsim", *command, "--run_dir", str(tmp_path / "run")]
        done = subprocess.run(words, capture_output=True, text=True, env=environ)
        said[command[0]] = done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == (1 if command == ["doctor"] else 2), said
    for lines in said.values():
        assert "fabric manager does not run (CUDA's error 802)" in lines, said
        assert "start it (systemctl start nvidia-fabricmanager)" in lines, said
