"""Run directories of earlier versions, in which classes have other addresses: LotteryFL, UCB, FedAdam, white noise."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.__main__ import main
from fedsim.strategy.checkpoint_files import read_checkpoint, read_states
from small import refuse

RUNS = Path(__file__).parent / "old_runs"
ADDRESSES = {
    "0_1": ("fedsim.selection.UCB", "fedsim.privacy.WhiteNoise", "fedsim.server.FedAdam"),
    "0_2_development": (
        "fedsim.federation.selection.UCB", "fedsim.federation.privacy.WhiteNoise",
        "fedsim.training.server_optimizers.FedAdam",
    ),
}  # fmt: skip


@pytest.fixture(params=ADDRESSES)
def old(request, tmp_path):
    """A copy: commands write into it."""
    return shutil.copytree(RUNS / request.param, tmp_path / request.param)


def call(*args):
    assert main([str(arg) for arg in args]) == 0


def test_its_config_names_the_old_modules(old):
    text = (old / "config.yaml").read_text()
    for address in ADDRESSES[old.name]:
        assert f"class_path: {address}\n" in text
    assert "class_path: fedsim.strategy.FederatedStrategy\n" in text


def test_every_old_address_leads_to_the_module_that_is_listed():
    code = "; ".join(
        [
            "import sys", "from fedsim.cli.checks import _MOVED, give_old_addresses", "give_old_addresses()",
            "from importlib import import_module as load",
            "assert all(load(old) is load(new) for old, new in _MOVED.items())",
        ]
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_scored(old, capsys):
    call("test", "--ckpt_path", old)
    assert "town2" in capsys.readouterr().out


def test_it_is_exported(old, tmp_path):
    call("export", "--ckpt_path", old, "--output", tmp_path / "model.safetensors")
    state = read_checkpoint(old / "checkpoints" / "best.ckpt")["state_dict"]
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert 0 < numbers <= sum(vector.numel() for vector in state.values())


def test_it_is_reported(old, capsys):
    call("report", old)
    name = "LotteryFL server_optimizer FedAdam"
    text = capsys.readouterr().out
    assert f"{name}: 2 rounds, seed 0" in text
    assert "IN DOUBT" not in text


def test_its_config_starts_a_new_run(old, tmp_path):
    call("fit", "--config", old / "config.yaml", "--run_dir", tmp_path / "new", "--trainer.max_epochs=1")
    assert json.loads((tmp_path / "new" / "summary.json").read_text())["rounds"] == 1


def test_it_is_continued_where_it_ended(old, tmp_path):
    call("fit", "--ckpt_path", old, "--run_dir", tmp_path / "new", "--trainer.max_epochs=3")
    paths = [run / "checkpoints" / "last.ckpt" for run in (old, tmp_path / "new")]
    before, after = contents = [read_checkpoint(path)["fedsim"] for path in paths]
    names = list(before["clients"])
    states = [read_states(path, content, names) for path, content in zip(paths, contents, strict=True)]
    times = [content["selection"]["N"] for content in contents]
    assert sum(times[1].values()) == sum(times[0].values()) + 2
    for name in names:  # masks only lose elements, and those of clients that sat the round out stay
        old_mask, new_mask = (state[name]["kept.mask"] for state in states)
        assert not (new_mask & ~old_mask).any()
        assert times[1][name] > times[0][name] or torch.equal(old_mask, new_mask)
    assert before["method"] == after["method"]


def test_another_config_is_named_as_such(old, capsys):
    """An old checkpoint has no digest; that it is whole must not be doubted for another reason."""
    line = refuse(capsys, "test", "--ckpt_path", old, "--data.source.init_args.clients=4")
    assert "the checkpoint has 3 clients and this federation 4" in line
    assert "edited" not in line


def without(content, *names):
    for name in names[:-1]:
        content = content[name]
    del content[names[-1]]


@pytest.mark.parametrize("damage", [
    lambda c: without(c, "loops"),
    lambda c: without(c, "fedsim", "clients"),
    lambda c: without(c, "fedsim", "hosts"),
    lambda c: c.update(callbacks="x"),
    lambda c: c.update(epoch=0.5),
    lambda c: c["fedsim"].update(files=1),
    lambda c: next(iter(c["fedsim"]["layouts"].values())).append([]),
    lambda c: c["fedsim"]["layouts"].clear(),
    lambda c: c.update(optimizer_states=True),
])  # fmt: skip
@pytest.mark.parametrize("command", ["test", pytest.param("fit", marks=pytest.mark.others)])
def test_damage_of_an_old_checkpoint_is_one_line(old, capsys, command, damage):
    for path in old.rglob("global.ckpt"):
        content = torch.load(path, weights_only=True)
        damage(content)
        torch.save(content, path)
    more = ["--trainer.max_epochs=3"] if command == "fit" else []
    assert "ckpt" in refuse(capsys, command, "--ckpt_path", old, *more)
