"""Batches in micro-batches against plain loops: gradients, running statistics, random streams, refusals."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from fedsim.core.errors import BadUpdateError, ConfigError
from fedsim.data import SyntheticReID
from fedsim.methods import FedCAPR, FedPav, Local, PFedMe
from fedsim.models import Neck, SmallCNN
from fedsim.training.batch import Batch
from fedsim.training.labels import Clustering
from fedsim.training.micro_batches import LARGEST_GRADIENT, MicroBatches, cut
from fedsim.training.objective import Objective, supervised_loss
from fedsim.training.settings import ClientOverride, LocalTraining
from small import LR, fit, make_data, make_model, sgd, vector

SOURCE = SyntheticReID(clients=1, unseen=1, scale=0.2)


def training(**options):
    return LocalTraining(**{"batch_size": 8, "optimizer": sgd} | options)


@pytest.mark.parametrize(
    ("num_images", "size", "sizes"),
    [(8, 3, [3, 3, 2]), (8, 8, [8]), (5, 8, [5]), (9, 4, [4, 5]), (3, 1, [1, 1, 1]), (4, 3, [4]), (1, 4, [1])],
)
def test_micro_batches_are_cut_in_order_and_none_has_one_image(num_images, size, sizes):
    micro_batches = cut(num_images, size)
    assert [len(range(num_images)[micro_batch]) for micro_batch in micro_batches] == sizes
    assert [i for micro_batch in micro_batches for i in range(num_images)[micro_batch]] == list(range(num_images))


STEPS = 3


def by_hand(model, size, accumulate):
    """Train the first client for one round by plain loops over batches, micro-batches and parameters, in float64
    sums."""
    client = next(iter(model.parts.clients.values()))
    client.begin_round(0, 1.0, "32-true", lambda _: None)
    client.model.shared.copy_(vector(model))
    network, head = copy.deepcopy(client.model.network), copy.deepcopy(client.model.head)
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
    labels, order = client.session.labeller.plan(client.session.batch_stream, True)
    batches = list(client.session.read(order[: STEPS * accumulate], labels, 1))
    network.train()
    norms = [m for m in network.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    losses = []
    for start in range(0, len(batches), accumulate):
        of_step = batches[start : start + accumulate]
        num_images = sum(len(batch.labels) for batch in of_step)
        of_batches = []
        for batch in of_step:
            gradients = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
            of_batches.append(gradients)
            before = [(m.running_mean.clone(), m.running_var.clone()) for m in norms]
            sums = [[torch.zeros_like(t, dtype=torch.float64) for t in pair] for pair in before]
            assert len(batch.labels) % size != 1
            for begin in range(0, len(batch.labels), size):
                rows = slice(begin, begin + size)
                for norm, (mean, var) in zip(norms, before, strict=True):
                    norm.running_mean.copy_(mean)
                    norm.running_var.copy_(var)
                features = network(batch.images[rows])
                output = SimpleNamespace(features=features, logits=head(features.neck))
                micro_batch = batch._replace(images=batch.images[rows], labels=batch.labels[rows])
                loss = supervised_loss(client.objective, output, micro_batch).loss
                for total, gradient in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                    total += len(micro_batch.labels) / num_images * gradient.double()
                share = len(micro_batch.labels) / len(batch.labels)
                for norm, pair in zip(norms, sums, strict=True):
                    pair[0] += share * norm.running_mean.double()
                    pair[1] += share * norm.running_var.double()
                losses.append((float(loss.detach()), len(micro_batch.labels)))
            for norm, (mean, var) in zip(norms, sums, strict=True):
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(var)
        for parameter, *gradients in zip(parameters, *of_batches, strict=True):
            parameter.grad = sum(gradient.float() for gradient in gradients)
        optimizer.step()
    client.leave()
    mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    return dict(network.named_parameters()) | dict(network.named_buffers()), mean


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("goal", [Objective(), Objective(triplet=1.0)], ids=["cross-entropy", "triplet"])
def test_a_round_in_micro_batches_equals_plain_loops(accumulate, goal):
    """Largest difference measured: 1.8e-7, with weights of five seeds, one and two threads."""
    options = {
        "client": training(micro_batch=3, accumulate=accumulate, local_steps=STEPS), "objective": goal,
        "neck": Neck(kind="none", dropout=0.0),  # a neck would normalise over three values: any rounding shows
    }  # fmt: skip
    data = make_data(SOURCE)
    start = make_model(FedPav(), **options)
    start.assemble(data, 0, 1, torch.device("cpu"))
    data.setup("fit")
    for each in start.parts.clients.values():
        each.images.open(data.open_train)
    expected, loss = by_hand(start, 3, accumulate)
    model = fit(make_model(FedPav(), **options), make_data(SOURCE), rounds=1)
    trained = model.parts.models["smallcnn"].network.state_dict()
    moved = 0
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            assert torch.allclose(trained[name], tensor, atol=1e-6), name
            moved += 1
    assert moved > 10
    [report] = model.reports.values()
    assert report.loss == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_micro_batches_of_a_whole_batch_change_no_bit(dropout):
    neck = Neck(kind="bnneck", dropout=dropout)
    plain, whole = (
        fit(make_model(FedPav(), neck=neck, client=training(micro_batch=size)), rounds=1) for size in (None, 8)
    )
    assert torch.equal(vector(plain), vector(whole))
    cut_ = fit(make_model(FedPav(), neck=neck, client=training(micro_batch=4)), rounds=1)
    assert not torch.equal(vector(plain), vector(cut_))


def test_without_normalisation_micro_batches_differ_from_whole_batches_in_the_order_of_sums_only():
    """Measured: 4e-9."""

    def trained(size):
        backbone = SmallCNN(width=8)
        for name, module in list(backbone.named_modules()):
            if isinstance(module, torch.nn.BatchNorm2d):
                parent, _, leaf = name.rpartition(".")
                setattr(backbone.get_submodule(parent), leaf, torch.nn.Identity())
        neck = Neck(kind="none", dropout=0.0)
        return vector(
            fit(make_model(FedPav(), backbone=backbone, neck=neck, client=training(micro_batch=size)), rounds=1)
        )

    torch.manual_seed(0)
    whole = trained(None)
    torch.manual_seed(0)
    assert torch.allclose(whole, trained(2), atol=1e-6)


def test_dropout_has_a_stream_of_its_own_in_each_micro_batch():
    neck = Neck(kind="bnneck", dropout=0.5)
    model = make_model(FedPav(), neck=neck, client=training(micro_batch=4))
    data = make_data(SOURCE)
    fit(model, data, rounds=1)
    client = next(iter(model.parts.clients.values()))
    client.begin_round(1, 1.0, "32-true", lambda _: None)
    ones = torch.ones(4, 64)
    dropout = next(m for m in client.model.network.modules() if "Dropout" in type(m).__name__)
    masks = []
    for _ in client.batches(0):
        masks.append(dropout(ones))
        dropout(ones)  # later micro-batches do not depend on the draws of earlier ones
    client.leave()
    client.begin_round(1, 1.0, "32-true", lambda _: None)
    again = [dropout(ones) for _ in client.batches(0)]
    client.leave()
    assert len(masks) > 4
    assert all(torch.equal(a, b) for a, b in zip(masks, again, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_a_gradient_beyond_the_exact_sums_makes_a_bad_update():
    steep = Objective(cross_entropy=1e6)
    with pytest.raises(BadUpdateError, match=rf"has a gradient beyond {LARGEST_GRADIENT:.0f},.*micro_batch to null"):
        fit(make_model(FedPav(), client=training(micro_batch=4, optimizer=still), objective=steep), rounds=1)


def test_micro_batches_whose_gradients_cancel_are_refused_like_others():
    """So the verdict is the same for a rank with all micro-batches and for ranks with some of them."""
    model = make_model(FedPav(), client=training(micro_batch=4))
    model.assemble(make_data(SOURCE), 0, 1, torch.device("cpu"))
    flat_model = model.parts.models["smallcnn"]
    optimizer = flat_model.optimizer(training())
    weight = optimizer.parameters[0]
    batch = Batch(torch.zeros(8, 3, 32, 16), torch.zeros(8, dtype=torch.int64))
    for steep, exceeds in ((LARGEST_GRADIENT / 2, False), (LARGEST_GRADIENT * 1.01, True)):
        micro_batches = MicroBatches(4, None, lambda _: None)
        for sign, _ in zip((1, -1), micro_batches.of(batch), strict=False):
            micro_batches.backward(sign * steep * weight.sum(), optimizer)
        assert not weight.grad.any()
        assert (float(micro_batches.excess) > 1) is exceeds


def still(params):
    return torch.optim.SGD(params, lr=1e-12)


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        (FedPav(), {"micro_batch": 9}, "micro_batch: 9 is larger than the batch (8)"),
        (FedPav(), {"micro_batch": 0}, "micro_batch: 0"),
        (FedPav(), {"micro_batch": 1}, "micro-batches of 1 leave one image of a batch of 8 alone"),
        (FedPav(), {"batch_size": 9, "micro_batch": 4}, "micro-batches of 4 leave one image of a batch of 9 alone"),
        (FedPav(), {"sampler": "identity", "micro_batch": 6}, "is not a multiple of num_instances"),
        (PFedMe(), {"micro_batch": 4}, "PFedMe needs whole batches"),
        (FedCAPR(), {"micro_batch": 4, "cluster": Clustering()}, "micro_batch: 4 cuts batches"),
    ],
)
def test_micro_batches_that_cannot_be_are_refused(method, options, line):
    with pytest.raises(ConfigError) as caught:
        fit(make_model(method, client=training(**options)), rounds=1)
    assert line in str(caught.value)
    assert "model.client.micro_batch" in str(caught.value)


def test_micro_batches_with_plain_sums_are_refused():
    with pytest.raises(
        ConfigError, match=r"model.client.micro_batch: sums over micro-batches are exact; set model.reduction"
    ):
        fit(make_model(FedPav(), client=training(micro_batch=4), reduction="fp32"), rounds=1)


def test_a_client_of_its_own_settings_is_cut_in_its_own_way():
    override = {"town0": ClientOverride(micro_batch=2)}
    model = fit(make_model(Local(), client=training(), clients=override), rounds=1)
    plain = fit(make_model(Local(), client=training()), rounds=1)
    same = {n: torch.equal(c.private, plain.parts.clients[n].private) for n, c in model.parts.clients.items()}
    assert same.pop("town0") is False
    assert all(same.values())
    assert len(same) == 2
    assert all(math.isfinite(report.loss) for report in model.reports.values())
