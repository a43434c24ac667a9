"""LotteryFL (Li et al., SEC 2021) against loops over the elements of named tensors."""

import copy
import itertools

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.methods import LotteryFL
from plain_loops import Federation, Layers, assert_close, play, sgd
from plain_pruning import accuracy, apply, flags_of, fraction, full, masked_mean, prune_each_layer
from small import receive

STEP, ROUNDS = 0.3, 4


def reference(target, threshold):
    """Algorithm 1 in float64; the federation after its last round, every client's mask, and who pruned when."""
    federation = Federation(backbone=Layers)
    first = copy.deepcopy(federation.model.state_dict())
    masks = {client.name: full(federation.model) for client in federation.clients}
    pruned_in = []
    for t in range(ROUNDS):
        states = []
        for client in federation.clients:
            model, mask = copy.deepcopy(federation.model), masks[client.name]
            apply(model, mask)
            if accuracy(model, client.head, client.x, client.y) > threshold and fraction(mask) < target:
                share = min(STEP, 1 - (1 - target) / (1 - fraction(mask)))
                mask = masks[client.name] = prune_each_layer(model, mask, share)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(first[name])
                apply(model, mask)
                pruned_in.append((t, client.name))
            for batch in client.batches(t):
                sgd(model, client.head, [batch])
                apply(model, mask)
            states.append(model.state_dict())
        weights = [1 / len(states)] * len(states)
        federation.model.load_state_dict(
            masked_mean(federation.model.state_dict(), states, list(masks.values()), weights)
        )
    return federation, masks, pruned_in


def between():
    """A threshold that some clients are above before any training, and others below, by as much as possible."""
    federation = Federation(backbone=Layers)
    found = sorted(accuracy(federation.model, client.head, client.x, client.y) for client in federation.clients)
    low, high = max(itertools.pairwise(found), key=lambda pair: pair[1] - pair[0])
    assert low < high
    return (low + high) / 2


@pytest.mark.parametrize("target", [0.6, 0.9])
def test_algorithm_1(target):
    """To 0.6 it is three steps, for which nobody waits; on the way to 0.9 some wait at first."""
    threshold = 0.0 if target == 0.6 else between()
    federation, masks, pruned_in = reference(target, threshold)
    model = play(LotteryFL(target=target, step=STEP, start_accuracy=threshold), ROUNDS, backbone=Layers)
    flat_model = model.parts.models["layers"]
    for name, client in model.parts.clients.items():
        assert flags_of(client.private_state()["kept.mask"], flat_model) == masks[name]
    assert_close(model, federation, tolerance=1e-5, arch="layers")
    assert 0 < len(pruned_in) < ROUNDS * len(masks)  # some wait, or are done before the last round
    if target == 0.6:
        assert len(pruned_in) == 3 * len(masks)
        assert min(fraction(mask) for mask in masks.values()) >= target
    else:
        assert len({str(mask) for mask in masks.values()}) > 1
    for mask in masks.values():
        assert fraction(mask) < target + 0.02


def test_the_personal_model_is_the_global_one_without_what_is_pruned():
    model = play(LotteryFL(start_accuracy=0.0), 2, backbone=Layers)
    for client in model.parts.clients.values():
        client.load()
        receive(client, model.settings.method, model.server)
        model.settings.method.personalise(client)
        mask = client.kept["mask"]
        assert not mask.all()
        expected = model.server.vector("layers").clone()
        expected[: len(mask)] *= mask
        assert torch.equal(client.model.shared, expected)
        client.unload()
    assert model.evaluator.primary == "personalised"


def test_elements_that_all_have_pruned_stay_in_the_global_model():
    start = play(LotteryFL(target=0.0), 1, backbone=Layers)
    model = play(LotteryFL(start_accuracy=0.0, step=0.9, target=0.9), 1, backbone=Layers)
    masks = [client.private_state()["kept.mask"] for client in model.parts.clients.values()]
    dead = ~torch.stack(masks).any(0)
    assert dead.any()
    assert torch.equal(model.round.aggregator.untouched["layers"], dead)
    first = start.server.kept["layers"]["initial"]
    assert torch.equal(model.server.vector("layers")[: len(dead)][dead], first[dead])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target": 1.0}, "target"),
        ({"step": 0.0}, "step"),
        ({"accuracy_images": 0}, "images"),
        ({"start_accuracy": -0.1}, "start_accuracy"),
    ],
)
def test_impossible_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        LotteryFL(**options)
