"""FedSAM against loops with two gradients for each batch."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.methods import FedAvg, FedSAM
from fedsim.training.client import Client
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, assert_close, play, shares
from small import fit, make_data, make_model, vector


def sharpness_aware(model, head, batches, rho, momentum):
    """Foret et al.: ascend by rho along the gradient, and step from where it was by the gradient found there."""
    parameters = [*model.parameters(), *head.parameters()]
    velocity = [torch.zeros_like(p) for p in parameters]
    gradient_of = lambda x, y: torch.autograd.grad(F.cross_entropy(head(model(x).neck), y), parameters)  # noqa: E731
    for x, y in batches:
        model.train()
        g = gradient_of(x, y)
        length = sum(float(part.square().sum()) for part in g) ** 0.5
        statistics = {n: b.clone() for n, b in model.named_buffers()}
        w = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, part in zip(parameters, g, strict=True):
                p.add_(rho * part / length)
        g = gradient_of(x, y)
        model.load_state_dict(statistics, strict=False)
        with torch.no_grad():
            for i, (p, old, part) in enumerate(zip(parameters, w, g, strict=True)):
                velocity[i] = momentum * velocity[i] + part
                p.copy_(old - LR * velocity[i])


@pytest.mark.parametrize(("rho", "momentum"), [(0.05, 0.0), (0.2, 0.0), (0.05, 0.5)])  # with 0.5, rounding grows
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_steps_follow_the_gradient_at_the_perturbed_point(rho, momentum, weighting):
    federation = Federation()
    equal = [1 / len(federation.clients)] * len(federation.clients)
    for t in range(2):
        states = []
        for client in federation.clients:
            model = copy.deepcopy(federation.model)
            sharpness_aware(model, client.head, client.batches(t), rho, momentum)
            states.append(model.state_dict())
        federation.move_to(states, shares(federation.clients) if weighting == "size" else equal)
    trained = play(FedSAM(rho=rho, weighting=weighting), 2, momentum=momentum)
    assert_close(trained, federation, 1e-6)
    for client in federation.clients:
        mine = trained.parts.clients[client.name].head.weight.double()
        torch.testing.assert_close(mine, client.head.weight, rtol=0, atol=1e-6)


def test_without_a_perturbation_a_step_is_fedavgs():
    """Also where batches are accumulated, and gradients clipped."""
    training = LocalTraining(batch_size=8, accumulate=2, grad_clip=0.1)
    runs = [fit(make_model(method, client=training)) for method in (FedSAM(rho=0.0), FedAvg(share_head=False))]
    assert torch.equal(vector(runs[0]), vector(runs[1]))
    assert runs[0].reports["town0"].loss == runs[1].reports["town0"].loss
    changed = fit(make_model(FedSAM(rho=0.1), client=training))
    assert not torch.equal(vector(changed), vector(runs[0]))


def test_a_gradient_of_zero_moves_nothing(monkeypatch):
    plain = Client.supervised_loss
    monkeypatch.setattr(Client, "supervised_loss", lambda *args, **options: 0.0 * plain(*args, **options))
    start, trained = (make_model(FedSAM(rho=0.3)) for _ in range(2))
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    fit(trained, rounds=1)
    parameters = slice(trained.parts.models["smallcnn"].flat.num_shared_parameters)
    torch.testing.assert_close(vector(trained)[parameters], vector(start)[parameters], rtol=0, atol=2**-39)


def test_micro_batches_are_refused():
    with pytest.raises(ConfigError, match=r"model\.client\.micro_batch: FedSAM needs whole batches"):
        fit(make_model(FedSAM(), client=LocalTraining(batch_size=8, micro_batch=4)), rounds=1)


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: FedSAM, as it is configured, needs identities"):
        fit(make_model(FedSAM(), client=training), rounds=1)


def test_a_negative_length_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.rho: -0.1 is negative"):
        FedSAM(rho=-0.1)
