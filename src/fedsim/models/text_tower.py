"""CLIP's text transformer (Radford et al., ICML 2021, arXiv:2103.00020) with learned tokens in a fixed sentence.

The sentence is "a photo of a X X X X person." (CLIP-ReID, arXiv:2211.13977). There is no tokenizer: the numbers of its
words are those of CLIP's vocabulary, in ``bpe_simple_vocab_16e6`` of OpenAI's release. The tower is causal, so tokens
behind the end have no effect, and are left out. K sentences, L tokens, C the tower's width, D features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from fedsim.core.errors import ConfigError
from fedsim.core.paths import FILE
from fedsim.core.tensor_file import problem_of_weights
from fedsim.models.weights import read_file

BEFORE = (49406, 320, 1125, 539, 320)
"""start, a, photo, of, a"""
AFTER = (2533, 269, 49407)
"""person, full stop, end"""
HEAD_WIDTH = 64
"""of CLIP's attention heads"""
_BLOCK = "transformer.resblocks."
_REMEDY = (
    "give the state dict of a CLIP by OpenAI's names, such as open_clip's file of its weights openai, or by Hugging "
    "Face's, of CLIPModel or CLIPTextModelWithProjection"
)
_HUGGING_FACE = {
    "text_model.embeddings.token_embedding.": "token_embedding.",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers.": _BLOCK,
    "text_model.final_layer_norm.": "ln_final.",
    ".self_attn.": ".attn.",
    ".layer_norm": ".ln_",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
}
"""parts of names in transformers -> OpenAI's, as in its models/clip/convert_clip_original_pytorch_to_hf.py"""


class TextTower(nn.Module):
    """A frozen tower of the ``tensors`` by OpenAI's names; ``setting`` and ``file`` are for messages.

    ``before`` and ``after`` are the numbers of the words around the learned tokens. All of it is float32; of the
    embeddings of tokens, only those of the sentence are held.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], setting: str, file: str, before: tuple[int, ...] = BEFORE,
        after: tuple[int, ...] = AFTER,
    ) -> None:  # fmt: skip
        super().__init__()
        self._file, self._setting = file, setting
        words, positions = (tensors.get(name) for name in ("token_embedding.weight", "positional_embedding"))
        self.width = 0 if words is None or words.dim() != 2 else words.shape[1]
        blocks = (re.match(rf"{_BLOCK}(\d+)\.", name) for name in tensors)
        self.depth = max((int(match[1]) for match in blocks if match), default=0) + 1
        for name, shape in self._shapes().items():
            self._check(tensors, name, shape)
            if name not in ("token_embedding.weight", "positional_embedding"):
                self.register_buffer(_flat(name), tensors[name].float().contiguous())
        assert words is not None
        assert positions is not None
        if (
            self.width % HEAD_WIDTH
            or len(words) <= max(before + after)
            or len(positions) < len(before) + len(after) + 1
        ):
            raise self._error(f"has {len(words)} words, {len(positions)} positions and width {self.width}: no CLIP's")
        self.register_buffer("before", words[list(before)].float())
        self.register_buffer("after", words[list(after)].float())
        self.register_buffer("positions", positions.float().contiguous())

    @property
    def num_features(self) -> int:
        """D."""
        return int(self.get_buffer("text_projection").shape[1])

    @property
    def most_tokens(self) -> int:
        """The most learned tokens that a sentence has room for."""
        taken = len(self.get_buffer("before")) + len(self.get_buffer("after"))
        return len(self.get_buffer("positions")) - taken

    def forward(self, prompts: Tensor) -> Tensor:
        """Return the features [K, D] of sentences with learned tokens ``prompts`` [K, T, C], all float32."""
        before, after = (self.get_buffer(name).expand(len(prompts), -1, -1) for name in ("before", "after"))
        tokens = torch.cat([before, prompts, after], dim=1)
        tokens = tokens + self.get_buffer("positions")[: tokens.shape[1]]
        for number in range(self.depth):
            tokens = self._block(tokens, f"{_BLOCK}{number}.")
        return self._norm(tokens[:, -1], "ln_final") @ self.get_buffer("text_projection")

    def _block(self, tokens: Tensor, block: str) -> Tensor:
        """Return tokens [K, L, C] behind a block."""
        tokens = tokens + self._attention(self._norm(tokens, f"{block}ln_1"), f"{block}attn.")
        hidden = self._linear(self._norm(tokens, f"{block}ln_2"), f"{block}mlp.c_fc.")
        return tokens + self._linear(hidden * (1.702 * hidden).sigmoid(), f"{block}mlp.c_proj.")  # QuickGELU

    def _attention(self, tokens: Tensor, name: str) -> Tensor:
        """Return the attention of tokens [K, L, C] to themselves and to those before them."""
        length = tokens.shape[1]
        parts = self._linear(tokens, f"{name}in_proj_").unflatten(2, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        query, key, value = parts  # each [K, heads, L, 64]; written out, as its gradient has the same bits each time
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = (query @ key.mT / HEAD_WIDTH**0.5).masked_fill(later, -torch.inf)
        return self._linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{name}out_proj.")

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return linear(values, *(self.get_buffer(_flat(f"{name}{part}")) for part in ("weight", "bias")))

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight, bias = (self.get_buffer(_flat(f"{name}.{part}")) for part in ("weight", "bias"))
        return layer_norm(values, (self.width,), weight, bias)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name; -1 is any size."""
        c = self.width
        shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (-1, -1), "positional_embedding": (-1, c)}
        for number in range(self.depth):
            parts = {"attn.in_proj_": 3 * c, "attn.out_proj.": c, "mlp.c_fc.": 4 * c, "mlp.c_proj.": c}
            for part, rows in parts.items():
                shapes[f"{_BLOCK}{number}.{part}weight"] = (rows, 4 * c if part == "mlp.c_proj." else c)
                shapes[f"{_BLOCK}{number}.{part}bias"] = (rows,)
            norms = (f"{_BLOCK}{number}.{norm}.{part}" for norm in ("ln_1", "ln_2") for part in ("weight", "bias"))
            shapes |= dict.fromkeys(norms, (c,))
        return shapes | {"ln_final.weight": (c,), "ln_final.bias": (c,), "text_projection": (c, -1)}

    def _check(self, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
        """Refuse a file without a tensor, or with one of another shape or of numbers that are not finite."""
        if name not in tensors:
            raise self._error(f"lacks {name}")
        tensor = tensors[name]
        fits = tensor.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not fits or problem_of_weights([(name, tensor)]):
            wanted = [size if size >= 0 else "any" for size in shape]
            raise self._error(f"has {name} of shape {list(tensor.shape)}, and finite numbers of {wanted} are expected")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._setting}: {self._file} {problem}; {_REMEDY}")


