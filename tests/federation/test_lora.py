"""Low-rank adapters: nothing else is trained, sent or stored."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from failing import Run, finish
from fedsim.__main__ import main
from fedsim.cli.describe import describe_federation
from fedsim.core.errors import ConfigError
from fedsim.federation.components.ledger import Traffic
from fedsim.methods import FedAvg, FedBN, FedPav, Scaffold
from fedsim.models import Group, LoRA, SmallCNN, TimmBackbone
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit, make_data, make_model, named

pytest.importorskip("peft", reason="needs fedsim-reid[models]")
pytest.importorskip("timm", reason="needs fedsim-reid[models]")

WIDTH, DEPTH, RANK = 32, 2, 2
TARGETS = {"qkv": (WIDTH, 3 * WIDTH), "attn.proj": (WIDTH, WIDTH), "fc1": (WIDTH, 4 * WIDTH), "fc2": (4 * WIDTH, WIDTH)}
"""inputs and outputs of the layers of a block"""


def vit(seed=0):
    torch.manual_seed(seed)
    options = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2}
    return TimmBackbone("vit_small_patch16_224", image_size=(32, 16), options=options)


def federation(method=None, seed=0, **options):
    return make_model(method or FedPav(), backbone=LoRA(vit(seed), RANK), **options)


def assembled(method=None, seed=0):
    model = federation(method, seed)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return model


def fixed_of(model):
    (flat,) = model.parts.models.values()
    state = flat.network.state_dict()
    return {name: state[name].clone() for name in flat.fixed}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A federation after two rounds, its fixed tensors from before, and the checkpoint."""
    path = tmp_path_factory.mktemp("lora") / "last.ckpt"
    model = fit(federation())
    model.trainer.save_checkpoint(path)
    return model, fixed_of(assembled()), path


