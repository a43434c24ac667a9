"""GPerXAN against plain loops over clients, batches and layers; what is shared, what is private, what it reduces to."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.methods import SKA, FedBN, GPerXAN
from fedsim.models import AssembledNorm2d, Features, Neck, SmallCNN
from fedsim.training.batch import Batch
from fedsim.training.flat_model import Output
from plain_loops import LR, NECK, Federation, play, shares
from small import fit, make_data, make_model, named, new_evaluator

SHARED = {"labels": "common", "partition": "iid", "parts": 2}
GUIDED = GPerXAN(share_head=True, guide=0.5)
STATISTICS = ("running_mean", "running_var")


class Assembled(nn.Module):
    """A backbone of one convolution and one assembled norm, without kinks: rounding does not grow."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = AssembledNorm2d(6)

    def forward(self, images):
        return torch.tanh(self.norm(self.conv(images)))


# -- plain code of the network, without modules ------------------------------------------------------------------------


def is_personal(name):
    """Batch normalisation: of the backbone and of the neck."""
    return ".norm.batch." in name or name.startswith("neck.")


def normalised(x, state, prefix, dims):
    """Batch normalisation in training; the running statistics of ``state`` move."""
    mean, variance = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    count = x.numel() // x.shape[1]
    for part, value in zip(STATISTICS, (mean, variance * count / (count - 1)), strict=True):
        state[prefix + part] = 0.9 * state[prefix + part] + 0.1 * value.detach().flatten()
    shape = (-1, *[1] * (x.dim() - 2))
    weight, bias = (state[prefix + part].view(shape) for part in ("weight", "bias"))
    return weight * (x - mean) / (variance + 1e-5).sqrt() + bias


def features_of(x, state):
    x = F.conv2d(x, state["backbone.conv.weight"], state["backbone.conv.bias"], stride=2)
    batch = normalised(x, state, "backbone.norm.batch.", (0, 2, 3))
    mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), unbiased=False, keepdim=True)
    weight, bias = (state[f"backbone.norm.instance_{part}"].view(-1, 1, 1) for part in ("weight", "bias"))
    instance = weight * (x - mean) / (variance + 1e-5).sqrt() + bias
    of_batch, of_instance = state["backbone.norm.scores"].exp() / state["backbone.norm.scores"].exp().sum()
    maps = torch.tanh(of_batch * batch + of_instance * instance)
    return normalised(maps.mean((2, 3)), state, "neck.0.", (0,))


def session(state, batches, guide):
    """Plain SGD on all parameters; the received head stays as it was."""
    received = [state["head.weight"].clone(), state["head.bias"].clone()]
    names = [name for name in state if not name.endswith(STATISTICS)]
    for x, y in batches:
        leaves = {name: state[name].clone().requires_grad_() for name in names}
        current = {**state, **leaves}
        features = features_of(x, current)
        loss = F.cross_entropy(F.linear(features, leaves["head.weight"], leaves["head.bias"]), y)
        loss = loss + guide * F.cross_entropy(F.linear(features, *received), y)
        gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
        state |= {name: current[name] for name in state if name not in names}
        state |= {name: state[name] - LR * gradient for name, gradient in zip(names, gradients, strict=True)}
    return state


def initial(method, data):
    """The server's tensors and the clients' first private ones, in float64."""
    model = make_model(method, backbone=Assembled(), neck=NECK)
    model.assemble(make_data(**data), 0, 1, torch.device("cpu"))
    flat = model.parts.models["assembled"]
    state = {entry.name: flat.flat.buffer[entry.span].view(entry.shape) for entry in flat.flat.entries}
    return {name: tensor.double().clone() for name, tensor in state.items()}


