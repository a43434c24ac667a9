"""A small text tower of CLIP's form with random numbers, and the same in plain loops."""

import os
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, DEPTH, FEATURES = 64, 2, 8


def tensors(words=49408, width=WIDTH, depth=DEPTH, features=FEATURES):
    """A tower's tensors by OpenAI's names."""
    stream = torch.Generator().manual_seed(5)

    def draw(*shape, std=0.1):
        return std * torch.randn(shape, generator=stream)

    state = {"token_embedding.weight": draw(words, width), "positional_embedding": draw(77, width)}
    for n in range(depth):
        block = f"transformer.resblocks.{n}."
        for name, rows, columns in (
            ("attn.in_proj_", 3 * width, width), ("attn.out_proj.", width, width), ("mlp.c_fc.", 4 * width, width),
            ("mlp.c_proj.", width, 4 * width),
        ):  # fmt: skip
            state |= {f"{block}{name}weight": draw(rows, columns), f"{block}{name}bias": draw(rows)}
        for name in ("ln_1", "ln_2"):
            state |= {f"{block}{name}.weight": 1 + draw(width), f"{block}{name}.bias": draw(width)}
    state |= {"ln_final.weight": 1 + draw(width), "ln_final.bias": draw(width)}
    return state | {"text_projection": draw(width, features)}


@cache
def small_tower():
    """The path of the tower's file: the same in all processes of a user, as ranks import their tests anew."""
    path = Path(tempfile.gettempdir()) / f"fedsim-small-tower-{os.getuid()}.safetensors"
    if not path.exists():
        save_file(tensors(), part := path.with_suffix(f".{os.getpid()}"))
        part.replace(path)
    return str(path)


def loop_tower(state, tokens, depth=DEPTH, width=WIDTH):
    """The feature of one sentence of embedded tokens [L, C], at its last token."""
    x = [token + state["positional_embedding"][i] for i, token in enumerate(tokens)]
    for n in range(depth):
        part = {k.removeprefix(f"transformer.resblocks.{n}."): v for k, v in state.items()}
        qkv = [part["attn.in_proj_weight"] @ norm(t, part, "ln_1") + part["attn.in_proj_bias"] for t in x]
        for i in range(len(x)):
            heads = []
            for h in range(0, width, 64):
                q = qkv[i][h : h + 64]
                scores = [torch.exp((q @ qkv[j][width + h : width + h + 64]) / 8) for j in range(i + 1)]
                values = [qkv[j][2 * width + h : 2 * width + h + 64] for j in range(i + 1)]
                heads.append(sum(s * v for s, v in zip(scores, values, strict=True)) / sum(scores))
            x[i] = x[i] + part["attn.out_proj.weight"] @ torch.cat(heads) + part["attn.out_proj.bias"]
            hidden = part["mlp.c_fc.weight"] @ norm(x[i], part, "ln_2") + part["mlp.c_fc.bias"]
            hidden = hidden / (1 + torch.exp(-1.702 * hidden))
            x[i] = x[i] + part["mlp.c_proj.weight"] @ hidden + part["mlp.c_proj.bias"]
    return norm(x[-1], state, "ln_final") @ state["text_projection"]


def norm(x, state, name):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def loop_texts(prompts, state, before, after):
    """The features, of length 1, of each person's sentence."""
    state = {name: tensor.double() for name, tensor in state.items()}
    words = state["token_embedding.weight"]
    texts = []
    for prompt in prompts:
        feature = loop_tower(state, [*words[list(before)], *prompt, *words[list(after)]])
        texts.append(feature / feature.square().sum().sqrt())
    return torch.stack(texts)
