"""A federation in which FedKLPR's masks have to win: most weights have no effect, and are the smallest."""

from functools import partial

import pytest
import torch
from torch import nn

from fedsim.functional.normalise import normalise_images
from fedsim.functional.pruning import pruned_fraction
from fedsim.methods import FedKLPR
from fedsim.methods.pruned import prunable_layers
from fedsim.models import Neck
from fedsim.training.labels import Clustering
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model

SIZE = (16, 8)


class Idle(nn.Module):
    """Of 16 channels between its layers 12 are always 0: 87 % of the weights write or read only these."""

    out_channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.third = nn.Conv2d(16, 6, 3, padding=1, bias=False)
        with torch.no_grad():
            for writes in (self.first, self.second):
                writes.weight[4:] *= 1e-4
            for reads in (self.second, self.third):
                reads.weight[:, 4:] *= 1e-4

    def forward(self, images):
        x = silence(torch.tanh(self.norm(self.first(images))))
        return torch.tanh(self.third(silence(torch.tanh(self.norm2(self.second(x))))))


def silence(maps):
    return torch.cat([maps[:, :4], torch.zeros_like(maps[:, 4:])], dim=1)


@pytest.mark.parametrize("clustering", [None, Clustering(k1=6, k2=2, min_samples=2)], ids=["identities", "clusters"])
def test_pruning_70_percent_costs_nothing_and_saves_bytes(clustering):
    """Twelve rounds: two until there are three accuracies, eight steps of nine points, and two more."""
    models = {}
    for prune in (True, False):
        method = FedKLPR(prune=prune, weighting="size", plateau=1.0, min_accuracy=0.0, prune_from=1)
        training = LocalTraining(batch_size=8, cluster=clustering, optimizer=partial(torch.optim.SGD, lr=0.01))
        model = make_model(method, backbone=Idle(), neck=Neck(kind="bnneck", dropout=0.0), client=training)
        models[prune] = fit(model, make_data(size=SIZE), rounds=12)
    data = make_data(size=SIZE)
    data.setup("fit")
    for name, client in models[True].parts.clients.items():
        mask = client.private_state()["kept.mask"]
        assert pruned_fraction(mask, prunable_layers(client.model)) == pytest.approx(0.7, abs=1e-3)
        test = data.federated.tests[name].query.images.decode(SIZE)
        found = []
        for prune, model in models.items():
            flat_model = model.parts.models["idle"]
            shared = model.server.vector("idle").clone()
            shared[: len(mask)][~mask] *= not prune  # the client's own model
            flat_model.shared.copy_(shared)
            with torch.no_grad():
                found.append(flat_model.network.eval()(normalise_images(test)).neck)
        assert torch.equal(*found)  # to the bit
    saved = models[True].parts.ledger.total / models[False].parts.ledger.total
    assert saved < 0.75
