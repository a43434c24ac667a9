"""FedSupWA against its release's rules as loops over numbers, images and clients."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fedsim.core.seeding import torch_generator
from fedsim.data.batches import people_batches
from fedsim.methods import FedPav, FedSupWA
from fedsim.methods.base import Weights
from fedsim.training.messages import Report
from fedsim.training.settings import LocalTraining
from plain_loops import LR, NECK, Federation, Smooth, assert_close, mean_of, sgd, shares, slow_retrieval
from small import fit, make_model, vector

PEOPLE = {"sampler": "people", "num_instances": 4, "batch_size": 8, "local_epochs": 2}


def batches_of(client, t):
    generator = torch_generator(0, t, client.name, "batches")
    order = [index for _ in range(2) for index in people_batches(client.y, 8, 4, generator)]
    return [(client.x[index], client.y[index]) for index in order]


def scored(model, head, x, y):
    """mAP of the images among each other, and the share of right guesses; the model is in training mode."""
    with torch.no_grad():
        z = model.train()(x).neck
        right = sum(int(row.argmax()) == int(label) for row, label in zip(head(z), y, strict=True)) / len(y)
    return slow_retrieval(z.tolist(), y.tolist(), list(range(len(y))))[0] + right


def suppressed(before, after, last):
    """A tensor after DPS, number by number."""
    d = [abs(a - b) for a, b in zip(before.flatten().tolist(), last.flatten().tolist(), strict=True)]
    w = [1 - (value - min(d)) / (max(d) - min(d) + 1e-4) for value in d]
    moved = [
        b + w_i * (a - b) for b, a, w_i in zip(before.flatten().tolist(), after.flatten().tolist(), w, strict=True)
    ]
    return torch.tensor(moved, dtype=torch.float64).view(before.shape)


def play_people(method, rounds=3, **options):
    training = LocalTraining(optimizer=partial(torch.optim.SGD, lr=LR), **PEOPLE)
    return fit(make_model(method, backbone=Smooth(), neck=NECK, client=training, **options), rounds=rounds)


@pytest.mark.parametrize(
    "options", [{}, {"suppress": False}, {"weighting": "size"}], ids=["both", "weights alone", "suppression alone"]
)
def test_rounds_are_the_releases_rules(options):
    federation, last, weights = Federation(), {}, []
    for t in range(3):
        states, gains = [], []
        for client in federation.clients:
            before, model = copy.deepcopy(federation.model), copy.deepcopy(federation.model)
            batches = batches_of(client, t)
            sgd(model, client.head, batches)
            if client.name in last and options.get("suppress", True):
                state, start = model.state_dict(), federation.model.state_dict()
                for name, value in state.items():
                    if value.is_floating_point():
                        state[name] = suppressed(start[name], value, last[client.name][name])
                model.load_state_dict(state)
            if "weighting" not in options:
                gains.append(-scored(before, client.head, *batches[-1]) + scored(model, client.head, *batches[-1]))
            states.append(model.state_dict())
            last[client.name] = model.state_dict()
        total = sum(math.exp(gain) for gain in gains)
        weights.append([math.exp(gain) / total for gain in gains] or shares(federation.clients))
        federation.model.load_state_dict(mean_of(states, weights[-1]))
    assert max(max(row) - min(row) for row in weights) > 0.01, "weights differ, so their rule is seen"
    assert_close(play_people(FedSupWA(**options)), federation, tolerance=5e-6)


def test_private_statistics_have_the_last_batch_once_more_and_not_twice():
    """The score of the received model moves none that stay with the client."""
    trained = play_people(FedSupWA(), rounds=1, bn_stats="local")
    flat, federation = trained.parts.models["smooth"].flat, Federation()
    for client in federation.clients:
        model, batches = copy.deepcopy(federation.model), batches_of(client, 0)
        sgd(model, client.head, batches)
        scored(model, client.head, *batches[-1])
        state = trained.parts.clients[client.name].private_state()["state"]
        for entry in (entry for entry in flat.entries if "running" in entry.name):
            own = state[entry.span.start - flat.num_shared :][: entry.numel].view(entry.shape)
            torch.testing.assert_close(own.double(), model.state_dict()[entry.name], rtol=0, atol=5e-6)


def test_without_both_parts_it_is_fedpav():
    ours, fedpav = play_people(FedSupWA(suppress=False, weighting="size")), play_people(FedPav())
    assert torch.equal(vector(ours, "smooth"), vector(fedpav, "smooth"))
    assert not torch.equal(vector(play_people(FedSupWA()), "smooth"), vector(fedpav, "smooth"))


def test_equal_gains_weigh_equally_and_large_ones_do_not_overflow():
    reports = {name: Report(n, {"gain": gain}) for name, n, gain in (("a", 3, 2000.0), ("b", 50, 2000.0))}
    assert FedSupWA().weights(reports) == Weights({"a": 0.5, "b": 0.5})
    reports["c"] = Report(9, {"gain": -2000.0})
    assert FedSupWA().weights(reports).clients["c"] == 0.0


def test_a_session_without_a_batch_has_no_gain():
    kept = {}
    client = SimpleNamespace(
        local_epochs=1, batches=lambda _: iter(()), device="cpu", kept=kept, keep=kept.__setitem__,
        model=SimpleNamespace(shared=torch.zeros(3)),
    )  # fmt: skip
    FedSupWA().train(client)
    assert kept["gain"] == 0
