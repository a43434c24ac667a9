"""The parser of a command is built once per process; no command line sees anything of an earlier one."""

import gc

import pytest
import torchmetrics
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

from fedsim.__main__ import main
from fedsim.cli import fit

SIZE = "model.client.batch_size"
NO_DEFAULT = Namespace(class_path="fedsim.federation.selection.RandomFraction", init_args=Namespace(fraction=0.5))


@pytest.fixture(autouse=True)
def _no_parser_is_built(monkeypatch):
    monkeypatch.setattr(fit, "_PARSERS", {})


@pytest.fixture
def printed(capsys):
    """Return what a command that ends early prints."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main([*words])
        assert end.value.code in (0, None)
        return capsys.readouterr().out

    return run


def defaults_changed_by(change, monkeypatch):
    """Let the next command line change its parser in ``change`` before it is read."""
    read = fit.FedSimCLI.parse_arguments

    def parse(cli, parser, args):
        change(cli._parser(cli.command))
        read(cli, parser, args)

    monkeypatch.setattr(fit.FedSimCLI, "parse_arguments", parse)


def test_a_parser_is_built_once(printed, monkeypatch):
    built, build = [], LightningCLI.setup_parser

    def count(cli, *args):
        built.append(cli.command)
        build(cli, *args)

    monkeypatch.setattr(LightningCLI, "setup_parser", count)
    for command in ("fit", "fit", "test", "fit"):
        printed(command, "--print_config")
    assert built == ["fit", "test"]


def test_options_of_one_command_line_are_not_those_of_the_next(printed, tiny):
    fresh = printed("fit", "--print_config")
    options = ["--model.method=FedProx", "--model.method.mu=0.5", "--trainer.callbacks+=LearningRateMonitor"]
    other = printed("fit", "--config", str(tiny), *options, "--data.size=[8, 4]", "--print_config")
    assert "FedProx" in other
    assert "LearningRateMonitor" in other
    assert printed("fit", "--print_config") == fresh


def test_a_mistake_behind_print_config_prints_nothing_later(printed, capsys, tiny, tmp_path):
    fresh = printed("describe", "--print_config")
    assert main(["describe", "--print_config", f"--{SIZE}=many"]) == 2
    assert SIZE in capsys.readouterr().err
    assert main(["describe", "--config", str(tiny), "--run_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown
    assert "seed_everything:" not in shown, "that is a config"
    assert printed("describe", "--print_config") == fresh


def test_a_default_that_one_command_line_changes_is_back_in_the_next(printed, monkeypatch):
    fresh = printed("fit", "--print_config")
    with monkeypatch.context() as patch:
        defaults_changed_by(lambda parser: parser.set_defaults({SIZE: 77}), patch)
        assert "batch_size: 77" in printed("fit", "--print_config")
    with monkeypatch.context() as patch:  # this default can be changed in its place
        defaults_changed_by(lambda parser: parser.get_default("model.selection").update(NO_DEFAULT), patch)
        assert "RandomFraction" in printed("fit", "--print_config")
    assert printed("fit", "--print_config") == fresh


def test_help_has_the_text_of_fields_whatever_came_before(printed):
    assert torchmetrics.MetricTracker  # now, as help names all subclasses of Module that are imported
    gc.collect()  # and those of earlier tests, as long as they live
    fresh = printed("fit", "-h", "all")
    fit._PARSERS.clear()
    config = printed("fit", "--print_config")
    assert printed("fit", "-h", "all") == fresh
    assert printed("fit", "--print_config") == config
