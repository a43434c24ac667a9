"""Losses of pytorch-metric-learning against plain loops, and the head that some of them learn."""

import math
import sys

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.methods import FedAvg, FedPav
from fedsim.models.reid import Features
from fedsim.training.metric_loss import MetricLoss
from fedsim.training.objective import Objective
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, named, sgd

pytest.importorskip("pytorch_metric_learning", reason="needs fedsim-reid[models]")

LABELS = torch.tensor([0, 0, 0, 2, 2, 3, 1, 3])


@pytest.fixture
def features():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.fixture
def head():
    """Class weights [5, 6]; identity 4 is not in the batch."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def similarities(features, others):
    return [[cosine(a, b) for b in others.tolist()] for a in features.tolist()]


def pairs(i):
    """Other images of the same identity, and images of others."""
    same = [j for j in range(len(LABELS)) if LABELS[j] == LABELS[i] and j != i]
    return same, [j for j in range(len(LABELS)) if LABELS[j] != LABELS[i]]


def value(loss, features, head):
    return loss(Features(features, features), LABELS, head)


def test_circle_loss(features, head):
    """Sun et al., CVPR 2020, Eqs. (5) and (6): O_p = 1 + m, O_n = -m, Delta_p = 1 - m, Delta_n = m."""
    m, gamma, s, total, counted = 0.25, 16.0, similarities(features, features), 0.0, 0
    for i in range(8):
        same, others = pairs(i)
        if same:
            of_negatives = sum(math.exp(gamma * max(0.0, s[i][j] + m) * (s[i][j] - m)) for j in others)
            of_positives = sum(math.exp(-gamma * max(0.0, 1 + m - s[i][j]) * (s[i][j] - 1 + m)) for j in same)
            total, counted = total + math.log(1 + of_negatives * of_positives), counted + 1
    assert counted == 7
    loss = MetricLoss(name="CircleLoss", options={"m": m, "gamma": gamma})
    assert value(loss, features, head).item() == pytest.approx(total / counted, rel=1e-5)


def test_supervised_contrastive_loss(features, head):
    """Khosla et al., NeurIPS 2020, Eq. (2)."""
    tau, s, total, counted = 0.2, similarities(features, features), 0.0, 0
    for i in range(8):
        same, others = pairs(i)
        if same:
            whole = math.log(sum(math.exp(s[i][j] / tau) for j in same + others))
            total, counted = total - sum(s[i][j] / tau - whole for j in same) / len(same), counted + 1
    loss = MetricLoss(name="SupConLoss", options={"temperature": tau})
    assert value(loss, features, head).item() == pytest.approx(total / counted, rel=1e-5)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss"])
def test_angular_losses_take_the_rows_of_the_head(name, features, head):
    """Deng et al., CVPR 2019, Eq. (3): s cos(theta + m); Wang et al., CVPR 2018, Eq. (4): s (cos(theta) - m)."""
    scale, margin, s, total = 8.0, 0.3, similarities(features, head), 0.0
    for i, label in enumerate(LABELS.tolist()):
        with_margin = math.cos(math.acos(s[i][label]) + margin) if name == "ArcFaceLoss" else s[i][label] - margin
        logits = [scale * (with_margin if z == label else s[i][z]) for z in range(5)]
        total += math.log(sum(math.exp(logit) for logit in logits)) - logits[label]
    given = math.degrees(margin) if name == "ArcFaceLoss" else margin
    loss = value(MetricLoss(name=name, options={"margin": given, "scale": scale}), features, head)
    assert loss.item() == pytest.approx(total / 8, rel=1e-5)
    of_features, of_head = torch.autograd.grad(loss, [features, head])
    assert of_features.any(1).all()
    assert of_head.any(1).all()


def test_a_loss_serves_heads_of_several_sizes(features):
    loss = MetricLoss(name="ArcFaceLoss")
    heads = [torch.randn(z, 6, generator=torch.Generator().manual_seed(z)) for z in (4, 9, 4)]
    first, _, again = (value(loss, features, head).item() for head in heads)
    assert first == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "CircelLoss"}, r"metric\.name: there is no loss CircelLoss; did you mean CircleLoss"),
        ({"name": "CircleLoss", "options": {"mm": 1}}, r"metric\.options: CircleLoss does not take these \(.*'mm'\)"),
        ({"name": "nowhere.Loss"}, r"metric\.name: there is no module nowhere "),
        ({"name": "torch.Tensor"}, r"metric\.name: there is no loss torch.Tensor; "),
        ({"name": "CircleLoss", "weight": 0.0}, r"metric\.weight: 0.0 is not positive"),
        ({"name": "ArcFaceLoss", "features": "pool"}, r"metric\.features: ArcFaceLoss compares with the head"),
        ({"name": "torch.nn.PReLU"}, r"metric\.name: torch.nn.PReLU learns weight, which no client would keep"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=rf"^model\.objective\.{message}") as caught:
        MetricLoss(**arguments)
    assert "\n" not in str(caught.value)


def test_a_loss_with_other_weights_is_refused(features, head):
    with pytest.raises(ConfigError, match=r"SoftTripleLoss learns fc, which no client would keep"):
        value(MetricLoss(name="SoftTripleLoss"), features, head)


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)
    with pytest.raises(ConfigError, match=r"^model.objective.metric needs pytorch_metric_learning; pip install "):
        MetricLoss(name="CircleLoss")


def trained(objective, method=None):
    client = LocalTraining(batch_size=8, sampler="identity", num_instances=4, optimizer=sgd)
    return make_model(method or FedPav(), client=client, objective=objective)


def test_clients_log_its_part():
    metric = MetricLoss(name="CircleLoss", weight=0.5, features="pool")
    model = fit(trained(Objective(triplet=0.25, metric=metric)))
    metrics = model.round_metrics
    for name in model.parts.names:
        parts = [metrics[f"train/{name}/{part}"] for part in ("cross_entropy", "triplet", "metric")]
        whole = metrics[f"train/{name}/loss"]
        assert parts[0] + 0.25 * parts[1] + 0.5 * parts[2] == pytest.approx(whole, rel=1e-5)


ANGULAR = Objective(cross_entropy=0.0, metric=MetricLoss(name="ArcFaceLoss", options={"scale": 8}))


def test_heads_learn_by_their_angles_alone():
    """Without cross-entropy the private heads move all the same, each of its own size; their biases do not."""
    model, start = fit(trained(ANGULAR)), trained(ANGULAR)
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    for name, client in model.parts.clients.items():
        before = start.parts.clients[name].head
        assert client.head.weight.shape == before.weight.shape
        assert (client.head.weight != before.weight).any(1).all()
        assert torch.equal(client.head.bias, before.bias)


@pytest.mark.parametrize("method", [FedPav(), FedAvg()], ids=["private heads", "shared head"])
def test_heads_for_angles_begin_with_long_rows(method):
    """From the short ones of cross-entropy, of length 0.006, the first step would be a thousand times too long."""
    for objective, std in ((ANGULAR, 1.0), (Objective(), 0.001)):
        model = make_model(method, objective=objective)
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
        if isinstance(method, FedAvg):
            weights = named(model)["head.weight"]
        else:
            weights = torch.cat([client.head.weight for client in model.parts.clients.values()])
        assert weights.std().item() == pytest.approx(std, rel=0.1)


def test_shared_heads_learn_by_their_angles_too():
    model, start = fit(trained(ANGULAR, FedAvg())), trained(ANGULAR, FedAvg())
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    assert (named(model)["head.weight"] != named(start)["head.weight"]).any(1).all()