def private_of(client):
    """A client's stored private tensors by name."""
    flat, state = client.model.flat, client.private_state()["state"]
    entries = [entry for entry in flat.entries if not entry.shared]
    return {e.name: state[e.span.start - flat.num_shared :][: e.numel].view(e.shape) for e in entries}


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_whole_sessions_against_plain_loops(weighting):
    method = GPerXAN(share_head=True, guide=0.5, weighting=weighting)
    federation, server = Federation(make_data(**SHARED)), initial(method, SHARED)
    personal = {client.name: {n: t for n, t in server.items() if is_personal(n)} for client in federation.clients}
    weights = shares(federation.clients) if weighting == "size" else [1 / len(personal)] * len(personal)
    for t in range(3):
        trained = [
            session(copy.deepcopy({**server, **personal[client.name]}), client.batches(t), method.guide)
            for client in federation.clients
        ]
        for client, state in zip(federation.clients, trained, strict=True):
            personal[client.name] = {name: state[name] for name in personal[client.name]}
        server = {name: sum(w * s[name] for w, s in zip(weights, trained, strict=True)) for name in server}
    model = play(method, 3, data=make_data(**SHARED), backbone=Assembled)
    sent = named(model, "assembled")
    assert sent.keys() == {name for name in server if not is_personal(name)}
    means = method.server_tensors(model.server, "assembled")
    assert means.keys() == {name for name in server if is_personal(name)}
    for name, tensor in {**sent, **means}.items():
        torch.testing.assert_close(tensor.double(), server[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, client in model.parts.clients.items():
        private = private_of(client)
        assert private.keys() == personal[name].keys()
        for entry, tensor in private.items():
            torch.testing.assert_close(tensor.double(), personal[name][entry], rtol=0, atol=1e-5)
    norms = [state["backbone.norm.batch.running_mean"] for state in personal.values()]
    assert not torch.allclose(norms[0], norms[1], atol=1e-4), "clients have normalisations of their own"


def test_the_guide_moves_features_and_a_guide_of_0_is_none():
    with_it, without = (
        fit(make_model(method), make_data(**SHARED)) for method in (GUIDED, GPerXAN(share_head=True, guide=0.0))
    )
    moved = {name for name, tensor in named(with_it).items() if not torch.equal(tensor, named(without)[name])}
    assert moved >= {"backbone.conv1.weight", "head.weight"}
    plain = fit(make_model(FedBN(share_head=True, weighting="size")), make_data(**SHARED))
    assert named(plain).keys() == named(without).keys()
    assert all(torch.equal(tensor, named(without)[name]) for name, tensor in named(plain).items())


def test_with_plain_means_and_private_necks_it_is_skas_local_normalisation():
    """SKA's LSN, which shares attention, too; the layers are those of the paper."""
    pairs = []
    for method in (GPerXAN(share_neck=False, weighting="uniform"), SKA(dual=False, unseen="avg")):
        torch.manual_seed(0)
        pairs.append((fit(make_model(method, backbone=SmallCNN(8, norm="xan"))), method))
    (a, _), (b, _) = pairs
    assert all(torch.equal(tensor, named(b)[name]) for name, tensor in named(a).items())
    norms = [method.server_tensors(model.server, "smallcnn") for model, method in pairs]
    assert norms[0].keys() == norms[1].keys()
    assert all(torch.equal(tensor, norms[1][name]) for name, tensor in norms[0].items())


# -- shared and private ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize("share_neck", [False, True])
def test_batch_normalisation_is_private_and_all_else_is_not(share_head, share_neck):
    if share_head and not share_neck:
        return  # refused: tests/models/test_groups.py
    neck = Neck(dim=8)
    model = make_model(
        GPerXAN(share_head=share_head, share_neck=share_neck), backbone=SmallCNN(8, norm="xan"), neck=neck
    )
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat = model.parts.models["smallcnn"]
    shared = {entry.name for entry in flat.flat.shared_entries}
    layers = {path: layer for path, layer in flat.network.named_modules() if isinstance(layer, AssembledNorm2d)}
    assert len(layers) == 4
    for path in layers:
        assert {f"{path}.instance_weight", f"{path}.instance_bias", f"{path}.scores"} <= shared
        assert not any(name.startswith(f"{path}.batch.") for name in shared)
    assert ("neck.0.weight" in shared) == share_neck
    assert "neck.1.weight" not in shared
    assert ("head.weight" in shared) == share_head


def test_bytes_are_those_of_the_model_and_on_the_way_up_those_of_the_norms():
    bytes_of = {}
    for unseen in ("average", "own"):
        model = fit(make_model(GPerXAN(unseen=unseen), backbone=SmallCNN(8, norm="xan")), rounds=1)
        flat, clients = model.parts.models["smallcnn"], len(model.parts.clients)
        norms = sum(entry.numel for entry in flat.flat.entries if not entry.shared)
        bytes_of[unseen] = model.round_metrics["comm/total_bytes"]
        assert model.round_metrics.get("comm/extra_bytes", 0) == (4 * norms * clients if unseen == "average" else 0)
        assert bytes_of[unseen] == clients * (2 * flat.shared_bytes + (4 * norms if unseen == "average" else 0))
    assert bytes_of["own"] < bytes_of["average"]


@pytest.mark.parametrize(("unseen", "kinds"), [("average", {"global"}), ("own", {"personalised"})])
def test_unseen_domains_are_scored_by_the_mean_or_by_the_clients(unseen, kinds):
    model = fit(make_model(GPerXAN(unseen=unseen), backbone=SmallCNN(8, norm="xan")), rounds=1)
    rows = new_evaluator(model).plan.rows("test", ())
    assert {row.kind for row in rows if row.domain == "new0"} == kinds
    assert {row.kind for row in rows if row.domain != "new0"} == {"personalised"}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_guide_without_a_common_head_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.method\.guide: it is the loss of a head that all clients sh"):
        GPerXAN(guide=0.5)
    with pytest.raises(ConfigError, match=r"^data\.labels: GPerXAN, as it is configured, needs classes .* to common$"):
        make_model(GUIDED).assemble(make_data(), 0, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^model\.method\.guide: -1\.0 is negative"):
        GPerXAN(share_head=True, guide=-1.0)


def test_soft_labels_of_generated_images_guide_as_they_are():
    """Of any mass: the sum over images is divided by the batch."""
    model = fit(make_model(GUIDED), make_data(**SHARED), rounds=1)
    flat = model.parts.models["smallcnn"]
    received, classes = torch.randn(flat.flat.num_shared), flat.num_classes
    neck, targets = torch.randn(3, flat.network.num_features), torch.rand(3, classes)
    output = Output(Features(neck, neck), torch.zeros(3, classes), flat.head.weight)
    client = SimpleNamespace(
        forward=lambda _: output, supervised_loss=lambda *_: torch.tensor(2.0), model=flat,
        received=SimpleNamespace(vector=received),
    )  # fmt: skip
    spans = {entry.name: entry.span for entry in flat.flat.entries}
    logits = neck @ received[spans["head.weight"]].view(classes, -1).T + received[spans["head.bias"]]
    rows = [-(target * row.log_softmax(0)).sum() for target, row in zip(targets, logits, strict=True)]
    loss = GUIDED.loss(client, Batch(torch.zeros(3), torch.zeros(3, dtype=torch.long), targets=targets))
    torch.testing.assert_close(loss, 2.0 + 0.5 * sum(rows) / 3)
