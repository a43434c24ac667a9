"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II) against loops with c and c_i by name of tensor."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import Scaffold
from fedsim.methods.base import Payload
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, assert_close, mean_of, play, sgd
from small import fit, make_model


@pytest.mark.parametrize(
    ("global_lr", "momentum", "weighting"),
    [(1.0, 0.0, "uniform"), (0.5, 0.0, "uniform"), (1.0, 0.9, "uniform"), (0.5, 0.0, "size")],
)
def test_algorithm_1(global_lr, momentum, weighting):
    federation, selection = Federation(), RandomFraction(0.6)  # two of three clients in each round
    names = [client.name for client in federation.clients]
    zeros = {n: torch.zeros_like(p) for n, p in federation.model.named_parameters()}
    c, own = dict(zeros), {name: dict(zeros) for name in names}
    rounds, asked = 4, []
    for t in range(rounds):
        chosen = selection.select(t, names, 0)
        asked.append(chosen)
        states, changes = [], []
        x = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
        for client in [k for k in federation.clients if k.name in chosen]:
            model, c_i = copy.deepcopy(federation.model), own[client.name]
            batches = client.batches(t)
            correct = lambda n, p, c_i=c_i: c[n] - c_i[n]  # noqa: E731 - line 10
            sgd(model, client.head, batches, correct=correct, momentum=momentum)
            counts = sum(
                momentum**m for j in range(len(batches)) for m in range(len(batches) - j)
            )  # K without momentum
            y = {n: p.detach() for n, p in model.named_parameters()}
            new = {n: c_i[n] - c[n] + (x[n] - y[n]) / (counts * LR) for n in x}  # line 12, option II
            changes.append({n: new[n] - c_i[n] for n in x})
            own[client.name] = new
            states.append(model.state_dict())
        images = [k.num_images if weighting == "size" else 1 for k in federation.clients if k.name in chosen]
        mean = mean_of(states, [number / sum(images) for number in images])
        for n in x:
            mean[n] = x[n] + global_lr * (mean[n] - x[n])  # lines 16 and 17
            c[n] = c[n] + len(chosen) / len(names) * sum(
                number / sum(images) * change[n] for number, change in zip(images, changes, strict=True)
            )
        federation.model.load_state_dict(mean)
    assert len({tuple(chosen) for chosen in asked}) > 1
    found = play(Scaffold(global_lr=global_lr, weighting=weighting), rounds, momentum, selection=selection)
    assert_close(found, federation, tolerance=1e-5)
    control, flat = found.server.kept["smooth"]["control"], found.parts.models["smooth"].flat
    for entry in flat.shared_parameters:
        torch.testing.assert_close(control[entry.span].view(entry.shape).double(), c[entry.name], rtol=0, atol=2e-5)
        for name, client in found.parts.clients.items():
            mine = client.private_state()["kept.control"][entry.span].view(entry.shape).double()
            torch.testing.assert_close(mine, own[name][entry.name], rtol=0, atol=2e-5)


def test_what_goes_both_ways_is_declared():
    model = play(Scaffold(), 1)
    shape = (model.parts.models["smooth"].flat.num_shared_parameters,)
    assert Scaffold().payload(model.server, "smooth", 0) == Payload(down=("control",), up={"control": shape})
    assert model.server.kept["smooth"]["control"].shape == shape


def test_a_step_size_must_be_positive():
    with pytest.raises(ConfigError, match=r"model\.method\.global_lr"):
        Scaffold(global_lr=0.0)


def test_momentum_of_earlier_rounds_is_refused():
    with pytest.raises(ConfigError, match=r"model\.client\.optimizer_state: Scaffold"):
        fit(make_model(Scaffold(), client=LocalTraining(batch_size=8, optimizer_state="keep")), rounds=1)


def test_steps_that_are_no_gradients_are_refused():
    training = LocalTraining(batch_size=8, optimizer=torch.optim.Adam)
    with pytest.raises(ConfigError, match=r"model\.client\.optimizer: Scaffold"):
        fit(make_model(Scaffold(), client=training), rounds=1)
