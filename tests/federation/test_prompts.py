"""Visual prompts: plain loops, who sees whom, and nothing but prompts and neck trains, is sent or stored."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from failing import Run, finish
from fedsim.__main__ import main
from fedsim.cli.describe import describe_federation, group_table
from fedsim.core.errors import ConfigError
from fedsim.federation.components.ledger import Traffic
from fedsim.methods import FedBN, FedPav
from fedsim.models import BODY, Group, LoRA, Neck, ReIDModel, SmallCNN, TimmBackbone, VisualPrompts, group_names
from fedsim.models.prompts import new_prompts, prompt_mask
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.training.flat_model import FlatModel
from fedsim.training.statistics import shared_names
from small import fit, make_data, make_model, named, refuse, vector

pytest.importorskip("timm", reason="needs fedsim-reid[models]")

VECTORS = json.loads((Path(__file__).parent / "prompts_vectors.json").read_text())
WIDTH, DEPTH, HEADS, TOKENS, PARTS = 32, 2, 2, 5, (1, 1, 1)
NAME = "vit_small_patch16_224"
OPTIONS = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ARCH = "visualprompts"


def vit(seed=0, size=(32, 16), **options):
    torch.manual_seed(seed)
    return TimmBackbone(NAME, image_size=size, options=OPTIONS, **options)


def prompted(seed=0, tokens=TOKENS, parts=PARTS, **options):
    return VisualPrompts(vit(seed), tokens, parts, **options)


def assembled(method=None, seed=0, **options):
    model = make_model(method or FedPav(), backbone=prompted(seed, **options))
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return model


def fixed_of(model):
    (flat,) = model.parts.models.values()
    state = flat.network.state_dict()
    return {name: state[name].clone() for name in flat.fixed}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A federation after two rounds, its fixed tensors from before, and the checkpoint."""
    path = tmp_path_factory.mktemp("prompts") / "last.ckpt"
    model = fit(make_model(FedPav(), backbone=prompted()))
    model.trainer.save_checkpoint(path)
    return model, fixed_of(assembled()), path


# -- who sees whom -----------------------------------------------------------------------------------------------------


def test_the_authors_small_mask():
    small = VECTORS["bapm_mask"]["small"]
    mask = prompt_mask(1, (small["rows"], small["columns"]), 4, (1, 1, 1))
    assert mask.int().tolist() == small["mask"]


def test_the_authors_mask_of_21_rows():
    big = VECTORS["bapm_mask"]["big"]
    parts = tuple(big["groups"][name] for name in ("upper", "middle", "lower"))
    mask = prompt_mask(1, (big["rows"], big["columns"]), sum(big["groups"].values()), parts)
    assert mask.sum().item() == big["allowed_total"]
    queries = {"class": 0, "upper": 1, "middle": 11, "lower": 21, "shared": 31, "first patch": 51, "last patch": 260}
    for name, query in queries.items():
        expected = torch.zeros(261, dtype=torch.bool)
        for begin, end in big["allowed_keys_of_query"][name]:
            expected[begin:end] = True
        assert torch.equal(mask[query], expected), name


