"""FedDyn against loops with g_k and h as the paper has them, by name of tensor."""

import copy
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedAvg, FedDyn
from fedsim.models import SmallCNN
from fedsim.training.settings import ClientOverride, LocalTraining
from plain_loops import Federation, assert_close, mean_of, play, sgd
from small import fit, make_model, state_of, vector


@pytest.mark.parametrize(
    ("alpha", "momentum", "weighting"),
    [(0.1, 0.0, "uniform"), (1.0, 0.0, "uniform"), (0.5, 0.5, "uniform"), (1.0, 0.0, "size")],
)
def test_algorithm_1(alpha, momentum, weighting):
    federation, selection = Federation(), RandomFraction(0.6)  # two of three clients in each round
    names = [client.name for client in federation.clients]
    alphas = {client.name: alpha for client in federation.clients}
    if weighting == "size":  # the authors' code: divided by the relative size
        images = sum(client.num_images for client in federation.clients)
        alphas = {client.name: alpha * images / len(names) / client.num_images for client in federation.clients}
        assert max(alphas.values()) > 1.2 * min(alphas.values())
    zeros = {n: torch.zeros_like(p) for n, p in federation.model.named_parameters()}
    h_over_alpha, gradients = dict(zeros), {name: dict(zeros) for name in names}
    rounds, selected = 4, []
    for t in range(rounds):
        selected.append(selection.select(t, names, 0))
        theta = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
        states, sums = [], dict(zeros)
        for client in [k for k in federation.clients if k.name in selected[-1]]:
            model, g = copy.deepcopy(federation.model), gradients[client.name]
            own = alphas[client.name]

            def dynamic(x, features, model=model, g=g, theta=theta, own=own):
                parameters = dict(model.named_parameters())
                linear = sum((g[n] * p).sum() for n, p in parameters.items())
                squared = sum((p - theta[n]).square().sum() for n, p in parameters.items())
                return own / 2 * squared - linear

            sgd(model, client.head, client.batches(t), dynamic, momentum=momentum)
            moved = {n: p.detach() - theta[n] for n, p in model.named_parameters()}
            gradients[client.name] = {n: g[n] - own * moved[n] for n in g}
            sums = {n: sums[n] + moved[n] for n in sums}
            states.append(model.state_dict())
        h_over_alpha = {n: h_over_alpha[n] - sums[n] / len(names) for n in h_over_alpha}
        new = mean_of(states, [1 / len(states)] * len(states))
        for n, value in h_over_alpha.items():
            new[n] = new[n] - value
        federation.model.load_state_dict(new)
    assert len({tuple(chosen) for chosen in selected}) > 1
    trained = play(FedDyn(alpha=alpha, weighting=weighting), rounds, momentum, selection=selection)
    assert_close(trained, federation, 2e-6)
    kept, flat = trained.server.kept["smooth"]["moves"], trained.parts.models["smooth"].flat
    for entry in flat.shared_parameters:
        torch.testing.assert_close(
            -kept[entry.span].view(entry.shape).double(), h_over_alpha[entry.name], rtol=0, atol=2e-6
        )
        for name, client in trained.parts.clients.items():
            mine = -alphas[name] * client.private_state()["kept.moves"][entry.span].view(entry.shape).double()
            torch.testing.assert_close(mine, gradients[name][entry.name], rtol=0, atol=2e-6)


def test_without_a_regulariser_it_is_fedavg_with_plain_means():
    model, plain = fit(make_model(FedDyn(alpha=0.0))), fit(make_model(FedAvg(share_head=False, weighting="uniform")))
    assert torch.equal(vector(model), vector(plain))
    assert model.server.kept["smallcnn"] == {}


def test_the_server_keeps_the_mean_of_the_clients_moves():
    """Each architecture has its own."""
    model = make_model(
        FedDyn(alpha=0.3), selection=RandomFraction(0.7), clients={"town2": ClientOverride(backbone=SmallCNN(width=4))}
    )
    fit(model, rounds=4)
    assert len(model.parts.models) == 2
    for arch, kept in model.server.kept.items():
        moves = [
            client.private_state().get("kept.moves", torch.zeros_like(kept["moves"]))
            for name, client in model.parts.clients.items()
            if model.parts.archs[name] == arch
        ]
        torch.testing.assert_close(kept["moves"], sum(moves) / len(moves), rtol=0, atol=1e-6)


def test_nothing_more_is_sent_than_by_fedavg():
    assert FedDyn().payload(None, "smooth", 0) == FedAvg().payload(None, "smooth", 0)


def test_steps_need_not_be_those_of_sgd():
    adam = partial(torch.optim.Adam, lr=1e-3)
    model = fit(make_model(FedDyn(), client=LocalTraining(batch_size=8, optimizer=adam)), rounds=2)
    assert all(tensor.isfinite().all() for tensor in state_of(model).values())


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.alpha: -1.0 is negative"):
        FedDyn(alpha=-1.0)
