"""Recipes train as they are shipped, on drawn people, and all rotations of leave-one-out are one sweep."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.data import datamodule

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
SMALL = {  # what makes the recipe's own network small; all else is as shipped
    "bot": ["--model.backbone.init_args.depth=18"],
    "vit": [
        "--model.backbone.init_args.image_size=[32, 16]",
        "--model.backbone.init_args.options={embed_dim: 32, depth: 1, num_heads: 2, drop_path_rate: 0.1}",
    ],
    "lora": [
        "--model.backbone.init_args.backbone.init_args.image_size=[32, 16]",
        "--model.backbone.init_args.backbone.init_args.options={embed_dim: 32, depth: 1, num_heads: 2}",
    ],
}
SMALL["prompts"] = SMALL["lora"]
BEFORE = {"lora": ["vit"], "prompts": ["vit"]}
DRY = [
    "--data.dry_run=true", "--data.size=[32, 16]", "--data.limit_client_batches=1", "--data.val=none",
    "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu",
]  # fmt: skip


def needs(*libraries):
    for library in libraries:
        pytest.importorskip(library, reason="needs fedsim-reid[models]")


def fit(folder, configs, *options):
    """Train by shipped configs, and return what the run directory says."""
    given = [word for config in configs for word in ("--config", config)]
    code = main(["fit", *given, *DRY, "--run_dir", str(folder), *options])
    return code, folder


@pytest.mark.parametrize("name", ["bot", "vit", "lora", "prompts"])
def test_a_recipe_trains_as_it_is_shipped(name, tmp_path, capsys):
    if name != "bot":
        needs("timm", "peft")
    configs = [f"recipes/{recipe}" for recipe in (*BEFORE.get(name, []), name)]
    source = "--data.source={class_path: SyntheticReID, init_args: {clients: 2, unseen: 1, scale: 0.3}}"
    code, folder = fit(tmp_path / "run", [*configs, "methods/fedpav"], source, *SMALL[name])
    assert code == 0, capsys.readouterr().err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["bytes_up"] > 0
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["client"]["schedule"]["warmup"] > 0
    assert config["model"]["neck"]["kind"] == "bnneck"


def test_the_bag_of_tricks_has_its_tricks():
    """Luo et al., CVPRW 2019, Section 3 and Figure 3 (b)."""
    content = yaml.safe_load((RECIPES / "bot.yaml").read_text())
    model, client = content["model"], content["model"]["client"]
    assert model["backbone"]["init_args"]["last_stride"] == 1
    assert client["schedule"] == {"kind": "milestones", "milestones": [40, 70], "gamma": 0.1, "warmup": 10}
    assert model["objective"] == {
        "cross_entropy": 1.0, "label_smoothing": 0.1, "triplet": 1.0, "margin": 0.3, "triplet_on": "pool",
            "center": {"weight": 0.001},
    }  # fmt: skip
    assert model["neck"] == {"kind": "bnneck", "bias": False, "dropout": 0.0}
    assert content["data"]["augmentation"] == {"pad": 10, "flip": 0.5, "erase": 0.5}
    assert client["batch_size"] == 16 * client["num_instances"] == 64
    assert content["trainer"]["max_epochs"] == 120


# -- leave one data set out --------------------------------------------------------------------------------------------

SETS = ["market1501", "msmt17", "cuhk03np", "cuhk02"]


@pytest.fixture
def _drawn_once(tmp_path, monkeypatch):
    """Let all rotations have the same stand-ins."""
    monkeypatch.setattr(datamodule, "TemporaryDirectory", lambda prefix: SimpleNamespace(name=str(tmp_path / "sets")))


def rotations(capsys, *options):
    """The command lines of the sweep."""
    capsys.readouterr()
    assert main(["sweep", "--method", "recipes/leave_one_out", *options, "--dry_run"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("_drawn_once")
def test_each_data_set_is_left_out_once(capsys, tmp_path):
    for line, left_out in zip(rotations(capsys), SETS, strict=True):
        words = line[line.index("fit") + 1 :]
        small = ["--model.backbone=SmallCNN", "--model.method=FedPav", *DRY, f"--run_dir={tmp_path / left_out}"]
        assert main(["describe", *[word for word in words if not word.startswith("--run_dir")], *small]) == 0
        text = capsys.readouterr().out
        clients = [
            name for name in SETS if f"\n{name} " in text.partition("Data of the clients")[2].partition("test set")[0]
        ]
        assert clients == [name for name in SETS if name != left_out]
        (row,) = [row for row in text.splitlines() if row.endswith("unseen") and not row.startswith("test set")]
        assert row.split()[0] == left_out


def test_each_method_of_the_field_fits_the_recipe(capsys):
    capsys.readouterr()
    assert (
        main(["sweep", "--method", "recipes/field", "--left_out", "town0", "town1", "--seeds", "0", "--dry_run"]) == 0
    )
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "town0" in line]
    four = "--data.source={class_path: SyntheticReID, init_args: {clients: 4, unseen: 0, scale: 0.3}}"
    for line in lines:
        words = [word for word in line[line.index("fit") + 1 :] if not word.startswith("--run_dir")]
        assert main(["describe", *words, four, "--trainer.devices=1"]) == 0, words
        text = capsys.readouterr().out
        clients = ["union"] if "--config=methods/centralised" in words else ["town1", "town2", "town3"]
        assert all(f"\n{name} " in text for name in clients)
    assert len(lines) == 16


# -- attacks and rules -------------------------------------------------------------------------------------------------


def test_each_attack_meets_each_rule(capsys, tmp_path):
    capsys.readouterr()
    assert main(["sweep", "--method", "recipes/attacks", "--config", "quickstart", "--dry_run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    pairs = [tuple(w for w in line if w.startswith(("--model.attack=", "--model.aggregation="))) for line in lines]
    attacks, rules = ({pair[place] for pair in pairs} for place in (0, 1))
    assert (len(attacks), len(rules), len(pairs), len({*pairs})) == (8, 8, 3 * 8 * 8, 8 * 8)
    eleven = "--data.source={class_path: SyntheticReID, init_args: {clients: 11, unseen: 0, scale: 0.2}}"
    tried = {(attack, rule) for attack, rule in pairs if attack == pairs[0][0] or rule == pairs[-1][1]}
    assert len(tried) == 8 + 8 - 1
    for attack, rule in sorted(tried):
        words = ["--config", "quickstart", "--config", "recipes/attacks", attack, rule, eleven, "--data.val=none"]
        assert main(["describe", *words]) == 0
    assert "Bulyan" in pairs[-1][1]
    code, folder = fit(tmp_path / "run", ["quickstart", "recipes/attacks"], *pairs[-1], eleven, "--trainer.devices=1")
    assert code == 0, capsys.readouterr().err
    figures = json.loads((folder / "summary.json").read_text())["final"]["metrics"]
    assert {"attack/test/success", "attack/test/honest/mAP"} <= figures.keys()
