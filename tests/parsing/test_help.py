"""Help: one screen, all options, the options of a class, lists of classes, completion in a shell."""

import inspect
import re
import subprocess
import sys
from contextlib import suppress

import pytest

import fedsim.methods
from fedsim.__main__ import COMMANDS, main
from fedsim.cli.commands import GROUPS
from fedsim.cli.light import completion
from fedsim.data.datamodule import FederatedDataModule
from fedsim.parsing.options import all_options
from fedsim.parsing.short_help import classes_of, kinds
from fedsim.settings.options import trainer_defaults
from fedsim.settings.table import UNKNOWN, setting_at
from fedsim.training.settings import LocalTraining

SCREEN = 62  # lines
ALL_COMMANDS = [[command] for command in COMMANDS] + [[group, own] for group in GROUPS for own in GROUPS[group]]


def said(capsys, *args):
    """What a command prints; the parser exits after its help."""
    with suppress(SystemExit):
        main(list(args))
    return capsys.readouterr().out


def usual_settings():
    """The five settings that all users change, with their defaults."""
    client = LocalTraining()
    size = inspect.signature(FederatedDataModule).parameters["size"].default
    return [
        ("model.client.optimizer.lr", client.backbone_lr),
        ("model.client.batch_size", client.batch_size),
        ("model.client.local_epochs", client.local_epochs),
        ("trainer.max_epochs", trainer_defaults()["max_epochs"]),
        ("data.size", list(size)),
    ]


def test_help_of_a_fit_is_one_screen_and_says_where_the_rest_is(capsys):
    text = said(capsys, "fit", "--help")
    assert text.count("\n") <= SCREEN
    named = set(re.findall(r"--([\w.]+\w)", text)) - {"help", "model.method.help", "trainer", "model", "data"}
    assert [name for name in named if setting_at(name) is UNKNOWN] == []
    assert "fedsim fit --help all" in text
    for option, default in usual_settings():
        assert re.search(rf"^  --{option} [^\n]*\(default: {re.escape(str(default))}\)$", text, re.MULTILINE), option


def test_a_command_that_scores_shows_its_own_options_and_not_those_of_a_fit(capsys):
    own = {"fit": {"overwrite", "seeds", "left_out"}, "test": {"save_ranking"}, "predict": {"save_maps", "images"}}
    texts = {command: said(capsys, command, "--help") for command in own}
    for command, text in texts.items():
        shown = set(re.findall(r"^  --(\w+)", text, re.MULTILINE))
        assert own[command] <= shown
        assert not shown & {name for other in own if other != command for name in own[other]}


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_help_of_every_command_is_one_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, *command, "--help").splitlines()
    assert 0 < len(lines) <= SCREEN
    assert " ".join(["fedsim", *command]) in lines[0]


@pytest.mark.parametrize("command", ["report", "augment fit"])
def test_short_help_names_every_option_and_says_where_the_rest_is(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, full = (said(capsys, *command.split(), "--help", *rest) for rest in ([], ["all"]))
    assert f"fedsim {command} --help all" in short
    assert full.count("\n") > SCREEN
    options = set(re.findall(r"^  (?:-h, )?--([\w.]+)", full, re.MULTILINE))
    listed = set(re.findall(r"^  --([\w.]+)", short, re.MULTILINE))
    for section, names in re.findall(r"^  --(\w+)\.NAME: [\w ]+: (.*(?:\n {4}.*)*)", short, re.MULTILINE):
        listed |= {section, *(f"{section}.{name}" for name in re.findall(r"\w+", names))}
    listed -= {f"{option}.NAME" for option in listed}
    assert listed == options - {"help", "appearance.help"}
    assert len(listed) > 15


def test_a_narrow_terminal_gets_short_help_of_more_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert "fedsim rank --help all" in said(capsys, "rank", "--help")


def test_all_options_are_those_of_the_parser(capsys):
    text = said(capsys, "fit", "--help", "all")
    assert text.count("\n") > 10 * SCREEN
    assert "E: passes over the client's images" in text
    options = set(re.findall(r"^ +(?:-\w, )?(?:-c \S+, )?--([\w.]+)", text, re.MULTILINE))
    linked = {"help", "model.seed"}  # the latter is seed_everything's
    several = {"seeds", "parallel", "left_out"}  # a command of its own reads them
    assert [name for name in all_options("fit") if name not in options | linked | several] == []
    own = {name for name in options if "." not in name} - {"trainer", "model", "data"}
    assert own <= {*all_options("fit"), "no_save_ranking", "no_save_maps"}


def test_help_of_a_class_explains_its_options(capsys):
    text = said(capsys, "fit", "--model.method.help", "FedKLPR")
    explained = re.findall(r"^  --model\.method(?:\.init_args)?\.(\w+)[^\n]*\n? +\S", text, re.MULTILINE)
    assert len(explained) >= 15
    assert "term that keeps features near the received model's" in " ".join(text.split())


def test_lists_have_every_class_with_a_line(capsys):
    listed = {entry.name: entry.line for entry in classes_of("model.method")}
    assert set(listed) == set(fedsim.methods.__all__) - {"Distillation"}
    text = said(capsys, "list")
    assert len(kinds()) == 9
    for kind, setting in kinds().items():
        assert f"{kind} (--{setting};" in text
        assert all(entry.line for entry in classes_of(setting)), kind
        assert len(classes_of(setting)) >= 2, kind
    assert "FedAvgM" in text
    assert said(capsys, "list", "backbones").count("\n") == 1 + len(classes_of("model.backbone"))


@pytest.mark.parametrize(
    ("words", "answer"),
    [("list method", "did you mean methods?"), ("fitt", "did you mean fit?"), ("data checks", "did you mean check?"),
     ("completion fish", "bash, zsh, tcsh")],
)  # fmt: skip
def test_a_slip_is_answered_with_what_was_meant(capsys, words, answer):
    assert main(words.split()) == 2
    assert answer in capsys.readouterr().err


def test_these_need_no_torch():
    code = (
        "import sys; from fedsim.__main__ import main; "
        "codes = [main(words.split()) for words in ('fit --help', 'list', 'completion')]; "
        "assert codes == [0, 0, 2], codes; assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_shell_completes_commands_options_and_classes(tmp_path):
    pytest.importorskip("shtab")
    script = tmp_path / "fedsim.bash"
    script.write_text(completion(["bash"], COMMANDS))

    def completed(*words):
        program = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            "_shtab_fedsim; echo ${COMPREPLY[@]}"
        )
        return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert completed("fedsim", "desc") == ["describe"]
    assert "--trainer.max_epochs" in completed("fedsim", "fit", "--trainer.max_e")
    assert completed("fedsim", "fit", "--model.method", "FedK") == ["FedKLPR"]


@pytest.mark.parametrize(("words", "value"), [([], False), (["--save_maps"], True), (["--save_maps", "true"], True),
                                              (["--save_maps=false"], False), (["--no_save_maps"], False)])  # fmt: skip
def test_a_flag_takes_a_word_too(words, value, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart", *words, "--print_config"])
    assert f"save_maps: {str(value).lower()}" in capsys.readouterr().out
