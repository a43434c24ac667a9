"""After a server step: the tensors that rank 0 sends to the others, in bytes, and the model from before the step."""

from functools import partial

import pytest
import torch

from failing import run_on_ranks
from fedsim.methods import SKA, FedDIP, FedDyn, FedPav, Scaffold
from fedsim.methods.base import InitialState, Payload
from fedsim.strategy.strategy import FederatedStrategy
from small import fit, make_data, make_model, vector


class Remembers(FedPav):
    """Keeps three tensors on the server; ranks need one that is sent, and one that they read."""

    server_every = 2
    reads_on_ranks = frozenset({"read"})

    def initial_state(self, model):
        sizes = {"sent": 3, "read": 5, "own": 7}
        return InitialState(server={name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()})

    def payload(self, server, arch, round_):
        return Payload(down=("sent",) if round_ % 2 else ())  # not in the first round after the step

    def server_step(self, server):
        for arch, before in server.before.items():
            assert not torch.equal(before, server.vector(arch))
            for name, tensor in [*server.kept[arch].items()]:
                server.keep(arch, name, tensor + 1)


def bytes_of_broadcasts(method, monkeypatch, rounds=2):
    sent = []
    broadcast_ = FederatedStrategy.broadcast_
    monkeypatch.setattr(
        FederatedStrategy, "broadcast_", lambda self, tensor: [sent.append(tensor.nbytes), broadcast_(self, tensor)][1]
    )
    model = fit(make_model(method), make_data(public="new0"), rounds)
    return sum(sent), vector(model).nbytes, model


@pytest.mark.parametrize(
    ("method", "steps", "tensors"),
    [
        (FedDyn(), 2, lambda model: 0),
        (Scaffold(), 2, lambda model: 4 * model.flat.num_shared_parameters),
        (FedDIP(initial=0.3), 2, lambda model: model.flat.num_shared_parameters),
        (SKA(dual=False, unseen="avg"), 2, None),
        (Remembers(), 1, lambda model: 8 * (3 + 5)),
        (FedPav(), 0, lambda model: 0),
    ],
    ids=["FedDyn", "Scaffold", "FedDIP", "SKA", "Remembers", "FedPav"],
)
def test_a_server_step_sends_the_models_and_the_declared_tensors(method, steps, tensors, monkeypatch):
    sent, of_model, trained = bytes_of_broadcasts(method, monkeypatch)
    kept = trained.server.kept["smallcnn"]
    extra = kept["norms"].nbytes if tensors is None else tensors(trained.parts.models["smallcnn"])
    assert sent == steps * (of_model + extra)
    assert trained.server.before == {}


def on_a_rank(folder, method):
    model = fit(make_model(method), make_data(public="new0"), devices=2)
    kept = model.server.kept["smallcnn"]
    torch.save((kept, vector(model)), folder / f"{type(method).__name__}-{model.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.parametrize(("method", "names"), [(Remembers(), {"sent", "read"}), (FedDyn(), set())], ids=["three", "h"])
def test_other_ranks_have_what_is_declared(method, names, tmp_path):
    run_on_ranks(partial(on_a_rank, method=method), tmp_path)
    (first, model), (second, same) = (torch.load(tmp_path / f"{type(method).__name__}-{n}.pt") for n in (0, 1))
    assert second.keys() == names < first.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert torch.equal(model, same)
    assert torch.equal(model, vector(fit(make_model(method), make_data(public="new0"))))
