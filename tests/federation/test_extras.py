"""What methods may do beyond the plain round: extras, weights per tensor, step sizes, replicas, changed gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError, TrainingError
from fedsim.methods import FedAvg, FedPav
from fedsim.methods.base import Payload, Weights
from fedsim.models import SmallCNN
from fedsim.training.messages import Report, Upload
from fedsim.training.public import PublicImages
from fedsim.training.server import Server
from fedsim.training.server_optimizers import FedAdam
from fedsim.training.settings import ClientOverride, LocalTraining
from plain_sums import exact_weighted_sum
from small import LR, fit, make_data, make_model, named, vector

# -- extras ------------------------------------------------------------------------------------------------------------


class Sending(FedAvg):
    """Every client sends the sum of its labels and its first shared weights; the server remembers the last means."""

    server_every = 1

    def payload(self, server, arch, round_):
        return Payload(up={"labels": (), "weights": (2, 3)} if round_ != 1 else {})

    def upload(self, client):
        extras = {"labels": client.images.labels.sum().float(), "weights": client.model.shared[:6].view(2, 3).clone()}
        sent.setdefault((client.round, client.client_name), extras)
        return Upload(client.model.shared, extras if client.round != 1 else {})

    def server_step(self, server):
        for arch, answers in server.answers.items():
            for name, mean in answers.extras.items():
                server.keep(arch, name, mean)


sent = {}


@pytest.mark.parametrize("options", [{}, {"on_bad_update": "skip_client"}, {"reduction": "fp32"}])
def test_the_server_gets_the_plain_means_of_extras(options):
    sent.clear()
    model = fit(make_model(Sending(), **options), rounds=3)
    for name in ("labels", "weights"):
        values = [extras[name].double() for (round_, _), extras in sent.items() if round_ == 2]
        assert len(values) == 3
        mean = model.server.kept["smallcnn"][name]
        assert mean.shape == values[0].shape
        torch.testing.assert_close(mean.double(), sum(values) / 3, rtol=1e-6, atol=1e-7)
        if not options:
            assert torch.equal(mean, exact_weighted_sum([1 / 3] * 3, values).float())


def test_extras_are_means_within_an_architecture():
    from fedsim.models import SmallCNN

    sent.clear()
    model = fit(make_model(Sending(), clients={"town1": ClientOverride(backbone=SmallCNN(width=6))}), rounds=1)
    assert float(model.server.kept["smallcnn2"]["labels"]) == float(sent[0, "town1"]["labels"])
    assert model.server.num_clients == {"smallcnn": 2, "smallcnn2": 1}
    assert list(model.server.answers["smallcnn"].reports) == ["town0", "town2"]


def test_rounds_without_extras_keep_what_is_kept():
    model = fit(make_model(Sending()), rounds=2)
    assert model.server.answers["smallcnn"].extras == {}
    assert set(model.server.kept["smallcnn"]) == {"labels", "weights"}


@pytest.mark.parametrize("extras", [{"labels": torch.zeros(2)}, {}])
def test_extras_are_what_was_declared(extras):
    class Wrong(Sending):
        def upload(self, client):
            return Upload(client.model.shared, extras)

    with pytest.raises(TrainingError, match=r"client town0, round 1: Wrong sends no .*, which payload declares"):
        fit(make_model(Wrong()), rounds=1)


@pytest.mark.parametrize("value", [float("nan"), 5000.0])
def test_extras_that_cannot_be_summed_are_bad_updates(value):
    class Bad(Sending):
        def upload(self, client):
            upload = super().upload(client)
            upload.extras["weights"][0, 0] = value if client.client_name == "town1" else 0
            return upload

    with pytest.raises(TrainingError, match="client town1, round 1"):
        fit(make_model(Bad()), rounds=1)
    skipping = fit(make_model(Bad(), on_bad_update="skip_client"), rounds=1)
    assert list(skipping.reports) == ["town0", "town2"]


# -- weights per tensor, step sizes ------------------------------------------------------------------------------------


class Split(FedPav):
    """Even tensors are the first client's alone, odd ones the mean over the others."""

    measures = {"share": "tensor"}  # noqa: RUF012 - a property of methods

    def weights(self, reports):
        shares = {name: report.tensor_signals["share"] for name, report in reports.items()}
        totals = [sum(column) for column in zip(*shares.values(), strict=True)]
        parameters = {name: [s / t for s, t in zip(own, totals, strict=True)] for name, own in shares.items()}
        return replace(super().weights(reports), parameters=parameters)

    def upload(self, client):
        uploads[client.client_name] = client.model.shared.clone()
        first = client.client_name == "town0"
        shares = [float((i % 2 == 0) == first) for i, _ in enumerate(client.model.flat.shared_parameters)]
        return replace(super().upload(client), signals={"share": shares})