def sees(query, key, num_first, grid, tokens, parts, patches_see_parts):
    """Whether one token sees another, from the text."""

    def part_of(token):
        number = token - num_first
        for part, count in enumerate(parts):
            if 0 <= number < count:
                return part
            number -= count
        return None

    first_patch = num_first + tokens
    if query >= first_patch and num_first <= key < first_patch and not patches_see_parts:
        return part_of(key) is None
    if num_first <= query < first_patch and key >= first_patch and part_of(query) is not None:
        row, height = (key - first_patch) // grid[1], grid[0]
        return [row < height // 2, height // 4 <= row < 3 * height // 4, row >= height // 2][part_of(query)]
    return True


def test_masks_at_random_are_those_of_a_loop():
    rng = random.Random(0)
    for _ in range(40):
        grid, parts = (rng.randint(1, 7), rng.randint(1, 3)), tuple(rng.randint(0, 2) for _ in range(3))
        tokens, num_first, open_ = sum(parts) + rng.randint(0, 2), rng.randint(1, 2), rng.random() < 0.5
        size = num_first + tokens + grid[0] * grid[1]
        mask = prompt_mask(num_first, grid, tokens, parts, patches_see_parts=open_)
        expected = [[sees(q, k, num_first, grid, tokens, parts, open_) for k in range(size)] for q in range(size)]
        assert mask.tolist() == expected


# -- the network by plain loops ----------------------------------------------------------------------------------------


def norm_loop(x, weight, bias):
    return np.stack([(row - row.mean()) / np.sqrt(row.var() + 1e-6) * weight + bias for row in x])


def attention_loop(x, state, name, allowed):
    """Self-attention, query by query over the keys that it sees."""
    size = WIDTH // HEADS
    q, k, v = np.split(x @ state[f"{name}.qkv.weight"].T + state[f"{name}.qkv.bias"], 3, axis=1)
    result = np.zeros_like(x)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            keys = [j for j in range(len(x)) if allowed(i, j)]
            scores = np.array([q[i, part] @ k[j, part] / math.sqrt(size) for j in keys])
            shares = np.exp(scores - scores.max())
            for j, share in zip(keys, shares / shares.sum(), strict=True):
                result[i, part] += share * v[j, part]
    return result @ state[f"{name}.proj.weight"].T + state[f"{name}.proj.bias"]


def gelu(x):
    return np.vectorize(lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))))(x)


def vit_loop(image, state, tokens, parts, deep, open_, patches=(2, 1)):
    """The feature of one image [3, H, W]: (P1) and (P2), token by token."""
    weight = state["patch_embed.proj.weight"]
    cut = [image[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16] for r in range(patches[0]) for c in range(patches[1])]
    x = np.stack([(weight * patch).sum(axis=(1, 2, 3)) + state["patch_embed.proj.bias"] for patch in cut])
    x = np.concatenate([state["cls_token"][0], x]) + state["pos_embed"][0]
    for i in range(DEPTH):
        if deep or i == 0:
            x = np.concatenate([x[:1], state[f"blocks.{i}.prompts"], x[1:]])
        of_block = {name.replace(f"blocks.{i}.block.", ""): tensor for name, tensor in state.items()}

        def allowed(query, key):
            return sees(query, key, 1, patches, tokens, parts, open_)

        y = norm_loop(x, of_block["norm1.weight"], of_block["norm1.bias"])
        x = x + attention_loop(y, of_block, "attn", allowed)
        y = norm_loop(x, of_block["norm2.weight"], of_block["norm2.bias"])
        y = gelu(y @ of_block["mlp.fc1.weight"].T + of_block["mlp.fc1.bias"])
        x = x + y @ of_block["mlp.fc2.weight"].T + of_block["mlp.fc2.bias"]
        if deep:
            x = np.concatenate([x[:1], x[1 + tokens :]])
    return norm_loop(x, state["norm.weight"], state["norm.bias"])[0]