def test_adapters_change_nothing_at_first():
    images = torch.randn(2, 3, 32, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vit().eval()(images)
        assert torch.equal(LoRA(vit(), RANK).eval()(images), expected)


def test_an_adapter_is_a_product_of_two_narrow_matrices():
    """W x + (alpha / r) B A x."""
    backbone = LoRA(vit(), RANK, alpha=3.0, targets=("fc1",))
    layer = backbone.get_submodule("adapted.timm.blocks.0.mlp.fc1")
    a, b = (layer.get_parameter(f"lora_{letter}.default.weight") for letter in "AB")
    torch.nn.init.normal_(b)
    x = torch.randn(5, WIDTH)
    base = layer.get_submodule("base_layer")
    torch.testing.assert_close(layer(x), base(x) + 3.0 / RANK * x @ a.T @ b.T)


@pytest.mark.parametrize("method", [FedPav(), FedBN(), FedAvg(share_head=False)], ids=["FedPav", "FedBN", "FedAvg"])
def test_the_ledger_counts_adapters_and_neck_alone(method):
    """A [r, in] and B [out, r] of every target; the bnneck has two weights and two statistics for each feature."""
    adapters = DEPTH * sum(RANK * (c_in + c_out) for c_in, c_out in TARGETS.values())
    neck = 0 if isinstance(method, FedBN) else 4 * WIDTH
    traffic = assembled(method).parts.ledger.expected(0, ["town0", "town2"])
    assert set(traffic.values()) == {Traffic(4 * (adapters + neck), 4 * (adapters + neck))}
    whole = make_model(method, backbone=vit())
    whole.assemble(make_data(), 0, 1, torch.device("cpu"))
    (dense,) = set(whole.parts.ledger.expected(0, ["town0"]).values())
    assert dense.up > 5 * 4 * (adapters + neck)


def test_extras_of_a_method_are_as_long_as_the_adapters():
    adapters = DEPTH * sum(RANK * (c_in + c_out) for c_in, c_out in TARGETS.values())
    (traffic,) = assembled(Scaffold()).parts.ledger.expected(0, ["town0"]).values()
    assert traffic.extra_up == traffic.extra_down == 4 * (adapters + 2 * WIDTH)


def test_nothing_but_adapters_and_neck_trains(trained):
    model, before, _ = trained
    after = fixed_of(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    learnt = named(model, "lora")
    assert {name.partition(".")[0] for name in learnt} == {"backbone", "neck"}
    matrices = [tensor for name, tensor in learnt.items() if ".lora_B." in name]
    assert len(matrices) == DEPTH * len(TARGETS)
    assert all(matrix.any() for matrix in matrices)


def test_clients_store_their_heads_alone(trained):
    model, _, _ = trained
    for client in model.parts.clients.values():
        assert client.private_state()["state"].numel() == sum(
            -(-part.numel() // 64) * 64 for part in (client.head.weight, client.head.bias)
        )


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(trained):
    model, _, path = trained
    whole = fit(federation(), rounds=3)
    resumed = fit(federation(), rounds=3, ckpt_path=path)
    assert torch.equal(resumed.server.vector("lora"), whole.server.vector("lora"))
    assert not torch.equal(resumed.server.vector("lora"), model.server.vector("lora"))


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tiny, tmp_path):
    """Each rank builds the fixed weights; both train the only client, and adapters drop inputs at random."""
    network = (
        "{class_path: LoRA, init_args: {rank: 2, dropout: 0.2, backbone: {class_path: TimmBackbone, init_args: "
        "{name: vit_small_patch16_224, image_size: [32, 16], options: {embed_dim: 32, depth: 2, num_heads: 2}}}}}"
    )
    vectors = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        options = (
            "--config", tiny, "--run_dir", folder, f"--model.backbone={network}", "--data.source.clients=1",
            "--model.client.micro_batch=4", "--trainer.max_epochs=2",
        )  # fmt: skip
        finish(Run(tmp_path / f"{ranks}-logs", "fit", *options, ranks=ranks))
        vectors.append(read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]["server.vectors.lora"])
    assert vectors[0].any()
    assert torch.equal(*vectors)


def test_adapters_of_other_weights_are_refused(trained):
    _, _, path = trained
    with pytest.raises(ConfigError, match=r"^ckpt_path: the trained tensors of lora belong to other fixed weights; "):
        fit(federation(seed=1), rounds=3, ckpt_path=path)


def test_ranks_compare_fixed_weights_too():
    (one,), (other,) = (assembled(seed=seed).parts.models.values() for seed in (0, 1))
    other.flat.buffer.copy_(one.flat.buffer)
    assert one.checksum != other.checksum


def test_the_adapters_can_be_exported(trained, tmp_path, capsys):
    model, _, path = trained
    output = tmp_path / "adapters.safetensors"
    assert main(["export", "--ckpt_path", str(path), "--output", str(output)]) == 0, capsys.readouterr().err
    found = load_file(output)
    expected = {name.removeprefix("backbone."): tensor for name, tensor in named(model, "lora").items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_describe_tells_fixed_tensors_from_private_ones():
    text = describe_federation(federation(), make_data(), 1, rounds=1)
    (line,) = [line for line in text.splitlines() if line.startswith("fixed ")]
    assert line.endswith("fixed")
    count = sum(tensor.numel() for tensor in fixed_of(assembled()).values())
    assert str(count) in line.replace(",", "").split()


def test_every_tensor_but_the_adapters_is_fixed():
    (flat,) = assembled().parts.models.values()
    backbone = {name: group for name, group in flat.groups.items() if name.startswith("backbone.")}
    assert {name for name, group in backbone.items() if group is Group.FIXED} == {
        n for n in backbone if ".lora_" not in n
    }
    assert {group for name, group in backbone.items() if ".lora_" in name} == {Group.CONV}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LoRA(SmallCNN(width=4), targets=("conv1",)), r"LoRA keeps SmallCNN fixed, but batch normalisation"),
        (lambda: LoRA(vit(), targets=("qkv", "query")), r"targets: TimmBackbone has no layer query; "),
        (lambda: LoRA(vit(), rank=0), r"rank: 0 is not positive"),
        (lambda: LoRA(vit(), dropout=1.0), r"dropout: 1.0 is not in \[0, 1\)"),
    ],
)
def test_mistakes_are_named(build, message):
    with pytest.raises(ConfigError, match=rf"^model\.backbone[.:] ?{message}"):
        build()


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"^model.backbone: LoRA needs peft; pip install 'fedsim-reid\[models\]'$"):
        LoRA(vit())
