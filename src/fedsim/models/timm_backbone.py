"""Backbones of the library timm: vision transformers, the image encoder of CLIP, and many more.

A. Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021; A.
Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (CLIP), ICML 2021.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.functional.normalise import IMAGENET_MEAN, IMAGENET_STD, Colour, renormalisation
from fedsim.models.backbones import Backbone
from fedsim.models.style import StyleLayers, check_places
from fedsim.models.weights import SUFFIXES, is_file, load_state, may_download, read_file
from fedsim.settings.facts import Facts


class TimmBackbone(Backbone):
    """A network of timm without its classifier.

    Convolutional networks return their last map [B, C, h, w]. Transformers return the vector [B, C] that timm
    chooses: for ViT the class token, for CLIP the one before the projection to the space that it shares with texts.

    Args:
        name: of timm: ``vit_small_patch16_224``, ``vit_base_patch16_224``, ``vit_base_patch16_clip_224``,
            ``vit_base_patch16_clip_quickgelu_224`` (the network of OpenAI's weights), ...
        weights: the name of public weights as timm lists it after the network's (``augreg_in21k_ft_in1k``,
            ``openai``), to be downloaded; the path of a local ``.pth`` or ``.safetensors`` file with timm's names or,
            for CLIP, OpenAI's and open_clip's (``visual.*``); or null for random weights.
        image_size: height and width of the images, for transformers: position embeddings of weights for another size
            are interpolated. null: the network's own.
        mean: of red, green and blue in the images that the weights were trained on, by which they were normalised;
            null: those of timm for these weights.
        std: the standard deviations of the same images.
        options: further arguments of timm's network, such as ``{drop_path_rate: 0.1}``.
        style: of any kind but ``snr`` and ``diversify``, at ``input`` or, in vision transformers, at ``patches``:
            behind the position embeddings, with the class token untouched; null: none.
        patch_stride: pixels from a patch of a vision transformer to the next; patches of more pixels overlap (He et
            al., "TransReID", ICCV 2021). Needs ``image_size``. null: the size of a patch.
    """

    def __init__(
        self,
        name: str,
        weights: Annotated[str | None, Facts(is_file=True, suffixes=SUFFIXES)] = None,
        image_size: tuple[int, int] | None = None,
        *,
        mean: Colour | None = None,
        std: Colour | None = None,
        options: Annotated[dict[str, Any] | None, Facts(null={})] = None,
        style: StyleLayers | None = None,
        patch_stride: int | None = None,
    ) -> None:
        timm = load_extra("timm", "model.backbone: TimmBackbone", "models")
        public = None if weights is None or is_file(weights) else weights
        full = name if public is None else f"{name}.{public}"
        _check_name(timm, name, public)
        # with a stride, position embeddings are interpolated once, to the grid of overlapping patches
        own_size = patch_stride is not None or image_size is None
        arguments = {"num_classes": 0, **(options or {}), **({} if own_size else {"img_size": tuple(image_size or ())})}
        try:
            network: Any = timm.create_model(full, pretrained=public is not None and may_download(), **arguments)
        except Exception as error:  # wrong arguments, no network, damaged downloads: many types
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"model.backbone: timm cannot build {full} ({type(error).__name__}: {reason})") from error
        super().__init__(OrderedDict(timm=network))
        self.out_channels = int(network.num_features)
        if patch_stride is not None:
            if not isinstance(network, timm.models.vision_transformer.VisionTransformer):
                raise ConfigError(f"backbone.patch_stride: {name} is no vision transformer; leave it out")
            _overlap_patches(network, patch_stride, image_size)
        if weights is not None and public is None:
            self._load_file(weights, name)
        config = network.pretrained_cfg
        self._colours = (tuple(mean or config["mean"]), tuple(std or config["std"]))
        self.style_input: nn.Module | None = None
        if style is not None and style.kind != "none":
            self._insert_style(style, name)

    def _insert_style(self, style: StyleLayers, name: str) -> None:
        """Put layers without parameters at the images and at the patches."""
        if style.kind in ("snr", "diversify"):
            raise ConfigError(
                f"backbone.style.kind: TimmBackbone has no {style.kind}; choose another kind, or another backbone"
            )
        network: Any = self.get_submodule("timm")
        has_patches = hasattr(network, "patch_drop") and hasattr(network.patch_embed, "grid_size")
        check_places(style, ["input", *(["patches"] if has_patches else [])], name)
        if "input" in style.after:
            self.style_input = style.build("input", 3)
        if "patches" in style.after:
            layer, grid = style.build("patches", self.out_channels), network.patch_embed.grid_size
            # the first part of timm's network behind the positions; it has no parameters, so that no name changes
            network.patch_drop = nn.Sequential(PatchStyle(layer, network.num_prefix_tokens, grid), network.patch_drop)

    def _load_file(self, weights: str, name: str) -> None:
        """Load a local file, in any layout that timm can convert."""
        network = self.get_submodule("timm")
        convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
        state = read_file(weights)
        load_state(network, state if convert is None else convert(state, network), weights, name)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W], normalised by ImageNet's mean and deviation, to a map or vectors."""
        network: Any = self.get_submodule("timm")
        if self._colours != (tuple(IMAGENET_MEAN), tuple(IMAGENET_STD)):
            scale, offset = renormalisation(*self._colours, images.device)
            images = images * scale + offset
        if self.style_input is not None:
            images = self.style_input(images)
        features: Tensor = network.forward_features(images)
        if features.dim() == 4 and features.shape[1] == self.out_channels:
            return features
        pooled: Tensor = network.forward_head(features, pre_logits=True)
        return pooled


