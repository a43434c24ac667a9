"""Visual prompts: trained tokens in the blocks of a vision transformer, whose weights may stay as they are.

M. Jia et al., "Visual Prompt Tuning" (VPT), ECCV 2022; X. Xu et al., "FedBPrompt", CVPR 2026, arXiv 2603.12912, whose
prompts of body parts see the patches of a part of the rows (BAPM), and who share prompts alone (PFTS).

Shapes: B images, N tokens of a block, C channels, T prompts; a grid of h x w patches.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.models.backbones import Backbone, PartlyFixed
from fedsim.settings.facts import Facts

PromptsByPart = tuple[int, int, int]
"""prompts that see the upper, the middle and the lower rows"""


class VisualPrompts(PartlyFixed):
    """A vision transformer with prompts in its blocks: the tokens of a block are [class, prompts, patches].

    Each block has prompts of its own, and what it computes for them is dropped (VPT-deep). The first prompts are those
    of body parts, the others are holistic and see all patches. Prompts have no positions.

    With ``train: prompts`` all other tensors of the backbone are fixed: the same on every client, never sent and in no
    checkpoint. So they must come from a file, from public weights or from the same seed again.

    Paper and code of FedBPrompt (leavlong/FedBPrompt, a92c23c) differ. 5, 5 and 5 of 50 prompts for parts are the
    paper's, by reading notes; the code has 10, 10 and 10. That patches see no prompts of parts is the code's. The
    start is VPT's: U(-a, a) with a = sqrt(6 / (3 p^2 + C)) for patches of p x p pixels.

    Args:
        backbone: such as ``TimmBackbone``, a vision transformer with its weights.
        tokens: T for each block; 0: none.
        parts: of these, prompts for the upper half of the rows, the middle half, and the lower half; ``[0, 0, 0]``:
            VPT, without a mask.
        deep: whether each block has prompts; otherwise those of the first block go through all blocks.
        patches_see_parts: whether patches see the prompts of parts.
        train: ``prompts``: all else of the backbone is fixed; ``all``: nothing is.
        dropout: of the prompts, in training.

    Raises:
        ConfigError: for a backbone that is no vision transformer of timm, and for more parts than tokens.
    """

    def __init__(
        self,
        backbone: Backbone | nn.Module,
        tokens: int = 50,
        parts: Annotated[PromptsByPart, Facts(needs="tokens")] = (5, 5, 5),
        *,
        deep: Annotated[bool, Facts(needs="tokens")] = True,
        patches_see_parts: Annotated[bool, Facts(needs="tokens and parts != [0, 0, 0]")] = False,
        train: Literal["prompts", "all"] = "prompts",
        dropout: Annotated[float, Facts(needs="tokens")] = 0.0,
    ) -> None:
        at_least("model.backbone", 0, tokens=tokens, parts=min(parts))
        within("model.backbone", "[0, 1)", dropout=dropout)
        if tokens < sum(parts):
            raise ConfigError(
                f"model.backbone.parts: {sum(parts)} prompts of parts are more than tokens, {tokens}; lower one of them"
            )
        network = _transformer(backbone)
        super().__init__("prompted", backbone)
        self.out_channels = int(network.num_features)
        self._trains_all = train == "all"
        if tokens:
            self._insert_prompts(
                network, tokens, parts, deep=deep, patches_see_parts=patches_see_parts, dropout=dropout
            )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not self.fixed(name))

    def _insert_prompts(
        self, network: Any, tokens: int, parts: PromptsByPart, *, deep: bool, patches_see_parts: bool, dropout: float
    ) -> None:
        """Put the blocks of a transformer into blocks with prompts."""
        num_first, grid = int(network.num_prefix_tokens), tuple(network.patch_embed.grid_size)
        mask = prompt_mask(num_first, grid, tokens, parts, patches_see_parts=patches_see_parts) if any(parts) else None
        for i, block in enumerate(network.blocks):
            prompts = new_prompts(tokens, self.out_channels, network.patch_embed.patch_size) if deep or not i else None
            leave = deep or i == len(network.blocks) - 1
            network.blocks[i] = PromptedBlock(block, prompts, (num_first, tokens if leave else 0), mask, dropout)

    def fixed(self, name: str) -> bool:
        """Whether the tensor of this name in the module is fixed."""
        return not (self._trains_all or name.endswith(".prompts"))

    def forward(self, images: Tensor) -> Tensor:
        """Map images as the backbone does."""
        features: Tensor = self.get_submodule("prompted")(images)
        return features


class PromptedBlock(nn.Module):
    """A block of a transformer that gets prompts behind its first tokens.

    Args:
        block: timm's.
        prompts: [T, C] that enter here; None: none do.
        place: how many tokens, such as the class token, are ahead of the prompts, and how many prompts leave here.
        mask: [N, N] bool, true where the token of a row sees that of a column; None: each sees all.
        dropout: of the prompts, in training.
    """

    def __init__(
        self, block: nn.Module, prompts: Tensor | None, place: tuple[int, int], mask: Tensor | None, dropout: float
    ) -> None:
        super().__init__()
        self.block = block
        self.prompts = None if prompts is None else nn.Parameter(prompts)
        self.dropout = nn.Dropout(dropout)
        self.place = place
        # by device, and no buffer: it follows from the arguments, and buffers are part of the model's state
        self._masks = {} if mask is None else {mask.device: mask}

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, N, C], without or with prompts, to tokens without or with them."""
        num_first, num_leaving = self.place
        if self.prompts is not None:
            prompts = self.dropout(self.prompts.expand(len(tokens), -1, -1))  # a mask for each image, as in VPT
            tokens = torch.cat([tokens[:, :num_first], prompts, tokens[:, num_first:]], dim=1)
        if self._masks and tokens.device not in self._masks:
            self._masks = {tokens.device: next(iter(self._masks.values())).to(tokens.device)}
        tokens = self.block(tokens, attn_mask=self._masks.get(tokens.device))
        if num_leaving:
            tokens = torch.cat([tokens[:, :num_first], tokens[:, num_first + num_leaving :]], dim=1)
        return tokens


