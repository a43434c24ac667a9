"""The examples of docs/your_own.md: each passes its check, they train together, and commands read the source."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsim.__main__ import main
from fedsim.data import SyntheticReID
from fedsim.testing import check_backbone, check_loss, check_method, check_source
from small import refuse

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ["own_backbone", "own_callback", "own_loss", "own_method", "own_source"]  # own_module.py has a page of its own
EXAMPLES = [DOCS / "examples" / f"{name}.py" for name in NAMES]

pytestmark = [pytest.mark.slow, pytest.mark.dist]  # each check has fits in processes of their own


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def people(tmp_path):
    """A folder of drawn people with its table."""
    rows = []
    for domain in SyntheticReID(clients=2, unseen=1, scale=0.1).domains():
        for part, split in (("train", domain.train), ("query", domain.query), ("gallery", domain.gallery)):
            if split is None:
                continue
            pixels = split.images.decode((32, 16)).permute(0, 2, 3, 1).numpy()
            for number, image in enumerate(pixels):
                file = f"{domain.name}-{part}-{number:04d}.png"
                Image.fromarray(image).save(tmp_path / file)
                rows.append([domain.name, part, file, split.pids[number], split.camids[number]])
    with (tmp_path / "people.csv").open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerows([["client", "part", "file", "person", "camera"], *rows])
    return tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_is_shown(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    shown = re.findall(r"```python\n(.*?)```", (DOCS / "your_own.md").read_text(), re.DOTALL)
    assert text in shown


def test_the_examples_pass_their_checks(people):
    from own_backbone import Stripes
    from own_loss import AcrossCameras
    from own_method import PullHome
    from own_source import TableOfImages

    check_method(PullHome(mu=0.2))
    check_backbone(Stripes(width=8))
    check_loss(AcrossCameras(first=1))
    source = TableOfImages(str(people / "people.csv"))
    check_source(source, size=(32, 16), picture=people / "seen.png")
    expected = SyntheticReID(clients=2, unseen=1, scale=0.1).domains()
    for mine, drawn in zip(source.domains(), sorted(expected, key=lambda domain: domain.name), strict=True):
        assert (mine.name, mine.train is None) == (drawn.name, drawn.train is None)
        assert np.array_equal(mine.gallery.pids, drawn.gallery.pids)


def test_the_commands_of_the_page_train_with_all_of_them(people, monkeypatch):
    commands = re.findall(r"^fedsim fit (.*?)\n```", (DOCS / "your_own.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(people)
    (people / "runs").mkdir()
    small = ["--trainer.max_epochs=2", "--trainer.devices=1", "--data.size=[32, 16]", "--data.val=none"]
    for command in commands:
        assert main(["fit", *shlex.split(command.replace("\\\n", " ")), *small]) == 0
    assert (people / "runs" / "own" / "summary.json").exists()
    lines = [json.loads(line) for line in (people / "runs" / "losses-0.jsonl").read_text().splitlines()]
    rows = {(line["round"], line["client"]) for line in lines}
    assert len(rows) == len(lines) == 2 * SyntheticReID().clients, "a line for each client and round"


def test_check_and_preview_take_a_source(people, capsys, monkeypatch):
    monkeypatch.chdir(people)
    source = ["--data.source", "own_source.TableOfImages", "--data.source.table", "people.csv"]
    assert main(["data", "check", *source, "--picture", "checked.png"]) == 0
    text = capsys.readouterr().out
    for domain in SyntheticReID(clients=2, unseen=1, scale=0.1).domains():
        trained = f"{len(domain.train.identities)} / {len(domain.train)}" if domain.train else "- / -"
        numbers = f"{trained} / {len(domain.query)} / {len(domain.gallery)}"
        assert re.search(rf"^{domain.name} +{numbers} +- +- +there; no official count$", text, re.MULTILINE)
    assert "no finding; wrote checked.png" in text
    assert main(["data", "preview", *source, "--output", "drawn.png"]) == 0
    assert "wrote drawn.png: 3 data sets" in capsys.readouterr().out
    with Image.open("checked.png") as checked, Image.open("drawn.png") as drawn:
        assert checked.size == drawn.size


def test_a_source_with_a_finding_ends_with_code_1(people, capsys, monkeypatch):
    monkeypatch.chdir(people)
    table = people / "people.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([line.replace(",query,", ",train,") for line in lines]))  # test people in training
    assert main(["data", "check", "--data.source=own_source.TableOfImages", "--data.source.table=people.csv"]) == 1
    captured = capsys.readouterr()
    assert "test identities must be new" in captured.out
    assert len([line for line in captured.err.splitlines() if line]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", "--data.source", "own_source.Nothing"], "data.source"),
        (
            ["check", "--data.source", "own_source.TableOfImages", "--data.source.table", "none.csv"],
            "none.csv: no such",
        ),
        (["preview", "--data.sauce", "SyntheticReID"], "--data.sauce"),
        (["manifest", "--data.source", "SyntheticReID"], "fedsim data manifest: takes no --data.source"),
        (["check", "--data.source", "SyntheticReID", "--rot", "."], "--rot"),
    ],
)
def test_mistakes_are_one_line(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refuse(capsys, "data", *words)


@pytest.mark.parametrize("command", ["check", "preview"])
def test_a_setting_that_lacks_is_said_with_a_command_that_lists_it(command, capsys):
    line = refuse(capsys, "data", command, "--data.source", "MarketFolders")
    assert "MarketFolders needs root" in line
    assert line.strip().endswith("; fedsim fit --help all lists all options")