uploads = {}


@pytest.mark.parametrize("reduction", ["exact", "fp32"])
def test_weights_per_tensor(reduction):
    model = fit(make_model(Split(), reduction=reduction), rounds=1)
    flat = model.parts.models["smallcnn"].flat
    sizes = {c.name: c.num_images for c in model.parts.federated.clients}
    for entry in flat.shared_entries:
        parts = {name: x[entry.span].double() for name, x in uploads.items()}
        if entry.kind == "buffer":
            expected = sum(n * parts[name] for name, n in sizes.items()) / sum(sizes.values())
        elif flat.shared_parameters.index(entry) % 2 == 0:
            expected = parts["town0"]
        else:
            expected = (parts["town1"] + parts["town2"]) / 2
        torch.testing.assert_close(vector(model)[entry.span].double(), expected, rtol=1e-6, atol=1e-6)


def test_weights_per_tensor_that_do_not_sum_to_one_are_a_defect():
    class Wrong(FedPav):
        def weights(self, reports):
            return replace(super().weights(reports), parameters={name: [0.5, 0.5] for name in reports})

    with pytest.raises(AssertionError, match=r"Wrong\.weights, of parameters, do not sum to 1"):
        fit(make_model(Wrong()), rounds=1)


class Far(FedPav):
    """Goes twice as far as the mean."""

    def weights(self, reports):
        return replace(super().weights(reports), step_size=2.0)


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.SGD, lr=1.0)])
def test_step_sizes_move_parameters_and_leave_statistics_at_the_mean(optimizer):
    start = make_model(FedPav())
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    theta, mean = vector(start).double(), vector(fit(make_model(FedPav()), rounds=1)).double()
    model = fit(make_model(Far(), server_optimizer=optimizer), rounds=1)
    span = model.parts.statistics["smallcnn"].span
    torch.testing.assert_close(vector(model)[span].double(), mean[span], rtol=0, atol=0)
    parameters = slice(span.start)
    expected = (2 * mean - theta)[parameters]
    torch.testing.assert_close(vector(model)[parameters].double(), expected, rtol=0, atol=1e-6)


def test_step_sizes_scale_what_a_server_optimizer_sees():
    # Adam's step hardly depends on the gradient's length
    plain, far = (fit(make_model(m, server_optimizer=FedAdam), rounds=1) for m in (FedPav(), Far()))
    assert not torch.equal(vector(plain), vector(far))
    torch.testing.assert_close(vector(plain), vector(far), rtol=0, atol=0.02)


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_a_replica_is_another_model_of_the_same_layout():
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat_model = model.parts.models["smallcnn"]
    flat_model.set_num_classes(3)
    replica = flat_model.replica("old")
    assert flat_model.replica("old") is replica is not flat_model.replica("new")
    assert replica.num_classes == 3
    assert replica.flat.entries == flat_model.flat.entries
    assert replica.whole.shape == flat_model.whole.shape
    replica.flat.check()
    replica.whole.copy_(flat_model.whole)
    images = torch.randn(4, 3, 32, 16)
    for mode in (True, False):
        a, b = (r.network.train(mode) and r.forward(images, "32-true") for r in (flat_model, replica))
        assert torch.equal(a.logits, b.logits)
    before = flat_model.flat.buffer.clone()
    replica.flat.buffer.zero_()
    assert torch.equal(flat_model.flat.buffer, before)
    flat_model.set_num_classes(2)
    assert flat_model.replica("old").whole.shape == flat_model.whole.shape


