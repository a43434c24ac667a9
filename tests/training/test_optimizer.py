"""Flat steps against tensor-by-tensor steps, and optimizers that start anew with every client."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import others
from fedsim.core.errors import ConfigError
from fedsim.core.flat import FlatParameters
from fedsim.methods import FedPav, Local
from fedsim.models import ResNet
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


class Watching(FedPav):
    """Remembers whether steps were flat."""

    def take_step(self, client, loss):
        if client.step(loss):
            was_flat.add(client.optimizer.is_flat)


was_flat = set()


def weights(model):
    return torch.cat([vector(model), *(client.private_state()["state"] for client in model.parts.clients.values())])


def train(optimizer, flat_step, method=None, state=None, **options):
    was_flat.clear()
    training = LocalTraining(
        batch_size=8, optimizer=optimizer, flat_step=flat_step, head_lr=0.01, grad_clip=1.0, optimizer_state=state
    )
    return fit(make_model(method or Watching(), client=training, **options))


def test_all_elementwise_optimizers_are_tried():
    made = {type(make([nn.Parameter(torch.zeros(1))])) for make in OPTIMIZERS.values()}
    assert made == set(ELEMENTWISE)


@pytest.mark.parametrize("state", others.some(["reset", "keep"], ["keep"]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_steps_give_the_same_bits(name, state):
    flat = train(OPTIMIZERS[name], True, state=state)
    assert was_flat == {True}
    plain = train(OPTIMIZERS[name], False, state=state)
    assert was_flat == {False}
    assert torch.equal(weights(flat), weights(plain))
    kept = [client.private_state() for client in flat.parts.clients.values()]
    assert all(any(n.startswith("kept.optimizer.") for n in k) == (state == "keep" and name != "SGD") for k in kept)


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
        train(torch.optim.Adagrad, True, state="keep")


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


@pytest.mark.parametrize(
    ("sizes", "is_flat"),
    [
        ([2**14, 2**14], True),
        ([2**14, 2**14 + 1], False),
        ([2, 2, 2**15 + 2**14 - 4], True),  # the mean counts: three parameters of 2**14
        ([p.numel() for p in ResNet(18).parameters()], False),  # 180,000 a parameter
    ],
)
def test_large_parameters_step_one_by_one(sizes, is_flat):
    """A flat buffer of gradients costs an addition and a clearing of each element; ``benchmarks/flat_steps.py``."""
    parameters = nn.ParameterList(torch.zeros(size) for size in sizes)
    flat = FlatParameters(parameters, lambda _: True)
    optimizer = LocalOptimizer(LocalTraining(), flat, [list(parameters.named_parameters()), []])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert optimizer.is_flat == is_flat


def test_flat_steps_with_accumulated_gradients_give_the_same_bits():
    results = [
        fit(make_model(FedPav(), client=LocalTraining(batch_size=8, accumulate=2, flat_step=flat)))
        for flat in (True, False)
    ]
    assert torch.equal(*map(weights, results))


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
    model = train(decay, True, backbone=Ungrateful())
    assert was_flat == {False}
    entry = next(e for e in model.parts.models["ungrateful"].flat.entries if e.name == "backbone.idle")
    assert torch.equal(vector(model, "ungrateful")[entry.span], torch.ones(5))


def test_frozen_parameters_stay():
    backbone = Ungrateful()
    backbone.idle.requires_grad_(False)
    model = train(partial(torch.optim.SGD, lr=0.05, weight_decay=0.5), True, backbone=backbone)
    assert was_flat == {True}
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
    results = [train(partial(torch.optim.SGD, lr=0.05), flat, Replacing()) for flat in (True, False)]
    assert torch.equal(*map(weights, results))
    assert not torch.equal(weights(results[0]), weights(train(partial(torch.optim.SGD, lr=0.05), True)))


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


def test_a_parameter_that_is_frozen_in_the_middle_of_a_session_is_an_error():
    class Freezing(FedPav):
        def take_step(self, client, loss):
            if client.step(loss):
                client.model.network.backbone.requires_grad_(False)

    with pytest.raises(ConfigError, match=r"model\.client\.flat_step"):
        train(partial(torch.optim.SGD, lr=0.05), True, Freezing())
