"""Configs of papers: the commands in their headers run, on drawn stand-ins of the data sets."""

import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from failing import is_of_a_launcher
from fedsim.__main__ import main
from fedsim.cli.sweep.file import command_of, draws, read_sweep
from fedsim.data import datamodule, write_generated
from fedsim.data.datasets import VIPeR

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "configs" / "papers"
FOLDER = PAPERS / "003"
CONFIGS = sorted(PAPERS.glob("*/*.yaml"))
SWEEPS = {  # draws
    "003/sweeps/figure4_batch_sizes": 3,
    "003/sweeps/figure5_local_epochs": 3,
    "001/sweeps/table2": 6,
    "001/sweeps/figure3": 10,
    "001/sweeps/figure4_clients": 3,
    "001/sweeps/figure4_expert": 2,
    "001/sweeps/figure4_fraction": 3,
    "001/sweeps/figure4_local_epochs": 3,
    "002/sweeps/selection": 9,
    "002/sweeps/table10": 4,
    "004/sweeps/table3": 5,
    "004/sweeps/table4": 5,
    "004/sweeps/table7": 6,
}
FEW = ["--data.source=[{class_path: VIPeR, init_args: {root: data}}]", "--data.unseen=null"]
SMALL = [
    "--data.dry_run=true", "--model.backbone=SmallCNN", "--model.backbone.width=8", "--data.size=[32, 16]",
    "--model.adaptive_backbones=null",
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    """A folder for the stand-ins of all dry runs: each is drawn once."""
    return tmp_path_factory.mktemp("standins")


@pytest.fixture(autouse=True)
def _one_folder(standins, monkeypatch):
    monkeypatch.setattr(datamodule, "TemporaryDirectory", lambda prefix: SimpleNamespace(name=str(standins)))


def name_of(path):
    return f"{path.parent.name}-{path.stem}"


def commands_of(path):
    """Command lines in the comments of a config, as lists of words, without ``fedsim``."""
    comments = re.findall(r"^#(.*)$", path.read_text(), re.MULTILINE)
    text = "\n".join(comments).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("   fedsim ")]


def fit_command(path):
    (command,) = [words for words in commands_of(path) if words[0] == "fit"]
    return command


def configs_of(words):
    """What the configs of a command say, by the position of their ``--config``."""
    positions = [i for i, word in enumerate(words) if word == "--config"]
    return {i: yaml.safe_load((ROOT / words[i + 1]).read_text()) for i in positions}


def names_clients(words):
    """Whether a config of the command has settings of single clients, other than networks, which then must be there."""
    overrides = [config.get("model", {}).get("clients", {}) for config in configs_of(words).values()]
    return any(set(own) - {"backbone"} for of_config in overrides for own in of_config.values())


def has_generated(words):
    """Whether the command asks for generated images."""
    return any(config.get("data", {}).get("generated") for config in configs_of(words).values())


def write_few(folder):
    """Write generated images for the client of ``FEW``; return their number."""
    (client,) = datamodule.FederatedDataModule(VIPeR("data"), val="none", dry_run=True).federated.clients
    a, b, c = client.train.identities[:3].tolist()
    labels = [{a: 1.0}, {b: 0.5, c: 0.25}, {c: 0.25}]
    write_generated(folder / client.name, torch.zeros(3, 3, 8, 4, dtype=torch.uint8), labels)
    return len(labels)


