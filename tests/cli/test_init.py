"""``fedsim init``: a config for a folder, which describes and trains as it is."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

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
        monkeypatch.setattr("fedsim.cli.init.command.visible_gpus", lambda count=count: count)
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


def of_cameras(folder, cameras, people=range(1, 6)):
    """A data set in Market-1501 layout, with random pixels; ``cameras``: of an identity -> its cameras."""
    rng = np.random.default_rng(0)
    for part, pids in (("bounding_box_train", people), ("query", (100, 101)), ("bounding_box_test", (100, 101))):
        for pid in pids:
            for cam in cameras(pid) if part != "query" else cameras(pid)[:1]:
                path = folder / part / f"{pid:04d}_c{cam}s1_{part[0]}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (16, 8, 3), dtype=np.uint8)).save(path)
    return folder


def fits(config, tmp_path):
    options = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    return main(["fit", "--config", str(config), "--run_dir", str(tmp_path / "run"), *options]) == 0


@pytest.mark.parametrize("name", ["b: {c", "\U0001f600", "# x", '"', "'", "\\", "{0}", "a" * 200, "- a"])
def test_a_config_for_a_folder_of_any_name_fits(tmp_path, name):
    config = tmp_path / "mine.yaml"
    of_cameras(tmp_path / name / f"{name}x", lambda _: (1, 2))
    of_cameras(tmp_path / name / "small", lambda _: (1, 2), people=range(1, 3))
    assert main(["init", str(tmp_path / name), "--output", str(config)]) == 0
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert content["data"]["source"]["init_args"]["root"] == str(tmp_path / name)
    assert list(content["model"]["clients"]) == ["small"]
    assert fits(config, tmp_path)


@pytest.mark.parametrize("name", ["a\nb: {c", "a\u2028b", "\x85"])
def test_line_breaks_are_for_paths_and_not_for_names(tmp_path, capsys, name):
    config = tmp_path / "mine.yaml"
    of_cameras(tmp_path / name / "site", lambda _: (1, 2))
    assert main(["init", str(tmp_path / name), "--output", str(config)]) == 0
    assert yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["source"]["init_args"]["root"] == str(
        tmp_path / name
    )
    assert fits(config, tmp_path)
    of_cameras(tmp_path / "sites" / name, lambda _: (1, 2))
    assert "of a data set," in refuse(capsys, "init", tmp_path / "sites", "--output", tmp_path / "other.yaml")
    assert not (tmp_path / "other.yaml").exists()


def test_a_name_that_is_no_text_is_refused_by_init_and_fit(tmp_path, capsys):
    os.rename(of_cameras(tmp_path / "data" / "site", lambda _: (1, 2)), os.fsencode(tmp_path / "data") + b"/stra\xdfe")
    config = tmp_path / "mine.yaml"
    line = refuse(capsys, "init", tmp_path / "data", "--output", config)
    assert "data.source: of a data set, 'stra\\udcdfe' holds bytes that are not UTF-8; rename its folder" in line
    assert not config.exists()
    of_cameras(tmp_path / "good" / "site", lambda _: (1, 2))
    assert main(["init", str(tmp_path / "good"), "--output", str(config)]) == 0
    options = ["--config", config, "--data.source.init_args.root", tmp_path / "data", "--run_dir", tmp_path / "run"]
    assert "'stra\\udcdfe' holds bytes that are not UTF-8" in refuse(capsys, "fit", *options)


@pytest.mark.parametrize("option", ["--run_dir", "--data.cache_dir", "--data.source.init_args.root", "--config", "-c"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_path_that_no_config_can_hold_is_refused(tmp_path, capsys, option, joined):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/stra\xdfe")
    words = [f"{option}={path}"] if joined else [option, path]
    assert "stra\\udcdfe holds bytes that are not UTF-8" in refuse(capsys, "fit", "--config", "quickstart", *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_own_name_is_no_text_is_refused_as_no_config_can_hold_it(tmp_path, capsys):
    folder, config = os.fsdecode(os.fsencode(tmp_path) + b"/stra\xdfe"), tmp_path / "mine.yaml"
    of_cameras(Path(folder) / "site", lambda _: (1, 2))
    assert "stra\\udcdfe holds bytes that are not UTF-8" in refuse(capsys, "init", folder, "--output", config)
    assert not config.exists()


@pytest.mark.parametrize("other", [False, True])
def test_a_data_set_of_one_camera_is_told_of_and_has_a_config_that_fits(tmp_path, caplog, other):
    config = tmp_path / "mine.yaml"
    of_cameras(tmp_path / "data" / "site", lambda _: (3, 3))
    for part in ("query", "bounding_box_test"):  # a second image of each person
        for path in list((tmp_path / "data" / "site" / part).iterdir()):
            shutil.copy(path, path.with_name(path.name.replace("s1_", f"s2_{part}")))
    if other:
        of_cameras(tmp_path / "data" / "other", lambda _: (1, 2))
    assert main(["init", str(tmp_path / "data"), "--output", str(config)]) == 0
    [line] = caplog.messages
    assert line.startswith("site: no query has a match from another camera, so the config counts those of its own")
    assert yaml.safe_load(config.read_text())["model"]["evaluation"] == {"camera_aware": False}
    assert fits(config, tmp_path)


def test_training_images_of_one_camera_choose_no_checkpoint(tmp_path):
    """Also if there are several cameras, and each person was seen by one of them."""
    config = tmp_path / "mine.yaml"
    for folder, cameras in (("one", lambda pid: (1,) if pid < 100 else (1, 2)),
                            ("each", lambda pid: (pid % 4 + 1,) if pid < 100 else (1, 2))):  # fmt: skip
        of_cameras(tmp_path / folder / "site", cameras, people=range(1, 31))
        assert main(["init", str(tmp_path / folder), "--output", str(config)]) == 0
        assert yaml.safe_load(config.read_text())["data"]["val"] == "none"
        assert "of site, no held-out image has a match from another camera" in config.read_text()
        assert fits(config, tmp_path / folder)
        config.unlink()
    of_cameras(tmp_path / "both" / "site", lambda _: (1, 2), people=range(1, 31))
    assert main(["init", str(tmp_path / "both"), "--output", str(config)]) == 0
    assert yaml.safe_load(config.read_text())["data"]["val"] == "identities"
    assert fits(config, tmp_path / "both")


def test_a_data_set_without_any_match_is_refused(tmp_path, capsys):
    folder = of_cameras(tmp_path / "data" / "site", lambda _: (1, 2))
    for part in ("query", "bounding_box_test"):
        for path in list((folder / part).iterdir()):
            path.rename(path.with_name(f"-1{path.name[4:].replace('.png', path.name[:4] + '.png')}"))
    line = refuse(capsys, "init", tmp_path / "data", "--output", tmp_path / "mine.yaml")
    assert "site: no query has a match from another camera (all matches are junk)" in line
    assert not (tmp_path / "mine.yaml").exists()


def test_a_relative_root_that_is_not_there_is_named_in_full(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    where = str(tmp_path / "data")
    for kind in ("MarketFolders", "Market1501", "MSMT17", "VIPeR", "FedReIDBench"):
        source = ["--data.source", kind, "--data.source.init_args.root", "data"]
        assert where in refuse(capsys, "describe", "--config", "quickstart", *source), kind
    options = ["--model.method=FedPav", "--model.backbone=SmallCNN"]
    assert where in refuse(capsys, "describe", *options, "--data.manifest", "data")
    assert where in refuse(capsys, "describe", "--config", "quickstart", "--data.generated.root", "data")
    assert where in refuse(capsys, "init", "data")
    assert where in refuse(capsys, "data", "check", "data")
