"""Files of configs/generators: what they say is what the parser takes, and networks are made of it."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from fedsim.__main__ import main
from fedsim.cli.augment.fit import built, fit_parser, settings_of_generators
from fedsim.cli.augment.images import preview, write
from fedsim.generation.networks import Discriminator, Generator, check_size
from fedsim.papers.files import read_paper, with_paper
from fedsim.parsing.config_files import join_configs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "generators"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
NAMING = [  # other files whose comments have commands of fedsim augment
    ROOT / "src" / "fedsim" / "papers" / "002.yaml",
    ROOT / "slurm" / "augment.sbatch",
    ROOT / "docs" / "augmentation.md",
]


def parsed(path, *options):
    """What ``fedsim augment fit`` makes of a file."""
    return fit_parser().parse_args([f"--settings={path}", "--config=some.yaml", *options])


def commands_of(path):
    """Commands of fedsim augment in a file's comments or code blocks, as lists of words after ``augment``."""
    text = re.sub(r"^ *# ?", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r" *fedsim augment \w", line)]
    return [shlex.split(line, comments=True)[2:] for line in lines]


def parse(command, *options):
    """Parse a command as ``fedsim augment`` does."""
    options = join_configs(with_paper(options))
    if command == "fit":
        return fit_parser().parse_args(options)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments({"preview": preview, "write": write}[command], as_group=False)
    return parser.parse_args(options)


def test_there_are_configs():
    assert {path.stem for path in CONFIGS} == {"people", "small"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_all_that_a_generator_depends_on(path):
    content = yaml.safe_load(path.read_text())
    assert tuple(content) == tuple(settings_of_generators())
    known = yaml.safe_load(fit_parser().dump(parsed(path), skip_none=False))
    for group in ("networks", "losses", "training"):
        assert content[group].keys() == known[group].keys()


def test_small_is_what_the_command_does_without_a_file():
    parser = fit_parser()
    dumped = [
        yaml.safe_load(parser.dump(given, skip_none=False))
        for given in (parsed(FOLDER / "small.yaml"), parser.parse_args(["--config=some.yaml"]))
    ]
    with_file, without = ({name: known[name] for name in settings_of_generators()} for known in dumped)
    assert with_file == without


@pytest.mark.parametrize(("name", "size"), [("small", (64, 32)), ("people", (256, 128))])
def test_networks_of_a_config_make_images(name, size):
    given = parsed(FOLDER / f"{name}.yaml", *(["--appearance.weights=null"] if name == "people" else []))
    values = built(fit_parser(), given)
    assert (values["size"] or size) == size  # null: that of configs/quickstart.yaml
    check_size(size, values["networks"])
    generator = Generator(values["appearance"], values["networks"], num_classes=3).eval()
    with torch.no_grad():
        images = generator(torch.zeros(1, 3, *size), torch.zeros(1, 3, *size))
        scores = Discriminator(values["networks"].width, values["networks"].scales)(images)
    assert images.shape == (1, 3, *size)
    assert len(scores) == values["networks"].scales


def test_people_has_the_published_sizes():
    given = parsed(FOLDER / "people.yaml", "--appearance.weights=null")
    values = built(fit_parser(), given)
    generator = Generator(values["appearance"], values["networks"], num_classes=3)
    assert generator.appearance.code_size == 4 * 2048
    assert generator.structure(torch.zeros(1, 3, *values["size"])).shape == (1, 128, 64, 32)
    numbers = sum(tensor.numel() for tensor in generator.appearance.backbone.state_dict().values())
    for path in (FOLDER / "people.yaml", ROOT / "docs" / "augmentation.md"):
        assert f"{numbers / 1e6:.1f} million numbers" in " ".join(path.read_text().replace("#", "").split())


@pytest.mark.parametrize("path", [*CONFIGS, *NAMING], ids=lambda path: path.name)
def test_commands_in_comments_are_options_of_the_commands(path):
    commands = commands_of(path)
    assert commands
    for command, *words in commands:
        options = [word for word in words if word.strip('"') not in ("$@", "...")]
        given = parse(command, *options)
        assert given.config is not None
        if "--paper" in words:
            assert [*map(json.loads, given.config)] == read_paper("002").configs()
        else:
            assert (ROOT / given.config).is_file() or "$" in given.config


@pytest.mark.others
@pytest.mark.slow
def test_the_worked_example_runs(tmp_path, capsys, monkeypatch, quick_judge):
    """The commands of docs/augmentation.md in their order, with few steps and one small round."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "augmentation.md").read_text()
    (block,) = [block for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) if "fedsim augment write" in block]
    lines = block.replace("\\\n", " ").splitlines()
    commands = [[word.replace("configs/", f"{ROOT}/configs/") for word in shlex.split(line)[1:]] for line in lines]
    few = {
        "augment fit": ["--processes=1", "--training.steps=1", "--networks.width=4", "--appearance.width=4"],
        "fit": ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=1",
                "--trainer.devices=1", "--trainer.enable_progress_bar=false"],
    }  # fmt: skip
    for words in commands:
        name = " ".join(words[:2]) if words[0] == "augment" else words[0]
        assert main([*words, *few.get(name, [])]) == 0, capsys.readouterr().err
    output = capsys.readouterr().out
    assert re.search(r"^town5 .* %$", output, re.MULTILINE)
    assert "mAP / rank-1 in percent" in output
    assert (tmp_path / "runs" / "augment" / "swaps.jpg").is_file()