class PatchStyle(nn.Module):
    """A style layer for the patches of a transformer: they are the map [B, C, h, w]; other tokens stay as they are.

    Args:
        layer: the style layer.
        num_others: tokens ahead of the patches, such as the class token.
        grid: h and w.
    """

    def __init__(self, layer: nn.Module, num_others: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.layer, self.num_others, self.grid = layer, num_others, grid

    def forward(self, tokens: Tensor) -> Tensor:
        """Change tokens [B, num_others + h * w, C]."""
        first, patches = tokens[:, : self.num_others], tokens[:, self.num_others :]
        changed = self.layer(patches.transpose(1, 2).unflatten(2, self.grid))
        return torch.cat([first, changed.flatten(2).transpose(1, 2)], dim=1)


def _overlap_patches(network: Any, stride: int, image_size: tuple[int, int] | None) -> None:
    """Let patches begin every ``stride`` pixels; interpolate the position embeddings to their grid."""
    if image_size is None:
        raise ConfigError("backbone.patch_stride: it needs image_size; set it to the height and width of data.size")
    embedding, sizes = network.patch_embed, network.patch_embed.patch_size
    within("backbone", f"[1, {min(sizes)}]", patch_stride=stride)
    grid = tuple((pixels - size) // stride + 1 for pixels, size in zip(image_size, sizes, strict=True))
    # of an image in which as many patches lie side by side
    network.set_input_size(img_size=tuple(count * size for count, size in zip(grid, sizes, strict=True)))
    embedding.proj.stride = (stride, stride)
    embedding.img_size = tuple(image_size)


def _check_name(timm: Any, name: str, public: str | None) -> None:
    """Raise ConfigError, with names that exist, if timm has no such network or weights."""
    if not timm.is_model(name):
        close: Sequence[str] = get_close_matches(name, timm.list_models(), n=3)
        remedy = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists the names"
        raise ConfigError(f"backbone.name: timm has no {name}; {remedy}")
    choices = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{name}.*")]
    if public is not None and public not in choices:
        raise ConfigError(
            f"backbone.weights: timm has no weights {public} of {name}; "
            f"choose {', '.join([*choices, 'a file'])}, or null"
        )
