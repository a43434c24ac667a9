"""Top-1 accuracy against plain loops, common labels where clients lack classes, and what a run says of it."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_accuracy

from failing import Run, finish, read_result
from fedsim.__main__ import main
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import FederatedDataModule
from fedsim.data.datasets import CIFAR10
from fedsim.data.federations import build_federation
from fedsim.data.images import Domain
from fedsim.evaluation.classification import hits_of
from fedsim.evaluation.settings import Evaluation
from fedsim.functional.normalise import normalise_images
from fedsim.methods import Ditto, FedAvg, FedBN, FedPav, Local
from fedsim.models import Group
from small import fit, make_data, make_model, new_evaluator, receive, refuse

SIZE = (16, 16)
CLASSES = 10
SETTINGS = Evaluation(task="classification", batch_size=8)
LACKING = {"partition": "dirichlet", "parts": 4, "alpha": 0.3}


def cifar(**options):
    defaults = {"size": SIZE, "partition": "iid", "parts": 4, "labels": "common", "dry_run": True}
    return make_data(CIFAR10("nowhere"), **defaults | options)


def trained(method, settings=SETTINGS, **options):
    return fit(make_model(method, evaluation=settings), cifar(**options), rounds=1)


@pytest.fixture(scope="module")
def federation():
    """One shared head; every client lacks classes."""
    return trained(FedAvg(share_head=True), **LACKING, val="images")


# -- labels ------------------------------------------------------------------------------------------------------------


def test_a_client_that_lacks_a_class_labels_the_others_alike():
    federated = cifar(**LACKING).federated
    assert federated.classes.tolist() == list(range(1, CLASSES + 1))
    lacking = [client for client in federated.clients if len(client.train.identities) < CLASSES]
    assert any(client.train.identities.max() > len(client.train.identities) for client in lacking)  # a gap
    for client in federated.clients:
        assert client.labels.tolist() == [pid - 1 for pid in client.train.pids]
        assert client.num_classes == CLASSES


def test_own_labels_stay_the_default():
    assert make_data().federated.classes is None
    for client in cifar(**LACKING, labels="own").federated.clients:
        assert sorted(set(client.labels.tolist())) == list(range(client.num_classes))
        assert client.num_classes == len(client.train.identities)


@pytest.mark.parametrize("val", ["images", "first_image", "none"])
def test_the_union_has_common_labels_too(val):
    one = cifar(dry_run=True).list_domains()[0]
    half = np.flatnonzero(one.train.pids > CLASSES // 2)
    domains = [
        Domain("a", one.train, one.query, one.gallery),
        Domain("b", one.train.take(half), one.query, one.gallery),
    ]
    members = build_federation(domains, labels="common", val=val).clients
    union = build_federation(domains, labels="common", val=val, partition="union").clients[0]
    assert union.labels.tolist() == [int(label) for member in members for label in member.train.pids - 1]
    assert union.num_classes == CLASSES
    if val != "none":
        assert union.val.query.pids.tolist() == [int(pid) for member in members for pid in member.val.query.pids]


@pytest.mark.parametrize(("labels", "lines"), [("common", 1), ("own", 0)])
def test_a_line_says_how_many_identities_are_joined(caplog, labels, lines):
    caplog.set_level("INFO", "fedsim")
    one = cifar(dry_run=True).list_domains()[0]
    few = one.train.take(np.flatnonzero(one.train.pids <= 3))
    domains = [Domain("a", one.train, one.query, one.gallery), Domain("b", few, one.query, one.gallery)]
    build_federation(domains, labels=labels, val="none")
    line = "data.labels: common: 3 identities of more than one data set are one person (or class) each"
    assert [message for message in caplog.messages if "joined" in message or "one person" in message] == [line] * lines


def test_whole_classes_are_not_held_out():
    with pytest.raises(ConfigError, match=r"data\.val: identities holds out whole classes"):
        _ = cifar(val="identities").federated


def test_images_are_held_out_once():
    whole, parted = (cifar(val=val, val_fraction=0.25).federated.clients for val in ("none", "images"))
    for all_, part in zip(whole, parted, strict=True):
        assert len(part.val.query) == round(0.25 * len(all_.train))
        assert sorted([*part.val.query.pids, *part.train.pids]) == sorted(all_.train.pids)
        pixels = [split.images.decode(SIZE) for split in (part.val.query, part.train, all_.train)]
        both = torch.cat(pixels[:2]).flatten(1)
        assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, pixels[2].flatten(1).tolist()))


def test_a_manifest_has_no_common_labels(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.labels: data\.manifest lists the images"):
        FederatedDataModule(manifest=str(tmp_path / "m.csv"), labels="common")


# -- scores ------------------------------------------------------------------------------------------------------------


def test_hits_are_torchmetrics_hits():
    torch.manual_seed(0)
    logits, labels = torch.randn(500, 7), torch.randint(0, 7, (500,))
    hits = hits_of(logits, labels)
    assert 0 < hits.sum() < 500
    assert hits.float().mean() == multiclass_accuracy(logits, labels, num_classes=7, average="micro")


def test_the_first_of_equal_logits_counts_and_what_is_not_finite_does_not():
    logits = torch.tensor([[1.0, 1.0, 0.0], [torch.nan, 1.0, 0.0], [torch.inf, 1.0, 0.0], [-1.0, -2.0, -3.0]])
    assert hits_of(logits, torch.zeros(4, dtype=torch.int64)).tolist() == [True, False, False, True]
    assert hits_of(logits, torch.ones(4, dtype=torch.int64)).tolist() == [False] * 4


def plain_accuracy(model, split, mirrored=False):
    """Image by image, class by class."""
    model.network.eval()
    right = 0
    with torch.no_grad():
        for image, pid in zip(normalise_images(split.images.decode(SIZE)), split.pids, strict=True):
            logits = model.head(model.network(image[None]).neck)[0]
            if mirrored:
                logits = logits + model.head(model.network(image.flip(-1)[None]).neck)[0]
            best = 0
            for label in range(CLASSES):
                if logits[label] > logits[best]:
                    best = label
            right += best == pid - 1
    return right / len(split)


@pytest.mark.parametrize("mirrored", [False, True])
def test_top1_of_the_global_model_by_plain_loops(federation, mirrored):
    evaluator = new_evaluator(federation, settings=replace(SETTINGS, flip=mirrored))
    (model,) = federation.parts.models.values()
    for split in ("test", "val"):
        scores = evaluator.score(split)
        model.shared.copy_(federation.server.vector(model.arch))
        sets = {"cifar10": federation.parts.federated.tests["cifar10"].gallery} if split == "test" else {
            client.name: client.val.query for client in federation.parts.federated.clients
        }  # fmt: skip
        expected = {name: plain_accuracy(model, images, mirrored) for name, images in sets.items()}
        for name, accuracy in expected.items():
            assert scores[f"{split}/global/{name}/top1"] == accuracy
            assert scores[f"{split}/personalised/{name}/top1"] == accuracy  # all is shared
        assert scores[f"{split}/top1"] == pytest.approx(np.mean(list(expected.values())))
        assert {key.rpartition("/")[2] for key in scores} == {"top1"}
        assert evaluator.curves == {}


@pytest.mark.parametrize("method", [FedPav(), Local(), FedBN(share_head=True), Ditto()], ids=lambda m: type(m).__name__)
def test_top1_of_personal_and_local_models_by_plain_loops(method):
    federation = trained(method, **LACKING)
    evaluator, names = federation.evaluator, list(federation.parts.clients)
    scores = evaluator.score("test", ())
    # a global model classifies only if it is complete: private heads or norms are nobody's classifier
    assert any("/global/" in key for key in scores) == (
        isinstance(method, Ditto) and Group.HEAD in method.shared_groups
    )
    (model,) = federation.parts.models.values()
    accuracies = []
    for name in names:
        client = federation.parts.clients[name]
        model.shared.copy_(federation.server.vector(model.arch))
        client.load()
        receive(client, federation.settings.method, federation.server)
        federation.settings.method.personalise(client)
        accuracies.append(plain_accuracy(model, federation.parts.federated.tests["cifar10"].gallery))
    assert scores["test/personalised/cifar10/top1"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert scores["test/top1"] == scores[f"test/{evaluator.primary}/cifar10/top1"]


def test_local_models_are_those_before_averaging():
    settings = replace(SETTINGS, test_during_fit=True)
    model = fit(
        make_model(FedAvg(share_head=True), evaluation=settings), cifar(**LACKING), rounds=1, limit_val_batches=1
    )
    (flat_model,) = model.parts.models.values()
    accuracies = []
    for client in model.parts.clients.values():
        flat_model.flat.buffer.copy_(model.parts.rank_share.snapshots.of(client.client_name))
        accuracies.append(plain_accuracy(flat_model, model.parts.federated.tests["cifar10"].gallery))
    assert model.scores["test/local/cifar10/top1"] == pytest.approx(np.mean(accuracies), abs=1e-12)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_own_labels_cannot_be_scored():
    with pytest.raises(ConfigError, match=r"data\.labels: own .* set it to common"):
        trained(FedAvg(share_head=True), labels="own")


def test_other_classes_cannot_be_scored():
    model = make_model(FedAvg(share_head=True), evaluation=replace(SETTINGS, test_during_fit=True))
    with pytest.raises(DataError, match=r"test set of town0: class \d+ is in no client's data set"):
        fit(model, make_data(labels="common"), rounds=1, limit_val_batches=1)


def test_what_classification_has_not_got_is_refused(federation, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.evaluation\.ensemble"):
        Evaluation(task="classification", ensemble=True)
    with pytest.raises(ConfigError, match=r"no retrieval features"):
        federation.evaluator.write_features(tmp_path)
    with pytest.raises(ConfigError, match=r"save_ranking"):
        federation.evaluator.score("test", rankings=tmp_path)


# -- whole runs --------------------------------------------------------------------------------------------------------

SMALL = [
    "--paper=001/cifar10", "--data.dry_run=true", "--model.backbone=SmallCNN",
    "--model.backbone.width=8", "--data.size=[16, 16]", "--model.client.batch_size=8", "--model.client.local_epochs=1",
    "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--data.partition=dirichlet", "--data.alpha=0.3", "--data.val=images",
    "--model.evaluation.batch_size=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run on one and on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (1, 2):
        how = [] if ranks == 1 else ["--model.evaluation.share_from=1"]
        finish(Run(folder / "logs", "fit", *SMALL, *how, f"--run_dir={folder / str(ranks)}", ranks=ranks))
    return folder / "1", folder / "2"


def test_two_ranks_log_the_same_bits(runs):
    rows = []
    for folder in runs:
        with (folder / "metrics.csv").open() as file:
            rows.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)])
    assert rows[0] == rows[1]
    assert any(row.get("test/global/cifar10/top1") for row in rows[0])
    one, two = (read_result(folder / "checkpoints" / "last.ckpt") for folder in runs)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_models_are_selected_by_val_top1(runs):
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert (runs[0] / "checkpoints" / "best.ckpt").exists()
    with (runs[0] / "metrics.csv").open() as file:
        scores = [float(row["val/top1"]) for row in csv.DictReader(file) if row.get("val/top1")]
    assert len(scores) == 2
    assert summary["best"]["metrics"]["val/top1"] == pytest.approx(max(scores), rel=1e-6)
    assert {key.rpartition("/")[2] for key in summary["final"]["metrics"]} == {"top1"}


def test_reports_show_top1(runs, capsys):
    score = 100 * json.loads((runs[0] / "summary.json").read_text())["final"]["metrics"]["test/global/cifar10/top1"]
    for options in ([], ["--metric", "top1"]):
        assert main(["report", str(runs[0]), *options]) == 0
        text = capsys.readouterr().out
        assert f"{score:.1f}" in text
        assert "top1 in percent" in text
        assert "rank-1" not in text
    assert main(["report", str(runs[0]), "--rule", "best"]) == 0
    assert "round with the best val/top1" in capsys.readouterr().out
    assert main(["report", str(runs[0]), "--target", "top1=2"]) == 0
    assert "top1 of at least 2 %" in capsys.readouterr().out


def test_best3_is_for_retrieval(runs, capsys):
    assert "--rule: best3 chooses by rank-1" in refuse(capsys, "report", str(runs[0]), "--rule", "best3")


def test_nothing_watches_scores_of_retrieval(tmp_path, capsys):
    stop = "--trainer.callbacks=[{class_path: EarlyStopping, init_args: {monitor: val/mAP, mode: max}}]"
    line = refuse(capsys, "fit", *SMALL, stop, f"--run_dir={tmp_path / 'run'}")
    assert "monitors val/mAP, which no such run logs; monitor val/top1" in line
    assert not (tmp_path / "run").exists()


def test_scores_of_a_finished_run_are_printed(runs, capsys):
    own = [f"--ckpt_path={runs[0]}", "--trainer.devices=1"]
    assert main(["test", *SMALL, *own]) == 0
    text = capsys.readouterr().out
    assert "top1" in text
    assert "mAP" not in text
    assert "no retrieval features" in refuse(capsys, "predict", *SMALL, *own)
