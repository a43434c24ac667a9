"""Every shipped config parses and builds a federation."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import ArgumentParser

import others
from fedsim.__main__ import main
from fedsim.data import datamodule
from fedsim.data.datamodule import FederatedDataModule
from fedsim.settings.configuration import flat
from fedsim.settings.table import class_at
from small import refuse
from small_tower import small_tower

ROOT = Path(__file__).parents[2]
DATA = ROOT / "configs" / "data"
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if path.parent.name != "generators"  # tests of their own
)


def preceding_options(content):
    """A config without a backbone, or with options of one that another config names, needs a backbone before it."""
    return [] if "class_path" in content.get("model", {}).get("backbone", {}) else ["--model.backbone=SmallCNN"]


def completing_options(content):
    options = []
    if "method" not in content.get("model", {}):
        options += ["--model.method=FedPav"]
    if content.get("data", {}).get("source", {}) == {}:
        options += ["--data.source=SyntheticReID"]
    if "TextAnchors" in str(content):
        options += [f"--model.method.tower={small_tower()}"]
    return options


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    """A folder for the stand-ins of all dry runs: each is drawn once."""
    return tmp_path_factory.mktemp("standins")


@pytest.fixture(autouse=True)
def _one_folder(standins, monkeypatch):
    monkeypatch.setattr(datamodule, "TemporaryDirectory", lambda prefix: SimpleNamespace(name=str(standins)))


@pytest.mark.parametrize("path", others.each_third(CONFIGS), ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_config_parses_and_describes_itself(path, tmp_path, capsys, market_tree, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(path.read_text())
    for library in ("timm", "peft") if "TimmBackbone" in path.read_text() else ():
        pytest.importorskip(library, reason="needs fedsim-reid[models]")
    options = completing_options(content)
    if "MarketFolders" in path.read_text():
        options += [f"--data.source.root={market_tree}", "--model.client.batch_size=4", "--data.val=none"]
    if "root: data}" in path.read_text() or "root: data," in path.read_text():  # the papers' data sets
        options += ["--data.dry_run=true"]
    if "IMAGENET1K" in path.read_text():
        options += ["--model.client.batch_size=4"]
    options += ["--run_dir", str(tmp_path / "run"), "--trainer.accelerator=cpu"]
    code = main(["describe", *preceding_options(content), "--config", str(path), *options])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "Shared tensors" in output.out
    assert re.search(r"bytes down per round, .* +[\d,]+", output.out)  # at most, or but for tables
    assert list(tmp_path.iterdir()) == []  # where it was called, and would have run: nothing is written


def test_there_are_configs():
    assert len(CONFIGS) >= 20


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_a_server_optimizer_alone_is_that_of_its_config(name, tmp_path, capsys):
    config = ROOT / "configs" / "methods" / f"{name.lower()}.yaml"
    resolved = []
    for options in (("--config", str(config)), ("--model.method=FedPav", f"--model.server_optimizer={name}")):
        rest = ["--model.backbone=SmallCNN", "--data.source=SyntheticReID", f"--run_dir={tmp_path}", "--print_config"]
        with pytest.raises(SystemExit):
            main(["fit", *options, *rest])
        resolved.append(yaml.safe_load(capsys.readouterr().out)["model"]["server_optimizer"])
    assert resolved[0] == resolved[1]


EIGHT = ("msmt17", "market1501", "cuhk03np", "prid2011", "cuhk01", "viper", "3dpes", "ilids")
FOUR = ("dukemtmc", "market1501", "cuhk03np", "msmt17")
PRESETS = {  # clients, and unseen data sets
    "fedreidbench": ((EIGHT[0], "dukemtmc", *EIGHT[1:]), ()),
    "fedreidbench_eight": (EIGHT, ()),
    "fedreidbench_by_camera": (tuple(f"market1501-cam{i}" for i in range(1, 7)), ()),
    "fedreidbench_by_identity": (tuple(f"market1501-part{i}" for i in range(1, 7)), ()),
    "ska": (FOUR, ("viper", "ilids", "grid", "prid2011")),
    "fedreid": (FOUR, ("viper", "ilids", "3dpes", "caviar4reid", "grid", "cuhksysu")),
    "waref": (("market1501", "cuhk03np", "prid2011", "cuhk01", "cuhk02", "viper", "3dpes", "ilids", "grid"), ()),
    "waref_two": (("3dpes", "ilids"), ()),
    "fedklpr": (("dukemtmc", "market1501", "ilids", "cuhk03np", "prid2011", "viper", "cuhk01", "3dpes"), ()),
    "cifar10": (tuple(f"cifar10-part{i}" for i in range(1, 5)), ()),
}
OTHERS = {"crowd", "market_layout", "synthetic"}


def data_of(*args):
    """The data module that a config and options describe."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(FederatedDataModule, "data")
    return parser.instantiate(parser.parse_args(list(map(str, args))))["data"]


