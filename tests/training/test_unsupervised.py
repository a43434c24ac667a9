"""Clients without identities: labels are never read, clusters replace them, and who has none sits a round out."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import BadUpdateError, ConfigError, DataError
from fedsim.data import Augmentation, SyntheticReID
from fedsim.data.images import ReIDSource, Split
from fedsim.data.market import MarketFolders
from fedsim.evaluation.settings import Evaluation
from fedsim.functional.normalise import normalise_images
from fedsim.methods import SKA, FedAvg, FedBN, FedCAPR, FedPav
from fedsim.models import Neck
from fedsim.training.labels import BottomUp, Clustering, ClusterOverride
from fedsim.training.labels.pseudo_labels import find_clusters
from fedsim.training.objective import Causality, Objective
from fedsim.training.settings import ClientOverride, LocalTraining, LongRound, RateSchedule
from small import Some, fit, make_data, make_model, vector

CLUSTERING = Clustering(k1=6, k2=2, min_samples=2)
HOPELESS = ClientOverride(cluster=ClusterOverride(min_samples=100))
SGD = partial(torch.optim.SGD, lr=0.02)
NECK = Neck(kind="bnneck", dropout=0.0, bias=False)


def training(**options):
    return LocalTraining(**{"batch_size": 8, "optimizer": SGD, "cluster": CLUSTERING} | options)


def play(source=None, method=None, rounds=2, data=None, client=None, **options):
    method = method or FedAvg(share_head=False)
    model = make_model(method, neck=NECK, client=client or training(), **options)
    return fit(model, data or make_data(source, size=(16, 8)), rounds)


def assembled(method=None, **options):
    model = make_model(method or FedAvg(share_head=False), neck=NECK, **{"client": training()} | options)
    data = make_data(size=(16, 8))
    model.assemble(data, 0, 1, torch.device("cpu"))
    for client in model.parts.clients.values():
        client.images.open(data.open_train)
    return model


def session(client, round_=0, reports=None):
    client.begin_round(round_, 1.0, "32-true", reports.append if reports is not None else lambda report: None)
    return client


# -- identities are not read -------------------------------------------------------------------------------------------


class Relabelled(ReIDSource):
    """The synthetic source, with other identities on its training images."""

    def __init__(self, change):
        self.change = change

    def domains(self):
        domains = SyntheticReID(clients=3, unseen=1, scale=0.2).domains()
        return [d if d.train is None else replace(d, train=self.relabel(d.train)) for d in domains]

    def relabel(self, train):
        return Split(train.images, self.change(train.pids), train.camids)


def everything(model):
    private = {f"{c}/{n}": t for c, client in model.parts.clients.items() for n, t in client.private_state().items()}
    return {"global": vector(model)} | private


@pytest.mark.parametrize("method", [FedAvg(), FedCAPR()], ids=["head shared where there is one", "FedCAPR"])
def test_other_identities_change_nothing(method):
    expected = everything(play(Relabelled(lambda pids: pids), method))
    changes = [
        np.random.default_rng(0).permutation,
        lambda pids: np.arange(1, len(pids) + 1),  # everybody is somebody else
        np.zeros_like,  # nobody is known
    ]
    for change in changes:
        found = everything(play(Relabelled(change), method))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_clients_that_cluster_hold_no_labels_and_no_head():
    model = assembled(clients={"town1": ClientOverride(local_epochs=2)})
    for client in model.parts.clients.values():
        assert not client.images.labels.any()
        assert not client.data.train.pids.any()
        assert client.head.weight.shape == (0, 32)
    assert model.parts.models["smallcnn"].head.weight.numel() == 0


def test_unknown_identities_need_clusters():
    unknown = Relabelled(np.zeros_like)
    with pytest.raises(ConfigError, match=r"^model\.client\.cluster: the training images of client town0 have"):
        play(unknown, client=training(cluster=None))
    with pytest.raises(DataError, match="client town0: validation needs identities"):
        play(data=make_data(unknown, val="images"))


def test_folders_whose_names_hold_only_cameras(market_tree, tmp_path):
    for name in ("north", "south", "west"):
        (tmp_path / name).symlink_to(market_tree / name)
    (tmp_path / "north").unlink()
    (tmp_path / "north").mkdir()
    for folder in ("query", "bounding_box_test"):
        (tmp_path / "north" / folder).symlink_to(market_tree / "north" / folder)
    (tmp_path / "north" / "bounding_box_train").mkdir()
    images = sorted((market_tree / "north" / "bounding_box_train").iterdir())
    forms = ("c{}_{}.png", "-1_c{}s1_{}.png", "a_cab_c{}_{}.png")
    for i, path in enumerate(images):
        name = forms[i % 3].format(path.name[6], f"{i:04d}")
        (tmp_path / "north" / "bounding_box_train" / name).symlink_to(path)
    north, south, _ = MarketFolders(str(tmp_path), unlabelled=True).domains()
    cameras = [int(path.resolve().name[6]) - 1 for path in north.train.images.paths]
    assert north.train.camids.tolist() == cameras
    assert set(cameras) == {0, 1}
    assert not north.train.pids.any()
    assert not south.train.pids.any()
    assert len(north.train) == len(images)
    model = play(MarketFolders(str(tmp_path), unlabelled=True), client=training(batch_size=4))
    assert model.round_metrics["train/clients"] == 2
    (tmp_path / "north" / "bounding_box_train" / "person.png").symlink_to(images[0])
    with pytest.raises(DataError, match=r"person\.png: the name does not begin like c1_001051\.jpg"):
        MarketFolders(str(tmp_path), unlabelled=True).domains()


# -- a local epoch -----------------------------------------------------------------------------------------------------


def test_images_are_clustered_as_the_model_sees_them_without_augmentation():
    client = assembled().parts.clients["town0"]
    client.images.augmentation = Augmentation(pad=4, flip=0.5)
    session(client)
    client.model.network.eval()
    with torch.no_grad():
        plain = normalise_images(client.data.train.images.decode((16, 8)))
        features = client.model.network(plain).neck
    client.model.network.train()
    clusters = find_clusters(features, k1=6, k2=2, eps=0.5, min_samples=2)
    next(client.batches(0))
    assert client.model.network.training
    pseudo = client.session.pseudo
    assert pseudo.num_clusters == clusters.max() + 1 > 3
    assert pseudo.share == (clusters >= 0).mean()
    of_image = [-1 if p < 0 else int(pseudo.proxies.clusters[p]) for p in pseudo.labels]
    assert of_image == clusters.tolist()
    cameras = [int(pseudo.proxies.cameras[p]) for p in pseudo.labels if p >= 0]
    assert cameras == client.data.train.camids[clusters >= 0].tolist()


def test_batches_hold_the_images_of_their_labels():
    client = session(assembled(client=training(cluster=replace(CLUSTERING, replicate=3))).parts.clients["town0"])
    plain = normalise_images(client.data.train.images.decode((16, 8)))
    count = 0
    for batch in client.batches(0):
        labels = client.session.pseudo.labels
        for image, label in zip(batch.images, batch.labels, strict=True):
            rows = (labels == label).nonzero().flatten() % len(plain)
            assert any(torch.equal(image, plain[row]) for row in rows)
        assert (batch.labels.view(-1, 4) == batch.labels.view(-1, 4)[:, :1]).all()
        count += 1
    assert len(labels) == 3 * len(plain)
    assert count == max(1, int((labels >= 0).sum()) // 8)


def test_the_memory_moves_with_each_batch_and_is_new_in_each_epoch():
    client = session(assembled(client=training(local_epochs=2)).parts.clients["town0"])
    memories = []
    for epoch in range(2):
        for batch in client.batches(epoch):
            before = client.session.pseudo.proxies.memory
            client.step(client.training_step(batch))
            after = client.session.pseudo.proxies.memory
            touched = (before != after).any(1).nonzero().flatten()
            assert set(touched.tolist()) <= set(batch.labels.tolist())
            assert len(touched)
        memories.append(client.session.pseudo)
    assert memories[0] is not memories[1]


def test_one_proxy_per_cluster_whatever_the_camera():
    client = session(assembled(client=training(cluster=replace(CLUSTERING, proxies="cluster"))).parts.clients["town0"])
    next(client.batches(0))
    pseudo = client.session.pseudo
    assert len(pseudo.proxies) == pseudo.num_clusters
    assert client.data.num_cameras > 1


def test_accuracy_is_the_share_of_images_that_are_nearest_to_their_cluster():
    few = training(cluster=replace(CLUSTERING, eps=0.9))  # the first model's guesses are poor
    client = session(assembled(client=few).parts.clients["town0"])
    right = total = 0
    for batch in client.batches(0):
        proxies = client.session.pseudo.proxies
        output = client.forward(batch.images)
        nearest = (torch.nn.functional.normalize(output.features.neck) @ proxies.memory.T).argmax(1)
        right += int((proxies.clusters[nearest] == proxies.clusters[batch.labels]).sum())
        total += len(batch.labels)
        client.supervised_loss(output, batch)
    _, correct, images, _ = client.session.metrics.read(())
    assert (correct, images) == (right, total)
    assert 0 < right < total


# -- who has no clusters -----------------------------------------------------------------------------------------------


def test_a_client_without_clusters_does_not_count(caplog):
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        model = play(clients={"town1": HOPELESS})
    assert caplog.messages.count("round 2 leaves out town1: no clusters of their images") == 1
    assert model.round_metrics["train/skipped"] == 1
    assert "train/town1/clusters" not in model.round_metrics
    others = play(data=make_data(Some("town0", "town2", "new0"), size=(16, 8)))
    assert torch.equal(vector(model), vector(others))
    for name in ("town0", "town2"):
        assert model.round_metrics[f"train/{name}/clusters"] == others.round_metrics[f"train/{name}/clusters"] > 0


def test_a_round_in_which_nobody_has_clusters_moves_nothing():
    start = assembled()
    model = play(client=training(cluster=replace(CLUSTERING, min_samples=100)))
    assert torch.equal(vector(model), vector(start))
    assert model.round_metrics["train/skipped"] == 3
    assert "train/loss" not in model.round_metrics


def test_a_client_that_has_clusters_in_one_epoch_counts(monkeypatch):
    import fedsim.training.labels.labeller

    real, calls = fedsim.training.labels.labeller.find_clusters, []

    def first_none(features, **options):
        calls.append(options)
        return real(features, **options | ({"min_samples": 100} if len(calls) % 2 else {}))

    monkeypatch.setattr(fedsim.training.labels.labeller, "find_clusters", first_none)
    model = play(rounds=1, client=training(local_epochs=2))
    assert len(calls) == 6
    assert model.round_metrics["train/clients"] == 3
    assert model.round_metrics["train/skipped"] == 0


def test_features_that_are_not_finite_are_a_bad_update():
    wild = training(local_epochs=2, optimizer=partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(
        BadUpdateError, match=r"^client town\d, round 1: features are not finite; lower model\.client\.opt"
    ):
        play(client=wild, rounds=1)
    model = play(client=wild, rounds=1, on_bad_update="skip_client")
    assert model.round_metrics["train/skipped"] == 3


# -- settings ----------------------------------------------------------------------------------------------------------


def test_single_clients_may_differ():
    own = {"town1": ClientOverride(cluster=ClusterOverride(k1=8, replicate=2)), "town2": ClientOverride(batch_size=4)}
    model = assembled(clients=own)
    settings = {name: client.training_settings.cluster for name, client in model.parts.clients.items()}
    assert settings["town0"] == settings["town2"] == CLUSTERING
    assert settings["town1"] == replace(CLUSTERING, k1=8, replicate=2)
    assert model.parts.costs["town1"] == 2 * model.parts.clients["town1"].data.num_images


def test_some_clients_may_know_identities():
    own = {"town1": ClientOverride(cluster=ClusterOverride(k1=6, k2=2, min_samples=2))}
    mixed = play(clients=own, client=training(cluster=None))
    assert mixed.round_metrics["train/clients"] == 3
    heads = {name: client.head.weight.shape[0] for name, client in mixed.parts.clients.items()}
    assert heads["town1"] == 0 < min(heads["town0"], heads["town2"])
    assert "train/town1/clusters" in mixed.round_metrics
    assert "train/town0/clusters" not in mixed.round_metrics
    with pytest.raises(ConfigError, match=r"^model\.method\.share_head: client town1 has no identity head"):
        play(method=FedAvg(share_head=True), clients=own, client=training(cluster=None))


@pytest.mark.parametrize("method", [SKA(), FedPav(weighting="cdw")], ids=["SKA", "cdw"])
def test_methods_that_need_identities_say_so(method):
    with pytest.raises(ConfigError, match=rf"^model\.method: {type(method).__name__}, .* needs identities, and"):
        play(method=method)


@pytest.mark.parametrize(
    ("name", "term"), [("metric", nn.Identity()), ("causality", Causality(weights=(0.1,)))], ids=["metric", "causality"]
)
@pytest.mark.parametrize(("field", "kind"), [("cluster", Clustering()), ("bottom_up", BottomUp())])
def test_a_loss_that_clusters_would_never_call_is_refused(name, term, field, kind):
    with pytest.raises(ConfigError, match=rf"^model\.objective\.{name}: model\.client\.{field} has another loss; "):
        make_model(FedAvg(share_head=False), client=LocalTraining(**{field: kind}), objective=Objective(**{name: term}))


def test_classes_need_identities():
    with pytest.raises(ConfigError, match=r"^model\.evaluation\.task: classification needs heads"):
        play(
            data=make_data(size=(16, 8), labels="common"),
            method=FedAvg(share_head=True),
            evaluation=Evaluation(task="classification"),
        )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"cluster": Clustering(k1=0, k2=0)}, "cluster.k1"),
        ({"cluster": Clustering(k1=4)}, "cluster.k2"),
        ({"cluster": Clustering(eps=1.0)}, "cluster.eps"),
        ({"cluster": Clustering(replicate=0)}, "cluster.replicate"),
        ({"cluster": Clustering(momentum=1.1)}, "cluster.momentum"),
        ({"batch_size": 10}, "batch_size"),
        ({"num_instances": 1}, "num_instances"),
        ({"long_round": LongRound(round=0, local_epochs=3)}, "long_round.round"),
        ({"schedule": RateSchedule(drops=-1)}, "schedule.drops"),
    ],
)
def test_wrong_numbers_are_named(options, name):
    with pytest.raises(ConfigError, match=rf"^model\.client\.{name}: "):
        make_model(FedAvg(), client=training(**options))


# -- a long round ------------------------------------------------------------------------------------------------------


def test_a_long_round_has_epochs_and_rates_of_its_own():
    schedule = RateSchedule(kind="step", step=2, gamma=0.1, warmup=1, warmup_start=0.5)
    long = LongRound(round=2, local_epochs=5, schedule=schedule)
    settings = training(local_epochs=2, long_round=long, schedule=RateSchedule(kind="step", step=1, gamma=0.5))
    for round_, expected in ((0, [1.0, 1.0]), (1, [0.25, 0.5, 0.05, 0.05, 0.005]), (2, [0.25, 0.25])):
        reports = []
        client = session(assembled(client=settings).parts.clients["town0"], round_, reports)
        rates = []
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                client.step(client.training_step(batch))
                rate = client.optimizer.rates[0]
            rates.append(rate / 0.02)
        assert rates == pytest.approx(expected)
        assert reports[-1].share == 1.0
        assert [report.share for report in reports] == sorted(report.share for report in reports)


def test_a_schedule_may_end():
    schedule = RateSchedule(kind="step", step=5, gamma=0.1, drops=1)
    assert [schedule.factor(t) for t in (0, 4, 5, 10, 19)] == pytest.approx([1, 1, 0.1, 0.1, 0.1])
    endless = replace(schedule, drops=None)
    assert endless.factor(10) == pytest.approx(0.01)


# -- does it learn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg(share_head=False), FedCAPR(), FedBN()], ids=["FedAvg", "FedCAPR", "FedBN"])
def test_clusters_teach_something(method):
    """The loss on clusters falls from some 30 to less than half of it.

    With seeds 0 to 4, one thread and two, and all three methods the ratio was 0.435 +- 0.051, at most 0.544: the bound
    is six standard deviations off. The mAP of held-out people says less: it rises by 0.11 +- 0.03.
    """

    def loss(rounds, lr):
        client = training(batch_size=16, local_epochs=2, optimizer=partial(torch.optim.Adam, lr=lr))
        model = make_model(method, neck=NECK, client=client)
        source = SyntheticReID(clients=2, unseen=0, scale=0.5)
        data = make_data(source, size=(32, 16), val="identities", val_fraction=0.4)
        return fit(model, data, rounds).round_metrics["train/loss"]

    assert loss(4, 1e-3) < 0.75 * loss(1, 0.0)
