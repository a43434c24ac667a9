"""Per-FedAvg against loops with w, w~ and both gradients of the difference by name of tensor."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import PerFedAvg
from fedsim.models.reid import ReIDModel
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, Layers, assert_close, assert_personalised, play
from small import fit, make_data, make_model


def parameters_of(model, head):
    return {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}


def gradient(model, head, batch):
    """The gradient of f_i at the model, by name; running statistics move."""
    model.train()
    x, y = batch
    parameters = parameters_of(model, head)
    loss = F.cross_entropy(head(model(x).neck), y)
    return dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))


def moved(model, head, way, size):
    """A copy of a model and its head, each parameter p at p + size * way."""
    pair = copy.deepcopy((model, head))
    with torch.no_grad():
        for name, p in parameters_of(*pair).items():
            p.add_(size * way[name])
    return pair


def outer_gradient(model, head, batches, method):
    """The gradient of a step of w, of which only the pass on D moves the statistics."""
    inner = gradient(model, head, batches[0])
    g = gradient(*moved(model, head, inner, -method.alpha), batches[1])
    if method.variant == "first_order":
        return g
    above, below = (gradient(*moved(model, head, g, sign * method.delta), batches[2]) for sign in (1, -1))
    return {n: g[n] - method.alpha * (above[n] - below[n]) / (2 * method.delta) for n in g}


def session(model, head, epochs, method, momentum):
    """All steps of w, in place."""
    size = 2 if method.variant == "first_order" else 3
    velocity = {n: torch.zeros_like(p) for n, p in parameters_of(model, head).items()}
    for batches in epochs:
        for start in range(0, len(batches), size):
            group = (batches + batches)[start : start + size]
            g = outer_gradient(model, head, group, method)
            with torch.no_grad():
                for n, p in parameters_of(model, head).items():
                    velocity[n] = momentum * velocity[n] + g[n]
                    p -= LR * velocity[n]


@pytest.mark.parametrize(
    ("variant", "adapt_steps", "epochs", "momentum", "backbone"),
    [
        ("first_order", 1, 1, 0.0, None),
        ("first_order", 20, 2, 0.5, Layers),
        ("hessian_free", 1, 1, 0.5, None),
        ("hessian_free", 2, 2, 0.0, Layers),
    ],
)
def test_algorithm_1(variant, adapt_steps, epochs, momentum, backbone):
    method = PerFedAvg(variant=variant, alpha=0.05, delta=0.1, adapt_steps=adapt_steps)
    options = {} if backbone is None else {"backbone": backbone}
    federation, selection = Federation(**options), RandomFraction(0.6)  # two of three clients in each round
    names, personal = [client.name for client in federation.clients], {}
    for t in range(3):
        states = []
        for client in [k for k in federation.clients if k.name in selection.select(t, names, 0)]:
            received = copy.deepcopy((federation.model, client.head))
            model = copy.deepcopy(federation.model)
            batches, n = client.batches(t, passes=epochs + adapt_steps), len(client.batches(t))
            session(model, client.head, [batches[e * n : (e + 1) * n] for e in range(epochs)], method, momentum)
            for batch in batches[epochs * n :][:adapt_steps]:
                step = gradient(*received, batch)
                for name, p in parameters_of(*received).items():
                    p.data -= method.alpha * step[name]
            personal[client.name] = received
            states.append(model.state_dict())
        federation.move_to(states, [1 / len(states)] * len(states))
    expected = {k.name: personal.get(k.name, (federation.model, k.head)) for k in federation.clients}
    trained = play(method, 3, momentum=momentum, epochs=epochs, selection=selection, **options)
    arch = "smooth" if backbone is None else "layers"
    assert_close(trained, federation, 2e-6, arch)
    assert_personalised(trained, expected, 2e-6)


def test_without_inner_steps_each_second_batch_trains():
    """alpha = 0: w~ is w, and D only moves statistics."""
    federation = Federation()
    for t in range(2):
        states = []
        for client in federation.clients:
            model = copy.deepcopy(federation.model)
            session(model, client.head, [client.batches(t)], PerFedAvg(alpha=0.0), 0.0)
            states.append(model.state_dict())
        federation.move_to(states, [1 / len(states)] * len(states))
    assert_close(play(PerFedAvg(alpha=0.0), 2), federation)
    plain, free = (play(PerFedAvg(variant=variant, alpha=0.0), 1) for variant in ("first_order", "hessian_free"))
    assert not torch.equal(plain.server.vector("smooth"), free.server.vector("smooth"))  # other batches


@pytest.mark.parametrize(("variant", "passes"), [("first_order", 2), ("hessian_free", 4)])
def test_a_client_with_one_batch_takes_it_for_all(variant, passes, monkeypatch):
    """A session has a step, and the adaptation a pass."""
    seen, plain = [], ReIDModel.forward

    def watch(network, images):
        seen.append(images)
        return plain(network, images)

    monkeypatch.setattr(ReIDModel, "forward", watch)
    model = fit(make_model(PerFedAvg(variant=variant)), make_data(limit_client_batches=1), rounds=1)
    sessions = len(model.parts.clients)
    assert len(seen) == sessions * (passes + 1)
    for start in range(0, len(seen), passes + 1):
        assert all(torch.equal(images, seen[start]) for images in seen[start : start + passes])
    assert model.round_metrics["train/steps"] == sessions


def test_the_difference_is_the_product_with_the_hessian():
    """Of a quadratic loss it is exact for any delta; here the error falls with the square of delta."""
    federation = Federation()
    client = federation.clients[0]
    model, head, batches = federation.model, client.head, client.batches(0)
    gradients = [
        outer_gradient(copy.deepcopy(model), head, batches, PerFedAvg(variant=variant, alpha=0.3, delta=delta))
        for variant, delta in (("first_order", 1.0), ("hessian_free", 1e-3), ("hessian_free", 1e-4))
    ]
    g = gradients[0]
    x, y = batches[2]
    parameters = parameters_of(model, head)
    slopes = torch.autograd.grad(F.cross_entropy(head(model(x).neck), y), [*parameters.values()], create_graph=True)
    along = sum((slope * g[n]).sum() for slope, n in zip(slopes, parameters, strict=True))
    products = torch.autograd.grad(along, [*parameters.values()])
    length, coarse, fine = (
        float(sum((of[n] - g[n] + 0.3 * p).square().sum() for n, p in zip(g, products, strict=True)).sqrt())
        for of in gradients
    )
    assert coarse < 0.01 * length
    assert fine == pytest.approx(0.01 * coarse, rel=0.1)


def test_accumulated_batches_are_refused():
    with pytest.raises(ConfigError, match=r"model\.client\.accumulate: a step of PerFedAvg"):
        fit(make_model(PerFedAvg(), client=LocalTraining(batch_size=8, accumulate=2)), rounds=1)


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: PerFedAvg, as it is configured, needs identities"):
        fit(make_model(PerFedAvg(), client=training), rounds=1)


@pytest.mark.parametrize(("field", "value"), [("alpha", -0.1), ("delta", 0.0), ("adapt_steps", 0)])
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        PerFedAvg(**{field: value})
