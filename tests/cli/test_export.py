"""``fedsim export`` of pruned models: dense and sparse files hold what the federation has."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedsim
from fedsim.__main__ import main
from fedsim.core.errors import DataError
from fedsim.core.sparse_file import read_sparse, write_sparse
from fedsim.data.preview import write_sheet
from fedsim.functional.encodings import sparse_bytes
from fedsim.methods import APFL, IFCA, SKA, Ditto, FedALA, FedBABU, FedBN, FedDIP, FedPav, GPerXAN, Local, LotteryFL
from fedsim.models.weights import is_file, read_file
from fedsim.report.layout import new_figure, save_figure
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import fit, make_model, named, receive, refuse


@pytest.fixture(scope="module")
def lottery(tmp_path_factory):
    """Clients that prune, with running statistics of their own; and the checkpoint."""
    path = tmp_path_factory.mktemp("lottery") / "last.ckpt"
    model = fit(make_model(LotteryFL(start_accuracy=0.0, step=0.6), bn_stats="local"))
    model.trainer.save_checkpoint(path)
    return model, path


@pytest.fixture(scope="module")
def dip(tmp_path_factory):
    """A server that prunes, and the checkpoint."""
    path = tmp_path_factory.mktemp("dip") / "last.ckpt"
    model = fit(make_model(FedDIP(initial=0.5, reconfig_interval=1)))
    model.trainer.save_checkpoint(path)
    return model, path


def exported(capsys, *args):
    capsys.readouterr()
    assert main(["export", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_a_client_s_file_holds_its_personal_model(lottery, tmp_path, capsys):
    model, checkpoint = lottery
    output = tmp_path / "town1.safetensors"
    text = exported(capsys, "--ckpt_path", checkpoint, "--output", output, "--client", "town1", "--sparse", "true")
    client = model.parts.clients["town1"]
    client.load()
    receive(client, model.settings.method, model.server)
    model.settings.method.personalise(client)
    expected = {
        name.removeprefix("backbone."): tensor.clone()
        for name, tensor in client.model.network.state_dict().items()
        if tensor.is_floating_point()
    }
    mask = client.kept["mask"]
    client.unload()
    dense, sparse = load_file(output), read_sparse(tmp_path / "town1.sparse.safetensors")
    assert dense.keys() == sparse.keys() == expected.keys()
    assert any("running_mean" in name for name in dense)
    for name, tensor in expected.items():
        assert torch.equal(dense[name], tensor), name
        assert torch.equal(sparse[name], tensor), name
    assert mask.float().mean() < 0.5
    sizes = [(tmp_path / f"town1{suffix}.safetensors").stat().st_size for suffix in ("", ".sparse")]
    assert sizes[1] < 0.6 * sizes[0]
    for size in sizes:
        assert f"{size:,} bytes" in text
    assert "not the network faster" in text


def test_a_sparse_file_is_as_long_as_its_encoding(dip, tmp_path, capsys):
    model, checkpoint = dip
    exported(capsys, "--ckpt_path", checkpoint, "--output", tmp_path / "m.safetensors", "--sparse", "true")
    path = tmp_path / "m.sparse.safetensors"
    found, expected = read_sparse(path), named(model)
    for name, tensor in expected.items():
        assert torch.equal(found[name.removeprefix("backbone.")], tensor)
    mask = model.server.kept["smallcnn"]["mask"]
    payload = 0
    for entry in model.parts.models["smallcnn"].flat.shared_entries:
        own = mask[entry.span]
        is_pruned = entry.kind == "parameter" and not own.all()
        payload += sparse_bytes(entry.numel, int(own.sum()), "bitmap") if is_pruned else 4 * entry.numel
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size == 8 + header + payload


@pytest.mark.parametrize(
    "method", [FedPav(), FedBN(), Local(), Ditto(), FedBABU()], ids=lambda method: type(method).__name__
)
def test_any_client_s_personalised_model_can_be_exported(method, tmp_path, capsys):
    model, output = fit(make_model(method)), tmp_path / "town1.safetensors"
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    exported(capsys, "--ckpt_path", tmp_path / "last.ckpt", "--output", output, "--client", "town1")
    client = model.parts.clients["town1"]
    client.load()
    receive(client, method, model.server)
    method.personalise(client)
    expected = {n.removeprefix("backbone."): t.clone() for n, t in client.model.network.state_dict().items()}
    client.unload()
    found = load_file(output)
    assert found.keys() == {name for name, tensor in expected.items() if tensor.is_floating_point()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_file_says_what_it_is_and_others_may_read_it(dip, tmp_path, capsys):
    output, before = tmp_path / "x.safetensors", os.umask(0o022)
    try:
        text = exported(capsys, "--ckpt_path", dip[1], "--output", output)
    finally:
        os.umask(before)
    assert text.startswith(f"wrote {output}: global model of FedDIP, round 2; ")
    assert output.stat().st_mode & 0o777 == 0o644
    with safe_open(output, "pt") as file:
        about = file.metadata()
    assert (about["method"], about["model"], about["round"], about["format"]) == ("FedDIP", "global", "2", "pt")
    assert (about["resize"], about["features_normalised"]) == ("bicubic, antialiased (Pillow)", "no")


@pytest.mark.parametrize("method", [GPerXAN(), SKA(dual=False, unseen="avg")], ids=["GPerXAN", "SKA"])
def test_the_server_s_model_is_exported_where_the_server_completes_it(method, tmp_path, capsys):
    model, output = fit(make_model(method)), tmp_path / "x.safetensors"
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    exported(capsys, "--ckpt_path", tmp_path / "last.ckpt", "--output", output)
    expected = {**named(model), **method.server_tensors(model.server, "smallcnn")}
    found = load_file(output)
    assert "bn1.running_mean" in found
    assert found.keys() == {n.removeprefix("backbone.") for n in expected if not n.startswith("head.")}
    assert all(torch.equal(t, found[n.removeprefix("backbone.")]) for n, t in expected.items())


@pytest.mark.parametrize(
    "method", [IFCA(clusters=2), APFL(), FedALA(), FedBABU(fine_tune="head")], ids=lambda method: type(method).__name__
)
def test_a_model_that_a_method_puts_together_is_refused(method, tmp_path, capsys):
    fit(make_model(method)).trainer.save_checkpoint(tmp_path / "last.ckpt")
    args = ["--ckpt_path", tmp_path / "last.ckpt", "--output", tmp_path / "x.safetensors", "--client", "town0"]
    assert f"{type(method).__name__} assembles a client's model in a way of its own" in refuse(capsys, "export", *args)


def test_what_cannot_be_exported_is_refused_in_a_line(lottery, dip, tmp_path, capsys):
    lottery, dip = lottery[1], dip[1]
    output = tmp_path / "x.safetensors"
    for checkpoint, options, expected in (
        (lottery, ["--client", "twon0"], "there is no client twon0; choose from town0, town1, town2"),
        (lottery, [], "no global model to export"),  # statistics are the clients' own
        (dip, ["--arch", "resnet"], "--arch: there is no architecture resnet; choose from smallcnn"),
    ):
        assert expected in refuse(capsys, "export", "--ckpt_path", checkpoint, "--output", output, *options)
    assert not output.exists()


def test_the_sparse_file_passes_the_same_door_as_the_dense_one(dip, tmp_path, capsys):
    (tmp_path / "m.sparse.safetensors").mkdir()
    args = ["--ckpt_path", dip[1], "--output", tmp_path / "m.safetensors", "--sparse", "true"]
    line = refuse(capsys, "export", *args)
    assert "--sparse: " in line
    assert "m.sparse.safetensors is a folder, not a file; name another --output" in line
    assert not (tmp_path / "m.safetensors").exists()


def test_a_model_without_pruned_weights_has_no_sparse_file(tmp_path, capsys):
    model = fit(make_model(LotteryFL(target=0.0)), rounds=1)
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    args = ["--ckpt_path", tmp_path / "last.ckpt", "--output", tmp_path / "x.safetensors", "--client", "town0"]
    assert "the model is not pruned" in refuse(capsys, "export", *args, "--sparse", "true")
    line = f"wrote {args[3]}: client town0 model of LotteryFL, round 1; "
    assert exported(capsys, *args).startswith(line)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["conv1.weight"], named(model)["backbone.conv1.weight"])
    assert set(read_checkpoint(tmp_path / "last.ckpt")["fedsim"]["ledger"]["unpruned"]) == {"town0", "town1", "town2"}


def test_the_mean_of_models_that_trained_apart(tmp_path, capsys):
    """Parameter-Average of paper 001: running statistics are averaged, too; heads are of different people."""
    model = fit(make_model(Local()))
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    args = ["--ckpt_path", tmp_path / "last.ckpt", "--output", tmp_path / "mean.safetensors", "--mean", "true"]
    exported(capsys, *args)
    found, own = load_file(tmp_path / "mean.safetensors"), []
    for client in model.parts.clients.values():
        client.load()
        own.append({n.removeprefix("backbone."): t.clone() for n, t in client.model.network.state_dict().items()})
        client.unload()
    expected = {name for name, t in own[0].items() if t.is_floating_point() and not name.startswith("head.")}
    assert found.keys() == expected
    assert any("running_var" in name for name in expected)
    for name in expected:
        mean = sum(tensors[name].double() for tensors in own) / 3
        assert torch.allclose(found[name].double(), mean, rtol=1e-6, atol=1e-7), name
        assert not torch.equal(found[name], own[0][name]), name
    assert "leave --client and --sparse out" in refuse(capsys, "export", *args, "--client", "town0")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 3), (2, 5, 1), (65,)])
def test_what_is_written_is_read(tmp_path, shape):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator)
    tensor.view(-1)[0] = 0.0  # a zero that is not pruned
    masks = {"some": torch.rand(shape, generator=generator) < 0.5, "none": torch.zeros(shape).bool()}
    tensors = {name: tensor * mask for name, mask in masks.items()} | {"dense": tensor}
    write_sparse(tensors, masks.keys(), tmp_path / "m")
    found = read_sparse(tmp_path / "m")
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert torch.equal(found[name], expected)


def test_a_tensor_that_lost_nothing_is_stored_as_it_is(tmp_path):
    write_sparse({"whole": torch.ones(9), "pruned": torch.eye(3)}, {"whole", "pruned"}, tmp_path / "m")
    assert load_file(tmp_path / "m").keys() == {"whole", "bitmap/pruned", "values/pruned"}


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"m: cannot be read"):
        read_sparse(path)
    save_file({"w": torch.ones(3)}, path)
    with pytest.raises(DataError, match="is not a sparse file"):
        read_sparse(path)
    metadata = {"format": "fedsim sparse 1", "shapes": json.dumps({"w": [9]})}
    whole = {"bitmap/w": torch.tensor([128, 128], dtype=torch.uint8), "values/w": torch.ones(2)}
    save_file(whole, path, metadata)
    assert read_sparse(path)["w"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 1]
    for broken in (
        {"values/w": torch.ones(2)},
        whole | {"values/w": torch.ones(3)},
        whole | {"bitmap/w": torch.tensor([128], dtype=torch.uint8)},
    ):
        save_file(broken, path, metadata)
        with pytest.raises(DataError, match="tensor w is damaged"):
            read_sparse(path)


# -- the kind of a file ------------------------------------------------------------------------------------------------


def test_the_case_of_a_suffix_chooses_no_other_kind(dip, tmp_path, capsys):
    line = refuse(capsys, "export", "--ckpt_path", dip[1], "--output", tmp_path / "m.ONNX", "--sparse", "true")
    assert "--sparse: is for .safetensors files" in line
    exported(capsys, "--ckpt_path", dip[1], "--output", tmp_path / "m.SAFETENSORS", "--sparse", "true")
    assert read_sparse(tmp_path / "m.sparse.safetensors").keys() == load_file(tmp_path / "m.SAFETENSORS").keys()
    assert read_file(str(tmp_path / "m.SAFETENSORS")).keys() == load_file(tmp_path / "m.SAFETENSORS").keys()
    assert is_file("m.SAFETENSORS")
    with new_figure(1, 1) as figure:
        save_figure(figure, tmp_path / "figure.PNG", "--figure")
    write_sheet(Image.new("RGB", (4, 4)), tmp_path / "sheet.JPG", "--output")
    kinds = [Image.open(tmp_path / name).format for name in ("figure.PNG", "sheet.JPG")]
    assert kinds == ["PNG", "JPEG"]


def test_one_function_says_which_suffix_a_file_has():
    own = (
        "strategy",
        "core/versions.py",
        "core/replaced_run.py",
        "cli/init",
        "cli/run_directory.py",
    )  # of fedsim's files
    source = Path(fedsim.__file__).parent
    for path in source.rglob("*.py"):
        if not path.relative_to(source).as_posix().startswith(own):
            assert not re.search(r"\.suffix (in|==|!=)|\.suffix\.", path.read_text()), path