@pytest.mark.parametrize(
    ("parts", "deep", "open_"),
    [((0, 0, 0), True, False), ((1, 1, 1), True, False), ((2, 0, 1), True, True), ((1, 1, 1), False, False)],
    ids=["VPT-deep", "BAPM", "patches see parts", "shallow"],
)
def test_features_are_those_of_plain_loops(parts, deep, open_):
    backbone = VisualPrompts(
        vit(size=(64, 32), **IMAGENET), TOKENS, parts, deep=deep, patches_see_parts=open_, train="all"
    )
    backbone = backbone.double().eval()
    with torch.no_grad():  # far from the start, where prompts hardly count
        for name, parameter in backbone.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)) if "prompts" in name or "pos" in name else None
    state = {n.removeprefix("prompted.timm."): t.numpy() for n, t in backbone.state_dict().items()}
    images = torch.randn(2, 3, 64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = backbone(images)
    for image, feature in zip(images.numpy(), features, strict=True):
        expected = vit_loop(image, state, TOKENS, parts, deep, open_, patches=(4, 2))
        np.testing.assert_allclose(feature.numpy(), expected, rtol=0, atol=1e-6)


def test_without_prompts_the_bits_are_the_backbones():
    images = torch.randn(2, 3, 32, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(prompted(tokens=0, parts=(0, 0, 0)).eval()(images), vit().eval()(images))


def test_prompts_start_uniform_with_vpts_bound():
    """sqrt(6 / (3 * 16 * 16 + 768)) = sqrt(6 / 1536) = 0.0625."""
    prompts = new_prompts(200, 768, (16, 16))
    assert prompts.abs().max().item() == pytest.approx(0.0625, rel=1e-3)
    assert prompts.abs().max().item() <= 0.0625
    assert prompts.square().mean().item() == pytest.approx(0.0625**2 / 3, rel=0.02)


def test_prompts_drop_out_in_training_alone():
    backbone = prompted(dropout=0.9)
    images = torch.randn(2, 3, 32, 16)
    with torch.no_grad():
        assert not torch.equal(backbone(images), backbone(images))
        same = torch.zeros(5, 3, 32, 16)
        assert len(backbone.train()(same).unique(dim=0)) == 5, "each image has a mask of its own"
        assert torch.equal(backbone.eval()(images), prompted().eval()(images))


def test_prompts_stay_with_a_copy_of_the_model():
    """A method with two models copies the network: each has its own prompts."""
    (flat,) = assembled().parts.models.values()
    replica = flat.replica("expert")
    replica.flat.buffer.zero_()
    names = [name for name, _ in flat.network.named_parameters() if name.endswith(".prompts")]
    assert len(names) == DEPTH
    assert all(flat.network.get_parameter(name).any() for name in names)
    assert not any(replica.network.get_parameter(name).any() for name in names)


# -- what trains, what is sent -----------------------------------------------------------------------------------------


def test_vit_b_shares_half_of_a_percent():
    """12 blocks of 50 prompts of 768 numbers are 460,800; the network has 85,809,408 with patches every 12 pixels."""
    with torch.device("meta"):
        backbone = TimmBackbone("vit_base_patch16_224", image_size=(256, 128), patch_stride=12)
        whole = sum(parameter.numel() for parameter in backbone.parameters())
        network = ReIDModel(VisualPrompts(backbone), Neck(kind="bnneck", dropout=0.0))
    assert whole == 85_809_408
    groups = group_names(network)
    flat = FlatModel("vit", network, shared_names(groups, BODY, "mean"), groups, max_classes=10)
    prompts, neck = 12 * 50 * 768, 4 * 768
    assert prompts == 460_800
    assert sum(entry.numel for entry in flat.flat.shared_entries) == prompts + neck
    assert flat.shared_bytes == 4 * (prompts + neck) == 1_843_200 + 12_288
    assert sum(tensor.numel() for name, tensor in network.state_dict().items() if name in flat.fixed) == whole
    lines = {line.split()[0]: line.replace(",", "").split() for line in group_table(flat).splitlines()}
    assert lines["conv"][1:] == ["12", "460800", "1843200", "shared"]
    assert lines["fixed"][2:] == ["85809408", "343237632", "fixed"]


@pytest.mark.parametrize("method", [FedPav(), FedBN()], ids=["FedPav", "FedBN"])
def test_the_ledger_counts_prompts_and_neck_alone(method):
    prompts, neck = DEPTH * TOKENS * WIDTH, 0 if isinstance(method, FedBN) else 4 * WIDTH
    traffic = assembled(method).parts.ledger.expected(0, ["town0", "town2"])
    assert set(traffic.values()) == {Traffic(4 * (prompts + neck), 4 * (prompts + neck))}


def test_with_all_nothing_is_fixed():
    (flat,) = assembled(train="all").parts.models.values()
    assert flat.fixed == []
    shared = sum(entry.numel for entry in flat.flat.shared_entries)
    assert shared == sum(parameter.numel() for parameter in prompted().parameters()) + 4 * WIDTH


def test_nothing_but_prompts_and_neck_trains(trained):
    model, before, _ = trained
    after = fixed_of(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (flat,), (start,) = model.parts.models.values(), assembled().parts.models.values()
    assert flat.fixed_checksum == start.fixed_checksum
    learnt, first = named(model, ARCH), start.network.state_dict()
    names = [name for name in learnt if name.endswith(".prompts")]
    assert {name.partition(".")[0] for name in learnt} == {"backbone", "neck"}
    assert len(names) == DEPTH
    assert not any(torch.equal(learnt[name], first[name]) for name in names)


def test_every_tensor_but_the_prompts_is_fixed():
    (flat,) = assembled().parts.models.values()
    backbone = {name: group for name, group in flat.groups.items() if name.startswith("backbone.")}
    assert {name for name, group in backbone.items() if group is not Group.FIXED} == {
        f"backbone.prompted.timm.blocks.{i}.prompts" for i in range(DEPTH)
    }
    text = describe_federation(make_model(FedPav(), backbone=prompted()), make_data(), 1, rounds=1)
    (line,) = [line for line in text.splitlines() if line.startswith("fixed ")]
    assert line.endswith("fixed")


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(trained):
    model, _, path = trained
    whole = fit(make_model(FedPav(), backbone=prompted()), rounds=3)
    resumed = fit(make_model(FedPav(), backbone=prompted()), rounds=3, ckpt_path=path)
    assert torch.equal(vector(resumed, ARCH), vector(whole, ARCH))
    assert not torch.equal(vector(resumed, ARCH), vector(model, ARCH))


def test_prompts_of_other_weights_are_refused(trained):
    _, _, path = trained
    with pytest.raises(ConfigError, match=r"^ckpt_path: the trained tensors of visualprompts belong to other fixed "):
        fit(make_model(FedPav(), backbone=prompted(seed=1)), rounds=3, ckpt_path=path)


def test_the_prompts_can_be_exported(trained, tmp_path, capsys):
    model, _, path = trained
    output = tmp_path / "prompts.safetensors"
    assert main(["export", "--ckpt_path", str(path), "--output", str(output)]) == 0, capsys.readouterr().err
    written = load_file(output)
    expected = {name.removeprefix("backbone."): tensor for name, tensor in named(model, ARCH).items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tiny, tmp_path):
    """Each rank builds the fixed weights; both train the only client, and prompts drop out at random."""
    network = (
        "{class_path: VisualPrompts, init_args: {tokens: 5, parts: [1, 1, 1], dropout: 0.2, backbone: {class_path: "
        "TimmBackbone, init_args: {name: vit_small_patch16_224, image_size: [32, 16], patch_stride: 8, "
        "options: {embed_dim: 32, depth: 2, num_heads: 2}}}}}"
    )
    vectors = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        options = (
            "--config", tiny, "--run_dir", folder, f"--model.backbone={network}", "--data.source.clients=1",
            "--model.client.micro_batch=4", "--trainer.max_epochs=2",
        )  # fmt: skip
        finish(Run(tmp_path / f"{ranks}-logs", "fit", *options, ranks=ranks))
        state = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
        vectors.append(state[f"server.vectors.{ARCH}"])
    assert vectors[0].any()
    assert torch.equal(*vectors)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: VisualPrompts(SmallCNN(width=4)),
            r": SmallCNN has no blocks for prompts; VisualPrompts needs a vision",
        ),
        (lambda: VisualPrompts(TimmBackbone("resnet18")), r": TimmBackbone has no blocks for prompts; "),
        (lambda: prompted(tokens=2), r"\.parts: 3 prompts of parts are more than tokens, 2; lower one of them"),
        (lambda: prompted(tokens=-1), r"\.tokens: -1 is less than 0"),
        (lambda: prompted(parts=(1, -1, 1)), r"\.parts: -1 is less than 0"),
        (lambda: prompted(dropout=1.0), r"\.dropout: 1.0 is not in \[0, 1\)"),
        (
            lambda: VisualPrompts(prompted()),
            r": VisualPrompts and VisualPrompts fix each other's weights; leave one out",
        ),
    ],
)
def test_mistakes_are_named(build, message):
    with pytest.raises(ConfigError, match=rf"^model\.backbone{message}"):
        build()


def test_adapters_and_prompts_together_are_refused():
    pytest.importorskip("peft", reason="needs fedsim-reid[models]")
    with pytest.raises(ConfigError, match=r"^model.backbone: VisualPrompts and LoRA fix each other's weights; "):
        VisualPrompts(LoRA(vit(), 2))


def test_one_line_for_prompts_on_a_convolutional_network(tiny, tmp_path, capsys):
    line = refuse(
        capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run",
        "--model.backbone={class_path: VisualPrompts, init_args: {backbone: {class_path: SmallCNN}}}",
    )  # fmt: skip
    assert "SmallCNN has no blocks for prompts" in line
