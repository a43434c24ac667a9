"""FedRep against loops that step the head by its names, and then the body."""

import copy
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedRep
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_personalised, mean_of, play, sgd
from small import fit, make_data, make_model, named, vector


def rounds_of(num_rounds, head_epochs, epochs=1, share_neck=True, selection=None, momentum=0.0):
    """The shared state after each round, and each client's model and head at the end."""
    federation = Federation()
    is_head = lambda name: name.startswith("head.") or (name.startswith("neck.") and not share_neck)  # noqa: E731
    models = {client.name: copy.deepcopy(federation.model) for client in federation.clients}
    phi = {n: t for n, t in federation.model.state_dict().items() if not is_head(n)}
    for t in range(num_rounds):
        names = [*models] if selection is None else selection.select(t, [*models], 0)
        chosen = [client for client in federation.clients if client.name in names]
        for client in chosen:
            model = models[client.name]
            model.load_state_dict(phi, strict=False)
            batches = client.batches(t, passes=head_epochs + epochs)
            first = len(batches) * head_epochs // (head_epochs + epochs)
            sgd(model, client.head, batches[:first], momentum=momentum, moves=is_head)
            sgd(model, client.head, batches[first:], momentum=momentum, moves=lambda n: not is_head(n))
        states = [{n: models[client.name].state_dict()[n] for n in phi} for client in chosen]
        phi = mean_of(states, [1 / len(states)] * len(states))
    for model in models.values():
        model.load_state_dict(phi, strict=False)
    return phi, {client.name: (models[client.name], client.head) for client in federation.clients}


@pytest.mark.parametrize(
    ("head_epochs", "epochs", "share_neck", "momentum"),
    [(2, 1, True, 0.0), (1, 2, False, 0.0), (3, 1, False, 0.5), (0, 1, True, 0.0)],
)
def test_algorithm_1(head_epochs, epochs, share_neck, momentum):
    selection = RandomFraction(0.6)  # two of three clients in each round
    phi, personal = rounds_of(3, head_epochs, epochs, share_neck, selection, momentum)
    method = FedRep(head_epochs=head_epochs, share_neck=share_neck)
    trained = play(method, 3, momentum=momentum, epochs=epochs, selection=selection)
    for name, tensor in named(trained, "smooth").items():
        torch.testing.assert_close(tensor.double(), phi[name].double(), rtol=0, atol=1e-6)
    assert_personalised(trained, personal, 1e-6)


def test_a_head_without_epochs_never_moves():
    """Nor do momentum and weight decay move it."""
    decaying = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    client = LocalTraining(batch_size=8, optimizer=decaying)
    start, trained = (make_model(FedRep(head_epochs=0), client=client) for _ in range(2))
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    fit(trained)
    for name, participant in trained.parts.clients.items():
        assert torch.equal(participant.private_state()["state"], start.parts.clients[name].private_state()["state"])
    assert not torch.equal(vector(start), vector(trained))


def test_all_parameters_can_be_trained_again_afterwards():
    model = fit(make_model(FedRep(head_epochs=1)), rounds=1).parts.models["smallcnn"]
    assert all(parameter.requires_grad for parameter in [*model.network.parameters(), *model.head.parameters()])


def test_the_log_counts_epochs_of_both_parts():
    model = play(FedRep(head_epochs=3), 1, epochs=2)
    assert model.reports["town0"].images == 5 * model.parts.clients["town0"].data.num_images


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: FedRep, as it is configured, needs identities"):
        fit(make_model(FedRep(), client=training), rounds=1)


def test_negative_epochs_are_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.head_epochs: -1 is less than 0"):
        FedRep(head_epochs=-1)
