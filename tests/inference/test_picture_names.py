"""Test sets with the names of other pictures: each picture has a file of its own, and the page has the sets' names."""

import csv
from typing import get_args

import pytest

from fedsim.__main__ import main
from fedsim.core.replaced_run import CONFUSION, OF_IMAGES, PROJECTED, files_of_sets
from fedsim.report.course import COURSE
from fedsim.report.projection import Projector
from runs_of_sites import CONFIG
from sites import site

pytest.importorskip("plotly", reason="the extra 'report' is not installed")
SETS = ("Confusion", "images-a", "pca-global")


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_other_picture_begins_with_a_word_that_no_file_of_a_set_begins_with():
    names = [CONFUSION, COURSE, f"{OF_IMAGES}x", *(f"{projector}-global" for projector in get_args(Projector))]
    assert {f"{projector}-" for projector in get_args(Projector)} == {*PROJECTED}
    assert {*names}.isdisjoint(files_of_sets(names).values())


def test_sets_may_have_the_names_of_other_pictures(tmp_path):
    for number, name in enumerate(SETS):
        site(tmp_path / "data" / name, range(1, 5 * (number < 2)), range(11, 14 + number), (1, 2, 3))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("ROOT", str(tmp_path / "data")))
    run, features = tmp_path / "run", tmp_path / "run" / "features"
    words = ["--trainer.callbacks+=Pictures", "--trainer.callbacks.projection=pca"]
    assert main(["fit", "--config", str(tmp_path / "run.yaml"), "--run_dir", str(run), *words]) == 0
    assert main(["predict", "--ckpt_path", str(run)]) == 0
    before = {path.name: path.read_bytes() for path in features.iterdir()}
    images = tmp_path / "data" / "images-a" / "query"
    images.rename(images.with_name("a"))
    assert main(["predict", "--ckpt_path", str(run), "--images", str(images.with_name("a"))]) == 0
    images.with_name("a").rename(images)
    assert {name: (features / name).read_bytes() for name in before} == before
    page = run / "page.html"
    options = ["--queries", "worst", "--confusion", "--projection", "pca", "--html", str(page)]
    assert main(["report", str(run), *options]) == 0
    drawn = run / "pictures" / "round-1"
    assert len(list(drawn.glob("*.png"))) == len(SETS) + 2
    for folder in (drawn, run / "queries"):
        found = {rows_of(path)[0]["data set"] for path in folder.glob("%*.csv")}
        assert found == {*SETS}
        assert "first image's camera" in rows_of(folder / "confusion.csv")[0]
    text = page.read_text()
    for name in SETS:
        assert f'alt="{name} of FedPav"' in text
        assert f'alt="{name} of FedPav in round 1"' in text
    assert 'alt="confusion of FedPav"' in text
    assert 'alt="pca-global of FedPav: features of test images as points"' in text
    assert "%43onfusion" not in text
