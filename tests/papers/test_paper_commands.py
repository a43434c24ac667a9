"""Commands in the headers of papers' files run to their end on stand-ins, their reports included."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedsim.__main__ import main
from fedsim.papers.files import list_papers
from small import refuse

FILES = Path(__file__).parents[2] / "src" / "fedsim" / "papers"
TINY = [
    "--data.limit_client_batches=1", "--model.client.local_epochs=1", "--trainer.accelerator=cpu",
    "--trainer.devices=1", "--trainer.enable_progress_bar=false",
]  # fmt: skip
"""what makes a command small beside the header's own options"""


def header_of(key):
    """The comments at the top of a paper's file, as one text, and the commands in them."""
    lines = (FILES / f"{key}.yaml").read_text().partition("\ntitle: ")[0].splitlines()
    commands = [shlex.split(line.removeprefix("#   fedsim ")) for line in lines if line.startswith("#   fedsim ")]
    return " ".join(line.removeprefix("#").strip() for line in lines), commands


def dry_options(key):
    """The options with which a header says that its commands work without the data."""
    text, _ = header_of(key)
    words = shlex.split(re.search(r"Without (?:them|any) add (--data\.dry_run.*?): two rounds", text)[1])
    more = re.search(r"need more: the same with (--model\.clients null.*?),", text)
    return words + (shlex.split(more[1]) if more else [])


@pytest.mark.slow
@pytest.mark.parametrize("key", list_papers())
def test_the_commands_of_a_header_run_without_the_data(key, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, commands = header_of(key)
    assert [words[0] for words in commands] == ["papers", "fit", "report"]
    for words in commands:
        small = [*dry_options(key), "--model.backbone.width=4", *TINY] if words[0] == "fit" else []
        code = main([*words, *small])
        output = capsys.readouterr()
        assert code == 0, f"fedsim {' '.join(words)}: {output.err}"
    assert "NOT COMPARABLE" in output.out
    assert re.search(r"; settings that differ: \d+\n    data: .*data\.dry_run true \(row: false\)", output.out)
    assert "no row of this table" not in output.out


CIFAR = ["--data.dry_run=true", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", *TINY]


def test_a_dry_run_on_cifar10_is_compared_with_its_column(tmp_path, capsys):
    assert main(["fit", "--paper=001/cifar10_half", *CIFAR, f"--run_dir={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--compare", "001/table2", "--metric", "top1"]) == 0
    text = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    score = 100 * summary["final"]["metrics"]["test/global/cifar10/top1"]
    cells = next(line for line in text.splitlines() if line.startswith("cifar10"))
    assert f"{score:.2f}" in cells.split()
    assert "is closest to 'FedAVG, S = 0.5' (001/cifar10_half)" in text
    assert "model.backbone" not in text[text.index("is closest") :]


SMALL_001 = [
    "--data.dry_run=true", "--data.size=[72, 36]", "--data.augmentation.crop=[64, 32]", "--trainer.max_epochs=1",
    "--trainer.check_val_every_n_epoch=1", "--data.unseen=null", *TINY,
    '--data.source=[{"class_path": "VIPeR", "init_args": {"root": "data"}}]',
]  # fmt: skip


@pytest.mark.parametrize("row", ["table3_parameter_average", "table6_supervised", "table6_same_weights"])
def test_a_row_that_starts_from_a_file_is_not_run_without_it(row, capsys):
    line = refuse(capsys, "fit", f"--paper=001/{row}", *SMALL_001, "--model.backbone=SmallCNN")
    assert "model.backbone: SmallCNN has no weights, but a config starts from runs/001/" in line
    assert "--model.backbone.depth 18" in line


@pytest.mark.slow
def test_the_mean_of_local_models_is_scored_in_a_dry_run(tmp_path, monkeypatch, capsys):
    """Local training, ``export --mean``, and the row that scores the file, with a small network of the same kind."""
    monkeypatch.chdir(tmp_path)
    small = [*SMALL_001, "--model.backbone.depth=18"]
    assert main(["fit", "--paper=001/table3_local", *small, "--run_dir=runs/001/local"]) == 0
    mean = Path("runs/001/local/mean.safetensors")
    words = ["--ckpt_path", "runs/001/local/checkpoints/last.ckpt", "--mean", "true", "--output", str(mean)]
    assert main(["export", *words]) == 0
    scores = []
    for name, weights in (("mean", []), ("random", ["--model.backbone.weights=null"])):
        assert main(["fit", "--paper=001/table3_parameter_average", *small, *weights, f"--run_dir={name}"]) == 0
        scores.append(json.loads(Path(name, "summary.json").read_text())["final"]["metrics"])
    assert scores[0] != scores[1]
    capsys.readouterr()
    assert main(["report", "mean", "--compare", "001/table3"]) == 0
    text = capsys.readouterr().out
    assert "is closest to 'Parameter-Average' (001/table3_parameter_average)" in text
    assert "model.backbone.weights: the content of the row's file is not known" in text
    assert text.count("model.backbone.weights") == 1, "another path is no difference"
    assert main(["report", "random", "--compare", "001/table3"]) == 0
    assert "model.backbone.weights none (row: runs/001/local/mean.safetensors)" in capsys.readouterr().out
