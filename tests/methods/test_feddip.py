"""FedDIP (Long et al., ICDM 2023) against loops with dense and masked weights by name of tensor."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.errors import ConfigError
from fedsim.functional.pruning import stepped_weight
from fedsim.methods import FedDIP
from plain_loops import LR, Federation, Layers, assert_close, mean_of, play, shares
from plain_pruning import apply, flags_of, fraction, full, prunable, prune_all_layers

ROUNDS = 4


def by_code(t, rounds, lam, steps, first):
    """The penalty's weight, round by round, in steps of whole rounds; the last step has the rest."""
    weights = []
    for step in range(steps):
        weight = 0.0 if step == 0 else first + (lam - first) / (steps - 1) * (step - 1)
        weights += [weight] * (rounds // steps)
    return (weights + [weight] * (rounds % steps))[t]


def reference(initial, target, every, lam, steps, first=None, regrow=True):
    federation = Federation(backbone=Layers)
    model = federation.model
    mask = prune_all_layers(model, full(model), initial)
    masks = [mask]
    for t in range(ROUNDS):
        penalty = lam * ((steps * t) // ROUNDS) / steps if first is None else by_code(t, ROUNDS, lam, steps, first)
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
            if t > 0 and not regrow:
                apply(model, mask)
            sparsity = target + (initial - target) * (1 - t / ROUNDS) ** 3
            mask = prune_all_layers(model, full(model), sparsity)
        apply(model, mask)
        masks.append(mask)
    return federation, masks


@pytest.mark.parametrize(
    ("initial", "target", "every", "lam"),
    [(0.0, 0.7, 1, 0.0), (0.3, 0.8, 2, 0.05), (0.3, 0.8, 2, 4.0), (0.5, 0.9, 1, 0.0)],  # 4.0: a weight of 1 at first
)
@pytest.mark.parametrize(("regrow", "first"), [(True, None), (False, 0.01)], ids=["paper", "code"])
def test_algorithm_1(initial, target, every, lam, regrow, first):
    federation, masks = reference(initial, target, every, lam, 4, min(first, lam) if first else None, regrow)
    method = FedDIP(
        rounds=ROUNDS, initial=initial, target=target, reconfig_interval=every, lam=lam, lam_steps=4, lam_first=first,
        regrow=regrow,
    )  # fmt: skip
    model = play(method, ROUNDS, backbone=Layers)
    flat_model = model.parts.models["layers"]
    assert flags_of(model.server.kept["layers"]["mask"], flat_model) == masks[-1]
    assert_close(model, federation, tolerance=1e-5, arch="layers")
    densities = [1 - fraction(mask) for mask in masks]
    assert densities[-1] < densities[1] <= densities[0]
    pruned = ~model.server.kept["layers"]["mask"]
    assert (model.server.vector("layers")[: len(pruned)][pruned] == 0).all()


@pytest.mark.parametrize("regrow", [True, False])
def test_pruned_weights_come_back_by_choice_alone(regrow):
    # the penalty shrinks the weights that are left, so that pruned ones overtake them
    method = FedDIP(rounds=4, initial=0.5, target=0.5, reconfig_interval=1, lam=2.0, regrow=regrow)
    short, long = (play(method, n, backbone=Layers) for n in (1, 4))
    before, after = (model.server.kept["layers"]["mask"] for model in (short, long))
    grown = ~before & after
    assert grown.any() == regrow
    assert (long.server.vector("layers")[: len(grown)][grown] != 0).any() == regrow


@pytest.mark.parametrize(("round_", "regrow", "is_reduced"), [(0, False, False), (2, False, True), (2, True, False)])
def test_the_weights_from_which_a_mask_is_taken(round_, regrow, is_reduced):
    """In round 0 the server of the authors' code does not apply the clients' first mask."""
    average, old, new = torch.tensor([1.0, 2, 3, 4]), torch.tensor([True, False, True, False]), torch.ones(4).bool()
    taken_from = []

    class Looking(FedDIP):
        def _make_mask(self, model, theta, sparsity):
            taken_from.append(theta.clone())
            return new

    kept = {"arch": {"mask": old}}
    server = SimpleNamespace(
        round=round_, kept=kept, vector=lambda arch: average,
        keep=lambda arch, name, value: kept[arch].update({name: value}),
        models={"arch": SimpleNamespace(flat=SimpleNamespace(num_shared_parameters=4))},
    )  # fmt: skip
    Looking(reconfig_interval=2, regrow=regrow).server_step(server)
    assert taken_from[0].tolist() == ([1, 0, 3, 0] if is_reduced else [1, 2, 3, 4])
    assert kept["arch"]["mask"] is new


def test_the_penalty_of_the_shipped_config_rises_as_in_the_code():
    method = FedDIP(rounds=20)
    weights = [stepped_weight(t, 20, method.lam, method.lam_steps, method.lam_first) for t in range(20)]
    assert weights[:3] == [0.0, 5e-4, pytest.approx(5.2632e-4, abs=1e-8)]
    assert weights[-1] == pytest.approx(9.7368e-4, abs=1e-8)
    for rounds in (1, 3, 19, 20, 43, 100):
        for t in range(rounds):
            expected = by_code(t, rounds, 1e-3, 20, 5e-4)
            assert stepped_weight(t, rounds, 1e-3, 20, 5e-4) == pytest.approx(expected, rel=1e-12)


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
    [
        ({"rounds": 0}, "rounds"),
        ({"initial": 1.0}, "initial"),
        ({"target": -0.1}, "target"),
        ({"lam": -1.0}, "lam"),
        ({"lam_first": -1.0}, "lam_first"),
    ],
)
def test_impossible_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=rf"model\.method\.{field}"):
        FedDIP(**options)
