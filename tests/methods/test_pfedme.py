"""pFedMe against loops with theta_i and w_i by name of tensor."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.methods import PFedMe
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_close, mean_of, play, sgd
from small import fit, make_model, receive


@pytest.mark.parametrize("beta", [1.0, 0.7])
def test_moreau_envelopes(beta):
    lam, eta, inner_steps = 3.0, 0.1, 3
    federation = Federation()
    theta_of = {}
    for t in range(2):
        start = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
        uploads = []
        for client in federation.clients:
            theta = copy.deepcopy(federation.model)
            w = dict(start)
            for batch in client.batches(t):
                sgd(theta, client.head, [batch] * inner_steps, correct=lambda n, p, w=w: lam * (p - w[n]))
                w = {n: w[n] - eta * lam * (w[n] - p.detach()) for n, p in theta.named_parameters()}
            theta_of[client.name] = copy.deepcopy(theta).state_dict()
            uploads.append({**theta.state_dict(), **w})
        new = mean_of(uploads, [1 / len(uploads)] * len(uploads))
        for n, w_t in start.items():
            new[n] = (1 - beta) * w_t + beta * new[n]
        federation.model.load_state_dict(new)
    found = play(PFedMe(lam=lam, local_lr=eta, inner_steps=inner_steps, beta=beta), 2)
    assert_close(found, federation)
    for name, client in found.parts.clients.items():
        client.load()
        receive(client, found.settings.method, found.server)
        found.settings.method.personalise(client)
        for entry in client.model.flat.shared_entries:
            mine = client.model.flat.buffer[entry.span].view(entry.shape).double()
            torch.testing.assert_close(mine, theta_of[name][entry.name], rtol=0, atol=5e-6)


def test_accumulated_batches_are_refused():
    with pytest.raises(ConfigError, match=r"model\.client\.accumulate"):
        fit(make_model(PFedMe(), client=LocalTraining(batch_size=8, accumulate=2)), rounds=1)


@pytest.mark.parametrize("field", ["lam", "local_lr", "beta", "inner_steps"])
def test_wrong_settings_are_refused(field):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        PFedMe(**{field: 0})
