"""The start of a command: wrong options are answered at once, and nothing is imported that a command does not need."""

import gc
import inspect
import subprocess
import sys
from typing import get_type_hints

import numpy as np
import pytest

from fedsim import data
from fedsim.core.collector import imports_without_collection
from fedsim.core.errors import ConfigError
from fedsim.federation import Federation
from fedsim.federation.settings import Settings
from fedsim.papers.files import read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.parsing.command_line import given
from fedsim.parsing.config_files import with_shipped
from fedsim.parsing.options import check_arguments, check_configs, check_options
from fedsim.settings.table import sections
from run_dirs import scores_of, with_mean, write_run


def test_the_constructor_of_the_federation_has_the_types_of_its_settings():
    assert get_type_hints(Federation.__init__) == get_type_hints(Settings) | {"return": type(None)}
    assert [parameter.default for parameter in inspect.signature(Federation).parameters.values()] == [
        parameter.default for parameter in inspect.signature(Settings).parameters.values()
    ]


@pytest.mark.parametrize(
    ("word", "guess"),
    [
        ("--trainer.max_epocs=3", "did you mean --trainer.max_epochs? "),
        ("--model.methods", "did you mean --model.method? "),
        ("--data.sourcex.root", "did you mean --data.source? "),
        ("--trainer.xyz", ""),
        ("--trainer.max_epoch=3", "did you mean --trainer.max_epochs? "),  # a beginning is no name
        ("--modle.method=Local", "did you mean --model? "),
        ("--seed_everythin", "did you mean --seed_everything? "),
        ("--ckpt_pat=x", "did you mean --ckpt_path? "),
        ("--run_di=x", "did you mean --run_dir? "),
        ("--lr=0.1", "did you mean --model.client.optimizer.lr? "),  # names that users know from other programs
        ("--learning_rate=0.1", "did you mean --model.client.optimizer.lr? "),
        ("--momentum=0.9", "did you mean --model.client.optimizer.momentum? "),  # some methods have one, too
        ("--epochs=5", "did you mean --trainer.max_epochs or --model.client.local_epochs? "),
        ("--rounds=5", "did you mean --trainer.max_epochs? "),
        ("--batch_size=5", "did you mean --model.client.batch_size? "),
        ("--local_epochs=5", "did you mean --model.client.local_epochs? "),
        ("--gpus=2", "did you mean --trainer.devices? "),
        ("--trainer.gpus=2", "did you mean --trainer.devices? "),
        ("--seed=1", "did you mean --seed_everything? "),
        ("--workers=1", "did you mean --data.workers? "),
        ("--clients=9", "did you mean --model.clients or --data.parts? "),
        ("--size=9", "did you mean --data.size? "),
        ("--trainer.lr=0.1", "did you mean --model.client.optimizer.lr? "),
        ("--mu=0.1", "did you mean --model.method.mu of FedProx? "),
        ("--model.alpha=1", "did you mean --model.method.alpha of APFL? "),  # below the place, not --data.alpha
        ("--weights=x.pth", "did you mean --model.backbone.weights? "),
        ("--model.rounds=5", "did you mean --trainer.max_epochs? "),  # not FedDIP's rounds
        ("--trainer.seed=1", "did you mean --seed_everything? "),
        ("--model.momentum=0.9", "did you mean --model.client.optimizer.momentum? "),
    ],
)
def test_a_slip_is_answered_with_the_name_that_was_meant(word, guess):
    with pytest.raises(ConfigError) as caught:
        check_options(["--config", "a.yaml", word], "fit")
    first, _, second = word.partition("=")[0].partition(".")
    option = f"{first}.{second.partition('.')[0]}" if first[2:] in sections() else first
    assert str(caught.value) == (f"{option}: there is no such option; {guess}fedsim fit --help all lists all options")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("modle: {client: {batch_size: 8}}", "modle: there is no such option; did you mean model?"),
        ("model: {clinet: {batch_size: 8}}", "model.clinet: there is no such option; did you mean model.client?"),
        ("model: {client: {schedule: {gama: 1}}}", "model.client.schedule.gama: there is no such option; did you mean"),
        ("model: {method: {class_path: FedProx, init_args: {mue: 1}}}", "model.method: FedProx has no option mue; did"),
        ("lr: 0.1", "lr: there is no such option; did you mean model.client.optimizer.lr?"),
    ],
)
def test_a_slip_in_a_config_is_named_with_the_file_whatever_is_below_it(tmp_path, text, line):
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    for check in (lambda words: check_arguments(given(words), "fit"), check_configs):
        with pytest.raises(ConfigError) as caught:
            check(["--config", str(config)])
        assert str(caught.value).startswith(f"{config}: {line}")


