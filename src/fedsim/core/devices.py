"""The devices of this machine, by the names that options take."""

from __future__ import annotations

import torch

from fedsim.core.errors import ConfigError


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


def cpu_computes_bf16() -> bool:
    """Return whether the CPU has instructions for bfloat16; without them, or without oneDNN, torch takes slow loops.

    >>> cpu_computes_bf16() in (True, False)
    True
    """
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # there is no public function
    return is_supported is not None and bool(is_supported())


def device_named(name: str) -> torch.device:
    """Return the device that the option ``--device`` names: cpu, cuda or cuda:N; cuda is the current GPU.

    Raises:
        ConfigError: if this machine has no such device; the message lists its devices.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: there is no device {name}; choose from {devices_here()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: {name} is not here; choose from {devices_here()}")
    return device
