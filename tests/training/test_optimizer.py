"""Optimizers of torch in a client's sessions: they start anew with every client, or keep their state."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.flat import FlatParameters
from fedsim.methods import FedPav, Local
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.settings import ELEMENTWISE, ClientOverride, LocalTraining
from small import Some, fit, make_data, make_model, vector

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD-Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "Adam": partial(torch.optim.Adam, lr=1e-3, weight_decay=5e-4),
    "AMSGrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": partial(torch.optim.RAdam, weight_decay=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
}


def weights(model):
    return torch.cat([vector(model), *(client.private_state()["state"] for client in model.parts.clients.values())])


def train(optimizer, method=None, state=None, **options):
    training = LocalTraining(batch_size=8, optimizer=optimizer, head_lr=0.01, grad_clip=1.0, optimizer_state=state)
    return fit(make_model(method or FedPav(), client=training, **options))


def test_all_elementwise_optimizers_are_tried():
    made = {type(make([nn.Parameter(torch.zeros(1))])) for make in OPTIMIZERS.values()}
    assert made == set(ELEMENTWISE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_kept_where_there_are_some(name):
    kept = [client.private_state() for client in train(OPTIMIZERS[name], state="keep").parts.clients.values()]
    assert all(any(n.startswith("kept.optimizer.") for n in k) == (name != "SGD") for k in kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kept_state_makes_rounds_one_training(name):
    """Against torch's optimizer, which steps the same gradients without a break: a quadratic bowl in three sessions."""
    layer = nn.Linear(3, 2)
    theirs = copy.deepcopy(layer)
    flat = FlatParameters(layer, lambda _: True)
    optimizer = LocalOptimizer(LocalTraining(optimizer=OPTIMIZERS[name]), flat, [list(layer.named_parameters()), []])
    reference, state = OPTIMIZERS[name](theirs.parameters()), {}
    for session in range(3):
        optimizer.reset(session)
        optimizer.continue_from(state)
        for _ in range(2):
            for mine, their in zip(layer.parameters(), theirs.parameters(), strict=True):
                mine.grad, their.grad = mine.detach().clone(), their.detach().clone()
            optimizer.step()
            reference.step()
        state = optimizer.state()
    assert torch.equal(*(torch.cat([p.detach().flatten() for p in of.parameters()]) for of in (layer, theirs)))


def test_only_known_optimizers_can_go_on():
    with pytest.raises(
        ConfigError, match=r"model\.client\.optimizer_state: keep works only for SGD, .*; set it to reset"
    ):
        train(torch.optim.Adagrad, state="keep")


@pytest.mark.parametrize("state", [None, "reset", "keep"])
@pytest.mark.parametrize(("method", "towns"), [(FedPav(), ["town0"]), (Local(), ["town0", "town1"]), (FedPav(), None)])
def test_who_goes_on_by_default(method, towns, state):
    """A client alone and a method that shares nothing are one long training; an average is a new start."""
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    training = LocalTraining(batch_size=8, optimizer=momentum, optimizer_state=state)
    model = fit(make_model(method, client=training), make_data(Some(*towns) if towns else None), rounds=1)
    keeps = state == "keep" or (state is None and towns is not None)
    for client in model.parts.clients.values():
        assert ("kept.optimizer.momentum_buffer" in client.private_state()) == keeps


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adagrad", "Rprop", "own"])
def test_a_client_finds_nothing_of_the_one_before_it(name):
    """Two clients on one flat model, and the second of them alone."""
    optimizer = {"Adagrad": torch.optim.Adagrad, "Rprop": torch.optim.Rprop, "own": Hoarding}.get(name)
    optimizer = optimizer or OPTIMIZERS[name]
    training = LocalTraining(batch_size=8, optimizer=optimizer)
    together = fit(make_model(Local(), client=training), make_data(Some("town0", "town1")))
    alone = fit(make_model(Local(), client=training), make_data(Some("town1")))
    a, b = (model.parts.clients["town1"].private_state()["state"] for model in (together, alone))
    assert torch.equal(a, b)


class Hoarding(torch.optim.SGD):
    """Remembers steps where nobody looks."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step(closure)


class Ungrateful(nn.Module):
    """A backbone with a parameter that never gets a gradient."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, images):
        return self.conv(images)


def test_a_parameter_without_gradient_is_not_decayed():
    decay = partial(torch.optim.SGD, lr=0.05, weight_decay=0.5)
    model = train(decay, backbone=Ungrateful())
    entry = next(e for e in model.parts.models["ungrateful"].flat.entries if e.name == "backbone.idle")
    assert torch.equal(vector(model, "ungrateful")[entry.span], torch.ones(5))


def test_frozen_parameters_stay():
    backbone = Ungrateful()
    backbone.idle.requires_grad_(False)
    model = train(partial(torch.optim.SGD, lr=0.05, weight_decay=0.5), backbone=backbone)
    entry = next(e for e in model.parts.models["ungrateful"].flat.entries if e.name == "backbone.idle")
    assert torch.equal(vector(model, "ungrateful")[entry.span], torch.ones(5))


def test_gradients_that_were_replaced_count():
    class Replacing(FedPav):
        def loss(self, client, batch):
            weight = client.model.head.weight
            if weight not in hooked:
                hooked.add(weight)
                weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
            return super().loss(client, batch)

    hooked = set()
    sgd = partial(torch.optim.SGD, lr=0.05)
    assert not torch.equal(weights(train(sgd, Replacing())), weights(train(sgd)))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_mean_of_a_constant_gradient_is_that_gradient(momentum, nesterov):
    """Whatever momentum has made of the steps: 1e-6 is rounding."""
    if nesterov and not momentum:
        return  # torch refuses it
    layer = nn.Linear(3, 2, bias=False)
    flat = FlatParameters(layer, lambda _: True)
    how = LocalTraining(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=momentum, nesterov=nesterov))
    optimizer = LocalOptimizer(how, flat, [list(layer.named_parameters()), []])
    optimizer.reset(0)
    start, gradient = flat.buffer.clone(), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(optimizer.mean_gradient(start), torch.zeros_like(start))  # nobody trained
    for _ in range(10):
        layer.weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(optimizer.mean_gradient(start)[:6], gradient.flatten(), rtol=0, atol=1e-6)


def test_overrides_have_optimizers_of_their_own():
    own = {"town1": ClientOverride(optimizer=partial(torch.optim.Adam, lr=1e-3))}
    model = fit(make_model(FedPav(), clients=own))
    a, b = (model.parts.clients[name].optimizer for name in ("town0", "town1"))
    assert a is not b
    assert model.parts.clients["town2"].optimizer is a
