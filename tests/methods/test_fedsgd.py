"""FedSGD: with one batch per client, the mean of the updates is one step with the mean gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.methods import FedSGD
from plain_loops import LR, Federation, play, shares
from small import named


def test_one_step_with_the_mean_gradient():
    federation = Federation()
    gradients = []
    for client in federation.clients:
        model = copy.deepcopy(federation.model).train()
        x, y = client.batches(0)[0]
        loss = F.cross_entropy(client.head(model(x).neck), y)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    found = named(play(FedSGD(share_head=False), 1), "smooth")
    for index, (name, p) in enumerate(federation.model.named_parameters()):
        mean = sum(n_k * g[index] for n_k, g in zip(shares(federation.clients), gradients, strict=True))
        torch.testing.assert_close(found[name].double(), p.detach() - LR * mean, rtol=0, atol=1e-6)


def test_no_steps_are_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.steps"):
        FedSGD(steps=0)