def test_the_settings_of_a_command_without_a_trainer_are_its_own():
    check_configs(["--output", "a.png", "--model", "x", "--config", "none.yaml"])


def test_what_the_parser_takes_goes_on_to_the_parser():
    words = "--trainer.max_epochs=3 --trainer.callbacks+=X --trainer=x.yaml trainer.nothing --model.method.help --data"
    check_options([*words.split(), "--model.method.init_args.mu", "--data.source", "--ckpt_path=model.pt"], "fit")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--model.client.lr=3",
            "--model.client.lr: there is no such option; did you mean --model.client.optimizer.lr?",
        ),
        ("--data.root=x", "--data.root: there is no such option; did you mean --data.source.root?"),
        (
            "--model.client.schedule.gama=1",
            "--model.client.schedule.gama: there is no such option; did you mean --model.client.schedule.gamma?",
        ),
        (
            "--config quickstart --model.client.optimizer.lrr=1",
            "model.client.optimizer: Adam has no option lrr; did you mean lr?",
        ),
        (
            "--model.client.optimizer=SGD --model.client.optimizer.init_args.momentun=1",
            "model.client.optimizer: SGD has no option momentun; did you mean momentum?",
        ),
        ("--model.method=FedPav --model.method.mu=1", "model.method: FedPav has no option mu; choose from weighting, "),
        (
            "--trainer.logger=CSVLogger --trainer.logger.nam=x",
            "trainer.logger: CSVLogger has no option nam; did you mean name?",
        ),
        (
            "--trainer.callbacks+=EarlyStopping --trainer.callbacks.patince=2",
            "trainer.callbacks: EarlyStopping has no option patince; did you mean patience?",
        ),
    ],
)
def test_arguments_of_classes_are_checked_without_the_classes(words, line):
    with pytest.raises(ConfigError) as caught:
        check_arguments(given(with_shipped(words.split())), "fit")
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    "words",
    [
        "--model.method=mine.Own --model.method.anything=1",
        "--model.method=FedPav --model.method=FedProx --model.method.mu=1",
        '--config={"model":{"method":"FedProx"}} --model.method.init_args.mu=1',
        "--model.clients.town.0.batch_size=8",  # a name may have a dot
        "--trainer.logger=WandbLogger --trainer.logger.save_code=true",  # which passes others on
        "--trainer.callbacks+=mine.Own --trainer.callbacks.path=x",
        "--model.backbone.width=8",  # of a class that the run's own config may name
        "--model.privacy.help",
        '--config={"data":{"source+":[{"class_path":"SyntheticReID"}]},"trainer":{"callbacks+":"EarlyStopping"}}',
    ],
)
def test_arguments_of_classes_that_are_not_known_go_on_to_the_parser(words):
    check_arguments(given(words.split()), "fit")


def features(folder):
    arrays = {"": np.eye(4, dtype=np.float32), "_pids": np.arange(4)}
    content = {f"{kind}{name}": array for kind in ("query", "gallery") for name, array in arrays.items()}
    np.savez(folder / "f.npz", **content, query_camids=np.zeros(4, dtype=int), gallery_camids=np.ones(4, dtype=int))
    return folder / "f.npz"


def people(folder):
    names = {"bounding_box_train": (1, 2), "query": (3, 4), "bounding_box_test": (3, 4)}
    for part, pids in names.items():
        (folder / "mine" / part).mkdir(parents=True)
        for pid in pids:
            for camera in (1, 2):
                path = folder / "mine" / part / f"{pid:04d}_c{camera}.jpg"
                path.write_bytes(f"P5 1 1 255\n{part}".encode())  # its beginning is read, its pixels are not
    return folder


TORCH, LIGHTNING = "torch", "lightning torchvision torchmetrics"


