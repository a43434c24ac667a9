"""Ditto against loops with two models per client."""

import copy

import pytest
import torch

from fedsim.core.errors import BadUpdateError, ConfigError
from fedsim.methods import Ditto
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_close, play, sgd, shares
from small import fit, make_model, receive


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_personal_models_train_near_the_global_one(momentum):
    lam = 1.5
    federation = Federation()
    personal = {}
    for t in range(2):
        states = []
        for client in federation.clients:
            w_t = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
            v = personal.setdefault(client.name, (copy.deepcopy(federation.model), copy.deepcopy(client.head)))
            batches = client.batches(t, passes=2)
            half = len(batches) // 2
            model = copy.deepcopy(federation.model)
            sgd(model, client.head, batches[:half], momentum=momentum)
            sgd(*v, batches[half:], correct=lambda n, p, w_t=w_t: lam * (p - w_t[n]), momentum=momentum)
            states.append(model.state_dict())
        federation.move_to(states, shares(federation.clients))
    found = play(Ditto(lam=lam), 2, momentum=momentum)
    assert_close(found, federation)
    for name, client in found.parts.clients.items():
        client.load()
        receive(client, found.settings.method, found.server)
        found.settings.method.personalise(client)
        model, head = personal[name]
        flat_model, state = client.model, model.state_dict()
        for entry in flat_model.flat.shared_entries:
            mine = flat_model.flat.buffer[entry.span].view(entry.shape).double()
            torch.testing.assert_close(mine, state[entry.name], rtol=0, atol=2e-6)
        torch.testing.assert_close(flat_model.head.weight.double(), head.weight, rtol=0, atol=2e-6)
        own = next(c for c in federation.clients if c.name == name).head
        torch.testing.assert_close(client.head.weight.double(), own.weight, rtol=0, atol=2e-6)


def test_clients_that_never_took_part_are_scored_with_the_global_model():
    from fedsim.federation.components.selection import RandomFraction

    model = play(Ditto(), 1, selection=RandomFraction(0.3))
    absent = next(client for name, client in model.parts.clients.items() if name not in list(model.reports))
    absent.load()
    receive(absent, model.settings.method, model.server)
    model.settings.method.personalise(absent)
    assert torch.equal(absent.model.shared, model.server.vector("smooth"))


def test_the_log_counts_the_global_task():
    model = play(Ditto(), 1)
    assert model.reports["town0"].images <= model.parts.clients["town0"].data.num_images


def test_a_negative_pull_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.lam"):
        Ditto(lam=-1.0)


def test_two_models_cannot_keep_one_optimizer():
    with pytest.raises(ConfigError, match=r"model\.client\.optimizer_state: Ditto"):
        fit(make_model(Ditto(), client=LocalTraining(batch_size=8, optimizer_state="keep")), rounds=1)


@pytest.mark.parametrize("how", ["stop", "skip_client"])
def test_a_personal_model_that_diverges_is_a_bad_update(how):
    """Its pull is that of a spring which every step stretches; the global model's training is as it should be."""
    model = make_model(Ditto(lam=1e9), on_bad_update=how)
    if how == "stop":
        with pytest.raises(BadUpdateError, match=r"client town0, round 1: .*loss or weights are not finite"):
            fit(model, rounds=1)
    else:
        assert not fit(model, rounds=1).reports
        assert not any("kept.personal" in client.private_state() for client in model.parts.clients.values())
