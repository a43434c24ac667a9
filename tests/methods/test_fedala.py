"""FedALA against loops that learn W by name of tensor."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedALA, FedAvg
from fedsim.models import Neck
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_close, assert_personalised, play, sgd, shares
from small import fit, make_model, vector

LAYERS = ("backbone.conv", "backbone.norm", "neck.0")


def write(model, values):
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n in values:
                p.copy_(values[n])


class Kept:
    """A client's last model, W, and the epochs in which it was learnt."""

    def __init__(self):
        self.local, self.w, self.epochs, self.statistics = None, None, [], {}

    def mixture(self, theta):
        """Theta_i + (Theta - Theta_i) * W of the top layers."""
        return {n: self.local[n] + (theta[n] - self.local[n]) * self.w[n] for n in self.w}

    def learn(self, model, client, theta, method, round_):
        """Learn W on one random sample, in batches of 8."""
        n = client.num_images
        order = torch.randperm(n, generator=torch_generator(0, round_, client.name, "aggregation"))
        sample, losses = order[: int(method.sample * n)], []
        is_first = not self.epochs
        scratch = copy.deepcopy(model)
        scratch.train()
        parameters = {n: p for n, p in scratch.named_parameters() if n in self.w}
        while True:
            for index in sample.split(8):
                write(scratch, self.mixture(theta))
                loss = F.cross_entropy(client.head(scratch(client.x[index]).neck), client.y[index])
                gradients = torch.autograd.grad(loss, [*parameters.values()])
                for n, g in zip(parameters, gradients, strict=True):
                    self.w[n] = (self.w[n] - method.eta * g * (theta[n] - self.local[n])).clamp(0, 1)
            losses.append(float(loss.detach()))
            settled = len(losses) > 10 and np.std(losses[-10:]) < method.threshold
            if not is_first or settled or len(losses) == method.start_epochs:
                break
        self.epochs.append(len(losses))


@pytest.mark.parametrize(
    ("layers", "eta", "threshold", "start_epochs", "epochs", "bn_stats"),
    [(1, 300.0, 0.0, 4, 4, "mean"), (2, 300.0, 1.0, 50, 11, "mean"), (None, 300.0, 0.0, 2, 2, "mean"),
     (2, 300.0, 0.0, 2, 2, "local")],
)  # fmt: skip
def test_algorithm_1(layers, eta, threshold, start_epochs, epochs, bn_stats):
    """``local``: statistics are the clients' own, as in the authors' code."""
    method = FedALA(layers=layers, eta=eta, threshold=threshold, start_epochs=start_epochs, sample=0.5)
    top = LAYERS if layers is None else LAYERS[-layers:]
    federation, selection = Federation(), RandomFraction(0.7)
    assert {n.rpartition(".")[0] for n, _ in federation.model.named_parameters()} == {*LAYERS}
    kept = {client.name: Kept() for client in federation.clients}
    for t in range(3):
        theta = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
        states, chosen = [], selection.select(t, [*kept], 0)
        for client in [k for k in federation.clients if k.name in chosen]:
            model, own = copy.deepcopy(federation.model), kept[client.name]
            model.load_state_dict(own.statistics, strict=False)
            if own.local is not None:
                own.learn(model, client, theta, method, t)
                write(model, own.mixture(theta))
            sgd(model, client.head, client.batches(t))
            own.local = {n: p.detach().clone() for n, p in model.named_parameters() if n.rpartition(".")[0] in top}
            if bn_stats == "local":
                own.statistics = {n: b.clone() for n, b in model.named_buffers()}
            own.w = own.w or {n: torch.ones_like(p) for n, p in own.local.items()}
            states.append(model.state_dict())
        federation.move_to(states, shares([k for k in federation.clients if k.name in chosen]))
    theta = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
    expected = {}
    for client in federation.clients:
        model = copy.deepcopy(federation.model)
        model.load_state_dict(kept[client.name].statistics, strict=False)
        if kept[client.name].local is not None:
            write(model, kept[client.name].mixture(theta))
        expected[client.name] = (model, client.head)
    trained = play(method, 3, selection=selection, bn_stats=bn_stats)
    if bn_stats == "mean":
        assert_close(trained, federation, 2e-6)
    assert_personalised(trained, expected, 2e-6)
    learnt = [own for own in kept.values() if own.epochs]
    assert learnt
    assert {own.epochs[0] for own in learnt} == {epochs}
    flat = trained.parts.models["smooth"].flat
    weights = []
    for name, own in kept.items():
        stored = trained.parts.clients[name].private_state()
        start = flat.num_shared_parameters - len(stored["kept.weights"])
        for entry in [e for e in flat.shared_parameters if e.offset >= start]:
            mine = stored["kept.weights"][entry.offset - start :][: entry.numel].view(entry.shape)
            torch.testing.assert_close(mine.double(), own.w[entry.name], rtol=0, atol=2e-4)
            weights.append(mine.flatten())
    assert torch.cat(weights).min() < 0.99, "nothing was learnt"


def test_weights_that_stay_at_one_are_fedavg_also_with_dropout():
    neck = Neck(dim=8, dropout=0.3)
    model, plain = fit(make_model(FedALA(eta=0.0), neck=neck)), fit(make_model(FedAvg(share_head=False), neck=neck))
    assert torch.equal(vector(model), vector(plain))
    for name, client in plain.parts.clients.items():
        assert torch.equal(client.private_state()["state"], model.parts.clients[name].private_state()["state"])


def test_only_the_top_layers_are_kept():
    model = play(FedALA(layers=1), 2)
    for client in model.parts.clients.values():
        assert len(client.private_state()["kept.local"]) == 2 * 64  # gain and bias of the neck's norm, with padding
    assert FedALA(layers=1).keeps == {}
    assert FedALA(layers=None).keeps == {"weights": "shared", "local": "shared"}
    assert len(play(FedALA(layers=99), 1).parts.clients["town0"].private_state()["kept.local"]) > 2 * 64


def test_the_log_counts_local_training_alone():
    model = play(FedALA(), 2)
    assert model.reports["town0"].images == model.parts.clients["town0"].data.num_images


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: FedALA, as it is configured, needs identities"):
        fit(make_model(FedALA(), client=training), rounds=1)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("sample", 0.0), ("eta", -1.0), ("threshold", -0.1), ("start_epochs", 0)]
)
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        FedALA(**{field: value})
