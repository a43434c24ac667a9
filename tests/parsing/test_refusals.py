"""Mistakes that fedsim does not see itself, but Lightning, the parser or the disk: one line, exit code 2."""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import yaml
from lightning import Trainer
from lightning_utilities.core import imports

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.federation.checks.compatibility import naming_the_field
from fedsim.parsing.config_files import read_config
from fedsim.parsing.error_lines import failure_of
from run_dirs import write_run
from small import refuse


@pytest.mark.parametrize("below", ["", "/sub", "/sub/sub"])
def test_a_run_directory_that_cannot_be_is_found_out_before_training(capsys, tiny, below):
    folder = f"{tiny}{below}"  # tiny is a file
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", folder)
    assert f"run_dir: {folder} cannot be a folder" in line
    assert "name another" in line


def test_so_is_one_that_the_system_refuses(capsys, tiny):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", "/proc/fedsim")
    assert "run_dir: /proc/fedsim cannot be a folder" in line


def test_so_is_that_of_a_sweep(capsys, tiny, write_sweep):
    line = refuse(capsys, "sweep", write_sweep(), "--local", "--run_dir", tiny)
    assert f"--run_dir: {tiny} cannot be a folder" in line


# what only Lightning knows: its words, with the field before them
OF_THE_TRAINER = [
    ("devices=-2", "trainer.devices: -2", "a number of ranks from 1, or auto"),
    ("devices=two", "trainer.devices: two", "a number of ranks from 1, or auto"),
    ("devices=0", "trainer.devices: 0", "a number of ranks from 1, or auto"),
    ("accelerator=cuuda", "trainer.accelerator: cuuda", "set trainer.accelerator to cpu or auto"),
    ("strategy=ddpp", "trainer.strategy: ddpp", "FederatedStrategy"),
    ("num_nodes=0", "trainer.num_nodes: 0", "leave it out"),
    ("max_epochs=-3", "trainer.max_epochs: -3", "give a number of rounds, 1 or more"),
    ("max_epochs=1:30", "trainer.max_epochs: 1:30 is not a number", "write it without colons"),
    ("max_time=soon", "trainer.max_time: soon", "00:12:00:00"),
    ("limit_val_batches=-1", "trainer.limit_val_batches: -1", "has to be in [0.0, 1.0]"),
    ("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch: 0", "set it to 1 or more"),
    ("check_val_every_n_epoch=-2", "trainer.check_val_every_n_epoch: -2", "set it to 1 or more"),
    ("check_val_every_n_epoch=null", "trainer.check_val_every_n_epoch: None", "set it to 1 or more"),
    ("num_sanity_val_steps=-2", "trainer.num_sanity_val_steps: -2", "use 0, or -1 for all"),
    ("log_every_n_steps=-1", "trainer.log_every_n_steps: -1", "set it to 1 or more"),
    ("val_check_interval={fault: 1}", "trainer.val_check_interval: ", "cannot be used"),
    ("max_time={fault: 1}", "trainer.max_time: ", "00:12:00:00"),
    ("devices=1000000", "trainer.devices: 1000000 ranks are too many for a machine", "give at most"),
]


@pytest.mark.parametrize(("option", "field", "remedy"), OF_THE_TRAINER, ids=[case[0] for case in OF_THE_TRAINER])
def test_what_lightning_refuses_names_the_field(capsys, tiny, tmp_path, option, field, remedy):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--trainer.{option}")
    assert field in line
    assert remedy in line
    assert not (tmp_path / "run").exists()


def test_describe_refuses_devices_too(capsys, tiny):
    assert "trainer.devices: -2 cannot be used" in refuse(capsys, "describe", "--config", tiny, "--trainer.devices=-2")


def test_describe_takes_more_ranks_than_this_machine_could_hold_but_not_any_number(capsys, monkeypatch, tiny):
    monkeypatch.setattr("fedsim.strategy.sharing.os.cpu_count", lambda: 2)
    words = ("describe", "--config", str(tiny))
    assert main([*words, "--trainer.devices=100"]) == 0
    assert "give at most 1024" in refuse(capsys, *words, "--trainer.devices=1000000000000000")


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda", "mps"])
def test_an_accelerator_that_is_not_there(capsys, tiny, tmp_path, name):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--trainer.accelerator={name}")
    assert f"trainer.accelerator: {name} cannot be used" in line
    assert "set trainer.accelerator to cpu or auto; here: cpu alone" in line


