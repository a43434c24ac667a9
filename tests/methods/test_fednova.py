"""FedNova against its update rule as a loop; the norm of a_i against torch's SGD on a constant gradient."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.functional.weighting import sgd_normaliser
from fedsim.methods import FedNova
from fedsim.methods.base import Weights
from fedsim.training.messages import Report
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_close, mean_of, play, sgd, shares
from small import fit, make_model


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.5, True), (0.9, True)])
def test_the_normaliser_counts_gradients(steps, momentum, nesterov):
    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        x.grad = -torch.ones_like(x)
        optimizer.step()
    assert sgd_normaliser(steps, momentum, nesterov) == pytest.approx(x.item(), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_normalised_averaging(momentum):
    federation = Federation()
    for t in range(2):
        x = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
        uploads, norms = [], []
        for client in federation.clients:
            model, batches = copy.deepcopy(federation.model), client.batches(t)
            sgd(model, client.head, batches, momentum=momentum)
            uploads.append(model.state_dict())
            tau = len(batches)
            a = [sum(momentum**m for m in range(tau - j)) for j in range(tau)]  # how often gradient j counts
            norms.append(sum(a))
        assert len(set(norms)) > 1
        p_i = shares(federation.clients)
        tau_eff = sum(p * norm for p, norm in zip(p_i, norms, strict=True))
        new = mean_of(uploads, p_i)  # statistics
        for n in x:
            d = [(x[n] - y[n]) / norm for y, norm in zip(uploads, norms, strict=True)]
            new[n] = x[n] - tau_eff * sum(p * d_i for p, d_i in zip(p_i, d, strict=True))
        federation.model.load_state_dict(new)
    assert_close(play(FedNova(), 2, momentum=momentum), federation, tolerance=5e-6)


def test_equal_work_gives_exactly_fedavg_s_weights():
    reports = {name: Report(n, {"normaliser": 3.7}) for name, n in (("a", 11), ("b", 31), ("c", 57))}
    shares_ = {"a": 11 / 99, "b": 31 / 99, "c": 57 / 99}
    assert FedNova().weights(reports) == Weights(shares_, {name: [w] for name, w in shares_.items()}, step_size=1.0)


def test_other_optimizers_are_refused():
    training = LocalTraining(batch_size=8, optimizer=torch.optim.Adam)
    with pytest.raises(ConfigError, match=r"model\.client\.optimizer: FedNova"):
        fit(make_model(FedNova(), client=training), rounds=1)