def test_counters_of_a_replica_go_back_to_the_beginning():
    backbone = SmallCNN(width=8)
    for layer in backbone.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # a cumulative average reads the counter
    model = make_model(FedPav(), backbone=backbone)
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat_model = model.parts.models["smallcnn"]
    flat_model.network.train()(torch.randn(4, 3, 32, 16))
    replica = flat_model.replica("late")
    replica.reset_counters()
    assert {int(b) for n, b in replica.network.named_buffers() if "num_batches" in n} == {0}
    assert {int(b) for n, b in flat_model.network.named_buffers() if "num_batches" in n} == {1}


def test_counters_that_no_layer_reads_are_there_only_while_they_count():
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat_model = model.parts.models["smallcnn"]
    with flat_model.counting():
        flat_model.network.train()(torch.randn(4, 3, 32, 16))
        assert {int(b) for n, b in flat_model.network.named_buffers() if "num_batches" in n} == {1}
    assert not [n for n, _ in flat_model.network.named_buffers() if "num_batches" in n]


# -- gradients ---------------------------------------------------------------------------------------------------------


class Pulling(FedAvg):
    """Adds a constant to all shared gradients: with SGD without momentum, each step moves by -lr more."""

    def take_step(self, client, loss):
        def pull():
            client.optimizer.add_to_gradients(torch.full((client.model.flat.num_shared_parameters,), 1e-3))
            changed.append(client.client_name)

        client.step(loss, pull)


changed = []


def plain_sgd(params):
    return torch.optim.SGD(params, lr=LR)


def train(method, **options):
    training = LocalTraining(batch_size=8, optimizer=plain_sgd, **options)
    return fit(make_model(method, client=training), rounds=1)


@pytest.mark.parametrize("share_head", [True, False])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"grad_clip": 0.5, "local_epochs": 2}])
def test_changed_gradients_move_other_weights(share_head, options):
    changed = train(Pulling(share_head=share_head), **options)
    assert not torch.equal(vector(changed), vector(train(FedAvg(share_head=share_head), **options)))


