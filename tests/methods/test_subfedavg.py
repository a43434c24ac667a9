"""Sub-FedAvg (Un) (Vahidian et al., 2021) against loops over the elements of named tensors."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.functional.pruning import pruned_fraction
from fedsim.methods import FedAvg, SubFedAvg, subfedavg
from fedsim.methods.pruned import prunable_layers
from fedsim.training.client import Client
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, Layers, assert_close, play, sgd
from plain_pruning import accuracy, apply, difference, flags_of, fraction, full, masked_mean, prune_each_layer
from small import make_data, make_model, receive

ROUNDS, EPOCHS = 4, 3


def reference(target, step, distance, threshold):
    """Algorithm 1 (Un) in float64; the federation, every client's mask, and what became of each trial."""
    federation = Federation(backbone=Layers)
    masks = {client.name: full(federation.model) for client in federation.clients}
    verdicts = []
    for t in range(ROUNDS):
        states = []
        for client in federation.clients:
            model, mask = copy.deepcopy(federation.model), masks[client.name]
            apply(model, mask)
            batches = client.batches(t, EPOCHS)
            per_epoch = len(batches) // EPOCHS
            for number, batch in enumerate(batches):
                sgd(model, client.head, [batch])
                apply(model, mask)
                if number == per_epoch - 1:
                    first = prune_each_layer(model, mask, step)
            last = prune_each_layer(model, mask, step)
            if fraction(mask) >= target:
                verdicts.append("done")
            elif difference(first, last) <= distance:
                verdicts.append("still")
            else:
                if target - fraction(mask) < step:
                    missing = (target - fraction(mask)) / (1 - fraction(mask))
                    last = prune_each_layer(model, mask, min(missing, 0.05))
                trial = copy.deepcopy(model)
                apply(trial, last)
                good = accuracy(trial, client.head, client.x, client.y) > threshold
                verdicts.append("pruned" if good else "reverted")
                if good:
                    model, masks[client.name] = trial, last
            states.append(model.state_dict())
        weights = [1 / len(states)] * len(states)
        federation.model.load_state_dict(
            masked_mean(federation.model.state_dict(), states, list(masks.values()), weights)
        )
    return federation, masks, verdicts


@pytest.mark.parametrize(
    ("target", "step", "distance", "threshold", "expected"),
    [
        (0.5, 0.3, 0.0, 0.3, {"pruned", "reverted"}),
        (0.35, 0.3, 0.0, 0.0, {"pruned", "done"}),
        (0.9, 0.1, 0.015, 0.0, {"pruned", "still"}),
    ],
)
def test_algorithm_1(target, step, distance, threshold, expected):
    federation, masks, verdicts = reference(target, step, distance, threshold)
    assert expected <= set(verdicts), verdicts
    method = SubFedAvg(target=target, step=step, min_distance=distance, min_accuracy=threshold)
    model = play(method, ROUNDS, backbone=Layers, epochs=EPOCHS)
    for name, client in model.parts.clients.items():
        state = client.private_state()
        assert state.keys() == {"state", "kept.mask"}
        assert flags_of(state["kept.mask"], model.parts.models["layers"]) == masks[name]
    assert_close(model, federation, tolerance=1e-5, arch="layers")


def test_seventy_percent_takes_the_authors_fourteen_steps(monkeypatch):
    """src/client/client_u.py of MMorafah/Sub-FedAvg: 10 % of what is left, then up to 5 %, at last just enough."""
    monkeypatch.setattr(subfedavg, "exceeds", lambda client, num_images, accuracy: torch.tensor(True))
    monkeypatch.setattr(Client, "fit", lambda client, hooks, after_epoch: [after_epoch(epoch) for epoch in range(2)])
    method = SubFedAvg(min_distance=-1.0)
    model = make_model(method, client=LocalTraining(local_epochs=2))
    model.assemble(data := make_data(), 0, 1, torch.device("cpu"))
    client = model.parts.clients["town0"]
    client.images.open(data.open_train)
    client.begin_round(0, 1.0, "32-true", lambda report: None)
    receive(client, method, model.server)
    found, left = [], 1.0
    while len(found) < 2 or found[-1] > found[-2]:
        method.train(client)
        found.append(pruned_fraction(client.kept["mask"], prunable_layers(client.model)))
    for step, value in enumerate(found[:14]):
        left -= left * (0.1 if step < 9 else min(0.05, (left - 0.3) / left))
        assert value == pytest.approx(1 - left, abs=0.002)  # whole elements of small layers, rounded up
    assert 0.7 <= found[13] == found[14] == found[-1]


def test_a_trial_that_fails_leaves_no_trace():
    plain = play(FedAvg(share_head=False, weighting="uniform"), 2, backbone=Layers, epochs=2)
    model = play(SubFedAvg(min_accuracy=1.0, min_distance=0.0), 2, backbone=Layers, epochs=2)
    assert torch.equal(model.server.vector("layers"), plain.server.vector("layers"))


def test_one_epoch_is_too_few():
    with pytest.raises(ConfigError, match=r"model\.client\.local_epochs: .* town0 has one; set at least 2"):
        play(SubFedAvg(), 1, backbone=Layers)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target": -0.1}, "target"),
        ({"step": 1.0}, "step"),
        ({"accuracy_images": 0}, "images"),
        ({"min_accuracy": -0.1}, "min_accuracy"),
    ],
)
def test_impossible_settings_are_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        SubFedAvg(**options)
