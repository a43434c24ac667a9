"""FedBABU against loops with a fixed head, and fine-tuning of what was received."""

import copy
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import FedBABU
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from plain_loops import Federation, assert_close, assert_personalised, play, sgd, shares
from small import fit, make_data, make_model, receive, vector


def is_head(name):
    return name.startswith("head.")


def is_body(name):
    return not is_head(name)


def random_head(client):
    """U(-1 / sqrt(D), 1 / sqrt(D)), as torch.nn.Linear has it, from a stream of the client."""
    generator = torch_generator(0, client.name, "fixed head")
    for parameter in client.head.parameters():
        drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data = (2 * drawn - 1).double() / 6**0.5  # D is 6
    return client.head


# heads of this size give large gradients: in float32, loops in two rounds with momentum come to 8e-6 of these
@pytest.mark.parametrize(("part", "momentum", "rounds"), [("all", 0.0, 2), ("head", 0.0, 2), ("all", 0.5, 1)])
def test_algorithm_1_and_fine_tuning(part, momentum, rounds):
    epochs, selection = 2, RandomFraction(0.6)  # two of three clients in each round
    federation = Federation()
    heads = {client.name: random_head(client) for client in federation.clients}
    tuned = {}
    for t in range(rounds):
        states = []
        chosen = [c for c in federation.clients if c.name in selection.select(t, [*heads], 0)]
        for client in chosen:
            model, personal = copy.deepcopy(federation.model), copy.deepcopy(federation.model)
            batches, head = client.batches(t, passes=1 + epochs), copy.deepcopy(heads[client.name])
            first = len(batches) // (1 + epochs)
            sgd(model, heads[client.name], batches[:first], momentum=momentum, moves=is_body)
            sgd(personal, head, batches[first:], momentum=momentum, moves=is_head if part == "head" else lambda n: True)
            states.append(model.state_dict())
            tuned[client.name] = (personal, head)
        federation.move_to(states, shares(chosen))
    trained = play(FedBABU(fine_tune_epochs=epochs, fine_tune=part), rounds, momentum=momentum, selection=selection)
    assert_close(trained, federation, 1e-6)
    missing = [name for name in heads if name not in tuned]
    tuned |= {name: (federation.model, heads[name]) for name in missing}
    if part == "head":  # the body is the global one
        tuned = {name: (federation.model, head) for name, (_, head) in tuned.items()}
    assert_personalised(trained, tuned, 1e-5)  # two further epochs of such steps


def test_without_fine_tuning_the_personalised_model_is_the_global_body_with_the_fixed_head():
    method = FedBABU(fine_tune_epochs=0)
    assert (method.delivers, method.keeps) == ("global", {})
    trained, tuned = play(method, 2), play(FedBABU(fine_tune_epochs=1), 2)
    assert torch.equal(vector(trained, "smooth"), vector(tuned, "smooth"))  # fine-tuning disturbs nothing
    federation = Federation()
    expected = {client.name: random_head(client) for client in federation.clients}
    for name, client in trained.parts.clients.items():
        client.load()
        receive(client, method, trained.server)
        method.personalise(client)
        assert torch.equal(client.model.shared, trained.server.vector("smooth"))
        torch.testing.assert_close(client.model.head.weight.double(), expected[name].weight, rtol=0, atol=1e-7)
        client.unload()


def test_heads_are_large_enough_to_train_the_body():
    """Logits of features of unit variance have a deviation of 1 / sqrt(3); those of usual heads 0.001 sqrt(D)."""
    model = play(FedBABU(fine_tune_epochs=0), 1)
    heads = [client.head.weight for client in model.parts.clients.values()]
    assert all(head.abs().max() <= 6**-0.5 for head in heads)
    assert torch.cat([head.flatten() for head in heads]).square().mean() > 0.5 / (3 * 6)


def test_momentum_and_decay_leave_the_head_where_it_is():
    decaying = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    client = LocalTraining(batch_size=8, optimizer=decaying)
    states = [
        fit(make_model(FedBABU(fine_tune_epochs=0), client=client), make_data(), rounds=rounds) for rounds in (1, 3)
    ]
    for name, participant in states[0].parts.clients.items():
        assert torch.equal(participant.head.weight, states[1].parts.clients[name].head.weight)
    assert not torch.equal(vector(states[0]), vector(states[1]))


def test_the_log_counts_the_body():
    reports = [play(FedBABU(fine_tune_epochs=epochs), 1).reports["town0"] for epochs in (0, 3)]
    assert reports[0].images == reports[1].images
    assert reports[0].loss == reports[1].loss


def test_clients_without_identities_are_refused():
    training = LocalTraining(batch_size=8, cluster=Clustering(k1=6, k2=2, min_samples=2))
    with pytest.raises(ConfigError, match=r"model\.method: FedBABU, as it is configured, needs identities"):
        fit(make_model(FedBABU(), client=training), rounds=1)


def test_two_models_cannot_keep_one_optimizer():
    keeping = LocalTraining(batch_size=8, optimizer_state="keep")
    with pytest.raises(ConfigError, match=r"model\.client\.optimizer_state: FedBABU"):
        fit(make_model(FedBABU(), client=keeping), rounds=1)
    fit(make_model(FedBABU(fine_tune_epochs=0), client=keeping), rounds=1)


def test_negative_epochs_are_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.fine_tune_epochs: -1 is less than 0"):
        FedBABU(fine_tune_epochs=-1)
