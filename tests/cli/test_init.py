"""``fedsim init``: a config for a folder, which describes and trains as it is."""

import shutil

import yaml

from fedsim.__main__ import main
from small import refuse


def test_the_config_for_a_folder_can_be_described_and_trained(market_tree, tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    assert main(["init", str(market_tree), "--output", str(config)]) == 0
    assert f"wrote {config}; try fedsim describe" in capsys.readouterr().out
    text = config.read_text()
    assert text.startswith("# 2 clients, north (24 images), south (24 images), of")
    assert "only tested on: west" in text
    content = yaml.safe_load(text)
    assert content["model"]["client"]["batch_size"] == 16
    assert content["data"]["val"] == "none"  # six identities each
    options = ["--config", str(config), "--run_dir", str(tmp_path / "run"), "--trainer.accelerator=cpu"]
    assert main(["describe", *options]) == 0
    assert main(["fit", *options, "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]) == 0
    assert "west (unseen)" in capsys.readouterr().out


def test_what_it_cannot_do_is_one_line(market_tree, tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("mine")
    assert "mine.yaml is there already" in refuse(capsys, "init", market_tree, "--output", config)
    assert config.read_text() == "mine"
    assert "no data set in Market-1501 layout" in refuse(capsys, "init", tmp_path, "--output", tmp_path / "new.yaml")
    shutil.copytree(market_tree / "west", tmp_path / "tested" / "west")
    line = refuse(capsys, "init", tmp_path / "tested", "--output", tmp_path / "new.yaml")
    assert "no data set has bounding_box_train, so nobody can train" in line
    assert not (tmp_path / "new.yaml").exists()
