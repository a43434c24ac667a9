"""LG-FedAvg against loops whose shared layers are written out."""

import copy

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.federation import Federation as ModuleFederation
from fedsim.methods import FedAvg, LGFedAvg
from fedsim.models import Neck, ResNet
from fedsim.training.settings import LocalTraining
from lightning_modules import Small
from plain_loops import Federation, Layers, assert_personalised, mean_of, play, sgd
from small import fit, make_data, make_model, named, vector

SHARED = {1: ("neck.",), 2: ("neck.", "backbone.second."), 3: ("neck.", "backbone.second.", "backbone.norm.")}
"""number of layers -> beginnings of the names of their tensors"""


@pytest.mark.parametrize(("layers", "weighting", "momentum"), [(1, "size", 0.5), (2, "uniform", 0.0), (3, "size", 0.5)])
def test_the_last_layers_are_averaged(layers, weighting, momentum):
    federation, selection = Federation(backbone=Layers), RandomFraction(0.6)  # two of three clients in each round
    models = {client.name: copy.deepcopy(federation.model) for client in federation.clients}
    shared = {n: t for n, t in federation.model.state_dict().items() if n.startswith(SHARED[layers])}
    for t in range(3):
        chosen = [k for k in federation.clients if k.name in selection.select(t, [*models], 0)]
        for client in chosen:
            models[client.name].load_state_dict(shared, strict=False)
            sgd(models[client.name], client.head, client.batches(t), momentum=momentum)
        sizes = [client.num_images if weighting == "size" else 1 for client in chosen]
        states = [{n: models[client.name].state_dict()[n] for n in shared} for client in chosen]
        shared = mean_of(states, [size / sum(sizes) for size in sizes])
    for model in models.values():
        model.load_state_dict(shared, strict=False)
    method = LGFedAvg(layers=layers, weighting=weighting)
    trained = play(method, 3, momentum=momentum, selection=selection, backbone=Layers)
    found = named(trained, "layers")
    assert found.keys() == {n for n in shared if "num_batches" not in n}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), shared[name], rtol=0, atol=2e-6)
    heads = {client.name: client.head for client in federation.clients}
    assert_personalised(trained, {name: (model, heads[name]) for name, model in models.items()}, 2e-6)


def names_of(model, arch):
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    return {entry.name for entry in model.parts.models[arch].flat.shared_entries}


def test_a_shared_head_is_the_last_layer():
    assert names_of(make_model(LGFedAvg(layers=1, share_head=True)), "smallcnn") == {"head.weight", "head.bias"}


def test_a_resnets_last_stage_and_its_neck_are_as_many_layers_as_is_said():
    names = names_of(make_model(LGFedAvg(layers=21), backbone=ResNet(depth=50), neck=Neck(kind="bnneck")), "resnet")
    assert {name.split(".")[1] for name in names if name.startswith("backbone.")} == {"layer4"}
    more = names_of(make_model(LGFedAvg(layers=22), backbone=ResNet(depth=50), neck=Neck(kind="bnneck")), "resnet")
    assert {name.rpartition(".")[0] for name in more - names} == {"backbone.layer3.5.bn3"}
    assert {name for name in names if name.startswith("neck.")}


@pytest.mark.parametrize("share_head", [False, True])
def test_all_layers_are_fedavg(share_head):
    models = [
        fit(make_model(kind)) for kind in (LGFedAvg(layers=99, share_head=share_head), FedAvg(share_head=share_head))
    ]
    assert torch.equal(*map(vector, models))


def test_local_statistics_stay_with_their_client():
    shared = names_of(make_model(LGFedAvg(layers=2), bn_stats="local"), "smallcnn")
    assert shared
    assert not any("running" in name for name in shared)


def test_unseen_domains_are_scored_by_the_clients_models():
    model = fit(make_model(LGFedAvg()), rounds=1)
    assert not model.evaluator.plan.has_global
    assert model.evaluator.plan.primary == "personalised"


def test_the_bytes_are_those_of_the_last_layers():
    model = fit(make_model(LGFedAvg(layers=1)), rounds=1)
    sent = sum(entry.numel for entry in model.parts.models["smallcnn"].flat.shared_entries)
    assert model.round_metrics["comm/up_bytes"] == 4 * sent * len(model.parts.clients)


def test_the_last_layers_of_a_module_are_shared():
    model = ModuleFederation(LGFedAvg(layers=1), Small, client=LocalTraining())
    model.assemble(make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)), 0, 1, torch.device("cpu"))
    [flat_model] = model.parts.models.values()
    layers = [name.rpartition(".")[0] for name, group in flat_model.groups.items() if group != "head"]
    shared = {entry.name.rpartition(".")[0] for entry in flat_model.flat.shared_entries}
    assert shared == {layers[-1]}


def test_no_layer_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.layers: 0 is less than 1"):
        LGFedAvg(layers=0)
