"""FedProto against loops over clients, classes and images."""

import copy
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedProto, Local
from fedsim.models import Neck, SmallCNN
from fedsim.training.labels import Clustering
from fedsim.training.settings import ClientOverride, LocalTraining
from plain_loops import LR, NECK, Federation, Smooth, assert_personalised, sgd
from small import Some, fit, make_data, make_model

SHARED = {"labels": "common", "partition": "iid", "parts": 2}


def prototypes_of(model, client):
    """The mean feature of each of a client's classes, and its number of images."""
    with torch.no_grad():
        features = model.eval()(client.x).neck
    by_class = {}
    for feature, label in zip(features, client.y.tolist(), strict=True):
        by_class.setdefault(label, []).append(feature)
    return {label: (sum(members) / len(members), len(members)) for label, members in by_class.items()}


def distance(features, labels, prototypes, compares):
    """The term of a batch."""
    total = 0.0
    if compares == "images":
        for feature, label in zip(features, labels.tolist(), strict=True):
            if label in prototypes:
                total = total + ((feature - prototypes[label]) ** 2).sum() / features.numel()
        return total
    for label in {*labels.tolist()} & {*prototypes}:
        members = [feature for feature, other in zip(features, labels.tolist(), strict=True) if other == label]
        total = total + ((sum(members) / len(members) - prototypes[label]) ** 2).sum().sqrt()
    return total


def session(model, client, batches, prototypes, method, momentum):
    """Local training; the labels of a batch are found by its images."""
    labels = {x.data_ptr(): y for x, y in batches}

    def loss_of(x, features):
        return method.lam * distance(features.neck, labels[x.data_ptr()], prototypes, method.compares)

    sgd(model, client.head, batches, loss_of, momentum=momentum)


@pytest.mark.parametrize(
    ("compares", "weighting", "lam", "momentum"),
    [("prototypes", "size", 1.0, 0.0), ("images", "uniform", 20.0, 0.5), ("prototypes", "uniform", 0.5, 0.5)],
)
def test_algorithm_1(compares, weighting, lam, momentum):
    method = FedProto(compares=compares, weighting=weighting, lam=lam)
    federation, selection = Federation(make_data(**SHARED)), RandomFraction(0.5)  # three of six clients in each round
    models = {client.name: copy.deepcopy(federation.model) for client in federation.clients}
    prototypes, seen = {}, []
    for t in range(4):
        sent = {}
        for client in [k for k in federation.clients if k.name in selection.select(t, [*models], 0)]:
            session(models[client.name], client, client.batches(t), prototypes, method, momentum)
            for label, (mean, count) in prototypes_of(models[client.name], client).items():
                sent.setdefault(label, []).append((mean, count if weighting == "size" else 1))
        for label, answers in sent.items():
            prototypes[label] = sum(mean * n for mean, n in answers) / sum(n for _, n in answers)
        seen.append({*sent})
    assert any(later < {*prototypes} for later in seen[1:]), "no class had to keep its prototype"
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=momentum)
    training = LocalTraining(batch_size=8, optimizer=optimizer, optimizer_state="reset")
    model = make_model(method, backbone=Smooth(), neck=NECK, client=training, selection=selection)
    trained = fit(model, make_data(**SHARED), rounds=4)
    heads = {client.name: client.head for client in federation.clients}
    assert_personalised(trained, {name: (model, heads[name]) for name, model in models.items()}, 5e-6)
    kept = trained.server.kept["smooth"]["prototypes"]
    for label, row in enumerate(kept.double()):
        assert row[-1] == (label in prototypes)
        torch.testing.assert_close(row[:-1], prototypes.get(label, torch.zeros(6).double()), rtol=0, atol=1e-5)


def test_without_the_term_it_is_local_training_and_with_it_not():
    states = [
        [
            client.private_state()["state"]
            for client in fit(make_model(method), make_data(**SHARED)).parts.clients.values()
        ]
        for method in (Local(), FedProto(lam=0.0), FedProto())
    ]
    local, without, with_it = states
    assert all(map(torch.equal, local, without))
    assert not any(map(torch.equal, local, with_it))


def test_the_first_round_is_local_training():
    models = [fit(make_model(method), make_data(**SHARED), rounds=1) for method in (Local(), FedProto())]
    a, b = ([client.private_state()["state"] for client in model.parts.clients.values()] for model in models)
    assert all(map(torch.equal, a, b))


def test_prototypes_are_the_only_bytes():
    model = fit(make_model(FedProto()), make_data(**SHARED), rounds=1)
    classes, width = len(model.parts.federated.classes), model.parts.models["smallcnn"].network.num_features
    of_one_way = 4 * classes * (width + 1) * len(model.parts.clients)
    assert model.round_metrics["comm/total_bytes"] == model.round_metrics["comm/extra_bytes"] == 2 * of_one_way


def test_clients_may_have_other_backbones():
    """Two architectures have one set of prototypes."""
    other = ClientOverride(backbone=SmallCNN(width=4))
    model = make_model(FedProto(), neck=Neck(kind="linear", dim=5), clients={"town0-part1": other})
    kept = [tensors["prototypes"] for tensors in fit(model, make_data(**SHARED), rounds=1).server.kept.values()]
    assert len(kept) == 2
    assert torch.equal(*kept)
    assert kept[0][:, -1].all()


def test_features_of_different_lengths_are_refused():
    other = ClientOverride(backbone=SmallCNN(width=4))
    with pytest.raises(ConfigError, match=r"^model\.neck: FedProto compares features, whose lengths differ \(smallcnn"):
        make_model(FedProto(), clients={"town0-part1": other}).assemble(make_data(**SHARED), 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, r"^data\.labels: FedProto, as it is configured, needs classes of several clients; set it to common$"),
        (
            SHARED | {"partition": "by_identity", "source": Some("town0")},
            r"^data\.partition: FedProto, .* each of the \d+ has one; choose by_camera",
        ),
    ],
    ids=["own labels", "people dealt out"],
)
def test_where_no_class_is_shared_it_is_refused(options, line):
    with pytest.raises(ConfigError, match=line):
        make_model(FedProto()).assemble(make_data(**options), 0, 1, torch.device("cpu"))


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: FedProto, as it is configured, needs identities"):
        fit(make_model(FedProto(), client=training), make_data(**SHARED), rounds=1)


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.lam"):
        FedProto(lam=-1.0)