def described(args):
    federated = data_of("--config", *args, "--data.dry_run=true").federated
    return tuple(client.name for client in federated.clients), federated


def test_every_preset_is_tested():
    assert {path.stem for path in DATA.glob("*.yaml")} == set(PRESETS) | OTHERS


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_the_papers_clients_and_unseen_data_sets(name):
    clients, unseen = PRESETS[name]
    found, federated = described([DATA / f"{name}.yaml"])
    assert found == clients
    assert federated.unseen == unseen
    assert all(client.val is None for client in federated.clients)
    for test in unseen:  # on ten random splits, where the data set has no test set of its own
        assert len(federated.tests[test].splits) == (0 if test == "cuhksysu" else 10)


def test_dry_runs_are_as_unbalanced_as_the_paper_in_their_order():
    """Table 1 has these nine in the order of their training images."""
    _, federated = described([DATA / "fedreidbench.yaml"])
    images = [client.num_images for client in federated.clients]
    assert images == sorted(images, reverse=True)
    assert images[0] > 10 * images[-1]


def test_a_crowd_has_as_many_clients_as_one_number_says(capsys):
    args = ["--config=quickstart", f"--config={DATA / 'crowd.yaml'}", "--data.source.clients=1200"]
    assert main(["describe", *args, "--trainer.devices=1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"of 1,200 clients .*\n.*\nimages +40 .* 48,000\nidentities +10 .* 12,000\n", shown)
    [per_round] = re.findall(r"bytes down per round, at most +([\d,]+)", shown)
    shared = sum(int(size.replace(",", "")) for size in re.findall(r" ([\d,]+) +shared", shown))
    assert int(per_round.replace(",", "")) == 12 * shared  # a hundredth of the clients are called


def test_describe_needs_no_network(monkeypatch, tmp_path, capsys):
    """Neither for the backbone of all nor for those of single clients."""

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    small = "{class_path: ResNet, init_args: {depth: 18, weights: IMAGENET1K_V1}}"
    options = ["--model.method=FedPav", f"--model.backbone={small}", "--data.source=SyntheticReID",
               "--model.clients", f"{{town1: {{backbone: {small.replace('18', '34')}}}}}",
               "--run_dir", str(tmp_path / "run"), "--trainer.accelerator=cpu"]  # fmt: skip
    assert main(["describe", *options]) == 0, capsys.readouterr().err
    assert "Shared tensors: resnet2" in capsys.readouterr().out
    assert "no network" in refuse(capsys, "fit", *options)


def test_cuhk03np_is_a_federation_of_its_own():
    options = ("--data.source=CUHK03NP", "--data.source.root=data")
    cameras, _ = described([DATA / "fedreidbench_by_camera.yaml", *options])
    assert cameras == ("cuhk03np-cam1", "cuhk03np-cam2")
    parts, _ = described([DATA / "fedreidbench_by_identity.yaml", *options, "--data.parts=2"])
    assert parts == ("cuhk03np-part1", "cuhk03np-part2")


def test_a_public_set_is_added_as_the_config_says():
    path = DATA / "fedreidbench_eight.yaml"
    (option,) = re.findall(r"--data\.source\+='(.*)'", path.read_text())
    clients, federated = described([path, f"--data.source+={option}", "--data.public=cuhk02"])
    assert clients == EIGHT == tuple(federated.tests)
    assert federated.public_name == "cuhk02"


def test_real_files_of_duke_are_refused_in_one_line_that_says_what_to_do(standins, tmp_path, capsys):
    described([DATA / "fedreidbench.yaml"])  # draws the files
    text = (DATA / "fedreidbench.yaml").read_text().replace("root: data", f"root: {standins}")
    (tmp_path / "nine.yaml").write_text(text)
    line = refuse(capsys, "data", "manifest", "--config", tmp_path / "nine.yaml", "--output", tmp_path / "m.csv")
    assert "DukeMTMC-reID was withdrawn by its owners" in line
    assert "configs/data/fedreidbench_eight.yaml" in line
    assert "set this to true in a copy of the config" in line
    acknowledged = text.replace("DukeMTMC, init_args: {", "DukeMTMC, init_args: {i_know_duke_is_withdrawn: true, ")
    (tmp_path / "nine.yaml").write_text(acknowledged)
    assert main(["data", "manifest", "--config", str(tmp_path / "nine.yaml"), "--output", str(tmp_path / "m.csv")]) == 0
    assert "9 clients" in capsys.readouterr().out


def test_fedreidbench_trains_without_the_data(tmp_path, capsys):
    options = ["--model.backbone=SmallCNN", "--model.backbone.width=8", "--data.dry_run=true", "--data.size=[32,16]",
               "--data.limit_client_batches=1", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2",
               "--trainer.accelerator=cpu", "--run_dir", str(tmp_path)]  # fmt: skip
    configs = ["--config", str(DATA / "fedreidbench.yaml"), "--config", str(DATA.parent / "methods" / "fedpav.yaml")]
    assert main(["fit", *configs, *options]) == 0
    final = json.loads((tmp_path / "summary.json").read_text())["final"]
    assert final["round"] == 2
    scored = {key.split("/")[2] for key in final["metrics"] if key.startswith("test/global/")}
    assert scored == {*PRESETS["fedreidbench"][0], "seen"}


NECK, EVALUATION, OPTIMIZER = "model.neck", "model.evaluation", "model.client.optimizer"
OTHERS_THAN_THE_CLASS = {
    "fedbn": {EVALUATION},
    "fedcapr": {"model.client.cluster", NECK},
    "feddip": {OPTIMIZER, "model.client.schedule", "trainer.max_epochs"},
    "feddyn": {OPTIMIZER},
    "fedklpr": {"model.client.cluster", NECK},
    "fednova": {OPTIMIZER},
    "fedproto": {"data.labels", "data.val"},
    "fedprox": {EVALUATION, "model.method.share_neck", "model.method.weighting"},
    "fedreid": {EVALUATION},
    "fedreid_fine_tune": {EVALUATION},
    "fedsupwa": {"model.client.sampler"},
    "fedureid": {
        NECK, OPTIMIZER, "model.client.batch_size", "model.client.bottom_up", "model.client.head_lr",
        "model.client.long_round", "model.client.micro_batch", "model.client.schedule",
    },
    "lotteryfl": {OPTIMIZER},
    "moon": {EVALUATION, "model.method.share_neck", "model.method.weighting"},
    "pfedme": {OPTIMIZER},
    "scaffold": {OPTIMIZER},
    "ska": {EVALUATION},
    "subfedavg": {OPTIMIZER, "model.client.local_epochs"},
}  # fmt: skip
"""config of a method's own name -> what it sets otherwise than a fit that names the class alone"""
VARIANTS = {"fedprox": "FedProx+D", "moon": "MOON+D"}  # of paper 000, with private necks and equal weights
"""config of a method's own name with other options of the method -> its first words, which name the variant"""


def names_of_differences(path):
    """The names of settings that a config of a method's own name has otherwise; None if it has another name."""
    content = yaml.safe_load(path.read_text())
    method = content["model"]["method"]
    cls = class_at(method if isinstance(method, str) else method["class_path"])
    if cls.name.lower() != path.stem.replace("_", ""):
        return None
    with_config, alone = (
        {name: entry.value for name, entry in flat(settings).items()}
        for settings in (content, {"model": {"method": cls.name}})
    )
    missing = object()
    differ = (n for n in with_config | alone if with_config.get(n, missing) != alone.get(n, missing))
    return {
        ".".join(name.split(".")[: 3 if name.startswith(("model.method", "model.client")) else 2]) for name in differ
    }


def test_a_method_and_the_config_of_its_name_are_one_experiment_but_for_named_settings():
    paths = sorted((ROOT / "configs" / "methods").glob("*.yaml"))
    differ = {path.stem: names for path in paths if (names := names_of_differences(path))}
    assert differ == OTHERS_THAN_THE_CLASS
    of_methods = {stem for stem, names in differ.items() if any(name.startswith("model.method") for name in names)}
    first_words = {path.stem: path.read_text().lstrip("# ").partition(",")[0] for path in paths}
    assert {stem: first_words[stem] for stem in of_methods} == VARIANTS
