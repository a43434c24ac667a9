"""Compiled backbones, channels last: equal results, names and memory of parameters; refusals with one line."""

import shutil
from functools import partial

import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.methods import FedAvg
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, state_of

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def training(**settings):
    return LocalTraining(batch_size=8, optimizer=SGD, **settings)


def trained(**settings):
    return fit(make_model(FedAvg(), client=training(**settings)), make_data(limit_client_batches=3), rounds=1)


def assert_close(model, reference):
    found, expected = state_of(model), state_of(reference)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on CPUs torch.compile needs a C++ compiler")
def test_a_compiled_backbone_trains_as_a_plain_one_does():
    from torch._dynamo.utils import counters  # its import takes seconds

    plain = trained()
    counters.clear()
    compiled = trained(compile=True)
    assert_close(compiled, plain)
    assert counters["stats"]["unique_graphs"] == 1
    [model], [other] = compiled.parts.models.values(), plain.parts.models.values()
    model.flat.check()
    assert list(model.network.state_dict()) == list(other.network.state_dict())
    images, mine, replica = torch.rand(8, 3, 32, 16), model.network, model.replica("trained").network
    for network, trains, size in ((mine, True, 5), (mine, False, 8), (replica, True, 8)):
        network.train(trains)(images[:size])
    assert counters["stats"]["unique_graphs"] == 1, "other sizes, evaluations and replicas stay plain"


def test_channels_that_lie_last_change_no_result(monkeypatch):
    seen, conv = set(), torch.nn.Conv2d.forward

    def watched(self, images):
        out = conv(self, images)
        if torch.is_grad_enabled():
            layouts = images.is_contiguous(memory_format=torch.channels_last), out.is_contiguous()
            seen.add((*layouts, self.weight.is_contiguous()))
        return out

    plain = trained(local_epochs=2)
    monkeypatch.setattr(torch.nn.Conv2d, "forward", watched)
    found = trained(local_epochs=2, channels_last=True)
    assert seen == {(True, False, True)}, "all maps are so, and no weight"
    assert_close(found, plain)
    [model] = found.parts.models.values()
    model.flat.check()
    model.replica("trained").forward(torch.rand(8, 3, 32, 16), "32-true")
    assert seen == {(True, False, True)}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"compile": True, "graph": True}, "c.compile: a step is either compiled or a graph; set compile or graph to"),
        ({"compile": True, "batch_size": None}, "c.compile: needs batches of one size; set batch_size, or"),
    ],
)
def test_what_cannot_be_compiled_is_refused(settings, line):
    with pytest.raises(ConfigError, match=line):
        LocalTraining(**settings).check("c")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^model.client.compile: no compiler is found \(g\+\+, clang\+\+\); set it to"
    ):
        trained(compile=True)