def load_tower(file: str, setting: str, device: torch.device) -> TextTower:
    """Return the tower of a file, on a device: a rank holds it once, for all clients.

    Raises:
        DataError: if there is no such file.
        ConfigError: if it holds more than tensors, or is no CLIP's text tower.
    """
    path = Path(FILE.check(file, setting, "give an existing file"))
    return _loaded(str(path), path.stat().st_mtime_ns, setting, device)


@lru_cache(maxsize=1)
def _loaded(file: str, changed: int, setting: str, device: torch.device) -> TextTower:  # noqa: ARG001 - of the cache
    """Return the tower of a file that was ``changed`` at this time in nanoseconds."""
    return TextTower(_by_openais_names(read_file(file, setting)), setting, file).to(device)


def _by_openais_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a file by OpenAI's names, also of a file by Hugging Face's.

    There, query, key and value of a block are three layers, and the projection is a layer, with its weight [D, C].
    """
    if not any(name.startswith("text_model.") for name in tensors):
        return tensors
    named = dict[str, Tensor]()
    for name, tensor in tensors.items():
        for theirs, openais in _HUGGING_FACE.items() if name.startswith("text_model.") else ():
            name = name.replace(theirs, openais)
        named[name] = tensor
    for name in [name for name in named if name.startswith(_BLOCK) and ".q_proj." in name]:
        parts = [named.get(name.replace(".q_proj.", f".{part}_proj."), torch.empty(0)) for part in "qkv"]
        if parts[0].dim() and len({part.shape for part in parts}) == 1:
            named[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    if (projection := named.get("text_projection.weight")) is not None and projection.dim() == 2:
        named["text_projection"] = projection.T
    return named


def _flat(name: str) -> str:
    """Return a name without dots, which names of buffers must not have."""
    return name.replace(".", "_")
