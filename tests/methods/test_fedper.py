"""FedPer's config against loops: base layers averaged by size, layers of each client that never leave it."""

import copy
from pathlib import Path

import pytest
import torch
import yaml

from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedAvg, FedPav
from plain_loops import NECK, Federation, assert_personalised, play, sgd, shares
from small import named, vector

CONFIG = Path(__file__).parents[2] / "configs" / "methods" / "fedper.yaml"


def fedper(**changed):
    method = yaml.safe_load(CONFIG.read_text())["model"]["method"]
    assert method["class_path"] == "FedAvg"
    return FedAvg(**method["init_args"] | changed)


def is_personal(name, share_neck):
    return name.startswith("neck.") and not share_neck


@pytest.mark.parametrize("share_neck", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_base_layers_are_averaged_and_the_last_ones_personal(share_neck, momentum):
    federation, selection = Federation(), RandomFraction(0.6)  # two of three clients in each round
    models = {client.name: copy.deepcopy(federation.model) for client in federation.clients}
    base = {n: t for n, t in federation.model.state_dict().items() if not is_personal(n, share_neck)}
    for t in range(3):
        chosen = [c for c in federation.clients if c.name in selection.select(t, [*models], 0)]
        for client in chosen:
            models[client.name].load_state_dict(base, strict=False)
            sgd(models[client.name], client.head, client.batches(t), momentum=momentum)
        states = [models[client.name].state_dict() for client in chosen]
        base = {
            n: sum(share * state[n] for share, state in zip(shares(chosen), states, strict=True)) for n in base
        }  # gamma_k = n_k / n
    trained = play(fedper(share_neck=share_neck), 3, momentum=momentum, selection=selection)
    for name, tensor in named(trained, "smooth").items():
        torch.testing.assert_close(tensor.double(), base[name].double(), rtol=0, atol=1e-6)
    for model in models.values():
        model.load_state_dict(base, strict=False)
    assert_personalised(trained, {c.name: (models[c.name], c.head) for c in federation.clients}, 1e-6)


def test_with_a_personal_classifier_alone_it_is_fedpav():
    assert NECK.kind == "bnneck", "a neck with parameters"
    plain, changed = play(FedPav(), 2), play(fedper(share_neck=True), 2)
    assert torch.equal(vector(plain, "smooth"), vector(changed, "smooth"))
    for name, client in plain.parts.clients.items():
        assert torch.equal(client.private_state()["state"], changed.parts.clients[name].private_state()["state"])
