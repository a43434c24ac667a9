"""Low-rank adapters: a backbone whose weights stay as they are, and small trained matrices beside them.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; the layers are those of the library peft.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.core.checks import positive, within
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.models.backbones import Backbone, PartlyFixed


class LoRA(PartlyFixed):
    """A backbone with low-rank adapters: ``W x + (alpha / r) B A x`` (Section 4.1). Only A and B train.

    All other tensors of the backbone are fixed: the same on every client, never sent and in no checkpoint. So they must
    come from a file, from public weights or from the same seed again. B starts at 0, and with it the adapter.

    Args:
        backbone: such as ``TimmBackbone``, with its weights.
        rank: r, the width between A [r, in] and B [out, r].
        alpha: the scale of the adapters is alpha / r.
        dropout: of the adapters' inputs, in training.
        targets: the layers that get adapters, by the last parts of their names: linear layers and convolutions. Those
            of timm's vision transformers are qkv, proj (of the attention, and of the patches), fc1, fc2.
    """

    def __init__(
        self,
        backbone: Backbone | nn.Module,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        targets: tuple[str, ...] = ("qkv", "attn.proj", "fc1", "fc2"),
    ) -> None:
        peft = load_extra("peft", "model.backbone: LoRA", "models")
        positive("model.backbone", rank=rank, alpha=alpha)
        within("model.backbone", "[0, 1)", dropout=dropout)
        class_name = type(backbone).__name__
        if any(isinstance(module, _BatchNorm) for module in backbone.modules()):
            raise ConfigError(
                f"model.backbone: LoRA keeps {class_name} fixed, but batch normalisation would update its statistics; "
                "choose a network with layer normalisation, such as a vision transformer"
            )
        names = [name for name, _ in backbone.named_modules()]
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ConfigError(
                    f"model.backbone.targets: {class_name} has no layer {target}; print its named_modules()"
                )
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
        super().__init__("adapted", peft.inject_adapter_in_model(config, backbone))
        width = getattr(backbone, "out_channels", None)
        if isinstance(width, int):  # otherwise the model raises the error
            self.out_channels = width

    def fixed(self, name: str) -> bool:
        """Whether the tensor of this name in the module is fixed."""
        return ".lora_" not in name

    def forward(self, images: Tensor) -> Tensor:
        """Map images as the backbone does."""
        features: Tensor = self.get_submodule("adapted")(images)
        return features
