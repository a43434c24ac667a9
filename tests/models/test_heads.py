"""Identity heads without a bias, and with torch's start: what they are, and that nothing moves the bias."""

import copy
import math
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.methods import FedAvg, FedBABU, FedPav
from fedsim.models.reid import IdentityHead, make_head
from fedsim.training.settings import LocalTraining
from plain_loops import NECK, Federation, Smooth, assert_close, sgd, shares
from small import fit, make_model

TORCHS = IdentityHead(bias=False, init="torch")


def test_torchs_start_is_uniform():
    head = make_head(64, 2000, torch_generator(0, "a"), kind=IdentityHead(init="torch"))
    for parameter in (head.weight, head.bias):
        assert parameter.abs().max().item() <= 1 / 8
        assert parameter.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.05)
    torch.testing.assert_close(torch.nn.Linear(64, 2000).weight.std(), head.weight.std(), rtol=0.02, atol=0)


def test_without_a_bias_the_weights_are_the_same():
    with_bias, without = (
        make_head(8, 5, torch_generator(0, "a"), kind=IdentityHead(bias=bias, init="torch")) for bias in (True, False)
    )
    assert torch.equal(with_bias.weight, without.weight)
    assert with_bias.bias.any()
    assert not without.bias.any()
    assert not without.bias.requires_grad


def test_rounds_without_a_bias_are_plain_loops():
    """Each client's head is a matrix; two rounds of FedPav."""
    reference = Federation()
    for client in reference.clients:
        bound = 1 / math.sqrt(6)
        generator = torch_generator(0, client.name, "head")
        weight = torch.empty(client.head.weight.shape).uniform_(-bound, bound, generator=generator)
        client.head = torch.nn.Linear(6, client.head.out_features, bias=False).double()
        client.head.weight.data.copy_(weight)
    for t in range(2):
        states = []
        for client in reference.clients:
            local = copy.deepcopy(reference.model)
            sgd(local, client.head, client.batches(t))
            states.append(local.state_dict())
        reference.move_to(states, shares(reference.clients))
    training = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.02))
    model = fit(make_model(FedPav(), backbone=Smooth(), neck=NECK, client=training, head=TORCHS))
    assert_close(model, reference)
    for client in reference.clients:
        head = model.parts.clients[client.name].head
        torch.testing.assert_close(head.weight.double(), client.head.weight.detach(), rtol=0, atol=2e-6)
        assert not head.bias.any()


@pytest.mark.parametrize("method", [FedPav(), FedBABU(fine_tune_epochs=1)], ids=["FedPav", "FedBABU"])
def test_no_method_moves_the_bias(method):
    decaying = LocalTraining(batch_size=8, optimizer=partial(torch.optim.Adam, lr=0.01, weight_decay=0.1))
    model = fit(make_model(method, client=decaying, head=TORCHS))
    assert not any(client.head.bias.any() for client in model.parts.clients.values())


def test_shared_heads_have_a_bias():
    with pytest.raises(ConfigError, match=r"^model.head.bias: a shared head has one; set it to true, or "):
        fit(make_model(FedAvg(), head=TORCHS))
