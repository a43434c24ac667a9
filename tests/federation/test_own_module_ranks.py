"""A user's LightningModule on several ranks, and from a config."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedAvg
from fedsim.training.own_module.network import tensors_of
from fedsim.training.settings import LocalTraining
from lightning_modules import FOREIGN, Small, assert_same, federation, module_state
from small import fit, make_data, refuse

KINDS = {kind.__name__: kind for kind in FOREIGN}


def play(name, devices):
    """Train a sample of unequal clients."""
    model = federation(
        FedAvg(), KINDS[name], selection=RandomFraction(0.7),
        client=LocalTraining(batch_size=8, local_epochs=2),
    )  # fmt: skip
    data = make_data(SyntheticReID(clients=4, unseen=1, scale=0.08), augmentation=Augmentation(pad=1, flip=0.5))
    model = fit(model, data, rounds=2, devices=devices)
    names = [n for n in sorted(model.round_metrics) if n.startswith("train/")]
    numbers = torch.tensor([model.round_metrics[name] for name in names], dtype=torch.float64)
    return {**module_state(model), "numbers": numbers}, model.strategy.global_rank


def play_on_ranks(folder):
    """What each rank does."""
    for name in KINDS:
        state, rank = play(name, 2)
        torch.save(state, folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    run_on_ranks(play_on_ranks, folder, timeout=600)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ranks_change_no_bit(on_two_ranks, name):
    expected, _ = play(name, 1)
    for rank in range(2):
        assert_same(torch.load(on_two_ranks / f"{name}-{rank}.pt", weights_only=True), expected)


# -- configs -----------------------------------------------------------------------------------------------------------

CONFIG = """
seed_everything: 0
trainer: {max_epochs: 2, accelerator: cpu, devices: 1, limit_val_batches: 0}
model:
  method: FedAvg
  module:
    class_path: lightning_modules.Small
    init_args: {lr: 0.02}
  private: ["neck.bias"]
  client: {batch_size: 8}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 3, unseen: 1, scale: 0.1}}
  size: [32, 16]
  val: none
  augmentation: {pad: 0, flip: 0.0}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "module.yaml"
    path.write_text(CONFIG)
    return path


def test_a_config_names_a_module(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config), f"--run_dir={tmp_path}/run"]) == 0
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "lightning_modules.Small" in saved
    assert "num_classes" not in saved
    assert main(["test", "--config", str(config), f"--run_dir={tmp_path}/run", "--ckpt_path=last"]) == 0
    assert "mAP" in capsys.readouterr().out
    export = ["export", f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt", "--client=town0"]
    assert main([*export, f"--output={tmp_path}/m.safetensors"]) == 0
    names = set(load_file(tmp_path / "m.safetensors"))
    assert names == {*tensors_of(Small(1))} - {"classifier.weight", "classifier.bias"}
    model = federation(FedAvg(), partial(Small, lr=0.02), private=("neck.bias",), client=LocalTraining(batch_size=8))
    fit(model, make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)))
    from fedsim.strategy.checkpoint_files import read_checkpoint

    state = read_checkpoint(next((tmp_path / "run" / "checkpoints").glob("last.ckpt")))["state_dict"]
    assert torch.equal(state["server.vectors.small"], module_state(model)["global"])


def test_a_module_takes_the_place_of_a_configs_network(tmp_path, caplog):
    caplog.set_level("INFO")
    options = ["--trainer.max_epochs=1", "--trainer.devices=1", "--data.size=[32,16]", f"--run_dir={tmp_path}/run"]
    assert main(["fit", "--config", "quickstart", "--model.module=lightning_modules.Small", *options]) == 0
    [line] = [record.message for record in caplog.records if "without effect" in record.message]
    idle = {text.split()[0] for text in line.partition(": ")[2].split(", ")}
    assert {"model.backbone", "model.neck.kind", "model.objective.label_smoothing", "model.client.optimizer"} <= idle


def test_describe_shows_a_module(config, tmp_path, capsys):
    assert main(["describe", "--config", str(config), f"--run_dir={tmp_path}/run"]) == 0
    assert "per client" in capsys.readouterr().out


def test_wrong_modules_of_a_config_end_in_one_line(config, tmp_path, capsys):
    def line(*options):
        return refuse(capsys, "fit", "--config", config, f"--run_dir={tmp_path}/other", *options)

    assert "there is no class lightning_modules.Tiny" in line("--model.module=lightning_modules.Tiny")
    assert "torch.nn.Linear" in line("--model.module=torch.nn.Linear")
    assert "lrr" in line("--model.module.init_args.lrr=0.1")
    typed = line("--model.module=lightning_modules.Typed", "--model.module.optimizing={optim: {lr: 0.1}}")
    assert "model.module.optimizing: it is of type Optimizing, which has no option optim" in typed
    assert "; annotate it as dict, or give a function that makes it" in typed
    as_backbone = line(
        "--model.module=null", "--model.backbone=lightning_modules.Small", "--model.backbone.num_classes=4"
    )
    assert (
        "model.backbone: lightning_modules.Small is a LightningModule; leave it out, and set model.module"
        in as_backbone
    )
    assert "model.private: no tensor of Small is named like" in line("--model.private=[head.*]")
    assert "needs features, logits or layers of fedsim's own model" in line("--model.method=APFL")
    assert not (tmp_path / "other").exists()
