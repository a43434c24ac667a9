"""The command line: a wrong setting is one line and exit code 2; a right one leaves a complete run directory."""

import csv
import json
import re

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from safetensors.torch import load_file

from fedsim.__main__ import main
from fedsim.core.metrics_rows import metrics_files
from fedsim.federation.callbacks import FolderStart
from fedsim.strategy.checkpoint_files import read_checkpoint
from small import refuse
from tiny_run import TINY

WRONG_SETTINGS = [
    (["--model.client.batch_size=abc"], "model.client.batch_size", "int"),
    (["--model.method=Nonsense"], "model.method", "choose from APFL, DACS, Ditto"),
    (
        ["--model.backbone=Nonsense"],
        "model.backbone",
        "choose from CifarResNet, ConvNeXt, LoRA, MobileNetV2, OSNet, ResNet, SmallCNN",
    ),
    (["--model.nonsense=1"], "model.nonsense", "--help"),
    (["--model.bn_stats=often"], "model.bn_stats", "'mean', 'first', 'pooled', 'local', 'recalibrate'"),
    (["--model.bn_stats=recalibrate"], "model.bn_stats", "data.public"),
    (["--model.client.batch_size=1"], "model.client.batch_size", "the smallest batch for batch normalisation"),
    (["--model.client.batch_size=null", "--model.client.sampler=identity"], "model.client.batch_size", "multiple"),
    (
        ["--data.max_identities=1", "--data.max_images=1", "--data.val=none"],
        "data",
        "fewer than the two training images of a batch",
    ),
    (["--model.client.optimizer_state=keep", "--model.client.optimizer=Adagrad"], "optimizer_state", "reset"),
    (["--model.client.local_epochs=0"], "model.client.local_epochs", "less than 1"),
    (["--model.client.local_steps=0"], "model.client.local_steps", "null for whole epochs"),
    (["--model.client.sampler=identity", "--model.client.num_instances=3"], "model.client.batch_size", "multiple"),
    (["--model.clients.mars={local_epochs: 2}"], "model.clients", "choose from town0, town1, town2, town3"),
    (["--model.selection=RandomFraction", "--model.selection.fraction=2"], "model.selection.fraction", "(0, 1]"),
    (["--model.backbone=ResNet", "--model.backbone.weights=/none.pth"], "/none.pth", "existing file"),
    (["--model.backbone=ResNet", "--model.backbone.weights=V9"], "V9", "IMAGENET1K_V1"),
    (["--model.neck.dropout=2"], "model.neck.dropout", "[0, 1)"),
    (["--trainer.max_epochs=many"], "trainer.max_epochs", "many"),
    (["--model.threads=0"], "model.threads", "0 is not in [1, 1024]"),
    (["--data.unseen=[mars]"], "data.unseen", "choose from town0"),
    (["--data.val_fraction=2"], "data.val_fraction", "between 0 and 1"),
    (["--data.generated=images"], "data.generated", "--data.generated.root FOLDER"),
    (["--data.size=[33, 16]"], "data.size", "even"),
    (["--seed_everything=true"], "seed_everything", "give a number"),
    (["--trainer.gradient_clip_val=1"], "trainer.gradient_clip_val", "model.client.grad_clip"),
    (["--trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches", "model.client.accumulate"),
    (["--trainer.limit_train_batches=0.5"], "trainer.limit_train_batches", "data.limit_client_batches"),
    (["--trainer.sync_batchnorm=true"], "trainer.sync_batchnorm", "model.bn_stats"),
    (["--trainer.precision=16-mixed"], "trainer.precision", "bf16-mixed"),
    (["--trainer.precision=64-true"], "trainer.precision", "bf16-mixed"),
    (["--trainer.strategy=ddp"], "trainer.strategy", "FederatedStrategy"),
    (["--trainer.val_check_interval=0.5"], "trainer.val_check_interval", "check_val_every_n_epoch"),
    (["--trainer.overfit_batches=1"], "overfit_batches", "data.limit_client_batches"),
    (["--model.method.weighting=foo"], "model.method", "foo"),
    (["--model.method=FedAvg", "--model.method.share_head=bananas"], "model.method", "bananas"),
    (["--model.objective.label_smoothing=2"], "model.objective.label_smoothing", "[0, 1)"),
    (["--model.client.schedule.step=0"], "model.client.schedule.step", "less than 1"),
    (["--model.client.optimizer.lr=-1"], "model.client.optimizer", "Invalid learning rate"),
    (["--model.client.batch_size=1"], "model.client.batch_size", "less than 2"),
    (["--model.evaluation.batch_size=0"], "model.evaluation.batch_size", "less than 1"),
    (["--model.backbone.width=0"], "backbone.width", "is not in [1, 4096]"),
    (["--data.size=[2, 2]"], "data.size", "cannot process"),
    (["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/map"], "val/map", "monitor val/mAP"),
    (
        ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/mAP", "--data.val=none"],
        "val/mAP",
        "data.val",
    ),
    (["--trainer.limit_train_batches=0"], "trainer.limit_train_batches", "at least 1"),
    (["--trainer.limit_train_batches=1"], "trainer.limit_train_batches", "data.limit_client_batches to 1"),
    (["--data.limit_client_batches=2.5"], "data.limit_client_batches", "share between 0 and 1"),
    (["--model.clients.town1={client: {batch_size: 8}}"], "model.clients", "client.batch_size"),
    (["--trainer.barebones=true"], "trainer.barebones", "fast_dev_run"),
    (
        ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=test/global/seen/mAP"],
        "EarlyStopping",
        "oracle/mAP",
    ),
    (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt", "checkpoint"),
    (["--ckpt_path=best"], "checkpoints", "does run_dir name a run?"),
    (
        ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_weights_only=true"],
        "ModelCheckpoint",
        "export",
    ),
    (["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_on_exception=true"], "ModelCheckpoint", "round"),
    (["--trainer.callbacks=Preemption", "--trainer.callbacks.grace=-1"], "grace", "negative"),
    (["--trainer.strategy.silence_timeout=0:00:00"], "trainer.strategy.silence_timeout", "positive"),
    (["--model.on_bad_update=ignore"], "model.on_bad_update", "'stop', 'skip_client'"),
    (["--model.client_store=cloud"], "model.client_store", "'device', 'host', 'disk'"),
]


@pytest.mark.parametrize(
    ("options", "field", "remedy"), WRONG_SETTINGS, ids=lambda v: " ".join(v) if type(v) is list else ""
)
def test_a_wrong_setting_is_one_line_with_field_and_remedy(capsys, tiny, tmp_path, options, field, remedy):
    line = refuse(capsys, "fit", "--config", tiny, "--run_dir", tmp_path / "run", *options)
    assert field in line
    assert remedy in line


def test_wrong_folders_and_files(capsys, tiny, tmp_path):
    fit = ["fit", "--config", tiny, "--run_dir", tmp_path / "run", "--data.source=MarketFolders"]
    empty = tmp_path / "set"
    for name in ("bounding_box_train", "query", "bounding_box_test"):
        (empty / name).mkdir(parents=True)
    assert "no such folder" in refuse(capsys, *fit, f"--data.source.root={tmp_path / 'nowhere'}")
    assert f"{empty / 'bounding_box_train'}: holds no images" in refuse(capsys, *fit, f"--data.source.root={empty}")
    one_each = tmp_path / "one"
    for name, pids in (("bounding_box_train", range(1, 5)), ("query", (9,)), ("bounding_box_test", (9,))):
        (one_each / name).mkdir(parents=True)
        for pid in pids:
            Image.new("RGB", (8, 16)).save(one_each / name / f"{pid:04d}_c1s1_000000_00.png")
    line = refuse(capsys, *fit, f"--data.source.root={one_each}", "--data.val=first_image")
    assert "client one: identity 1 has one image" in line
    assert "data.val" in line


def test_wrong_config_files(capsys, tmp_path):
    broken, unknown = tmp_path / "broken.yaml", tmp_path / "unknown.yaml"
    broken.write_text("model: {method: FedPav\n")
    unknown.write_text("model: {client: {batchsize: 3}}\n")
    assert "nofile.yaml" in refuse(capsys, "fit", "--config", "nofile.yaml")
    assert f"{broken}: line 1 is not valid YAML" in refuse(capsys, "fit", "--config", broken)
    assert "model.client.batchsize" in refuse(capsys, "fit", "--config", unknown)
    line = refuse(capsys, "fit")
    assert "model.method; give a config with these fields, such as --config quickstart" in line
    assert f"{tmp_path} is a folder, not a file" in refuse(capsys, "fit", "--config", tmp_path)


def test_other_commands_refuse_in_one_line_too(capsys, tmp_path):
    garbage = tmp_path / "garbage.ckpt"
    garbage.write_bytes(b"not a checkpoint")
    assert "no such checkpoint" in refuse(capsys, "export", "--ckpt_path", "nowhere.ckpt", "--output", "x.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    for command in (["export", "--output", "x.safetensors"], ["test"], ["validate"], ["predict"], ["fit"]):
        line = refuse(capsys, *command, "--ckpt_path", "nowhere.ckpt")
        assert "--ckpt_path: " in line
        assert "is not there: no such checkpoint or run directory" in line
        assert "is a model of fedsim export --folder, no run" in refuse(capsys, *command, "--ckpt_path", model)
    assert "is a file; checkpoints of fedsim are directories" in refuse(
        capsys, "export", "--ckpt_path", garbage, "--output", "x.safetensors"
    )
    assert "holds no summary.json" in refuse(capsys, "report", tmp_path)
    assert "no such folder" in refuse(capsys, "data", "preview", "--root", tmp_path / "nowhere")
    assert "choose from check, convert, cut, manifest, prepare, preview, splits" in refuse(capsys, "data", "nonsense")


@pytest.fixture(scope="module")
def finished(fedsim, tmp_path_factory):
    """A finished run of FedPav on a torchvision network, and one of Local."""
    folder = tmp_path_factory.mktemp("runs")
    config = folder / "config.yaml"
    config.write_text(TINY)
    resnet = ["--model.backbone=ResNet", "--model.backbone.depth=18", "--data.limit_client_batches=1"]
    pav = fedsim("fit", "--config", config, "--run_dir", folder / "pav", "--trainer.max_epochs=2", *resnet,
                 "--trainer.check_val_every_n_epoch=1")  # fmt: skip
    for seed in (0, 1):
        fedsim("fit", "--config", config, "--run_dir", folder / f"local{seed}", "--model.method=Local",
               f"--seed_everything={seed}")  # fmt: skip
    return folder, pav


def test_fit_leaves_a_complete_run_directory_and_prints_a_table(finished):
    folder, result = finished
    for name in ("config.yaml", "metrics.csv", "summary.json", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (folder / "pav" / name).exists(), name
    for text in ("FedPav", "global", "local", "personalised", "new0 (unseen)", "mean seen", "mAP / rank-1"):
        assert text in result.stdout
    assert "round 2/2: loss" not in result.stdout  # progress goes to stderr
    summary = json.loads((folder / "pav" / "summary.json").read_text())
    assert summary["finished"] is True
    assert (summary["rounds"], summary["seed"], summary["method"]) == (2, 0, "FedPav")
    resolved = yaml.safe_load((folder / "pav" / "config.yaml").read_text())
    assert resolved["seed_everything"] == 0
    with (folder / "pav" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = [row for row in rows if row["test/global/seen/mAP"]][-1]
    final = summary["final"]["metrics"]
    assert float(last["test/global/seen/mAP"]) == pytest.approx(final["test/global/seen/mAP"])  # Lightning logs float32
    assert float(last["val/mAP"]) == float(last["val/global/seen/mAP"])
    assert final["test/global/seen/mAP"] == pytest.approx(
        np.mean([final[f"test/global/town{i}/mAP"] for i in range(4)])
    )
    backbone = 4 * (11_176_512 + 9_600)  # ResNet-18: parameters and running statistics
    neck = 4 * (512 * 16 + 16 + 2 * 16 + 2 * 16)
    assert summary["bytes_up"] == summary["bytes_down"] == 2 * 4 * (backbone + neck)  # 2 rounds, 4 clients


def test_last_is_the_last_round_and_a_resumed_run_keeps_the_curves(fedsim, tiny, tmp_path):
    run = tmp_path / "run"
    options = ["--config", tiny, "--run_dir", run, "--trainer.check_val_every_n_epoch=2"]
    fedsim("fit", *options, "--trainer.max_epochs=3")
    last = run / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == 3  # an evaluation was after round 2
    fedsim("fit", "--ckpt_path", run, "--trainer.max_epochs=5")  # the run directory says the rest
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["rounds"], summary["final"]["round"]) == (5, 5)
    assert [path.name for path in metrics_files(run)] == ["metrics.csv"]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows if row["train/loss"]] == [0, 1, 2, 3, 4]
    scored = [int(row["epoch"]) for row in rows if row["val/mAP"]]
    assert scored == [1, 2, 3, 4], "the last round of either call is scored, too"


def test_a_client_that_diverges_on_one_rank_stops_all(fedsim, tiny, tmp_path):
    town = "{optimizer: {class_path: torch.optim.SGD, init_args: {lr: 1.0e+30}}}"
    result = fedsim("fit", "--config", tiny, "--run_dir", tmp_path / "run", "--trainer.devices=2",
                    f"--model.clients.town1={town}", check=False)  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "client town1, round 1: it received a global model with values up to" in result.stderr
    assert "loss or weights are not finite" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_fit_without_test_scores_ends_well(capsys, tiny, tmp_path):
    options = ["--model.evaluation.test_during_fit=false", "--trainer.devices=1", "--run_dir", str(tmp_path / "run")]
    assert main(["fit", "--config", str(tiny), *options]) == 0
    output = capsys.readouterr().out
    assert "no test scores: see model.evaluation.test_during_fit" in output
    assert "no scores" not in output  # validation was scored
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]["metrics"]
    assert metrics  # of validation
    assert not any(name.startswith("test/") for name in metrics)


def test_small_clients_are_named_once(tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    options = ["--model.client.batch_size=1000", "--trainer.devices=1", "--trainer.max_epochs=1"]
    assert main(["fit", "--config", str(tiny), *options, "--run_dir", str(tmp_path / "run")]) == 0
    [line] = [record.message for record in caplog.records if "fewer" in record.message]
    assert all(f"{name} (" in line for name in ("town0", "town1", "town2", "town3"))


def test_scoring_needs_a_checkpoint(capsys, tiny, tmp_path):
    for command in ("validate", "test", "predict"):
        line = refuse(capsys, command, "--config", tiny, "--run_dir", tmp_path / "run")
        assert f"{command} needs a checkpoint" in line


def test_a_finished_run_is_not_overwritten(finished, capsys):
    folder, _ = finished
    line = refuse(capsys, "fit", "--config", folder / "config.yaml", "--run_dir", folder / "pav")
    assert "holds a run already" in line
    assert "--overwrite" in line
    foreign = folder / "local0" / "checkpoints" / "last.ckpt"
    line = refuse(
        capsys, "fit", "--config", folder / "config.yaml", "--run_dir", folder / "pav", "--ckpt_path", foreign
    )
    assert "holds a run already" in line or "the checkpoint is of method Local" in line
    assert (folder / "pav" / "metrics.csv").is_file()


def test_features_and_lists_need_a_run_directory_that_can_be(finished, capsys, tiny):
    folder, _ = finished
    options = ["--config", folder / "config.yaml", "--model.method=Local", "--ckpt_path", folder / "local0"]
    for command in (["predict"], ["test", "--save_ranking"]):
        line = refuse(capsys, *command, *options, "--run_dir", tiny)  # a file
        assert f"run_dir: {tiny}" in line
        assert "cannot be a folder" in line


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path):
    for name in (
        "metrics-1.csv",
        "metrics.csv",
        "summary.json",
        "checkpoints/best.ckpt/v1/global.ckpt",
        "features/town0.npz",
        "rankings/town0.png",
        "maps/town0.png",
        "queries.npz",
        "tests/best.json",
        "notes",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    start = FolderStart(tmp_path, overwrite=True)
    start.prepare()
    start.settle(ends=True)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["notes"]


def test_metrics_of_resumed_parts_are_read_in_their_order(tmp_path):
    for name in ("metrics-10.csv", "metrics.csv", "metrics-2.csv"):
        (tmp_path / name).touch()
    assert [path.name for path in metrics_files(tmp_path)] == ["metrics-2.csv", "metrics-10.csv", "metrics.csv"]


def test_test_on_a_checkpoint_repeats_the_scores_of_the_fit(fedsim, finished):
    folder, _ = finished
    run = folder / "local0"
    result = fedsim("test", "--ckpt_path", run / "checkpoints" / "last.ckpt", cwd=folder)
    summary = json.loads((run / "summary.json").read_text())["final"]["metrics"]
    for domain in ("town0", "new1", "seen"):
        line = next(row for row in result.stdout.splitlines() if row.split()[:2] == [domain, "personalised"])
        assert f"{100 * summary[f'test/personalised/{domain}/mAP']:.1f}" in line.split()


def test_a_test_with_a_config_of_its_own_says_nothing_of_lightnings_checkpoints(fedsim, finished, tmp_path):
    run = finished[0] / "pav"
    result = fedsim("test", "--config", run / "config.yaml", "--ckpt_path", run, "--run_dir", tmp_path / "other")
    assert "dirpath" not in result.stderr


def test_a_checkpoint_of_another_method_is_refused(finished, fedsim):
    folder, _ = finished
    checkpoint = folder / "local0" / "checkpoints" / "last.ckpt"
    test = ["test", "--config", folder / "config.yaml", "--ckpt_path", checkpoint]
    result = fedsim(*test, check=False)
    assert result.returncode == 2
    assert "the checkpoint is of method Local, model.method is FedPav" in result.stderr
    result = fedsim(*test, "--model.method=Local", "--data.val=none", check=False)
    assert result.returncode == 2
    assert "client town0 has 7 identities in the checkpoint, 10 here" in result.stderr


def test_predict_writes_features_of_every_test_set(fedsim, finished):
    folder, _ = finished
    run = folder / "pav"
    options = ("--config", run / "config.yaml", "--ckpt_path", run / "checkpoints" / "last.ckpt", "--save_maps")
    said = fedsim("predict", *options).stdout
    assert f"wrote {run / 'features'} and {run / 'maps'}" in said
    assert sorted(path.name for path in (run / "maps").glob("*.png")) == [
        f"{name}.png" for name in ("new0", "new1", "town0", "town1", "town2", "town3")
    ]
    files = sorted(path.stem for path in (run / "features").glob("*.npz"))
    assert files == ["new0", "new1", "town0", "town1", "town2", "town3"]
    arrays = np.load(run / "features" / "town0.npz")
    assert arrays["query"].shape == (len(arrays["query_pids"]), 16)
    assert arrays["gallery"].shape == (len(arrays["gallery_camids"]), 16)
    assert set(arrays["query_pids"]) <= set(arrays["gallery_pids"])


def test_export_loads_into_plain_torchvision(finished, tmp_path):
    folder, _ = finished
    checkpoint, output = folder / "pav" / "checkpoints" / "last.ckpt", tmp_path / "model.safetensors"
    assert main(["export", "--ckpt_path", str(checkpoint), "--output", str(output)]) == 0
    tensors = load_file(output)
    network = torchvision.models.resnet18()
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    counters = {name for name in missing if name.endswith("num_batches_tracked")}
    assert set(missing) - counters == {"fc.weight", "fc.bias"}
    assert all(name.startswith("neck.") for name in unexpected)
    content = read_checkpoint(checkpoint)
    vector = content["state_dict"]["server.vectors.resnet"]
    entry = next(e for e in content["fedsim"]["layouts"]["resnet"] if e["name"] == "backbone.conv1.weight")
    assert torch.equal(network.conv1.weight.flatten(), vector[entry["offset"] :][: network.conv1.weight.numel()])


def test_export_of_a_method_without_a_global_model_says_so(finished, capsys, tmp_path):
    folder, _ = finished
    checkpoint = folder / "local0" / "checkpoints" / "last.ckpt"
    line = refuse(capsys, "export", "--ckpt_path", checkpoint, "--output", tmp_path / "x.safetensors")
    assert "no global model" in line
    assert not (tmp_path / "x").exists()
    good = folder / "pav" / "checkpoints" / "last.ckpt"
    assert "is a folder" in refuse(capsys, "export", "--ckpt_path", good, "--output", tmp_path)


def test_report_groups_seeds_and_draws(finished, capsys, tmp_path):
    folder, _ = finished
    runs = [str(folder / name) for name in ("pav", "local0", "local1")]
    figure = tmp_path / "figure.png"
    assert main(["report", *runs, "--figure", str(figure)]) == 0
    table = capsys.readouterr().out
    summaries = [json.loads((folder / f"local{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    scores = [100 * s["final"]["metrics"]["test/personalised/town0/mAP"] for s in summaries]
    assert f"{np.mean(scores):.1f}+-{np.std(scores, ddof=1):.1f}" in table
    assert "seeds 0, 1" in table
    assert Image.open(figure).size[0] > 600
    assert "ends with .foo" in refuse(capsys, "report", *runs, "--figure", tmp_path / "figure.foo")
    assert main(["report", *runs, "--best", "--metric", "rank1"]) == 0
    assert "rank-1 in percent, round with the best val/mAP" in capsys.readouterr().out


def test_your_own_backbone_and_method_need_no_registration(capsys, tiny, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--run_dir", str(tmp_path / "run"), "--model.method=mine.NormsOnly", "--model.backbone=mine.Tiny"]
    assert main(["describe", "--config", str(tiny), *options, "--model.backbone.channels=5"]) == 0
    table = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (table["conv"], table["norm"], table["neck"]) == ("private", "shared", "private")
    assert main(["fit", "--config", str(tiny), *options, "--trainer.max_epochs=1"]) == 0


OWN_CLASSES = """
from dataclasses import dataclass

from torch import nn

from fedsim.methods.base import Method
from fedsim.models import Group


class Tiny(nn.Module):
    def __init__(self, channels: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, channels, 3), nn.GroupNorm(1, channels), nn.ReLU())
        self.out_channels = channels

    def forward(self, x):
        return self.layers(x)


@dataclass(frozen=True, kw_only=True)
class NormsOnly(Method):
    @property
    def shared_groups(self):
        return frozenset({Group.NORM})
"""


def test_preview_draws_a_contact_sheet(capsys, tmp_path, market_tree):
    few = tmp_path / "few.yaml"
    few.write_text(
        "data:\n  source: {class_path: SyntheticReID, init_args: {clients: 4, unseen: 1}}\n  size: [64, 32]\n"
    )
    for count, options in ((8, []), (3, ["--root", str(market_tree)]), (5, ["--config", str(few)])):
        output = tmp_path / f"sheet{count}{len(options)}.png"
        output.unlink(missing_ok=True)
        assert main(["data", "preview", *options, "--output", str(output)]) == 0
        assert f"{count} data sets" in capsys.readouterr().out
        assert Image.open(output).size[1] > count * 50
        before = output.read_bytes()
        assert "exists already" in refuse(capsys, "data", "preview", "--output", output)
        assert output.read_bytes() == before


def test_a_damaged_image_stops_all_ranks_with_its_path(fedsim, tiny, market_tree, tmp_path):
    import shutil

    root = tmp_path / "damaged"
    shutil.copytree(market_tree, root)
    victim = sorted((root / "south" / "bounding_box_train").iterdir())[3]
    victim.write_bytes(victim.read_bytes()[:40])
    result = fedsim(
        "fit", "--config", tiny, "--run_dir", tmp_path / "run", "--data.source=MarketFolders",
        f"--data.source.root={root}", "--data.val=none", "--trainer.devices=2", check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert str(victim) in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_of_a_client_need_no_client_in_the_config(tiny, tmp_path, capsys):
    """What errors advise: ``model.clients.NAME.batch_size``; also after a run's own config, which says null."""
    null, some = tmp_path / "null.yaml", tmp_path / "some.yaml"
    null.write_text("model: {clients: null}")
    some.write_text("model: {clients: {town0: {local_epochs: 3}, town1: {local_epochs: 2}}}")

    def resolved(*words):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(tiny), *map(str, words), "--print_config"])
        clients = yaml.safe_load(capsys.readouterr().out)["model"]["clients"]
        return {name: {k: v for k, v in own.items() if v is not None} for name, own in clients.items()}

    nested = ["--model.clients.town0.batch_size=8", "--model.clients.town1.grad_clip", "1.5"]
    alone = {"town0": {"batch_size": 8}, "town1": {"grad_clip": 1.5}}
    assert resolved(*nested) == alone
    assert resolved("--config", null, *nested) == resolved(f"--config={some}", "--model.clients=null", *nested) == alone
    both = {"town0": {"local_epochs": 3, "batch_size": 8}, "town1": {"local_epochs": 2, "grad_clip": 1.5}}
    assert resolved(f"--config={some}", *nested) == both
    assert resolved("--model.clients", "{town2: {accumulate: 2}}", *nested) == {"town2": {"accumulate": 2}, **alone}


def test_the_last_round_is_scored_whatever_the_interval(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--config", str(tiny), "--run_dir", str(run), "--trainer.check_val_every_n_epoch=2"]
    assert main(["fit", *options]) == 0  # of three rounds
    assert json.loads((run / "summary.json").read_text())["final"]["round"] == 3
    with (run / "metrics.csv").open() as file:
        scored = [int(row["epoch"]) + 1 for row in csv.DictReader(file) if row["val/mAP"]]
    assert scored == [2, 3]
    assert f"wrote {run}: config.yaml, metrics.csv, summary.json, checkpoints, queries.npz" in capsys.readouterr().out


def test_a_run_that_is_shorter_than_the_interval_has_scores_of_its_last_round(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--config", str(tiny), "--run_dir", str(run), "--trainer.check_val_every_n_epoch=9"]
    assert main(["fit", *options]) == 0
    assert json.loads((run / "summary.json").read_text())["final"]["round"] == 3
    assert (run / "checkpoints" / "best.ckpt").is_dir()
    assert "mean seen" in capsys.readouterr().out


def test_where_nothing_is_scored_the_remedy_is_named(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["fit", "--config", str(tiny), "--run_dir", str(run), "--trainer.limit_val_batches=0"]) == 0
    remedy = f"fedsim test --ckpt_path {run}"
    assert f"no scores: nothing was evaluated; {remedy} scores a checkpoint" in capsys.readouterr().out
    assert main(remedy.split()[1:]) == 0


def test_without_a_terminal_long_rounds_write_lines_with_the_time_left(tiny, tmp_path, caplog):
    callback = "{class_path: fedsim.federation.callbacks.RoundProgress, init_args: {line_interval: 0.0}}"
    options = ["--run_dir", str(tmp_path / "run"), f"--trainer.callbacks=[{callback}]", "--trainer.max_epochs=2"]
    with caplog.at_level("INFO", logger="fedsim"):
        assert main(["fit", "--config", str(tiny), *options]) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        re.fullmatch(r"round 1/2: town0 \(1/4\), batch 1/\d+, loss [\d.]+, about \d:\d\d:\d\d left", x) for x in lines
    )
    assert any(re.fullmatch(r"round 1/2: loss .*, about \d:\d\d:\d\d left", line) for line in lines)
    assert any(re.fullmatch(r"round 2/2: loss .* \d+\.\d{3}", line) for line in lines), "nothing is left"
