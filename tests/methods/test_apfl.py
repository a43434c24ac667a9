"""APFL against loops with w_i, v_i and their mixture by name of tensor."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import APFL, Local
from fedsim.training.client import Client
from fedsim.training.labels import Clustering
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, assert_close, assert_personalised, play
from small import fit, make_model, receive


def parameters_of(model, head):
    return {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}


def gradient(model, head, x, y):
    model.train()
    parameters = parameters_of(model, head)
    return dict(
        zip(
            parameters,
            torch.autograd.grad(F.cross_entropy(head(model(x).neck), y), [*parameters.values()]),
            strict=True,
        )
    )


class Personal:
    """v_i, its velocity, and a network that holds the mixture with its statistics."""

    def __init__(self, model, head, alpha):
        self.network, self.head, self.alpha = copy.deepcopy(model), copy.deepcopy(head), alpha
        self.v = {n: p.detach().clone() for n, p in parameters_of(model, head).items()}

    def mix(self, w):
        with torch.no_grad():
            for n, p in parameters_of(self.network, self.head).items():
                p.copy_(self.alpha * self.v[n] + (1 - self.alpha) * w[n])


def local_round(model, head, personal, batches, momentum, adaptive):
    """Algorithm 1's local descent: both steps from the same v_i and w_i."""
    velocities = [{n: torch.zeros_like(v) for n, v in personal.v.items()} for _ in range(2)]
    for number, (x, y) in enumerate(batches):
        w = {n: p.detach().clone() for n, p in parameters_of(model, head).items()}
        personal.mix(w)
        g_mixture, g_w = gradient(personal.network, personal.head, x, y), gradient(model, head, x, y)
        slope = float(sum(((personal.v[n] - w[n]) * g_mixture[n]).sum() for n in w))
        for n, p in parameters_of(model, head).items():
            velocities[0][n] = momentum * velocities[0][n] + g_w[n]
            velocities[1][n] = momentum * velocities[1][n] + personal.alpha * g_mixture[n]
            p.data = w[n] - LR * velocities[0][n]
            personal.v[n] = personal.v[n] - LR * velocities[1][n]
        if adaptive and number == 0:
            personal.alpha = min(1.0, max(0.0, personal.alpha - LR * slope))


@pytest.mark.parametrize(
    ("alpha", "adaptive", "momentum"), [(0.5, False, 0.0), (0.3, True, 0.0), (0.7, True, 0.5), (0.0, False, 0.0)]
)
def test_algorithm_1(alpha, adaptive, momentum):
    federation, selection = Federation(), RandomFraction(0.6)  # two of three clients in each round
    names, personal = [client.name for client in federation.clients], {}
    for t in range(3):
        states = []
        for client in [k for k in federation.clients if k.name in selection.select(t, names, 0)]:
            own = personal.setdefault(client.name, Personal(federation.model, client.head, alpha))
            model = copy.deepcopy(federation.model)
            local_round(model, client.head, own, client.batches(t), momentum, adaptive)
            states.append(model.state_dict())
        federation.move_to(states, [1 / len(states)] * len(states))
    expected = {client.name: (federation.model, client.head) for client in federation.clients}
    for client in [k for k in federation.clients if k.name in personal]:
        own = personal[client.name]
        own.mix(parameters_of(federation.model, client.head))
        expected[client.name] = (own.network, own.head)
    trained = play(APFL(alpha=alpha, adaptive=adaptive), 3, momentum=momentum, selection=selection)
    assert_close(trained, federation, 2e-6)
    assert_personalised(trained, expected, 2e-6)
    for name, own in personal.items():
        kept = float(trained.parts.clients[name].private_state()["kept.alpha"])
        assert kept == pytest.approx(own.alpha, abs=1e-6)
        assert adaptive == (abs(kept - alpha) > 1e-7)


def test_shares_stay_between_nothing_and_all(monkeypatch):
    """A rate of 1e6 throws them to one of the ends, in the second round: in the first, v_i begins as w_i."""
    monkeypatch.setattr(LocalOptimizer, "rates", [1e6, 1e6])  # which only the step of alpha reads here
    model = play(APFL(), 2)
    shares = {float(client.private_state()["kept.alpha"]) for client in model.parts.clients.values()}
    assert shares <= {0.0, 1.0}


def test_a_share_of_nothing_is_the_global_model_and_a_share_of_all_is_local_training():
    neither, alone = (play(APFL(alpha=alpha, adaptive=False), 2) for alpha in (0.0, 1.0))
    local = play(Local(), 2)
    for name, client in neither.parts.clients.items():
        client.load()
        receive(client, neither.settings.method, neither.server)
        neither.settings.method.personalise(client)
        span = slice(client.model.flat.num_shared_parameters)
        assert torch.equal(client.model.shared[span], neither.server.vector("smooth")[span])
        client.unload()
        mine, its = alone.parts.clients[name], local.parts.clients[name]
        mine.load()
        its.load()
        receive(mine, alone.settings.method, alone.server)
        alone.settings.method.personalise(mine)
        found = {e.name: mine.model.flat.buffer[e.span] for e in mine.model.flat.entries}
        for entry in its.model.flat.entries:
            assert torch.equal(found[entry.name], its.model.flat.buffer[entry.span]), entry.name
        assert torch.equal(mine.model.head.weight, its.model.head.weight)


def test_between_two_steps_the_personal_model_stays(monkeypatch):
    """With accumulated batches, v_i is back from the mixture after each batch, and moves with every third one."""
    seen, plain = {}, Client.supervised_loss

    def watch(client, output, batch, counts=True):
        if counts:  # w_i's turn: v_i's batch is over
            seen.setdefault(client.client_name, []).append(client.model.replica("personal").flat.buffer.clone())
        return plain(client, output, batch, counts)

    monkeypatch.setattr(Client, "supervised_loss", watch)
    model = make_model(APFL(), client=LocalTraining(batch_size=8, accumulate=3, optimizer_state="keep"))
    span = slice(fit(model, rounds=2).parts.models["smallcnn"].flat.num_shared_parameters)
    for buffers in seen.values():
        moved = [not torch.equal(a[span], b[span]) for a, b in pairwise(buffers[: len(buffers) // 2])]
        assert moved == [number % 3 == 1 or number == len(moved) - 1 for number in range(len(moved))]


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: APFL, as it is configured, needs identities"):
        fit(make_model(APFL(), client=training), rounds=1)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_a_share_that_is_none_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"model\.method\.alpha: .* is not in \[0, 1\]"):
        APFL(alpha=alpha)
