"""FedCAPR: the regulariser against the received model, and weights by how far features moved."""

import copy
from functools import partial

import pytest
import torch

from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg, FedCAPR
from fedsim.methods.reference import remember_received
from fedsim.models import Neck
from fedsim.training.labels import Clustering
from fedsim.training.messages import Report
from fedsim.training.settings import LocalTraining
from plain_loops import Smooth
from small import Some, fit, make_data, make_model, receive, signals_of, vector

SIZE = (16, 8)
CLUSTERING = Clustering(k1=6, k2=2, min_samples=2)


def make(method, epochs=1, clustering=CLUSTERING, **options):
    training = LocalTraining(
        batch_size=8, local_epochs=epochs, cluster=clustering, optimizer=partial(torch.optim.SGD, lr=0.05)
    )
    neck = Neck(kind="bnneck", dropout=0.0, bias=False)
    return make_model(method, backbone=Smooth(), neck=neck, client=training, **options)


def assembled(method, **options):
    model, data = make(method, **options), make_data(size=SIZE)
    model.assemble(data, 0, 1, torch.device("cpu"))
    client = model.parts.clients["town0"]
    client.images.open(data.open_train)
    return model, client


def begin(model, client, round_):
    model.server.round = round_
    client.begin_round(round_, 1.0, "32-true", lambda report: None)
    receive(client, model.settings.method, model.server)
    model.settings.method.download(client)


def distances(before, after, images):
    """1 - cos of the features of two models, image by image in float64."""
    found = []
    with torch.no_grad():
        for a, b in zip(before(images).neck.double(), after(images).neck.double(), strict=True):
            found.append(1 - float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()))
    return found


@pytest.mark.parametrize("last_camera", [False, True])
@pytest.mark.parametrize("round_", [0, 1])
def test_the_loss_adds_the_distance_from_the_received_model_from_the_second_round(round_, last_camera):
    model, client = assembled(FedCAPR(reg_last_camera_only=last_camera))
    begin(model, client, round_)
    received = copy.deepcopy(client.model.network).eval()
    remember_received(client)
    added = []
    for batch in client.batches(0):
        proxies = copy.deepcopy(client.session.pseudo)
        trained = copy.deepcopy(client.model.network)
        loss = model.settings.method.loss(client, batch)
        cameras = proxies.proxies.cameras[batch.labels]
        each = distances(received, trained, batch.images)
        plain = proxies.score(trained(batch.images).neck, batch.labels).loss
        counted = [d for d, c in zip(each, cameras.tolist(), strict=True) if not last_camera or c == max(cameras)]
        expected = float(plain.detach()) + (0.13 * sum(counted) / len(counted) if round_ else 0.0)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
        added.append(sum(counted) / len(counted))
        client.step(loss)
    assert max(added) > 1e-3


def test_the_weight_is_how_far_the_first_images_features_turned():
    model, client = assembled(FedCAPR(), epochs=2)
    begin(model, client, 0)
    received = copy.deepcopy(client.model.network).eval()
    model.settings.method.train(client)
    images = normalise_images(client.data.train.images.decode(SIZE))[:32]
    assert len(client.data.train) > 32
    trained = copy.deepcopy(client.model.network).eval()
    expected = sum(distances(received, trained, images)) / 32
    found = signals_of(model.settings.method.upload(client))
    assert found.keys() == model.settings.method.measures.keys()
    assert found["cdw"] == pytest.approx(expected, abs=1e-6)
    assert expected > 1e-3


def weights(distances_, **options):
    return FedCAPR(**options).weights({name: Report(1, {"cdw": d}) for name, d in distances_.items()}).clients


def test_weights_are_shares_of_the_distances():
    assert weights({"a": 0.01, "b": 0.03}) == {"a": 0.25, "b": 0.75}
    assert weights({"a": 0.0, "b": 0.0}) == {"a": 0.5, "b": 0.5}
    assert weights({"a": 0.0004, "b": 0.0012}, quantise=True) == {"a": 0.0, "b": 1.0}
    assert weights({"a": 0.0004, "b": 0.0009}, quantise=True) == {"a": 0.5, "b": 0.5}


def test_one_client_without_regulariser_is_fedavg():
    def play(method):
        return vector(fit(make(method), make_data(Some("town0"), size=SIZE)), "smooth")

    plain = play(FedAvg(share_head=False))
    assert torch.equal(play(FedCAPR(regulariser=0.0)), plain)
    assert torch.equal(play(FedCAPR(reg_from=3)), plain)  # two rounds
    assert not torch.equal(play(FedCAPR()), plain)


def test_clients_that_know_identities_get_the_same_two_terms():
    model = fit(make(FedCAPR(), clustering=None), make_data(size=SIZE))
    assert {name for name in model.round_metrics if name.endswith("/cdw")} == {f"train/town{i}/cdw" for i in range(3)}
