"""IFCA: Algorithm 1 against plain loops, and clusters that find the clients that belong together."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.methods import IFCA
from plain_loops import NECK, Federation, Smooth, assert_close, play, sgd
from small import fit, make_data, make_model, receive


def loss_of(model, client):
    """F_i(theta): the mean cross-entropy over all images in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(client.head(model(client.x).neck), client.y))


@pytest.mark.parametrize("rounds", [1, 3])
def test_algorithm_1(rounds):
    found = play(IFCA(spread=0.5), rounds)
    begin = make_model(IFCA(spread=0.5), backbone=Smooth(), neck=NECK)
    begin.assemble(make_data(), 0, 1, torch.device("cpu"))
    reference = Federation()
    thetas = [copy.deepcopy(reference.model) for _ in range(2)]
    initial = begin.server.kept["smooth"]["cluster1"]
    state = thetas[1].state_dict()
    for entry in begin.parts.models["smooth"].flat.shared_entries:
        state[entry.name] = initial[entry.span].view(entry.shape).double()
    thetas[1].load_state_dict(state)
    choices = {}
    for t in range(rounds):
        members = {0: [], 1: []}
        for client in reference.clients:
            losses = [loss_of(theta, client) for theta in thetas]
            j = choices[client.name] = losses.index(min(losses))
            model = copy.deepcopy(thetas[j])
            sgd(model, client.head, client.batches(t))
            members[j].append(model.state_dict())
        for j, states in members.items():
            if states:
                mean = {
                    key: sum(s[key] for s in states) / len(states) if value.is_floating_point() else value
                    for key, value in states[0].items()
                }
                thetas[j].load_state_dict(mean)
    reference.model = thetas[0]
    assert_close(found, reference, 5e-6)
    kept = found.server.kept["smooth"]["cluster1"]
    second = thetas[1].state_dict()
    for entry in found.parts.models["smooth"].flat.shared_entries:
        torch.testing.assert_close(kept[entry.span].view(entry.shape).double(), second[entry.name], rtol=0, atol=5e-6)
    for name, client in found.parts.clients.items():
        assert int(client.private_state()["kept.cluster"]) == choices[name]


def test_the_initial_models_differ_by_the_spread_and_depend_on_the_seed():
    model = make_model(IFCA(clusters=3, spread=0.2))
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    flat, kept = model.parts.models["smallcnn"].flat, model.server.kept["smallcnn"]
    assert sorted(kept) == ["cluster1", "cluster2"]
    assert not torch.equal(kept["cluster1"], kept["cluster2"])
    for theta in kept.values():
        for entry in flat.shared_entries:
            change = theta[entry.span] - model.server.vector("smallcnn")[entry.span]
            if entry.kind == "buffer":
                assert not change.any()
            elif entry.numel > 500:
                ratio = change.std() / model.server.vector("smallcnn")[entry.span].std()
                assert 0.17 < float(ratio) < 0.23  # of 500 numbers: 0.2 with a standard error of 3 %


def test_every_model_travels_down_and_one_up():
    model = make_model(IFCA(clusters=3))
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    traffic = model.parts.ledger.expected(0, ["town0"])["town0"]
    assert traffic.received == 3 * traffic.down
    assert traffic.extra_up == 4  # the estimate
    assert traffic.up == traffic.down


def test_a_client_gets_the_model_of_its_last_estimate():
    model = fit(make_model(IFCA(clusters=2)), rounds=2)
    for client in model.parts.clients.values():
        client.load()
        receive(client, model.settings.method, model.server)
        for choice in (0, 1):
            client.keep("cluster", torch.tensor(choice))
            model.settings.method.personalise(client)
            expected = (model.server.vector("smallcnn"), model.server.kept["smallcnn"]["cluster1"])[choice]
            assert torch.equal(client.model.shared, expected)
        client.unload()


@pytest.mark.parametrize(("options", "field"), [({"clusters": 0}, "clusters"), ({"spread": 0.0}, "spread")])
def test_wrong_numbers(options, field):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        IFCA(**options)