def new_prompts(tokens: int, channels: int, patch_size: tuple[int, int]) -> Tensor:
    """Return prompts [T, C] for patches of these pixels, uniform as in VPT, from torch's global stream."""
    bound = math.sqrt(6 / (3 * math.prod(patch_size) + channels))
    return torch.empty(tokens, channels).uniform_(-bound, bound)


def prompt_mask(
    num_first: int, grid: tuple[int, ...], tokens: int, parts: PromptsByPart, *, patches_see_parts: bool = False
) -> Tensor:
    """Return the attention mask [N, N] of [first tokens, prompts, patches]: bool, a row for each token that attends.

    The first ``num_first`` tokens and the holistic prompts see all. Prompts of parts see first tokens, all prompts and
    their patches: of h rows, the upper ones are 0 to h // 2, the middle ones h // 4 to 3 h // 4, and the lower ones
    from h // 2. Patches see all but the prompts of parts, or, with ``patches_see_parts``, all.

    >>> prompt_mask(1, (4, 1), 4, (1, 1, 1)).int().tolist()[2]  # the middle prompt: patches 1 and 2 of four
    [1, 1, 1, 1, 1, 0, 1, 1, 0]
    """
    height, width = grid
    patches = num_first + tokens
    mask = torch.ones(patches + height * width, patches + height * width, dtype=torch.bool)
    rows = ((0, height // 2), (height // 4, 3 * height // 4), (height // 2, height))
    prompt = num_first
    for count, (top, bottom) in zip(parts, rows, strict=True):
        mask[prompt : prompt + count, patches : patches + top * width] = False
        mask[prompt : prompt + count, patches + bottom * width :] = False
        prompt += count
    if not patches_see_parts:
        mask[patches:, num_first:prompt] = False
    return mask


def _transformer(backbone: nn.Module) -> Any:
    """Return timm's vision transformer in a backbone; raise ConfigError if there is none."""
    timm = load_extra("timm", "model.backbone: VisualPrompts", "models")
    transformer_class = timm.models.vision_transformer.VisionTransformer
    for module in backbone.modules():
        if isinstance(module, transformer_class):
            return module
    raise ConfigError(
        f"model.backbone: {type(backbone).__name__} has no blocks for prompts; VisualPrompts needs a vision "
        "transformer, such as TimmBackbone with name vit_base_patch16_224"
    )
