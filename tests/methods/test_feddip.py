"""FedDIP (Long et al., ICDM 2023) against loops with dense and masked weights by name of tensor."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.methods import FedDIP
from plain_loops import LR, Federation, Layers, assert_close, mean_of, play, shares
from plain_pruning import apply, flags_of, fraction, full, prunable, prune_all_layers

ROUNDS = 4


def reference(initial, target, every, lam, steps):
    federation = Federation(backbone=Layers)
    model = federation.model
    mask = prune_all_layers(model, full(model), initial)
    masks = [mask]
    for t in range(ROUNDS):
        penalty = lam * ((steps * t) // ROUNDS) / steps
        states = []
        for client in federation.clients:
            masked = copy.deepcopy(model)
            apply(masked, mask)
            dense = {n: p.detach().clone() for n, p in masked.named_parameters()}
            for x, y in client.batches(t):
                own, head = dict(masked.named_parameters()), dict(client.head.named_parameters())
                loss = F.cross_entropy(client.head(masked(x).neck), y)
                loss = loss + penalty * sum((own[n] ** 2).sum().sqrt() for n in prunable(masked))
                gradients = torch.autograd.grad(loss, [*own.values(), *head.values()])
                with torch.no_grad():
                    for (n, p), g in zip(own.items(), gradients, strict=False):
                        dense[n] = dense[n] - LR * g
                        p.copy_(dense[n])
                    for p, g in zip(head.values(), gradients[len(own) :], strict=True):
                        p -= LR * g
                apply(masked, mask)
            states.append({**masked.state_dict(), **dense})
        model.load_state_dict(mean_of(states, shares(federation.clients)))
        if t % every == 0:
            sparsity = target + (initial - target) * (1 - t / ROUNDS) ** 3
            mask = prune_all_layers(model, full(model), sparsity)
        apply(model, mask)
        masks.append(mask)
    return federation, masks


@pytest.mark.parametrize(
    ("initial", "target", "every", "lam"),
    [(0.0, 0.7, 1, 0.0), (0.3, 0.8, 2, 0.05), (0.3, 0.8, 2, 4.0), (0.5, 0.9, 1, 0.0)],  # 4.0: a weight of 1 at first
)
def test_algorithm_1(initial, target, every, lam):
    federation, masks = reference(initial, target, every, lam, steps=4)
    method = FedDIP(rounds=ROUNDS, initial=initial, target=target, reconfig_interval=every, lam=lam, lam_steps=4)
    model = play(method, ROUNDS, backbone=Layers)
    resident = model.parts.models["layers"]
    assert flags_of(model.server.kept["layers"]["mask"], resident) == masks[-1]
    assert_close(model, federation, tolerance=1e-5, arch="layers")
    densities = [1 - fraction(mask) for mask in masks]
    assert densities[-1] < densities[1] <= densities[0]
    pruned = ~model.server.kept["layers"]["mask"]
    assert (model.server.vector("layers")[: len(pruned)][pruned] == 0).all()


def test_pruned_weights_can_come_back():
    short, long = (
        play(FedDIP(rounds=4, initial=0.5, target=0.1, reconfig_interval=1), n, backbone=Layers) for n in (1, 4)
    )
    before, after = (model.server.kept["layers"]["mask"] for model in (short, long))
    grown = ~before & after
    assert grown.any()
    assert (long.server.vector("layers")[: len(grown)][grown] != 0).any()


def test_the_client_s_own_model_is_masked_and_what_it_sends_is_not():
    seen = []

    class Looking(FedDIP):
        def upload(self, client):
            upload = super().upload(client)
            mask = client.received.extras["mask"]
            own = client.model.shared[: len(mask)]
            seen.append((bool((own[~mask] == 0).all()), bool((upload.vector[: len(mask)][~mask] != 0).any())))
            return upload

    play(Looking(initial=0.5), 1, backbone=Layers)
    assert seen == [(True, True)] * 3


@pytest.mark.parametrize(
    ("options", "field"),
    [({"rounds": 0}, "rounds"), ({"initial": 1.0}, "initial"), ({"target": -0.1}, "target"), ({"lam": -1.0}, "lam")],
)
def test_impossible_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        FedDIP(**options)
