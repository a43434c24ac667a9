"""FedProx: local training against the proximal loss itself, differentiated by autograd."""

import copy

import pytest

from fedsim.core.errors import ConfigError
from fedsim.methods import FedProx
from plain_loops import Federation, assert_close, play, sgd, shares


@pytest.mark.parametrize("mu", [0.5, 5.0])
def test_local_training_minimises_the_proximal_loss(mu):
    federation = Federation()
    for t in range(2):
        states = []
        for client in federation.clients:
            model, w_t = copy.deepcopy(federation.model), dict(federation.model.named_parameters())

            def proximal(x, features, model=model, w_t=w_t):
                return mu / 2 * sum((p - w_t[n].detach()).square().sum() for n, p in model.named_parameters())

            sgd(model, client.head, client.batches(t), proximal)
            states.append(model.state_dict())
        federation.move_to(states, shares(federation.clients))
    assert_close(play(FedProx(mu=mu), 2), federation)


def test_a_strong_pull_keeps_clients_at_home():
    plain, held = (play(FedProx(mu=mu), 1) for mu in (0.0, 40.0))
    start = Federation()
    distances = []
    for model in (plain, held):
        theta = start.model.state_dict()["backbone.conv.weight"]
        entry = next(e for e in model.parts.models["smooth"].flat.entries if e.name == "backbone.conv.weight")
        distances.append((model.server.vector("smooth")[entry.span].view(entry.shape) - theta).norm())
    # five initialisations, one thread and two: 0.245 +- 0.054, so the bound is 4.7 standard deviations off
    assert distances[1] < 0.5 * distances[0]


def test_a_negative_mu_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.mu"):
        FedProx(mu=-1.0)
