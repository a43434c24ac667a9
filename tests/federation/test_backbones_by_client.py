"""Clients with backbones of different kinds (paper 002): averaged apart, one embedding width, any number of ranks."""

import pytest
import torch

from failing import run_on_ranks
from fedsim.federation.components.selection import UCB, Selection
from fedsim.methods import FedPav, WeightedPav
from fedsim.models import CifarResNet, ConvNeXt, Neck, ResNet
from fedsim.training.settings import ClientOverride, LocalTraining
from small import fit, make_data, make_model, named, sgd, vector

NECK = Neck(kind="linear", dim=128, dropout=0.0)
TALL = (64, 32)  # ConvNeXt has a stride of 32


class Chosen(Selection):
    """Given clients in each round."""

    def __init__(self, *rounds):
        self.rounds = rounds

    def select(self, round_, clients, seed):
        return [name for name in clients if name in self.rounds[round_]]


def convnexts(*names):
    torch.manual_seed(1)
    return {name: ClientOverride(backbone=ConvNeXt("micro")) for name in names}


def play(method=None, devices=1, rounds=3, others=("town1", "town2"), **options):
    """town0 has a residual network, the others ConvNeXt."""
    torch.manual_seed(0)
    backbone = options.pop("backbone", None) or CifarResNet(20)
    settings = {"client": LocalTraining(batch_size=8, optimizer=sgd), "neck": NECK, "clients": convnexts(*others)}
    model = make_model(method or WeightedPav(), backbone=backbone, **settings | options)
    return fit(model, make_data(size=TALL, limit_client_batches=3), rounds=rounds, devices=devices)


def private(model):
    return {name: client.private_state()["state"] for name, client in model.parts.clients.items()}


def test_resnet_and_convnext_learn_in_one_federation():
    model = play(backbone=ResNet(18), rounds=1)
    assert model.parts.archs == {"town0": "resnet", "town1": "convnext", "town2": "convnext"}
    assert {r.network.num_features for r in model.parts.models.values()} == {128}
    assert all(torch.isfinite(vector(model, arch)).all() for arch in model.parts.models)
    start = make_model(WeightedPav(), backbone=ResNet(18), neck=NECK, clients=convnexts("town1", "town2"))
    start.assemble(make_data(size=TALL), 0, 1, torch.device("cpu"))
    for arch in model.parts.models:
        assert not torch.equal(vector(start, arch), vector(model, arch))
        assert all(name.startswith("backbone.") for name in named(model, arch))
    for name, state in private(model).items():  # embedding and classifier have trained
        assert not torch.equal(state, start.parts.clients[name].private_state()["state"])


@pytest.mark.parametrize("others", [("town1", "town2"), ("town1",)])
def test_clients_of_an_architecture_come_to_what_they_would_alone(others):
    """Two clients of an architecture, or one: the other architectures change no bit of theirs."""
    together = play(others=others)
    alone = play(others=others, selection=Chosen(*[others] * 3))
    assert torch.equal(vector(together, "convnext"), vector(alone, "convnext"))
    for name in others:
        assert torch.equal(private(together)[name], private(alone)[name])


def test_an_architecture_that_nobody_trained_keeps_its_global_model():
    one = play(rounds=1)
    more = play(rounds=2, selection=Chosen(("town0", "town1", "town2"), ("town0",)))
    assert torch.equal(vector(one, "convnext"), vector(more, "convnext"))
    assert not torch.equal(vector(one, "cifarresnet"), vector(more, "cifarresnet"))


def test_a_single_client_s_model_becomes_the_global_one():
    model = play(FedPav(), rounds=1, others=("town1",), selection=Chosen(("town1",)))
    client = model.parts.clients["town1"]
    again = play(FedPav(), rounds=1, others=("town1",), selection=Chosen(("town1",)))
    # exact sums are made on a grid: the last upload lies still in the rank's model
    upload = model.parts.models["convnext"].shared
    torch.testing.assert_close(vector(model, "convnext"), upload, rtol=0, atol=1e-7)
    assert torch.equal(vector(model, "convnext"), vector(again, "convnext"))
    assert client.model.arch == "convnext"


# a sample of two of three clients leaves an architecture with no client, with one, and with two
TURNS = ("town1", "town2"), ("town0",), ("town0", "town2")
RUNS = {
    "ucb": lambda devices: play(devices=devices, selection=UCB(2)),
    "turns": lambda devices: play(FedPav(), devices, selection=Chosen(*TURNS)),
}


def play_on_two(folder):
    """What each of two ranks does."""
    for name, run in RUNS.items():
        model = run(2)
        result = {f"global {arch}": vector(model, arch) for arch in model.parts.models} | private(model)
        torch.save(result, folder / f"{name}-{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one(tmp_path):
    run_on_ranks(play_on_two, tmp_path)
    for name, run in RUNS.items():
        one = run(1)
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]
        for arch in one.parts.models:
            for found in ranks:
                assert torch.equal(vector(one, arch), found[f"global {arch}"]), (name, arch)
        states = {k: v for found in ranks for k, v in found.items() if not k.startswith("global ")}
        assert states.keys() == private(one).keys()
        for client, state in private(one).items():
            assert torch.equal(state, states[client]), (name, client)
