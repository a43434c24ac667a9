"""Every shipped config parses and builds a federation."""

import re
from pathlib import Path

import pytest
import yaml

from fedsim.__main__ import main

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "sweeps")  # test_sweep.py


def completing_options(content):
    options = []
    if "backbone" not in content.get("model", {}):
        options += ["--model.backbone=SmallCNN"]
    if "method" not in content.get("model", {}):
        options += ["--model.method=FedPav"]
    if content.get("data", {}).get("source", {}) == {}:
        options += ["--data.source=SyntheticReID"]
    return options


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_config_parses_and_describes_itself(path, tmp_path, capsys, market_tree):
    content = yaml.safe_load(path.read_text())
    options = completing_options(content)
    if "MarketFolders" in path.read_text():
        options += [f"--data.source.root={market_tree}", "--model.client.batch_size=4", "--data.val=none"]
    if "root: data}" in path.read_text() or "root: data," in path.read_text():  # the papers' data sets
        options += ["--data.dry_run=true"]
    if "IMAGENET1K" in path.read_text():
        options += ["--model.backbone.weights=null", "--model.client.batch_size=4"]
    options += ["--run_dir", str(tmp_path / "run"), "--trainer.accelerator=cpu"]
    code = main(["describe", "--config", str(path), *options])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "What is shared" in output.out
    assert re.search(r"bytes down per round, all clients +[\d,]+", output.out)


def test_there_are_configs():
    assert len(CONFIGS) >= 8