def test_gradients_change_once_per_step_whatever_is_accumulated():
    changed.clear()
    model = train(Pulling(), accumulate=3)
    steps = {name: client.optimizer.num_steps for name, client in model.parts.clients.items()}
    assert set(changed) == set(steps)
    for c in model.parts.federated.clients:
        batches = -(-c.num_images // 8) - (c.num_images % 8 == 1)
        assert changed.count(c.name) == -(-batches // 3)


def test_changed_gradients_are_clipped():
    class Exploding(FedAvg):
        def take_step(self, client, loss):
            start = client.received.vector[: client.model.flat.num_shared_parameters]
            if client.step(loss, lambda: client.optimizer.add_to_gradients(torch.full_like(start, 1e6))):
                moved.append(float((client.model.shared[: len(start)] - start).norm()))

    moved = []
    train(Exploding(), grad_clip=1.0)
    assert moved[0] == pytest.approx(LR, rel=1e-3)  # one step with a gradient of length 1


class Averaging(FedAvg):
    """Asks for the mean gradient of the session, and adds up the gradients themselves."""

    def take_step(self, client, loss):
        client.step(loss, lambda: gradients.append({p: p.grad.clone() for p in client.optimizer.parameters}))

    def upload(self, client):
        if client.client_name == "town0":
            start = client.received.vector[: client.model.flat.num_shared_parameters]
            means.append(client.optimizer.mean_gradient(start))
            places.append({p: client.model.flat.place_of(p) for p in client.optimizer.parameters})
        return super().upload(client)


gradients, means, places = [], [], []


@pytest.mark.parametrize("share_head", [True, False])
def test_the_mean_gradient_of_plain_sgd(share_head):
    gradients.clear()
    means.clear()
    places.clear()
    model = train(Averaging(share_head=share_head), head_lr=0.2)
    steps = model.parts.clients["town0"].data.num_images // 8 + (model.parts.clients["town0"].data.num_images % 8 > 1)
    for p, place in places[0].items():
        expected = sum(g[p] for g in gradients[:steps]) / steps
        if place < len(means[0]):
            found = means[0][place : place + p.numel()].view_as(p)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


# -- public images -----------------------------------------------------------------------------------------------------


def test_public_batches_are_the_same_for_whoever_asks_and_new_in_each_round():
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    server: Server = model.server
    images = torch.randint(0, 256, (10, 3, 32, 16), dtype=torch.uint8)
    mine, other = (PublicImages(images, server.augmentation, server.seed, torch.device("cpu")) for _ in range(2))
    for round_, augmented in enumerate((False, True)):
        first, again = (list(public.batches(round_, 4, augmented)) for public in (mine, other))
        for (i, x), (j, y) in zip(first, mine.batches(round_, 4, augmented), strict=True):
            assert torch.equal(i, j)
            assert torch.equal(x, y)
        assert [len(index) for index, _ in first] == [4, 4, 2]
        assert sorted(torch.cat([index for index, _ in first]).tolist()) == list(range(10))
        for (i, x), (j, y) in zip(first, again, strict=True):
            assert torch.equal(i, j)
            assert torch.equal(x, y)
        assert [i.tolist() for i, _ in mine.batches(round_ + 1, 4, augmented)] != [i.tolist() for i, _ in first]


@pytest.mark.parametrize("needs", [True, False])
def test_clients_see_public_images_if_their_method_requires_them(needs):
    seen = []

    class Looking(FedPav):
        requires = frozenset({"public_images"} if needs else ())

        def train(self, client):
            seen.append(client.received.public)

    model = fit(make_model(Looking()), make_data(public="new0"), rounds=1)
    assert isinstance(model.server.public, PublicImages)
    assert seen == [model.server.public if needs else None] * 3


def test_methods_that_need_public_images_say_so():
    class Needing(FedPav):
        requires = frozenset({"public_images"})

    with pytest.raises(ConfigError, match=r"model\.method: Needing.*needs public images; set data\.public"):
        fit(make_model(Needing()))


def test_signals_and_weights_are_logged():
    class Measuring(FedPav):
        measures = {"size": "client"}  # noqa: RUF012 - a property of methods

        def upload(self, client):
            return replace(super().upload(client), signals={"size": float(client.data.num_images)})

        def weights(self, reports):
            total = sum(report.signals["size"] for report in reports.values())
            return Weights({name: report.signals["size"] / total for name, report in reports.items()})

    model = fit(make_model(Measuring()), rounds=1)
    sizes = {c.name: c.num_images for c in model.parts.federated.clients}
    for name, n in sizes.items():
        assert model.round_metrics[f"train/{name}/size"] == n
        assert model.round_metrics[f"train/{name}/weight"] == n / sum(sizes.values())
    assert torch.equal(vector(model), vector(fit(make_model(FedPav()), rounds=1)))


def test_reports_carry_numbers_of_tensors():
    assert Report(3, {}).tensor_signals == {}
    model = fit(make_model(Split()), rounds=1)
    report = model.server.answers["smallcnn"].reports["town0"]
    shares = report.tensor_signals["share"]
    assert len(shares) == len([n for n in named(model) if "running" not in n])
    assert list(shares) == [float(i % 2 == 0) for i in range(len(shares))]