def on_standins(words, run_dir):
    """The command for few data sets and in small; later options win."""
    with_data = [i for i, config in configs_of(words).items() if "source" in config.get("data", {})]
    position = 2 + max(with_data, default=words.index("--config"))
    few = [] if "--data.source" in words or names_clients(words) else FEW
    common = [] if names_clients(words) else ["--model.clients=null"]  # else networks of clients that are not there
    return [*words[1:position], *few, *words[position:], *SMALL, *common, f"--run_dir={run_dir}"]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_headers_name_files_that_exist(path):
    words = fit_command(path)
    configs = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
    assert str(path.relative_to(ROOT)) in configs
    mentioned = re.findall(r"\bconfigs/[a-z\d_/.-]+\.yaml", path.read_text())
    mentioned += [
        f"{path.parent.relative_to(ROOT)}/{name}"
        for name in re.findall(r"[ (]((?:sweeps/)?[a-z\d_]+\.yaml)", path.read_text())
    ]
    assert [name for name in mentioned if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_the_command_in_the_header_fits_the_data(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = on_standins(fit_command(path), tmp_path)
    if has_generated(fit_command(path)):
        write_few(tmp_path / "generated")
        words.append(f"--data.generated.root={tmp_path / 'generated'}")
    code = main(["describe", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "What is shared" in output.out


def test_every_sweep_is_tested():
    found = {str(path.relative_to(PAPERS).with_suffix("")) for path in PAPERS.glob("*/sweeps/*.yaml")}
    assert found == {*SWEEPS, "000/sweeps/table2_and_table3"}


@pytest.mark.parametrize("name", SWEEPS)
def test_every_draw_of_a_sweep_fits_the_data(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(PAPERS / f"{name}.yaml")
    found = list(draws(sweep))
    assert len(found) == SWEEPS[name]
    for draw in found:
        _, program, command, *options = command_of(sweep, draw)
        assert [program, command] == ["fedsim", "fit"]
        code = main(["describe", *options, *FEW, *SMALL, "--model.clients=null", f"--run_dir={tmp_path}"])
        assert code == 0, capsys.readouterr().err


def test_a_batch_of_128_is_there_for_every_client_of_a_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = fit_command(FOLDER / "table6_batch_128.yaml")
    code = main(["describe", *words[1:], *SMALL, f"--run_dir={tmp_path}"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert len(re.findall(r"^\w+ +0  smallcnn", output.out, re.MULTILINE)) >= 8


@pytest.mark.parametrize("name", ["table4_batch_32", "table7_local", "table2_by_camera"])
def test_a_small_run_stands_beside_its_table(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = on_standins(fit_command(FOLDER / f"{name}.yaml"), tmp_path / "run")
    options = ["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1", "--data.limit_client_batches=2"]
    assert main(["fit", *words, *options]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--compare", "003"]) == 0
    text = capsys.readouterr().out
    assert f"\n{name.partition('_')[0]}: " in text
    assert "DRY RUN" in text
    assert "best3 is the mean over rounds 1, 2, 3" in text


def test_an_overlay_changes_what_its_name_says():
    protocol = yaml.safe_load((FOLDER / "protocol.yaml").read_text())
    assert protocol["model"]["client"]["batch_size"] == 32
    for size in (32, 64, 128):
        (path,) = FOLDER.glob(f"table*_batch_{size}.yaml")
        assert yaml.safe_load(path.read_text()) == {"model": {"client": {"batch_size": size}}}


def test_the_sweep_over_methods_names_overlays_that_exist():
    sweep = read_sweep(PAPERS / "000" / "sweeps" / "table2_and_table3.yaml")
    overlays = [draw["config"] for draw in draws(sweep)]
    assert len(overlays) == len(set(overlays)) == 9
    assert {ROOT / path for path in overlays} <= set(CONFIGS)


@pytest.mark.slow
def test_one_command_runs_tables_2_and_3_of_paper_000_and_prints_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in filter(is_of_a_launcher, list(os.environ)):  # left by fits in this process; draws are processes
        monkeypatch.delenv(name)
    path = PAPERS / "000" / "sweeps" / "table2_and_table3.yaml"
    ((_, *given),) = [words for words in commands_of(path) if "--data.dry_run=true" in words]
    (position,) = [i for i, word in enumerate(given) if word == "--"]
    sets = [{"class_path": name, "init_args": {"root": "data"}} for name in ("Market1501", "VIPeR")]
    smaller = ["--model.backbone.width=4", "--data.size=[24, 12]", "--data.augmentation.crop=[20, 10]",
               f"--data.source={sets}", "--data.limit_client_batches=2", "--trainer.accelerator=cpu",
               "--trainer.devices=1"]  # fmt: skip
    own = [*given[:position], "--run_dir", str(tmp_path), "--count", "2"]
    assert main(["sweep", *own, *given[position:], *smaller]) == 0
    text = capsys.readouterr().out
    assert "\ntable2: " in text
    assert "68.2 / 87.4" in text  # local supervised, Market-1501
    assert "\ntable3: " in text
    assert "48.2 / 44.3" in text  # FedAvg+D, VIPeR
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    scores = {summary["method"]: summary["final"]["metrics"] for summary in found}
    for method, kind in (("Local", "personalised"), ("FedAvg", "global")):
        for name in ("market1501", "viper"):
            numbers = [100 * scores[method][f"test/{kind}/{name}/{metric}"] for metric in ("mAP_trapezoid", "rank1")]
            cell = "{:.1f} / {:.1f}".format(*numbers)
            assert [line for line in text.splitlines() if line.startswith(name) and cell in line]


# -- paper 002 ---------------------------------------------------------------------------------------------------------


def test_backbones_of_single_clients_are_those_of_clients_that_there_are():
    (clients,) = yaml.safe_load((ROOT / "src" / "fedsim" / "published" / "002.yaml").read_text())["clients"]
    for path in (PAPERS / "002").glob("*.yaml"):
        model = yaml.safe_load(path.read_text()).get("model", {})
        overrides = model.get("clients", {})
        assert {*overrides, *model.get("adaptive_backbones", {}).get("caps", {})} <= set(clients), path
        for override in overrides.values():
            assert set(override) == {"backbone"}


def test_tables_of_paper_002_differ_in_what_they_are_about(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def shown(name):
        words = on_standins(fit_command(PAPERS / "002" / f"{name}.yaml"), tmp_path)
        assert main(["describe", *words]) == 0
        return capsys.readouterr().out

    averaged, partial = shown("table9_fedavg"), shown("table9_fedpav")
    assert re.search(r"^head .* shared$", averaged, re.MULTILINE)
    assert re.search(r"^head .* private$", partial, re.MULTILINE)
    assert "Who takes part depends on the run" in shown("table10_iid_adaptive")
    assert "Who takes part depends on the run" not in shown("table10_iid_plain")


def test_table_7_of_paper_002_is_about_generated_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def shown(name, *options):
        words = on_standins(fit_command(PAPERS / "002" / f"{name}.yaml"), tmp_path)
        assert main(["describe", *words, *options]) == 0
        return capsys.readouterr().out

    count, without = write_few(tmp_path), shown("table7_no_generated")
    found = shown("table7_generated", f"--data.generated.root={tmp_path}")
    assert re.search(rf"^viper +0 .* {count}$", found, re.MULTILINE)
    assert "generated" not in without

    def rest(text):  # all but the table of clients
        return [part for part in text.split("\n\n") if not part.startswith("Who holds what")]

    assert rest(found) == rest(without)
    assert len(rest(found)) > 2
