"""FedUReID: clusters that grow, the exclusive loss, personalised epochs and updates."""

import math
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg, FedUReID
from fedsim.models import Neck
from fedsim.training.labels import BottomUp, Clustering
from fedsim.training.labels.bottom_up import merge_clusters
from fedsim.training.settings import ClientOverride, LocalTraining
from plain_loops import Smooth
from small import fit, make_data, make_model, receive, vector

SIZE = (16, 8)


def make(method, epochs=1, bottom_up=BottomUp(merge=0.3), **options):  # noqa: B008 - frozen
    training = LocalTraining(
        batch_size=8, local_epochs=epochs, bottom_up=bottom_up, optimizer=partial(torch.optim.SGD, lr=0.05)
    )
    neck = Neck(kind="bnneck", dropout=0.0, bias=False)
    return make_model(method, backbone=Smooth(), neck=neck, client=training, **options)


def assembled(method, **options):
    model, data = make(method, **options), make_data(size=SIZE)
    model.assemble(data, 0, 1, torch.device("cpu"))
    client = model.parts.clients["town0"]
    client.images.open(data.open_train)
    return model, client


def begin(model, client, round_, reports=None):
    model.server.round = round_
    client.begin_round(round_, 1.0, "32-true", reports.append if reports is not None else lambda report: None)
    receive(client, model.settings.method, model.server)
    model.settings.method.download(client)


def finish(model, client):
    model.settings.method.upload(client)
    client.end_round([(client.model.shared, math.inf)])
    client.leave()


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_clusters_merge_before_each_round_by_the_received_models_features():
    model, client = assembled(FedUReID(dynamic=False), epochs=2)
    num = client.data.num_images
    assert int(0.3 * num) != round(0.3 * num)  # EasyFL's code rounds down
    labels = torch.arange(num)
    for round_ in range(3):
        begin(model, client, round_)
        if round_:
            client.model.network.eval()
            with torch.no_grad():
                plain = normalise_images(client.data.train.images.decode(SIZE))
                features = client.model.network(plain).pool
            client.model.network.train()
            labels = merge_clusters(features, labels, int(0.3 * num), 0.003)
        model.settings.method.train(client)
        assert torch.equal(client.session.pseudo.labels, labels)
        assert client.session.pseudo.num_clusters == num - round_ * int(0.3 * num) > 1
        assert client.session.pseudo.share == 1.0
        finish(model, client)
        assert torch.equal(client.private_state()["kept.bottom_up"], labels)


def test_the_loss_is_exclusive_and_the_memory_begins_empty():
    model, client = assembled(FedUReID(), bottom_up=BottomUp(merge=0.5, temperature=0.2, momentum=0.25))
    begin(model, client, 0)
    client.keep("bottom_up", torch.arange(client.data.num_images) // 3)  # as if there had been rounds
    memory = None
    for batch in client.batches(0):
        pseudo = client.session.pseudo
        if memory is None:
            memory = [torch.zeros(6, dtype=torch.float64) for _ in range(pseudo.num_clusters)]
        output = client.forward(batch.images)
        x = output.features.neck.detach().double()
        x = x / x.norm(dim=1, keepdim=True)
        losses = []
        for image, y in zip(x, batch.labels.tolist(), strict=True):
            scores = [math.exp(float(v @ image) / 0.2) for v in memory]
            losses.append(-math.log(scores[y] / sum(scores)))
        found = client.supervised_loss(output, batch)
        assert float(found.detach()) == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        for image, y in zip(x, batch.labels.tolist(), strict=True):
            moved = 0.25 * memory[y] + 0.75 * image
            memory[y] = moved / moved.norm()
        assert torch.allclose(pseudo.proxies.memory.double(), torch.stack(memory), atol=1e-6)
    assert len({int(label) for label in client.session.pseudo.labels}) < client.data.num_images


# -- personalised epochs and updates -----------------------------------------------------------------------------------


def count_batches(method, epochs=3, round_=1):
    model, client = assembled(method, epochs=epochs)
    reports = []
    begin(model, client, round_, reports)
    model.settings.method.train(client)
    return len(reports), client


def test_local_training_ends_with_an_epoch_in_which_the_clusters_were_known():
    """As in EasyFL, applications/fedureid/reid/{trainers,bottomup}.py: never in mid-epoch, never in the first round."""
    everything, client = count_batches(FedUReID(dynamic=False))
    per_epoch = everything // 3
    # what the same batches say of precision: a batch that is right, or the epoch's share
    guesses, labels = client.session.metrics._guesses, client.session.metrics._labels
    for threshold in (0.0, 0.05, 0.2, 1.0):
        expected = everything
        for batch in range(everything):
            start = batch // per_epoch * per_epoch
            right = [
                int((g == z).sum()) for g, z in zip(guesses[start : batch + 1], labels[start : batch + 1], strict=True)
            ]
            seen = [len(z) for z in labels[start : batch + 1]]
            if right[-1] == seen[-1] or sum(right) / sum(seen) > threshold:
                expected = start + per_epoch
                break
        assert count_batches(FedUReID(precision=threshold))[0] == expected
    assert count_batches(FedUReID(precision=0.0))[0] < everything
    assert count_batches(FedUReID(precision=0.0), round_=0)[0] == everything


def test_the_download_mixes_the_clients_last_model_with_the_global_one():
    model, client = assembled(FedUReID(update=0.25, dynamic=False))
    arch = client.model.arch
    begin(model, client, 0)
    assert torch.equal(client.model.shared, model.server.vector(arch))  # there is no last one
    model.settings.method.train(client)
    own = client.model.shared.clone()
    finish(model, client)
    moved = model.server.vector(arch).clone()
    begin(model, client, 1)
    torch.testing.assert_close(client.model.shared, 0.25 * own + 0.75 * moved, rtol=0, atol=1e-6)
    assert (own != moved).any()


@pytest.mark.parametrize("bottom_up", [BottomUp(merge=0.2), None], ids=["clusters", "identities"])
def test_without_what_sets_it_apart_it_is_fedavg(bottom_up):
    def play(method):
        return vector(fit(make(method, bottom_up=bottom_up), make_data(size=SIZE)), "smooth")

    plain = play(FedAvg(share_head=False))
    assert torch.equal(play(FedUReID(dynamic=False)), plain)
    assert not torch.equal(play(FedUReID(dynamic=False, update=0.5)), plain)
    assert torch.equal(play(FedUReID(precision=0.0)), plain)  # one local epoch: it is trained to its end


def test_settings():
    own = {"town1": ClientOverride(bottom_up=BottomUp(merge=0.01))}
    model, _ = assembled(FedUReID(), clients=own)
    merges = [client.training_settings.bottom_up.merge for client in model.parts.clients.values()]
    assert merges == [0.3, 0.01, 0.3]
    with pytest.raises(ConfigError, match=r"^model\.client\.bottom_up: cluster is set, too"):
        make_model(FedUReID(), client=LocalTraining(bottom_up=BottomUp(), cluster=Clustering()))
    for name, value in (("merge", 1.5), ("size_penalty", -1.0), ("momentum", 2.0), ("temperature", 0.0)):
        with pytest.raises(ConfigError, match=rf"^model\.client\.bottom_up\.{name}: "):
            make_model(FedUReID(), client=LocalTraining(bottom_up=BottomUp(**{name: value})))
    for name in ("precision", "update"):
        with pytest.raises(ConfigError, match=rf"^model\.method\.{name}: "):
            FedUReID(**{name: 1.5})