@pytest.mark.parametrize(
    ("command", "code", "absent"),
    [
        ("report {run}", 0, "torch matplotlib scipy plotly jinja2"),
        ("report {run} --significance --figure {run}/f.png", 0, TORCH),
        ("report {compared} --compare 003/table4", 0, "torch matplotlib scipy plotly jinja2"),
        ("report {run} --wrong", 2, TORCH),
        ("sweep {sweep} --dry-run", 0, TORCH),
        ("sweep --method fedpav --print", 0, TORCH),
        ("fit --config configs/quickstart.yaml --trainer.epochs 3", 2, TORCH),
        ("data preview --config {slip}", 2, TORCH),
        ("augment fit --config={slip}", 2, TORCH),
        ("doctor --config quickstart --config {slip}", 2, TORCH),
        ("rank {features} --rerank", 0, LIGHTNING),
        ("data check {people}", 0, f"{TORCH} {LIGHTNING}"),
        ("data splits {people}/mine --num 1", 0, f"{TORCH} {LIGHTNING}"),
        ("data cut --root {people}/wrong --output {people}/cut", 2, f"{TORCH} {LIGHTNING}"),
        ("data convert --mat {people}/wrong --protocol wrong --output {people}/new", 2, f"{TORCH} {LIGHTNING}"),
        ("init {people} --output {people}/fedsim.yaml", 0, f"{TORCH} {LIGHTNING}"),
    ],
)
def test_a_command_imports_no_more_than_it_needs(root, tmp_path, write_sweep, command, code, absent):
    run = write_run(tmp_path / "run", {1: scores_of(with_mean({"a": 0.5}))})
    row = resolved_row(read_paper("003"), "table4_batch_32")
    compared = write_run(tmp_path / "compared", {1: scores_of({"viper": 0.5})}, config=row)
    (tmp_path / "slip.yaml").write_text("modle: {method: Local}")
    paths = {
        "slip": tmp_path / "slip.yaml",
        "run": run,
        "compared": compared,
        "people": people(tmp_path / "people"),
        "sweep": write_sweep(),
        "features": features(tmp_path),
    }
    words = [word.format(**paths) for word in command.split()]
    program = (
        "import gc, sys; from fedsim.__main__ import main; code = main(sys.argv[2:]); "
        "print('frozen', gc.get_freeze_count() > 1000, gc.isenabled()); "
        "sys.exit(f'imported {found}' if (found := set(sys.argv[1].split()) & set(sys.modules)) else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, absent, *words], capture_output=True, text=True, cwd=root)
    assert done.returncode == code, done.stderr
    assert (code == 2) == ("fedsim: error: " in done.stderr)
    # the collector leaves alone what was imported for the command; nothing is before its options are right
    assert done.stdout.splitlines()[-1] == f"frozen {code == 0 or 'wrong' in command} True"
    assert "leaked" not in done.stderr  # by libraries that count their objects as a process ends


def test_the_collector_goes_on_where_pytorch_was_imported_before():
    before = gc.get_freeze_count()
    with imports_without_collection():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_names_of_a_room_that_are_imported_at_their_first_use_are_there():
    assert set(data.__all__) <= set(dir(data))
    assert [name for name in data.__all__ if getattr(data, name).__name__ != name] == []
    with pytest.raises(AttributeError, match=r"module 'fedsim.data' has no attribute 'Market'"):
        _ = data.Market


def test_a_notebook_without_widgets_gets_no_line_about_them():
    """tqdm warns in its import, which is Lightning's; here a kernel is there, and ipywidgets is not."""
    program = """
import sys, types, warnings
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
for name in ("ipykernel", "ipykernel.zmqshell"):  # newer versions of tqdm look for these
    sys.modules[name] = types.ModuleType(name)
sys.modules |= {"IPython": ipython, "ipywidgets": None, "IPython.html": None}
if sys.argv[1] == "fedsim":
    import fedsim
with warnings.catch_warnings(record=True) as caught:
    if sys.argv[1] != "fedsim":
        warnings.simplefilter("always")
    import tqdm.auto
print(sum("IProgress not found" in str(warning.message) for warning in caught))
"""
    for name, count in (("fedsim", "0"), ("without", "1")):
        done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == count, done.stderr