@pytest.mark.parametrize("command", ["fit", "describe"])
@pytest.mark.parametrize("devices", ["[9]", "3", "[0, 0]", "cuda:9"])
def test_gpus_that_are_not_there_are_named_with_those_that_are(capsys, monkeypatch, tiny, command, devices):
    monkeypatch.setattr("fedsim.core.devices.why_cuda_fails", lambda cuda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    words = ["--trainer.accelerator=gpu", f"--trainer.devices={devices}"]
    line = refuse(capsys, command, "--config", tiny, *words)
    assert f"trainer.devices: {devices} cannot be used" in line
    assert "here: cpu, cuda:0 (NVIDIA H100), cuda:1 (NVIDIA H100)" in line


def test_only_what_lightning_raises_is_a_wrong_setting():
    given = {"devices": "auto", "accelerator": "cpu"}
    with pytest.raises(ConfigError, match=r"^trainer\.accelerator: cpu cannot"), naming_the_field(given):
        Trainer(accelerator="cuuda")
    with pytest.raises(TypeError, match="devices of a defect"), naming_the_field(given):
        raise TypeError("devices of a defect")


# -- what the parser says ----------------------------------------------------------------------------------------------

OF_THE_PARSER = [
    ("--seed_everything=-5", "seed_everything: -5 is not a number from 0 to 4294967295"),
    ("--seed_everything=4294967296", "seed_everything: 4294967296 is not a number from 0 to 4294967295"),
    ("--seed_everything=abc", "seed_everything: expected a number from 0 to 4294967295, got abc"),
    ("--data.size=64", "data.size: expected a height and a width, such as [64, 32], got 64"),
    ("--data.size=64x32", "data.size: expected a height and a width, such as [64, 32], got 64x32"),
    ("--data.size=[64]", "data.size: expected a height and a width, such as [64, 32], got [64]"),
    ("--trainer.precision=17", "trainer.precision: expected 32-true or bf16-mixed, got 17"),
    ("--trainer.logger=nolog", "trainer.logger: there is no class nolog; give the class_path of one"),
    ("--trainer.logger=wandb", "trainer.logger: there is no class wandb; did you mean WandbLogger?"),
    ("--model.clients.town0=5", "such as {town0: {batch_size: 8}}, got {town0: 5}"),
    ("--model.clients.town0={batch_size:", "{batch_size: has no end; write the value in quotes"),
    ("--trainer.max_epochs=many", "trainer.max_epochs: expected int or null, got many"),
    ("--model.client.optimizer=torch.optim.Adamm", "model.client.optimizer: there is no class torch.optim.Adamm"),
    ("--model.client.optimizer=nowhere.Adam", "model.client.optimizer: there is no class nowhere.Adam"),
    ("--model.client.optimizer.lr=nan", "model.client.optimizer.lr: nan is no finite number"),
    ("--model.clients={town0: 5}", "model.clients: expected the fields of each client, such as {town0: {batch_size"),
    ("--model.clients={town0: {batch_size: x}}", "model.clients.batch_size: expected int or null, got x"),
    ("--model.method=5", "model.method: there is no class 5; choose from APFL"),
    ("--data.source.clients=x", "data.source.clients: expected int, got x"),
    ("--trainer.strategy.connect_timeout=x", 'd days, h:m:s" but got "x"'),
    ("--model.client=5", "model.client: is a section; give its fields"),
    ("--model.method=Dittoo", "model.method: there is no class Dittoo; did you mean Ditto?"),
    ("--model.client.optimizer=Adamm", "model.client.optimizer: there is no class Adamm; did you mean Adam?"),
    ("--trainer.logger=WandbLoger", "trainer.logger: there is no class WandbLoger; did you mean WandbLogger?"),
    ("--model.method=fedsim.methods.FedPv", "has no attribute 'FedPv'); did you mean FedPav?"),
    ("--model.method=nowhere.Mine", "(no module named 'nowhere'); is nowhere installed, in the working directory"),
    ("--model.method=small.Some", "small.Some is not a subclass of Method; derive it from Method"),
    ("--model.method=sklearn.Foo", "no class sklearn.Foo (module 'sklearn' has no attribute 'Foo'); is the name"),
    ("--model.backbone=sklearn.Foo", "there is no class sklearn.Foo (module 'sklearn' has no attribute 'Foo'); is the"),
    ("--model.method=..FedPav", "model.method: there is no class ..FedPav; did you mean FedPav?"),
    ("--data.alpha=-0.5", "data.alpha: -0.5 is not positive"),
    ("--data.parts=-3", "data.parts: -3 is not positive"),
    (
        "--model.server_optimizer={class_path: nowhere.Adam, init_args: {lr: 0.1}}",
        "model.server_optimizer: there is no class nowhere.Adam (no module named 'nowhere'); is nowhere installed",
    ),
    ("--model.client.optimizer={class_path: sklearn.A}", "no class sklearn.A (module 'sklearn' has no attribute 'A')"),
    ("--model.client.optimizer=fedsim.methods.FedPav", "methods.FedPav is not a subclass of Optimizer; derive it from"),
    ("--model.client.optimizer=textwrap.dedent", "dedent cannot be used (Expected 'textwrap.dedent' to be a func"),
    ("--model.method.weightng=size", "model.method: FedPav has no option weightng; did you mean weighting?"),
    ("--model.clients.town0.batch=3", "model.clients: ClientOverride has no option batch; did you mean batch_size?"),
    ("--model.client.lr=0.1", "there is no such option; did you mean --model.client.optimizer.lr?"),
    ("--model.client.batchsize=3", "there is no such option; did you mean --model.client.batch_size?"),
    ("--trainer.max_epoch=3", "--trainer.max_epoch: there is no such option; did you mean --trainer.max_epochs?"),
    ("--model.seed=1", "model.seed: is no option; give seed_everything"),
    ("--model.availability=5", "model.availability: is a section"),
    ("--model.selection=", "model.selection: name a class; choose from AllClients"),
    ("--model.client.optimizer=", "model.client.optimizer: name a class; give the class_path of one"),
    ("--model.privacy=", "model.privacy: name a class; choose from DifferentialPrivacy"),
    ("--model.method={fault: 1, init_args: {share_head: true}}", "model.method: FedPav has no option fault; choose"),
    ("--model.backbone={class_ath: ResNet, init_args: {depth: 18}}", "no option class_ath; did you mean class_path?"),
    ("--model.backbone={class_ath: ResNet}", "SmallCNN has no option class_ath; did you mean class_path?"),
    ("--data.source=[{class_ath: FedReIDBench}]", "SyntheticReID has no option class_ath; did you mean class_path?"),
    ("--model.clients={town0: {batch_size: 4}, town1: 5}", "such as {town0: {batch_size: 8}}, got 5"),
    ("--model.objective.margin=-0.1", "model.objective.margin: -0.1 is negative"),
    ("--model.neck.dim=1000000000", "model.neck.dim: 1000000000 is not in [1, 65536]"),
    ("--model.backbone.width=1000000000", "backbone.width: 1000000000 is not in [1, 4096]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "line"),
    [("report --hmtl x", "--hmtl: there is no such option; did you mean --html?; fedsim report --help all lists"),
     ("report runs --htm x", "--htm: there is no such option; did you mean --html?"),  # a beginning is no name
     ("rank --distanc cosine f.npz", "--distanc: there is no such option; did you mean --distance?"),
     ("sweep --metod fedpav", "--metod: there is no such option; did you mean --method?"),
     ("doctor --jsn", "--jsn: there is no such option; did you mean --json?"),
     ("data check --rot x", "--rot: there is no such option; did you mean --root?"),
     ("augment fit --config c --losses.imag 3", "--losses.imag: there is no such option; did you mean --losses.image?"),
     ("train --config quickstart", "there is no command train; did you mean fit?"),
     ("fit quickstart", "quickstart: is no option; did you mean --config quickstart?"),
     ("predict", "give the run to score, such as --ckpt_path runs/"),
     ("fit --config quickstart --seeds 0,1,2", "0,1,2 is not a list of integers >= 0; give such as --seeds 0 1 2"),
     ("papers --paper 003", "papers: cannot use --paper"),
     ("papers 003 004", "papers: cannot use 004; give one paper, or one name, or nothing")],
)  # fmt: skip
def test_every_command_answers_a_slip_in_a_line(capsys, tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").write_text("data: {source: SyntheticReID}")
    assert line in refuse(capsys, *words.split())


@pytest.mark.parametrize(("option", "words"), OF_THE_PARSER, ids=[case[0] for case in OF_THE_PARSER])
def test_what_the_parser_refuses_is_said_in_full(capsys, tiny, tmp_path, option, words):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", option)
    assert words in line
    for noise in ("Subtypes", "Given value", "class '", "..."):
        assert noise not in line


@pytest.mark.parametrize(
    ("option", "words"),
    [("--size=64", "size: expected a height and a width, such as [64, 32], got 64"),
     ("--clients=town0", "clients: expected a list of names, such as '[town0]', got town0"),
     ("--networks=5", "networks: is a section")],
)  # fmt: skip
def test_options_of_augment_too(capsys, tiny, tmp_path, option, words):
    assert words in refuse(capsys, "augment", "fit", "--config", tiny, "--output", tmp_path / "out", option)


@pytest.mark.parametrize(
    ("field", "options", "words"),
    [("client.optimizer", "{class_path: torch.optim.Adam, init_args: {betas: [-0.5, 0.9]}}", "betas: Invalid beta"),
     ("client.optimizer", "{class_path: torch.optim.SGD, init_args: {lr: -0.5}}", "rate: -0.5; give a"),
     ("client.optimizer", "{class_path: torch.optim.RMSprop, init_args: {eps: -0.5}}", "eps: Invalid epsilon value"),
     ("client.optimizer", "{class_path: torch.optim.SGD, init_args: {nesterov: true, momentum: 0.0}}", " Nesterov"),
     ("server_optimizer", "{class_path: torch.optim.SGD, init_args: {momentum: -0.5}}", "momentum: Invalid momentum"),
     ("server_optimizer", "{class_path: FedAdam, init_args: {lr: -0.5}}", "lr: Invalid learning rate: -0.5"),
     ("server_optimizer", "{class_path: FedAdam, init_args: {betas: [0.9, 1.0]}}", "betas: Invalid beta"),
     ("server_optimizer", "{class_path: FedYogi, init_args: {tau: 0.0}}", "tau: Invalid tau value: 0.0")],
)  # fmt: skip
def test_what_an_optimizer_says_names_its_argument(capsys, tiny, tmp_path, field, options, words):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--model.{field}={options}")
    assert f"model.{field}{'.' if words[0] != ' ' else ':'}" in line
    assert words in line


# -- config files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [("trainer: 5", "trainer: is a section with fields below it, but got 5"),
     ("data: 5", "data: is a section with fields below it, but got 5"),
     ("model: 5", "model: is a section with fields below it, but got 5"),
     ("model: {client: [1]}", "model.client: is a section with fields below it, but got [1]"),
     ("model: {client: {schedule: 3}}", "model.client.schedule: is a section with fields below it, but got 3"),
     ("data: {augmentation: [1]}", "data.augmentation: is a section with fields below it, but got [1]"),
     ("trainer:", "trainer: this section is empty; write its fields below it, or remove it"),
     ("model: {client: }", "model.client: this section is empty; write its fields below it, or remove it")],
)  # fmt: skip
def test_a_section_of_a_later_file_that_is_none_names_file_and_field(capsys, tiny, tmp_path, content, words):
    later = tmp_path / "later.yaml"
    later.write_text(content)
    for last in (["--config", later], [f"--config={later}"]):
        assert f"{later}: {words}" in refuse(capsys, "fit", "--config", tiny, *last, "--run_dir", tmp_path / "run")


def test_commands_about_data_see_it_too(capsys, tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text("data: 5")
    line = refuse(capsys, "data", "preview", "--config", config, "--output", tmp_path / "sheet.png")
    assert f"{config}: data: is a section" in line


def test_a_section_may_be_a_file_of_its_own(capsys, tiny, tmp_path):
    section, config = tmp_path / "trainer.yaml", tmp_path / "later.yaml"
    section.write_text("{max_epochs: 7, accelerator: cpu, devices: 1}")
    config.write_text(f"trainer: {section}")
    assert main(["describe", "--config", str(tiny), "--config", str(config)]) == 0
    assert "bytes of 7 rounds" in capsys.readouterr().out


def test_an_argument_of_a_default_class_needs_no_class(capsys, tiny, tmp_path):
    config = tmp_path / "plain.yaml"
    content = yaml.safe_load(tiny.read_text())
    del content["model"]["client"]["optimizer"]
    config.write_text(yaml.safe_dump(content))
    printed = []
    for options in ([], ["--model.client.optimizer.lr=0.005"], ["--model.client.optimizer.lr=0.2"]):
        assert main(["describe", "--config", str(config), *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    late = ["--model.client.optimizer.lr=0.2", "--model.client.optimizer=Adam"]
    line = refuse(capsys, "describe", "--config", config, *late)
    assert "model.client.optimizer: names no class that has lr; name it before" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [(["--model.server_optimizer.lr=1"],
      "model.server_optimizer: names no class that has lr; name it before, such as --model.server_optimizer FedAdam"),
     (["--model.server_optimizer=Adam", "--model.server_optimizer.differentiable=true"],
      "model.server_optimizer.differentiable: no gradient goes through a step here; leave it out"),
     (["--model.client.optimizer.differentiable=true"],
      "model.client.optimizer.differentiable: no gradient goes through a step here; leave it out"),
     (["--trainer.strategy.start_method=spawn"], "trainer.strategy.start_method: spawn is not one of 'popen'")],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_settings_that_no_run_can_have_are_refused_before_it(capsys, tiny, tmp_path, options, line):
    assert line in refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", *options)


def test_the_class_of_a_section_in_a_file_is_not_replaced_by_the_default_one(capsys, tiny, tmp_path):
    content = yaml.safe_load(tiny.read_text())
    content["model"]["client"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    configs = [tmp_path / "whole.yaml", tmp_path / "parts.yaml"]
    configs[0].write_text(yaml.safe_dump(content))
    section = tmp_path / "client.yaml"
    section.write_text(yaml.safe_dump(content["model"]["client"]))
    content["model"]["client"] = str(section)
    configs[1].write_text(yaml.safe_dump(content))
    printed = []
    for config in configs:
        assert main(["describe", "--config", str(config), "--model.client.optimizer.lr=0.2"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [("data: 5", "data: is a section"),
     (f"trainer: {{max_epochs: {10**20}}}", f"trainer.max_epochs: {10**20} is no integer of 64 bits"),
     (f"model: {{client: {{batch_size: {10**20}}}}}", f"model.client.batch_size: {10**20} is no integer of 64 bits"),
     ("model: {objective: {triplet: .nan}}", "model.objective.triplet: nan is not a finite number"),
     ("model: {evaluation: {layer: null}}", "model.evaluation.layer: null is not allowed; leave it out for the"),
     ("model: {availability: 5}", "model.availability: is a section"),
     ("model: {evaluation: {layr: pool}}", "there is no such option; did you mean model.evaluation.layer?"),
     ("trainer: {max_epochs: 1:30}", "trainer.max_epochs: 1:30 is not a number; write it without colons"),
     ("model:\n  method: FedPav\n  client\ndata: {}\n", "line 3 is not valid YAML (could not find expected"),
     ("model:\n  method: FedPav\n data: {}\n", "line 3 is not valid YAML (did not find expected key)"),
     ("model:\n  client: [1,\n\ntrainer:\n  a: 3\n", "line 2 is not valid YAML (did not find expected ',' or ']')"),
     ("model:\n  method: 'a\ntrainer:\n  b: 4\n", "line 2 is not valid YAML (found unexpected end of stream)"),
     ("trainer: {max_epochs: 1}\ntrainer: {max_epochs: 2}", "trainer: is given twice, in lines 1 and 2; remove one"),
     ("model: {client: {batch_size: 4, batch_size: 8}}", "model.client.batch_size: is given twice"),
     ("model: {method: {class_path: FedPav, weighting: size}}", "model.method.weighting: is not allowed next to"),
     ("model: {method: {class_path: FedPav, init_args: }}", "model.method.init_args: expected arguments with their"),
     ("model: {method: {class_path: }}", "model.method.class_path: expected the name of a class, got nothing")],
)  # fmt: skip
def test_what_yaml_itself_would_take_names_the_field(capsys, tiny, tmp_path, content, words):
    later = tmp_path / "later.yaml"
    later.write_text(content.replace(", batch_size: 8", ",\n  batch_size: 8"))
    line = refuse(capsys, "fit", "--config", tiny, "--config", later, "--run_dir", tmp_path / "run")
    assert words in line
    assert not (tmp_path / "run").exists()


def test_a_setting_that_does_not_fit_the_data_leaves_the_run_there_as_it_is(capsys, tiny, tmp_path):
    """It is found out before ``--overwrite`` removes anything."""
    run = write_run(tmp_path / "run", {1: {"val/mAP": 0.5}})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    options = ("--run_dir", run, "--overwrite=true", "--model.clients={nobody: {batch_size: 4}}")
    assert "there is no client nobody" in refuse(capsys, "fit", "--config", tiny, *options)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [("--trainer.callbacks=EarlyStopping", "EarlyStopping needs monitor; give it as --trainer.callbacks.monitor"),
     ("--trainer.callbacks=LearningRateFinder", "LearningRateFinder would train the server's step; set model.client"),
     ("--trainer.callbacks=BatchSizeFinder", "BatchSizeFinder would train the server's step; set model.client"),
     ("--trainer.precision=16", "trainer.precision: 16 is not supported; use 32-true or bf16-mixed")],
)  # fmt: skip
def test_what_lightning_has_and_a_federation_has_not(capsys, tiny, tmp_path, options, words):
    assert words in refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", options)


def hide(monkeypatch, package, module, constant):
    """Let Lightning look again for a package that is not there; ``constant`` of ``module`` holds what it found."""
    real, there = imports._version, imports.module_available

    def version(name):
        if name == package:
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(imports, "_version", version)
    monkeypatch.setattr(imports, "module_available", lambda name: name != package and there(name))
    found = getattr(import_module(module), constant)
    monkeypatch.setattr(f"{module}.{constant}", imports.RequirementCache(found.requirement, found.module))


FABRIC, PYTORCH = "lightning.fabric.loggers", "lightning.pytorch"


@pytest.mark.parametrize(
    ("option", "package", "where", "words"),
    [("logger=TensorBoardLogger", "tensorboard", (f"{FABRIC}.tensorboard", "_TENSORBOARD_AVAILABLE"),
      "TensorBoardLogger needs tensorboard, which is not installed; run pip install 'fedsim-reid[tensorboard]'"),
     ("logger=MLFlowLogger", "mlflow", (f"{PYTORCH}.loggers.mlflow", "_MLFLOW_AVAILABLE"),
      "MLFlowLogger needs mlflow, which is not installed; run pip install 'fedsim-reid[mlflow]'"),
     ("callbacks=RichProgressBar", "rich", (f"{PYTORCH}.callbacks.progress.rich_progress", "_RICH_AVAILABLE"),
      "RichProgressBar cannot be built (`RichProgressBar` requires `rich` >= 10.2.2. Install it by running `pip")],
)  # fmt: skip
def test_a_class_whose_package_is_missing_names_it(capsys, monkeypatch, tiny, tmp_path, option, package, where, words):
    hide(monkeypatch, package, *where)
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--trainer.{option}")
    assert words in line


def test_the_reason_of_others_constructors_is_said_and_that_of_ours_is_a_defect():
    # as the parser wrote it of Lightning's MLFlowLogger without a tracking_uri, with MLflow 3.17
    message = """Does not validate against any of the Union subtypes
Subtypes: [<class 'lightning.pytorch.loggers.logger.Logger'>, <class 'bool'>, <class 'NoneType'>]
Errors:
  - The filesystem tracking backend (e.g., './mlruns') is in maintenance mode. Please migrate to a database backend
  - Expected a <class 'bool'>
Given value type: <class 'jsonargparse._namespace.Namespace'>
Given value: Namespace(class_path='lightning.pytorch.loggers.MLFlowLogger', init_args=Namespace(run_name=None))"""
    failure = failure_of(ValueError(message), "fit")
    assert failure.code == 2
    assert failure.message == (
        "MLFlowLogger cannot be built (The filesystem tracking backend (e.g., './mlruns') is in maintenance mode. "
        "Please migrate to a database backend)"
    )
    assert failure_of(ValueError(message.replace("lightning.pytorch.", "fedsim.")), "fit") is None


# -- own classes -------------------------------------------------------------------------------------------------------


def own_module(folder, monkeypatch, text):
    """Write a module into a new working directory; return its name, which no other test has."""
    name = f"own_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    return name


def test_own_classes_are_found_in_the_working_directory(capsys, tiny, tmp_path, monkeypatch):
    name = own_module(tmp_path, monkeypatch, "from fedsim.methods import FedPav\nclass Mine(FedPav): pass\n")
    assert main(["describe", "--config", str(tiny), f"--model.method={name}.Mine"]) == 0
    assert capsys.readouterr().out.startswith("Mine, 3 rounds")


@pytest.mark.parametrize(
    ("text", "words"),
    [("def f(:", "line 1: SyntaxError: invalid syntax"),
     ("x = 1\ny = z", "line 2: NameError: name 'z' is not defined"),
     ("import not_there", "no module named 'not_there'); own_"),
     ("class Other: pass", "has no attribute 'Mine')"),
     ("def __getattr__(name):\n    raise AttributeError('nope')", ".Mine (nope); is the name right?"),
     ("def __getattr__(name):\n    raise AttributeError", ".Mine (its module gives no reason); is the name right?")],
)  # fmt: skip
def test_an_own_class_that_cannot_be_imported_says_why(capsys, tiny, tmp_path, monkeypatch, text, words):
    name = own_module(tmp_path, monkeypatch, text)
    assert words in refuse(
        capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", f"--model.method={name}.Mine"
    )


# -- settings that are gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "place", "gone"),
    [
        (["--model.client.flat_step=true"], "--model.client", "flat_step is gone since 0.3"),
        (["--model.client={flat_step: true}"], "model.client", "flat_step is gone since 0.3"),
        (["--model.clients.town0.flat_step=true"], "model.clients", "flat_step is gone since 0.3"),
        (["--model.client=SECTION"], "model.client", "flat_step is gone since 0.3"),
        (["--config=CONFIG"], "CONFIG: model.client", "flat_step is gone since 0.3"),
        (
            ["--model.method=FedKLPR", "--model.method.unit_features=true"],
            "--model.method",
            "unit_features is gone since 0.3",
        ),
        (["--model.method=SSCU", "--model.method.entropies=batch"], "--model.method", "entropies is gone since 0.4"),
        (["--config=METHOD"], "METHOD: model.method", "entropies is gone since 0.4"),
    ],
)
def test_a_setting_that_is_gone_is_named_as_such_at_each_door(capsys, tmp_path, tiny, words, place, gone):
    config, section, method = (tmp_path / name for name in ("old.yaml", "section.yaml", "method.yaml"))
    config.write_text("model: {client: {class_path: LocalTraining, init_args: {flat_step: true}}}")
    section.write_text("{flat_step: true, batch_size: 4}")
    method.write_text("model: {method: {class_path: SSCU, init_args: {entropies: first_image}}}")
    for word, path in (("CONFIG", str(config)), ("SECTION", str(section)), ("METHOD", str(method))):
        words, place = [given.replace(word, path) for given in words], place.replace(word, path)
    assert f"error: {place}: {gone}; remove it" in refuse(capsys, "describe", "--config", tiny, *words)


def test_a_gone_setting_is_dropped_where_it_says_what_there_is_now(tmp_path):
    """Each config of 0.3 with the method has it; its other value trained something else."""
    config = tmp_path / "old.yaml"
    for value, left in (("batch", {"lam_au": 5.0}), ("first_image", {"lam_au": 5.0, "entropies": "first_image"})):
        config.write_text(f"model: {{method: {{class_path: SSCU, init_args: {{lam_au: 5.0, entropies: {value}}}}}}}")
        assert read_config(str(config))["model"]["method"]["init_args"] == left
