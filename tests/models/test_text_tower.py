"""CLIP's text tower against plain loops and open_clip; files that are no tower's."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from fedsim.core.errors import ConfigError, DataError
from fedsim.models.text_tower import AFTER, BEFORE, TextTower, load_tower
from small_tower import loop_texts, tensors

SMALL = {"before": (11, 1, 2), "after": (4, 12)}
"""the sentence in a vocabulary of 13 words"""


def prompts(width=64):
    return torch.randn(3, 4, width, generator=torch.Generator().manual_seed(1))


def test_the_tower_is_that_of_plain_loops():
    state = tensors(words=13)
    found = normalize(TextTower(state, "field", "file", **SMALL)(prompts()))
    torch.testing.assert_close(found.double(), loop_texts(prompts().double(), state, **SMALL), rtol=0, atol=1e-5)


def test_gradients_reach_the_prompts_and_nothing_else():
    tower = TextTower(tensors(words=13), "field", "file", **SMALL)
    learned = prompts().requires_grad_()
    tower(learned).sum().backward()
    assert (learned.grad.abs().sum((1, 2)) > 0).all()
    assert not list(tower.parameters())
    assert not any(tensor.requires_grad for tensor in tower.buffers())


def test_the_tower_and_its_sentence_are_those_of_open_clip():
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    text = open_clip.model.CLIPTextCfg(context_length=77, vocab_size=49408, width=128, heads=2, layers=2)
    vision = open_clip.model.CLIPVisionCfg(layers=1, width=64, image_size=32, patch_size=16)
    clip = open_clip.CLIP(16, vision, text, quick_gelu=True).eval()
    tokens = open_clip.get_tokenizer("ViT-B-16")(["a photo of a tall young blond man person."])
    assert tokens[0, :5].tolist() == [*BEFORE]
    assert tokens[0, 9:12].tolist() == [*AFTER]
    tower = TextTower(clip.state_dict(), "field", "file")
    learned = clip.token_embedding(tokens)[:1, 5:9].detach()
    torch.testing.assert_close(tower(learned), clip.encode_text(tokens[:1]), rtol=0, atol=1e-5)


def by_hugging_face(state):
    """The same numbers by the names of transformers' CLIPModel (models/clip/convert_clip_original_pytorch_to_hf.py)."""
    named = {
        "logit_scale": torch.tensor(2.0), "vision_model.post_layernorm.weight": torch.ones(3),
        "visual_projection.weight": torch.ones(2, 3), "text_model.embeddings.position_ids": torch.arange(77)[None],
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "text_projection.weight": state["text_projection"].T,
    }  # fmt: skip
    layers = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    layers["attn.out_proj"] = "self_attn.out_proj"
    for part in ("weight", "bias"):
        named[f"text_model.final_layer_norm.{part}"] = state[f"ln_final.{part}"]
        for n in range(2):
            openais, theirs = f"transformer.resblocks.{n}.", f"text_model.encoder.layers.{n}."
            for name, own in layers.items():
                named[f"{theirs}{own}.{part}"] = state[f"{openais}{name}.{part}"]
            for name, tensor in zip("qkv", state[f"{openais}attn.in_proj_{part}"].chunk(3), strict=True):
                named[f"{theirs}self_attn.{name}_proj.{part}"] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def test_a_file_by_hugging_face_s_names_gives_the_same_bits(tmp_path):
    state = tensors()
    files = {"openai": state, "hugging_face": by_hugging_face(state)}
    towers = []
    for name, content in files.items():
        save_file(content, tmp_path / f"{name}.safetensors")
        towers.append(load_tower(str(tmp_path / f"{name}.safetensors"), "field", torch.device("cpu")))
    assert torch.equal(*(tower(prompts()) for tower in towers))
    for lost, problem in (
        ("text_projection.weight", "lacks text_projection; .* CLIPTextModelWithProjection"),
        ("text_model.encoder.layers.1.self_attn.k_proj.bias", "lacks transformer.resblocks.1.attn.in_proj_bias"),
    ):
        content = {name: tensor for name, tensor in files["hugging_face"].items() if name != lost}
        save_file(content, tmp_path / "part.safetensors")
        with pytest.raises(ConfigError, match=problem):
            load_tower(str(tmp_path / "part.safetensors"), "field", torch.device("cpu"))


class Bad:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:FutureWarning")  # OpenAI made such files
def test_files_that_are_no_tower_are_refused_in_a_line(tmp_path, capsys):
    state = tensors(words=49408, depth=1)

    def refusal(change, name="tower.safetensors"):
        save_file({**state, **change} if isinstance(change, dict) else change(state), tmp_path / name)
        return refused(tmp_path / name)

    def refused(path):
        with pytest.raises((ConfigError, DataError)) as error:
            load_tower(str(path), "model.method.tower", torch.device("cpu"))
        assert str(error.value).startswith("model.method.tower: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    lacks = refusal(lambda s: {k: v for k, v in s.items() if k != "ln_final.bias"})
    assert "lacks ln_final.bias; give the state dict of a CLIP" in lacks
    assert "lacks token_embedding.weight" in refusal(lambda s: {"text_model.final_layer_norm.bias": s["ln_final.bias"]})
    assert "has text_projection of shape [63, 8]" in refusal({"text_projection": torch.zeros(63, 8)})
    assert "has ln_final.bias of shape [64], and finite" in refusal({"ln_final.bias": torch.full((64,), torch.nan)})
    assert "has 10 words, 77 positions" in refusal({"token_embedding.weight": torch.zeros(10, 64)})
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"ln_final.bias": Bad()}))
    assert "cannot read" in refused(tmp_path / "bad.pt")
    for name in ("ViT-B-16.pt", "named.safetensors"):
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / name)
        remedy = "save its tensors: torch.save(torch.jit.load(FILE, 'cpu').state_dict(), 'tensors.pt')"
        assert f"{name} is a TorchScript program, as OpenAI's files of CLIP are, and" in (
            line := refused(tmp_path / name)
        )
        assert line.endswith(remedy)
    assert "is not there: no such file; give an existing file" in refused(tmp_path / "none.pt")
    assert "run" not in capsys.readouterr().out


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "tower.safetensors"
    towers = []
    for features in (4, 8):
        save_file(tensors(features=features), path)
        towers += [load_tower(str(path), "field", torch.device("cpu")) for _ in range(2)]
    assert towers[0] is towers[1]
    assert [tower.num_features for tower in towers] == [4, 4, 8, 8]
