"""``fedsim init``: a config for a folder, which describes and trains as it is."""

import shutil
from pathlib import Path

import yaml

from fedsim.__main__ import main
from small import refuse


def test_the_config_for_a_folder_can_be_described_and_trained(market_tree, tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    assert main(["init", str(market_tree), "--output", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("north: 24 images, 6 identities\nsouth: 24 images, 6 identities\n")
    assert f"wrote {config}; try fedsim describe" in out
    text = config.read_text()
    assert text.startswith("# 2 clients, north (24 images, 6 identities), south (24 images, 6 identities), of")
    assert "only tested on: west" in text
    content = yaml.safe_load(text)
    assert content["model"]["client"]["batch_size"] == 16
    assert "clients" not in content["model"]
    assert content["data"]["val"] == "none"  # six identities each
    options = ["--config", str(config), "--run_dir", str(tmp_path / "run"), "--trainer.accelerator=cpu"]
    assert main(["describe", *options]) == 0
    assert main(["fit", *options, "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]) == 0
    assert "west (unseen)" in capsys.readouterr().out


def test_lines_for_a_gpu_are_commented(market_tree, tmp_path, monkeypatch):
    """Without their # they are those of the shipped recipe."""
    config, plain = tmp_path / "mine.yaml", tmp_path / "plain.yaml"
    for output, count in ((config, 1), (plain, 0)):
        monkeypatch.setattr("fedsim.cli.init.visible_gpus", lambda count=count: count)
        assert main(["init", str(market_tree), "--output", str(output)]) == 0
    given, without = yaml.safe_load(config.read_text()), yaml.safe_load(plain.read_text())
    assert given == without
    assert "GPU" not in plain.read_text()
    lines = ("precision:", "benchmark:", "channels_last:", "graph:")
    content = "\n".join(
        line.replace("# ", "", 1) if line.lstrip(" #").startswith(lines) else line
        for line in config.read_text().splitlines()
    )
    used = yaml.safe_load(content)
    recipe = yaml.safe_load((Path(__file__).parents[2] / "configs" / "recipes" / "h100.yaml").read_text())
    for section in ("precision", "benchmark"):
        assert used["trainer"][section] == recipe["trainer"][section]
    for section in ("channels_last", "graph"):
        assert used["model"]["client"][section] == recipe["model"]["client"][section]


def keep(folder, start, number):
    """Remove all but some training images of those whose names begin so; return the data set's folder."""
    kept = sorted((folder / "bounding_box_train").glob(f"{start}*"))[:number]
    for path in set((folder / "bounding_box_train").iterdir()) - set(kept):
        path.unlink()
    return folder


def test_a_small_client_has_its_own_batch_and_a_word_of_warning(market_tree, tmp_path, capsys, caplog):
    root, config = tmp_path / "data", tmp_path / "mine.yaml"
    shutil.copytree(market_tree, root)
    keep(root / "south", "0001", 2)
    keep(Path(shutil.copytree(market_tree / "north", root / "a few")), "", 5)
    assert main(["init", str(root), "--output", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "a few: 5 images, 2 identities\nnorth: 24 images, 6 identities\nsouth: 2 images, 1 identity\n"
    )
    model = yaml.safe_load(config.read_text())["model"]
    assert model["client"]["batch_size"] == 16  # north's
    assert model["clients"] == {"a few": {"batch_size": 4}, "south": {"batch_size": 2}}
    assert "no choice of a checkpoint: south has only 1 identity\n" in config.read_text()
    assert caplog.messages == [
        "south: only one identity to train on, so there is nothing to distinguish; add more, or keep it out of "
        'training: data.unseen: ["south"], without its line in model.clients'
    ]
    assert main(["describe", "--config", str(config)]) == 0


def test_a_client_of_one_image_is_warned_of(market_tree, tmp_path, caplog):
    folder = keep(Path(shutil.copytree(market_tree / "north", tmp_path / "north")), "", 1)
    assert main(["init", str(folder), "--output", str(tmp_path / "mine.yaml")]) == 0
    [line] = caplog.messages
    assert line.startswith("north: only one training image, and a fit needs two; add more, or keep it out")


def test_what_it_cannot_do_is_one_line(market_tree, tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("mine")
    assert "mine.yaml exists already" in refuse(capsys, "init", market_tree, "--output", config)
    assert config.read_text() == "mine"
    assert "no data set in Market-1501 layout" in refuse(capsys, "init", tmp_path, "--output", tmp_path / "new.yaml")
    shutil.copytree(market_tree / "west", tmp_path / "tested" / "west")
    line = refuse(capsys, "init", tmp_path / "tested", "--output", tmp_path / "new.yaml")
    assert "no data set has a folder bounding_box_train, so there is no client to train" in line
    assert not (tmp_path / "new.yaml").exists()
