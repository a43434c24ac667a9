"""The devices of this machine, by the names that options take."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from fedsim.core.errors import ConfigError
from fedsim.core.nvidia import GPUS, gpus_of_driver, nvidia_driver, why_cuda_fails, why_unseen

log = logging.getLogger(__name__)


def devices_here() -> str:
    """Return the devices that torch can use, for a message.

    >>> devices_here().startswith("cpu")
    True
    """
    names = [f"cuda:{index}{_model(index)}" for index in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *names]) if names else "cpu alone (torch sees no GPU; fedsim doctor shows why)"


def _model(index: int) -> str:
    try:
        return f" ({torch.cuda.get_device_name(index)})"
    except (RuntimeError, AssertionError):  # a GPU that is counted, but does not start
        return ""


def check_accelerator(accelerator: object, warns: bool = True, gpus: Path = GPUS) -> None:
    """Warn of NVIDIA GPUs that a run on ``auto`` cannot use, as it would take the CPU without a word.

    Args:
        accelerator: the setting ``trainer.accelerator``.
        warns: whether to warn.
        gpus: the folder with one folder per GPU.

    Raises:
        ConfigError: if the setting requires them, or torch counts them, and CUDA does not start.
    """
    requires = accelerator in ("gpu", "cuda")
    if not requires and accelerator not in ("auto", None):
        return
    if torch.cuda.is_available():
        check_start(f"trainer.accelerator: {accelerator or 'auto'}, but GPUs", "trainer.accelerator to cpu")
        return
    if not (requires or warns) or (number := gpus_of_driver(gpus)) == 0:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    unseen = why_unseen(torch.__version__, torch.version.cuda, nvidia_driver(), number, visible)
    if unseen.is_hidden:
        return
    many = f"{number} NVIDIA GPU{'s' * (number > 1)} here cannot be used: {unseen.cause}"
    remedy = f"{unseen.remedy}; fedsim doctor shows more"
    if requires:
        raise ConfigError(f"trainer.accelerator: {accelerator}, but {many}; {remedy}")
    log.warning("THIS RUN IS ON THE CPU. %s; %s. If that is intended, set trainer.accelerator to cpu", many, remedy)


def check_start(setting: str, cpu: str) -> None:
    """Raise ConfigError if CUDA does not start, though torch counts GPUs.

    Args:
        setting: the one that takes GPUs, at the beginning of the line.
        cpu: the setting that takes the CPU.
    """
    if torch.version.cuda is not None and (failure := why_cuda_fails(torch.version.cuda)) is not None:
        raise ConfigError(f"{setting} cannot be used: {failure.cause}; {failure.remedy}, or set {cpu}")


def has_gpu() -> bool:
    """Return whether a GPU of this machine can be used; CUDA does not start in this process.

    >>> has_gpu() in (True, False)
    True
    """
    return torch.cuda.is_available() and why_cuda_fails(torch.version.cuda or "") is None


def allow_tf32(is_allowed: bool) -> bool:
    """Let cuDNN compute convolutions of float32 tensors in TF32, or not; return whether it was allowed before."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = is_allowed  # not by the newer fp32_precision: torch.compile could not read that
    return before


def cpu_computes_bf16() -> bool:
    """Return whether the CPU has instructions for bfloat16; without them, or without oneDNN, torch takes slow loops.

    >>> cpu_computes_bf16() in (True, False)
    True
    """
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # there is no public function
    return is_supported is not None and bool(is_supported())


def device_named(name: str, setting: str = "--device") -> torch.device:
    """Return the device that a ``setting`` names: cpu, cuda or cuda:N; cuda is the current GPU.

    Raises:
        ConfigError: if this machine has no such device; the message lists its devices. If CUDA does not start.
    """
    try:
        device = torch.device(name) if isinstance(name, str | torch.device) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"{setting}: there is no device {name}; choose from {devices_here()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{setting}: {name} is not here; choose from {devices_here()}")
    if device.type == "cuda":
        check_start(f"{setting}: {name}", "it to cpu")
    return device


@dataclass(frozen=True)
class DeviceKind:
    """A device by its name; it annotates arguments of :func:`fedsim.core.checked.checked`."""

    knows_auto: bool = False
    """whether ``auto`` is a name, too"""

    def check(self, value: Any, name: str) -> Any:
        """Return the name of the device; ``name`` and errors are those of :func:`device_named`.

        >>> DeviceKind(knows_auto=True).check("auto", "--device")
        'auto'
        """
        if not (self.knows_auto and value == "auto"):
            device_named(value, name)
        return value


Device = Annotated[str, DeviceKind()]
"""cpu, cuda or cuda:N"""
AnyDevice = Annotated[str, DeviceKind(knows_auto=True)]
"""also auto"""
